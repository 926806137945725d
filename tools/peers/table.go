package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/tools/corpus"
)

// metric is a figure of a mode.
type metric struct {
	mode, field string
	title       string
	scale       float64
	more        bool // more is better
}

var metrics = []metric{
	{"events", "blocks_per_s", "events, first pass, M blocks/s", 1e-6, true},
	{"events", "blocks_per_s_second", "events, second pass, M blocks/s", 1e-6, true},
	{"queries", "p50_us", "query p50, µs", 1, false},
	{"queries", "p99_us", "query p99, µs", 1, false},
	{"queries", "p999_us", "query p99.9, µs", 1, false},
	{"queries", "p999_typical_us", "query p99.9 of medians, µs", 1, false},
	{"queries", "queries_per_s", "k queries/s", 1e-3, true},
	{"load", "p50_us", "query p50 beside a writer, µs", 1, false},
	{"load", "p99_us", "query p99 beside a writer, µs", 1, false},
	{"load", "p999_us", "query p99.9 beside a writer, µs", 1, false},
	{"load", "blocks_per_s", "the writer, M blocks/s", 1e-6, true},
	{"mixed", "seconds", "mixed, s", 1, false},
	{"memory", "bytes_per_holding", "bytes per holding", 1, false},
}

// cell is a figure of an index.
type cell struct {
	index string
	mode  mode
	field string
}

// results has all measurements on a corpus.
type results struct {
	indexes []string
	modes   []mode
	values  map[cell][]float64
	digests map[string][]string // by index, of every run with a digest
}

// median returns the middle value, or the mean of the two middle values. The result is false without values.
func median(xs []float64) (float64, bool) {
	if len(xs) == 0 {
		return 0, false
	}
	xs = slices.Sorted(slices.Values(xs))
	return (xs[(len(xs)-1)/2] + xs[len(xs)/2]) / 2, true
}

// print writes the table: for every figure the ratios to the peers, then the figures.
func (all *results) print(w io.Writer, h corpus.Header) error {
	ratios := []string{}
	if slices.Contains(all.indexes, us) {
		for _, name := range all.indexes {
			if name != us {
				ratios = append(ratios, "/ "+name)
			}
		}
	}
	rows := [][]string{append(append([]string{""}, ratios...), all.indexes...)}
	for _, m := range all.modes {
		for _, x := range metrics {
			if x.mode == m.name {
				rows = append(rows, all.row(m, x, len(ratios) > 0))
			}
		}
	}
	if answers := all.answers(h); answers != nil {
		rows = append(rows, append(append([]string{"answers"}, make([]string, len(ratios))...), answers...))
	}
	widest := 0
	for _, row := range rows {
		widest = max(widest, utf8.RuneCountInString(row[0]))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, row := range rows {
		row[0] += strings.Repeat(" ", widest-utf8.RuneCountInString(row[0])) // titles to the left
		fmt.Fprintln(t, strings.Join(row, "\t")+"\t")
	}
	return t.Flush()
}

// row returns a figure of all indexes.
func (all *results) row(m mode, x metric, ours bool) []string {
	title := x.title
	if m.threads > 1 {
		title += fmt.Sprintf(" (%d threads)", m.threads)
	}
	ratios, figures := []string{}, []string{}
	mine, _ := median(all.values[cell{us, m, x.field}])
	for _, name := range all.indexes {
		value, measured := median(all.values[cell{name, m, x.field}])
		figure, ratio := "–", "–"
		if measured {
			figure = digits(value * x.scale)
		}
		if measured && mine > 0 && value > 0 {
			if ratio = digits(value / mine); x.more {
				ratio = digits(mine / value)
			}
		}
		if figures = append(figures, figure); ours && name != us {
			ratios = append(ratios, ratio)
		}
	}
	return append(append([]string{title}, ratios...), figures...)
}

// digits formats a number with three significant digits.
func digits(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	default:
		return fmt.Sprintf("%.2f", x)
	}
}

// answers reports for every index whether all answers of all rounds were right. Without a known digest of the corpus,
// it prints the digests. The result is nil without digests.
func (all *results) answers(h corpus.Header) (line []string) {
	want, known := corpus.Expected(h)
	if len(all.digests) == 0 {
		return nil
	}
	for _, name := range all.indexes {
		got := slices.Compact(slices.Sorted(slices.Values(all.digests[name])))
		switch {
		case len(got) == 0:
			line = append(line, "–")
		case len(got) > 1:
			line = append(line, "wavering")
		case !known:
			line = append(line, got[0])
		case got[0] == want.String():
			line = append(line, "right")
		default:
			line = append(line, "wrong")
		}
	}
	return line
}
