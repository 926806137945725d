package tables

import (
	"fmt"
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// regionPrefixes prints a line for each region.
func regionPrefixes(w io.Writer, list []api.RegionPrefix) {
	if len(list) == 0 {
		return
	}
	rows := make([][]any, len(list))
	for i, p := range list {
		price, age, blocks := "-", "-", fmt.Sprint(p.Blocks)
		if p.PriceMS != nil {
			price = fmt.Sprintf("%g ms", *p.PriceMS)
		}
		switch {
		case p.Local:
			age = "here"
		case p.AgeMS > 0 || p.State != api.RegionUnknown:
			age = (time.Duration(p.AgeMS) * time.Millisecond).Round(100 * time.Millisecond).String()
		}
		if p.State == api.RegionUnknown {
			blocks = "?"
		}
		rows[i] = []any{p.Region, blocks, p.Tokens, price, age, p.State, p.Reason}
	}
	cli.Table(w, []string{"REGION", "BLOCKS", "TOKENS", "PRICE", "AGE", "STATE", "WHY"}, rows)
	cli.Fprintln(w)
}
