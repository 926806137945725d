package load

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/simnet"
)

var rounds = flag.Int("rounds", testkit.Rounds(120), "histories of TestReplicas")

// testModels are the models of all histories.
var testModels = []Model{{"m", ""}, {"m", "group"}}

// truth has the changes of a booking on all nodes, joined without the code under test. A killed session's changes may
// be lost.
type truth struct {
	id       string
	deadline time.Duration // without progress
	changes  []localChange
}

type localChange struct {
	by   *simNode
	kind change
	state
}

// simNode is one session of a node.
type simNode struct {
	*Replica
	simnet.Node
	w *world

	tables []*Table // present and dropped tables

	watched map[Model]map[Key]*Request // requests under way, from Watch
	ended   map[Model]map[Key]*Request // ended requests, from Watch
	wrong   error                      // the last wrong call of Watch
}

// world is a network of a few nodes in virtual time.
type world struct {
	simnet.Network[*simNode, shared.Message]
	limits Limits
	truth  map[Model]map[Key]*truth
	models []Model // of the operations
}

func newWorld(seed uint64, n int, limits Limits) *world {
	limits.setDefaults()
	w := &world{Network: simnet.New[*simNode, shared.Message](seed), limits: limits,
		truth: map[Model]map[Key]*truth{}, models: testModels}
	for _, m := range testModels {
		w.truth[m] = map[Key]*truth{}
	}
	for i := range n {
		w.start(i)
	}
	return w
}

// start begins a new session at a place, instead of the present session.
func (w *world) start(place int) {
	n := &simNode{w: w, watched: map[Model]map[Key]*Request{}, ended: map[Model]map[Key]*Request{}}
	n.Replica = NewReplica(w.Now, ReplicaConfig{Origin: w.Uint64() | 1, Limits: w.limits, Watch: n.watch, Past: n.past,
		Recall: n.recall})
	w.Start(place, n)
	for _, m := range testModels {
		n.model(m)
	}
	n.noteTables()
}

func (n *simNode) Receive(now time.Duration, data []byte) {
	n.Replica.Receive(now, data)
	n.noteTables()
}

// noteTables records the changes of requests in new tables.
func (n *simNode) noteTables() {
	for _, m := range testModels {
		table := n.Replica.Table(m)
		if table == nil || slices.Contains(n.tables, table) {
			continue
		}
		n.tables = append(n.tables, table)
		forward := table.changed
		table.changed = func(kind change, r *record) {
			n.note(m, kind, r)
			forward(kind, r)
		}
	}
}

// Table returns a model's table. A missing table reads as an empty table.
func (n *simNode) Table(m Model) *Table {
	if t := n.Replica.Table(m); t != nil {
		return t
	}
	return NewTable(n.cfg.Origin, n.w.limits)
}

// watch stores the request, and checks the order of calls: a request is new once, then changes, and ends.
func (n *simNode) watch(m Model, r *Request) {
	if n.watched[m] == nil {
		n.watched[m] = map[Key]*Request{}
	}
	known := n.watched[m][r.Key] != nil
	switch {
	case r.New && known || !r.New && !known && !r.Ended:
		n.wrong = fmt.Errorf("node %d: Watch received %+v; already watched: %v", n.Place, r, known)
	case r.Age < 0 || r.Age > max(n.w.limits.Expiry, n.w.Now):
		n.wrong = fmt.Errorf("node %d: Watch received %+v with a wrong age", n.Place, r)
	case r.Ended:
		delete(n.watched[m], r.Key)
		n.recall(m, r)
	default:
		n.watched[m][r.Key] = r
	}
}

// past yields the ended requests.
func (n *simNode) past(m Model, yield func(*Request) bool) {
	for _, r := range n.ended[m] {
		if !yield(r) {
			return
		}
	}
}

func (n *simNode) recall(m Model, r *Request) {
	if n.ended[m] == nil {
		n.ended[m] = map[Key]*Request{}
	}
	n.ended[m][r.Key] = r
}

// checkWatched compares the requests of Watch with the table.
func (n *simNode) checkWatched(m Model) error {
	under := 0
	for key, r := range n.Table(m).records {
		if r.gone {
			continue
		}
		under++
		q := n.watched[m][key]
		if q == nil || q.Rank != r.rank || q.Private != int(r.private) || q.Outputs != int(r.outputs()) ||
			q.PrefillDone != r.done || !slices.Equal(q.Hashes, r.hashes) {
			return fmt.Errorf("watched %+v, the table has %+v", q, r)
		}
	}
	if under != len(n.watched[m]) {
		return fmt.Errorf("watched %d requests, the table has %d", len(n.watched[m]), under)
	}
	return n.wrong
}

