package tables

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// HotPrefixes prints a line for each hot prefix, and a line for each copy.
func HotPrefixes(w io.Writer, list *api.HotList) {
	if len(list.Missing) > 0 {
		cli.Fprintf(w, "INCOMPLETE: nodes %v do not answer; the requests that they routed do not count\n", list.Missing)
	}
	if len(list.Disabled) > 0 {
		cli.Fprintf(w, "nodes %v count no prefixes; run them with --hot-prefixes 1024\n", list.Disabled)
	}
	if len(list.Prefixes) == 0 {
		cli.Fprintln(w, "no prefix needs a further copy")
	} else {
		rows := make([][]any, len(list.Prefixes))
		for i, p := range list.Prefixes {
			target := "-"
			if p.Target != "" {
				target = fmt.Sprintf("%s/%d", p.Target, p.TargetRank)
			}
			kept := "no"
			if p.TokensKept {
				kept = "yes"
			}
			rows[i] = []any{p.Hash, p.Tokens, fmt.Sprintf("%.1f", p.RequestsPerS), firstHolders(p.Holders),
				fmt.Sprintf("%.0f", p.WaitMS), fmt.Sprintf("%.0f", p.RecomputedPerS),
				fmt.Sprintf("%.1f", p.SavesMSPerHour/1000), fmt.Sprintf("%.1f", p.CostMS/1000), target, kept}
		}
		HotColumns.Table(w, rows)
	}
	if len(list.Copies) == 0 {
		return
	}
	rows := make([][]any, len(list.Copies))
	now := time.Now()
	for i, c := range list.Copies {
		by := "operator"
		if c.Automatic {
			by = "warm-up"
		}
		rows[i] = []any{c.Hash, fmt.Sprintf("%s/%d", c.Worker, c.Rank), by, max(now.Sub(c.At), 0).Round(time.Second),
			c.Computed, fmt.Sprintf("%.0f", c.TookMS), c.Requests, c.Reused, fmt.Sprintf("%.1f", c.SavedMS/1000)}
	}
	cli.Fprintln(w)
	CopiesColumns.Table(w, rows)
}

// firstHolders lists at most two workers, and the number of the others.
func firstHolders(list []events.WorkerID) string {
	const shown = 2
	var names []string
	for _, worker := range list[:min(shown, len(list))] {
		names = append(names, string(worker))
	}
	if more := len(list) - shown; more > 0 {
		names = append(names, fmt.Sprintf("+%d", more))
	}
	if len(names) == 0 {
		return "-"
	}
	return strings.Join(names, ",")
}

// PrefixCopy prints a copy.
func PrefixCopy(w io.Writer, c *api.PrefixCopy) {
	cli.Fprintf(w, "%s/%d has computed %d tokens of prefix %s (%s) in %.0f ms\n", c.Worker, c.Rank, c.Computed, c.Hash,
		cli.Count(uint64(c.Blocks), "block"), c.TookMS)
}
