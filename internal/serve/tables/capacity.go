package tables

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Capacity prints a line for each tier and for some sizes, and sentences about more and less memory.
func Capacity(w io.Writer, c *api.Capacity) {
	if len(c.Points) == 0 {
		cli.Fprintf(w, "no curve yet: the nodes have too few requests with known blocks\n")
	} else {
		cli.Fprintf(w, "%s of %d tokens in the requests from %s to %s, %s sampled\n\n", cli.Count(c.Blocks, "block"),
			c.BlockSize, c.From.Local().Format(time.TimeOnly), c.To.Local().Format(time.TimeOnly), percent(c.Rate))
		capacityTiers(w, c)
		capacityPoints(w, c)
	}
	for _, line := range c.Advice {
		cli.Fprintf(w, "%s\n", line)
	}
	for _, name := range c.Missing {
		cli.Fprintf(w, "node %s did not answer: the node's requests are missing here\n", name)
	}
	for _, name := range c.Disabled {
		cli.Fprintf(w, "node %s stores no samples: see --capacity-samples of indexer serve\n", name)
	}
	if c.Dropped > 0 {
		cli.Fprintf(w, "the nodes did not record %d requests since their start: too many requests\n", c.Dropped)
	}
	if c.Skipped > 0 {
		cli.Fprintf(w, "%s of requests with another block size are missing here\n", cli.Count(c.Skipped, "block"))
	}
}

func capacityTiers(w io.Writer, c *api.Capacity) {
	if len(c.Tiers) == 0 {
		return
	}
	var rows [][]any
	for i := range c.Tiers {
		t := &c.Tiers[i]
		share := percent(t.Share)
		if t.ShareBound {
			share = ">= " + share
		}
		rows = append(rows, []any{t.Tier, t.Blocks, t.Source, share, points(t.Doubled, t.Beyond),
			points(t.Last, t.LastBound)})
	}
	CapacityColumns.Table(w, rows)
	cli.Fprintf(w, "\n")
}

// capacityPoints prints a size of the curve for each octave.
func capacityPoints(w io.Writer, c *api.Capacity) {
	var rows [][]any
	next := c.Points[len(c.Points)-1].Blocks
	for i := len(c.Points) - 1; i >= 0; i-- {
		p := &c.Points[i]
		if p.Blocks > next {
			continue
		}
		next = p.Blocks / 2
		routed, share := "-", p.Shared
		if p.Routed != nil {
			routed, share = percent(*p.Routed), *p.Routed
		}
		rows = append([][]any{{p.Blocks, percent(p.Shared), routed, strings.Repeat("#", int(40*share+0.5))}}, rows...)
	}
	CapacityPointsColumns.Table(w, rows)
	cli.Fprintf(w, "\n")
}

// points returns a difference of hit rates. bound means that it is a lower bound. A bound of 0.0 points is no
// information.
func points(share float64, bound bool) string {
	text := fmt.Sprintf("%.1f points", 100*share)
	switch {
	case bound && strings.HasPrefix(text, "0.0 "):
		return "unknown"
	case bound:
		return ">= " + text
	}
	return text
}
