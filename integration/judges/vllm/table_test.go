//go:build realvllm

package vllm

import (
	"fmt"
	"strings"
	"sync"
	"text/tabwriter"
)

// table counts requests by class for every part of the test.
type table struct {
	mu    sync.Mutex
	rows  []*row
	notes []string
}

// row is a part of the test.
type row struct {
	mu              sync.Mutex
	model, part     string
	counts          map[class]int
	tooHigh, tooLow int // differences of all classes
	reused, of      int // blocks
	windows         int // requests in sequence with a reusable prefix shortened by windows
	atStep          int // concurrent changes explained at the very step of the look-up
	heldBack        int // removals before the next step
	behind          int // greatest number of missing events in kvatlas at a query
}

func (t *table) row(model, part string) *row {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := &row{model: model, part: part, counts: map[class]int{}}
	t.rows = append(t.rows, r)
	return r
}

// note adds a line below the table.
func (t *table) note(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// notBehind records the number of missing events in kvatlas at a query.
func (r *row) notBehind(events int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.behind = max(r.behind, events)
}

func (r *row) add(c class, o *observation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[c]++
	r.reused += o.reused
	r.of += len(o.request.prompt.tokens) / blockSize
	switch {
	case o.predicted > o.reused:
		r.tooHigh++
	case o.predicted < o.reused:
		r.tooLow++
	}
}

func (t *table) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "model\tpart\trequests")
	for _, c := range classes {
		fmt.Fprintf(w, "\t%s", c)
	}
	fmt.Fprint(w, "\ttoo high\ttoo low\twindows\tat step\treused\theld back\tbehind\n")
	for _, r := range t.rows {
		requests := 0
		for _, n := range r.counts {
			requests += n
		}
		fmt.Fprintf(w, "%s\t%s\t%d", r.model, r.part, requests)
		for _, c := range classes {
			fmt.Fprintf(w, "\t%d", r.counts[c])
		}
		fmt.Fprintf(w, "\t%d\t%d\t%d\t%d\t%d of %d\t%d\t%d\n",
			r.tooHigh, r.tooLow, r.windows, r.atStep, r.reused, r.of, r.heldBack, r.behind)
	}
	w.Flush()
	for _, n := range t.notes {
		b.WriteString(n + "\n")
	}
	return b.String()
}
