//go:build realvllm

package vllm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
)

// fleetReport is the table of all arms, and the file with their requests.
type fleetReport struct {
	t    *testing.T
	file *os.File // nil: none
	rows []string
	more []string
}

func newFleetReport(t *testing.T, folder string) *fleetReport {
	t.Helper()
	r := &fleetReport{t: t, rows: []string{"arm\trequests/s\trequests\treused\tTTFT p50\tp90\tp99\tmean, ms\tend p50\tp99, ms" +
		"\task p50\tp99, ms\tequal\texplained\tmost computed by an engine"}}
	if folder == "" {
		return r
	}
	var err error
	if err = os.MkdirAll(folder, 0o755); err == nil {
		r.file, err = os.Create(filepath.Join(folder, "requests.jsonl"))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.file.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *fleetReport) note(format string, args ...any) {
	r.more = append(r.more, fmt.Sprintf(format, args...))
}

// add adds a judged arm.
func (r *fleetReport) add(a *arm) {
	r.t.Helper()
	var ttft, end, ask []float64
	tokens, reused, equals, explained, mean := 0, 0, 0, 0, 0.0
	computed := make([]int, len(a.at))
	for i := range a.served {
		s := &a.served[i]
		if r.file != nil {
			if err := json.NewEncoder(r.file).Encode(s); err != nil {
				r.t.Fatal(err)
			}
		}
		if s.err != nil {
			continue
		}
		ttft, end, ask = append(ttft, s.TTFT), append(end, s.End), append(ask, s.Ask)
		tokens, reused, mean = tokens+s.Tokens, reused+s.Reused, mean+s.TTFT
		computed[s.Worker] += s.Tokens - s.Reused
		switch s.Class {
		case equal:
			equals++
		case concurrent:
			explained++
		}
	}
	if len(ttft) == 0 {
		return
	}
	r.rows = append(r.rows, fmt.Sprintf("%s\t%.1f\t%d\t%.1f%%\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.2f\t%.2f\t%d\t%d\t%.0f%%",
		a.way.name, a.rate, len(ttft), 100*float64(reused)/float64(tokens), quantile(ttft, 0.5), quantile(ttft, 0.9),
		quantile(ttft, 0.99), mean/float64(len(ttft)), quantile(end, 0.5), quantile(end, 0.99), quantile(ask, 0.5),
		quantile(ask, 0.99), equals, explained, 100*float64(slices.Max(computed))/float64(max(tokens-reused, 1))))
}

// quantile sorts the list.
func quantile(list []float64, q float64) float64 {
	slices.Sort(list)
	return list[min(int(q*float64(len(list))), len(list)-1)]
}

func (r *fleetReport) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(r.rows, "\n"))
	if err := w.Flush(); err != nil {
		r.t.Error(err)
	}
	return b.String() + strings.Join(r.more, "\n")
}
