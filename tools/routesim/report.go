package routesim

import (
	"fmt"
	"io"
	"strings"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// Print writes a report for people.
func (rep *Report) Print(w io.Writer) error {
	fmt.Fprintf(w, "%s: %d workers of %d tokens, a working set of %d tokens\n", rep.Workload, rep.Workers,
		rep.Engine.Capacity, rep.WorkingSet)
	for i := range rep.Points {
		p := &rep.Points[i]
		fmt.Fprintf(w, "\nKV memory / working set %.2f", p.Ratio)
		if p.Rate > 0 {
			fmt.Fprintf(w, ", %.2f requests/s", p.Rate)
		}
		fmt.Fprintf(w, "\na single cache with the fleet's memory would reuse %s, with knowledge of the future %s, without bounds %s\n",
			percent(p.Bound.LRU), percent(p.Bound.Capacity), percent(p.Bound.Offered))
		if err := p.print(w); err != nil {
			return err
		}
	}
	if len(rep.Published) > 0 {
		var rows [][]any
		for _, b := range rep.Published {
			two := func(x [2]float64, format string) string {
				return fmt.Sprintf(format+" | "+format, x[0], x[1])
			}
			rows = append(rows, []any{b.Theirs, b.Arm, two(b.OutputPerS, "%.0f"), two(b.TTFTP90, "%.2f"),
				two(b.TTFTMean, "%.2f")})
		}
		fmt.Fprintln(w)
		if err := cli.Table(w, []string{"PUBLISHED", "OUR ARM", "OUTPUT tok/s: theirs | ours", "TTFT p90 s",
			"TTFT mean s"}, rows); err != nil {
			return err
		}
	}
	rep.printWorth(w)
	return nil
}

func (p *Point) print(w io.Writer) error {
	var rows, funnel [][]any
	for _, r := range p.Runs {
		t := &r.Total
		rows = append(rows, []any{r.Arm, r.routers(), percent(t.HitRate), seconds(t.TTFTMean), seconds(t.TTFTP50),
			seconds(t.TTFTP90), seconds(t.TTFTP99), fmt.Sprintf("%.0f", t.OutputPerS),
			fmt.Sprintf("%.0f", t.PerUser), fmt.Sprintf("%.2f", r.Imbalance), r.Preemptions})
		f := &r.Funnel
		funnel = append(funnel, []any{r.Arm, r.routers(), percent(f.Offered), percent(f.Capacity), percent(f.Perfect),
			percent(f.Chosen), percent(f.Reused)})
	}
	if err := cli.Table(w, []string{"ARM", "ROUTERS", "HITS", "TTFT mean", "p50", "p90", "p99", "OUTPUT tok/s",
		"tok/s USER", "IMBALANCE", "PREEMPTED"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return cli.Table(w, []string{"WHERE REUSE IS LOST", "ROUTERS", "OFFERED", "CAPACITY", "PERFECT ROUTING", "CHOSEN",
		"REUSED"}, funnel)
}

// printWorth prints the cases in which exact knowledge improves the result.
func (rep *Report) printWorth(w io.Writer) {
	var lines []string
	for i := range rep.Points {
		p := &rep.Points[i]
		for _, x := range p.Exact {
			at := fmt.Sprintf("memory / working set %.2f", p.Ratio)
			if p.Rate > 0 {
				at += fmt.Sprintf(", %.2f requests/s", p.Rate)
			}
			what := fmt.Sprintf("hits %+.1f points, TTFT p90 %+.2f s, output %+.1f%%", 100*x.HitRate, -x.TTFTP90,
				100*(x.OutputShare-1))
			if x.Nothing {
				what = "buys nothing (" + what + ")"
			}
			lines = append(lines, fmt.Sprintf("  %s, against %s, routers %d: %s", at, x.Against, x.Routers, what))
		}
	}
	if lines != nil {
		fmt.Fprintf(w, "\nWhat exact shared knowledge buys:\n%s\n", strings.Join(lines, "\n"))
	}
}

func (r *Run) routers() string {
	if !r.Arm.Scales() {
		return "any"
	}
	return fmt.Sprint(r.Routers)
}

func percent(x float64) string { return fmt.Sprintf("%.1f%%", 100*x) }

func seconds(x float64) string {
	if x < 1 {
		return fmt.Sprintf("%.0f ms", 1000*x)
	}
	return fmt.Sprintf("%.2f s", x)
}
