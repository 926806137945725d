package tables

import (
	"fmt"
	"io"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
)

// Compared prints the texts that two tokenizers tokenize differently, and the totals.
func Compared(w io.Writer, list []tokenize.Comparison) {
	counts := tokenize.Tally(list)
	var rows [][]any
	for i := range list {
		if v := list[i].Verdict(); v != "same" {
			rows = append(rows, []any{v, fmt.Sprintf("%q", list[i].Text), list[i].Error})
		}
	}
	if len(rows) > 0 {
		ComparedColumns.Table(w, rows)
		cli.Fprintln(w)
	}
	cli.Fprintf(w, "%d texts: %d same, %d differ, %d refused here, %d refused there, %d not compared\n", len(list),
		counts["same"], counts["differ"], counts["refused here"], counts["refused there"], counts["NOT COMPARED"])
}
