package tables

import (
	"fmt"
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// RegionsColumns are the columns of the prefixes in regions.
var RegionsColumns = columns("region",
	"REGION", "name of the region",
	"BLOCKS", "longest prefix of a single worker of the region, in any tier; ? if unknown",
	"TOKENS", "the same in tokens",
	"PRICE", "configured milliseconds that a request in the region adds to the time to first token",
	"AGE", "age of the oldest digest in use; here for the own region",
	"STATE", "complete, partial (the prefix may be longer) or unknown",
	"WHY", "reason for a state other than complete")

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
	RegionsColumns.Table(w, rows)
	cli.Fprintln(w)
}
