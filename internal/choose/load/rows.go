package load

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// row is a rank that has, or had, requests.
type row struct {
	key     events.RankKey
	id      uint32 // in Table.prompts
	index   int    // in Table.loads and Table.rows
	weight  uint64
	records []*record
	idle    time.Duration // the time of the last end of a request
	pace    routing.Pace
	since   time.Duration // since when the row has requests to prefill, if any
}

// pending returns the number of tokens to prefill.
func (r *record) pending() int64 {
	if r.done {
		return 0
	}
	return r.tokens
}

// pend adds a record's pending tokens to its row's load (sign 1), or subtracts the tokens (-1).
func (t *Table) pend(r *record, sign int64) {
	n := r.pending()
	if n == 0 {
		return
	}
	load := &t.loads[r.row.index]
	if load.Prefilling == 0 {
		r.row.since = t.sent(r)
	}
	load.PrefillTokens += sign * n
	load.Prefilling += int32(sign)
}

// attach adds a record's load to its row.
func (t *Table) attach(r *record) {
	row := t.rowOf(r.rank)
	r.row, r.pos = row, len(row.records)
	row.records = append(row.records, r)
	r.tail = t.prompts.Reach(r.hashes)
	for _, run := range r.runs {
		t.cut(r.tail, int(run.from))
	}
	for n := r.tail; n.Parent != nil; n = n.Parent {
		row.enter(n, weightAt(r.runs, n.Start))
	}
	row.weight += r.unsharedWeight(r.private)
	t.pend(r, 1)
	t.loads[row.index].Requests++
	t.round(row)
}

// rowOf returns a rank's row, and creates a missing row.
func (t *Table) rowOf(key events.RankKey) *row {
	if r := t.byRank[key]; r != nil {
		return r
	}
	t.changes++
	r := &row{key: key, id: uint32(len(t.places)), index: len(t.rows)}
	if last := len(t.free) - 1; last >= 0 {
		r.id, t.free = t.free[last], t.free[:last]
		t.places[r.id] = int32(r.index)
	} else {
		t.places = append(t.places, int32(r.index))
	}
	t.byRank[key] = r
	t.rows = append(t.rows, r)
	t.loads = append(t.loads, Load{Rank: key})
	return r
}

// detach removes a record's load from its row.
func (t *Table) detach(r *record) {
	row := r.row
	last := row.records[len(row.records)-1]
	row.records[r.pos], last.pos = last, r.pos
	row.records[len(row.records)-1] = nil
	row.records = row.records[:len(row.records)-1]
	for n := r.tail; n.Parent != nil; {
		up := n.Parent
		row.leave(n)
		n = up
	}
	row.weight -= r.unsharedWeight(r.private)
	t.pend(r, -1)
	t.loads[row.index].Requests--
	t.round(row)
	r.row, r.tail = nil, nil
}

// rerun applies a record's new weights to its prompt.
func (t *Table) rerun(r *record, before []run) {
	for _, run := range r.runs {
		t.cut(r.tail, int(run.from))
	}
	for n := r.tail; n.Parent != nil; n = n.Parent {
		if w := weightAt(r.runs, n.Start); w != weightAt(before, n.Start) {
			r.row.change(n, w)
		}
	}
}

// round rounds a row's blocks, half up.
func (t *Table) round(row *row) {
	t.loads[row.index].Blocks = int64((row.weight + half + slack) / one)
}

// removeRow removes a rank without requests.
func (t *Table) removeRow(row *row) {
	t.changes++
	last := t.rows[len(t.rows)-1]
	t.rows[row.index], t.loads[row.index] = last, t.loads[last.index]
	t.places[last.id], last.index = int32(row.index), row.index
	t.free = append(t.free, row.id)
	t.rows, t.loads = t.rows[:len(t.rows)-1], t.loads[:len(t.loads)-1]
	delete(t.byRank, row.key)
}