func (n *simNode) note(m Model, kind change, r *record) {
	all := n.w.truth[m]
	if kind == booked {
		all[r.key] = &truth{id: r.id, deadline: n.w.Now + min(n.w.limits.Expiry, MaxExpiry)}
	}
	s := localChange{by: n, kind: kind, state: r.state}
	s.outs, s.runs = slices.Clone(r.outs), slices.Clone(r.runs)
	all[r.key].changes = append(all[r.key].changes, s)
}

// op runs a random operation on a random node.
func (w *world) op() {
	n, m := w.Nodes[w.IntN(len(w.Nodes))], w.models[w.IntN(len(w.models))]
	id := fmt.Sprint("r", w.IntN(60))
	switch w.IntN(22) {
	case 0, 1, 2, 3, 4, 5, 6:
		n.model(m)
		n.noteTables()
		_ = n.Book(w.Now, m, Booking{ID: id, Rank: rankKey(w.IntN(6)), Hashes: prompt(w), NoReuse: w.IntN(5) == 0,
			PrefillTokens: int64(w.IntN(3) * 100)})
	case 7, 8, 9:
		_ = n.Update(w.Now, m, id, (*Table).PrefillComplete)
	case 10, 11, 12, 13, 14:
		_ = n.Update(w.Now, m, id, outputBlock(float64(w.IntN(18)-1)/16))
	case 15, 16, 17, 18:
		_ = n.Free(w.Now, m, id)
	case 20, 21:
		_ = n.Update(w.Now, m, id, (*Table).Progress)
	case 19:
		if k := rankKey(w.IntN(6)); w.IntN(5) == 0 {
			for _, n := range w.Nodes { // all nodes detect the removal
				n.RemoveRank(w.Now, k)
			}
		}
	}
}

// check compares the tables of all nodes, and the tables with the changes. A booking near the expiry may be present or
// absent.
func (w *world) check(late time.Duration) error {
	for _, m := range testModels {
		first := w.Nodes[0].Table(m)
		near := false
		for _, n := range w.Nodes {
			t := n.Table(m)
			if err := errors.Join(t.Check(), n.checkWatched(m)); err != nil {
				return fmt.Errorf("node %d: %w", n.Place, err)
			}
			if len(t.rivals) > 0 {
				return fmt.Errorf("node %d: ids of two requests: %v", n.Place, t.rivals)
			}
			for key, r := range t.records {
				if w.truth[m][key] == nil {
					return fmt.Errorf("node %d: no booking of %v", n.Place, key)
				}
				if r.id != w.truth[m][key].id {
					return fmt.Errorf("node %d: %v is of %q", n.Place, key, r.id)
				}
			}
		}
		for key, is := range w.truth[m] {
			if first, last := is.deadlines(); last > w.Now-late && first < w.Now+50*time.Millisecond {
				near = true
				continue
			}
			for _, n := range w.Nodes[1:] {
				a, b := first.records[key], n.Table(m).records[key]
				if (a == nil) != (b == nil) || a != nil && !a.state.equal(&b.state) {
					return fmt.Errorf("%v: nodes 0 and %d have %+v and %+v", key, n.Place, a, b)
				}
			}
			if err := is.agrees(first.records[key], w.Now); err != nil {
				return fmt.Errorf("%v of %q: %w", key, is.id, err)
			}
		}
		if near {
			continue
		}
		rows := naive(first)
		for _, n := range w.Nodes {
			t := n.Table(m)
			if t.Digest() != first.Digest() {
				return fmt.Errorf("digests %+v and %+v", t.Digest(), first.Digest())
			}
			others := map[string]Load{}
			for _, l := range t.Loads(nil, nil) {
				if l.Requests > 0 {
					others[l.Rank.String()] = l
				}
			}
			if !maps.Equal(rows, others) {
				return fmt.Errorf("loads of node %d are %v, want %v", n.Place, others, rows)
			}
		}
	}
	return nil
}

