package whatif

import (
	"fmt"
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// Print writes a report for people. The error of the replay comes first.
func (rep *Report) Print(w io.Writer) error {
	cli.Fprintf(w, "%d requests of %s from %s to %s, the second half measured\n\n", rep.Counts.Replayed, rep.Model,
		rep.From.Local().Format(time.DateTime), rep.To.Local().Format(time.DateTime))
	cli.Fprintf(w, "error of the replay of the history:  %s\n", rep.HistoryError.String())
	cli.Fprintf(w, "error of the replay with own choices: %s\n\n", rep.BaselineError.String())
	head := []string{"", "MEASURED", "HISTORY", "TODAY'S FLEET"}
	columns := []*Figures{&rep.Measured, &rep.History, &rep.Baseline}
	if rep.Changed != nil {
		head = append(head, "CHANGED", "EXPECTED")
		columns = append(columns, rep.Changed, rep.Expected)
	}
	var rows [][]any
	for _, f := range []struct {
		name string
		of   func(*Figures) string
	}{
		{"workers", func(f *Figures) string { return fmt.Sprint(f.Workers) }},
		{"hit rate", func(f *Figures) string { return fmt.Sprintf("%.1f %%", 100*f.HitRate) }},
		{"TTFT mean", func(f *Figures) string { return seconds(f.TTFTMean) }},
		{"TTFT p50", func(f *Figures) string { return seconds(f.TTFTP50) }},
		{"TTFT p99", func(f *Figures) string { return seconds(f.TTFTP99) }},
		{"requests/s", func(f *Figures) string { return known(f.RequestsPerS, "%.2f") }},
		{"computed prompt tokens", func(f *Figures) string { return fmt.Sprint(f.ComputedTokens) }},
		{"worker hours", func(f *Figures) string { return fmt.Sprintf("%.3g", f.WorkerHours) }},
	} {
		row := []any{f.name}
		for _, c := range columns {
			row = append(row, f.of(c))
		}
		rows = append(rows, row)
	}
	if err := cli.Table(w, head, rows); err != nil {
		return err
	}
	cli.Fprintf(w, "\n")
	if rep.Changed != nil {
		cli.Fprintf(w, "with the changes: %s\n", rep.effect())
	}
	for _, note := range rep.Notes {
		cli.Fprintf(w, "- %s\n", note)
	}
	return nil
}

// effect returns the difference of the expected to the measured figures as a sentence. Worker hours are compared with
// today's fleet: the measured figures have only workers with requests.
func (rep *Report) effect() string {
	m, e := &rep.Measured, rep.Expected
	text := fmt.Sprintf("hit rate %+.1f points", 100*(e.HitRate-m.HitRate))
	if m.TTFTMean > 0 && e.TTFTMean > 0 {
		text += fmt.Sprintf(", TTFT mean %+.0f %%, p99 %+.0f %%", 100*(e.TTFTMean/m.TTFTMean-1), 100*(e.TTFTP99/m.TTFTP99-1))
	}
	if m.ComputedTokens > 0 {
		text += fmt.Sprintf(", computed tokens %+.0f %%", 100*(float64(e.ComputedTokens)/float64(m.ComputedTokens)-1))
	}
	return text + fmt.Sprintf(", worker hours %+.0f %%", 100*(float64(e.Workers)/float64(rep.Baseline.Workers)-1))
}

func (e *Errors) String() string {
	text := fmt.Sprintf("hit rate %+.1f points", 100*e.HitRate)
	if e.TTFTMean == nil {
		return text + ", TTFT unknown"
	}
	return text + fmt.Sprintf(", TTFT mean %+.0f %%, p50 %+.0f %%, p99 %+.0f %%", 100**e.TTFTMean, 100**e.TTFTP50,
		100**e.TTFTP99)
}

func seconds(x float64) string {
	if x < 1 {
		return known(1000*x, "%.0f ms")
	}
	return fmt.Sprintf("%.2f s", x)
}

// known formats a figure; 0 is unknown.
func known(x float64, format string) string {
	if x == 0 {
		return "unknown"
	}
	return fmt.Sprintf(format, x)
}