// naive computes the loads of a table from the requests only, by rank.
func naive(t *Table) map[string]Load {
	rows, blocks := map[string]Load{}, map[string]map[string]uint64{}
	for _, r := range t.records {
		if r.gone {
			continue
		}
		rank := r.rank.String()
		l := rows[rank]
		l.Rank = r.rank
		if l.Requests++; !r.done {
			l.PrefillTokens += r.tokens
			if r.tokens > 0 {
				l.Prefilling++
			}
		}
		rows[rank] = l
		if blocks[rank] == nil {
			blocks[rank] = map[string]uint64{}
		}
		for i := range r.hashes {
			w := uint64(one)
			for _, run := range r.runs {
				if int(run.from) <= i {
					w = run.weight
				}
			}
			p := path(r.hashes[:i+1])
			blocks[rank][p] = max(blocks[rank][p], w)
		}
		outputs := uint32(0)
		for _, o := range r.outs {
			outputs += o.n
		}
		private := uint64(one)
		if r.mark.after > 0 {
			private = r.mark.weight
		}
		blocks[rank]["own of "+r.id] = uint64(r.private)*private + uint64(r.mark.after)*r.mark.weight +
			uint64(outputs-r.mark.after)*one
	}
	for rank, of := range blocks {
		sum := uint64(0)
		for _, w := range of {
			sum += w
		}
		l := rows[rank]
		l.Blocks = int64(math.Floor(float64(sum)/one + 0.5))
		rows[rank] = l
	}
	return rows
}

// deadlines returns the earliest and the latest expiry of the request. first excludes progress that only dead nodes
// received.
func (is *truth) deadlines() (first, last time.Duration) {
	first, last = is.deadline, is.deadline
	for _, s := range is.changes {
		at := is.deadline + s.progress()
		if last = max(last, at); !s.by.Dead {
			first = max(first, at)
		}
	}
	return first, last
}

// agrees compares a record with the changes. nil is a missing record.
func (is *truth) agrees(r *record, now time.Duration) error {
	var sure, all state // joined
	known, ended, maybe := false, false, false
	outs := [2]map[uint64]uint32{{}, {}}
	for _, s := range is.changes {
		if s.kind == outlive {
			maybe = true
			continue
		}
		if s.kind == freed {
			ended, maybe = ended || !s.by.Dead, true
			continue
		}
		known = known || !s.by.Dead
		for i, to := range []*state{&sure, &all} {
			if i == 0 && s.by.Dead {
				continue
			}
			to.done, to.gone = to.done || s.done, to.gone || s.gone
			for _, o := range s.outs {
				outs[i][o.origin] = max(outs[i][o.origin], o.n)
			}
			if s.mark.after > to.mark.after || s.mark.after == to.mark.after && s.mark.origin >= to.mark.origin {
				to.mark, to.runs = s.mark, s.runs
			}
		}
	}
	first, last := is.deadlines()
	switch {
	case r == nil && known && !maybe && first > now:
		return errors.New("the record is missing")
	case r == nil:
		return nil
	case last <= now:
		return fmt.Errorf("the record outlived the expiry at %v", last)
	case ended:
		return errors.New("the record was freed")
	}
	if sure.done && !r.done || r.done && !all.done || sure.gone && !r.gone || r.gone && !all.gone {
		return fmt.Errorf("%+v, want %+v to %+v", r.state, sure, all)
	}
	for _, o := range r.outs {
		if o.n < outs[0][o.origin] || o.n > outs[1][o.origin] {
			return fmt.Errorf("%d outputs of %x, want %d to %d", o.n, o.origin, outs[0][o.origin], outs[1][o.origin])
		}
		delete(outs[0], o.origin)
	}
	if len(outs[0]) > 0 {
		return fmt.Errorf("no outputs of %v", outs[0])
	}
	if sure.mark == all.mark && (r.mark != all.mark || !slices.Equal(r.runs, all.runs)) {
		return fmt.Errorf("decay %+v with %v, want %+v with %v", r.mark, r.runs, all.mark, all.runs)
	}
	return nil
}

// quiet returns a world of ready nodes without faults.
func quiet(t *testing.T, n int) *world {
	w := newWorld(*seed, n, Limits{})
	w.Run(2 * time.Second)
	for _, n := range w.Nodes {
		if !n.Ready() {
			t.Fatalf("node %d is not ready", n.Place)
		}
	}
	return w
}
