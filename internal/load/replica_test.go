package load

import (
	"container/heap"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

var rounds = flag.Int("rounds", 200, "histories of TestReplicas")

// testModels are what histories book in.
var testModels = []Model{{"m", ""}, {"m", "group"}}

// truth is what nodes have said of one booking, joined without the code under test. What a session said that was
// killed since may have been lost with it.
type truth struct {
	id       string
	deadline time.Duration
	said     []saying
}

type saying struct {
	by   *simNode
	kind change
	state
}

// simNode is one session of a node.
type simNode struct {
	*Replica
	w     *world
	place int // which node it is
	dead  bool
	group int // of nodes that hear each other

	watched map[Model]map[Key]*Request // under way, as Watch told it
	ended   map[Model]map[Key]*Request // not any more
	wrong   error                      // of what Watch told
}

type flight struct {
	at     time.Duration
	serial int
	to     int // place
	data   []byte
}

type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	return f[i].at < f[j].at || f[i].at == f[j].at && f[i].serial < f[j].serial
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	x := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return x
}

// world is a few nodes in virtual time, and the net between them.
type world struct {
	*rand.Rand
	limits Limits
	now    time.Duration
	nodes  []*simNode
	flight flights
	serial int
	truth  map[Model]map[Key]*truth

	loss, twice float64
	delay       time.Duration // the most
	published   [][]byte
	record      bool // keep what is published
	bytes       int  // of it
}

func newWorld(seed uint64, n int, limits Limits) *world {
	limits.setDefaults()
	w := &world{Rand: rand.New(rand.NewPCG(seed, 9)), limits: limits, truth: map[Model]map[Key]*truth{},
		delay: 2 * time.Millisecond}
	for _, m := range testModels {
		w.truth[m] = map[Key]*truth{}
	}
	for i := range n {
		w.nodes = append(w.nodes, nil)
		w.start(i)
	}
	return w
}

// start begins a new session at a place, in place of the one that is there.
func (w *world) start(place int) {
	group := 0
	if before := w.nodes[place]; before != nil {
		before.dead, group = true, before.group
	}
	n := &simNode{w: w, place: place, group: group, watched: map[Model]map[Key]*Request{},
		ended: map[Model]map[Key]*Request{}}
	n.Replica = NewReplica(w.now, ReplicaConfig{Origin: w.Uint64() | 1, Limits: w.limits, Watch: n.watch, Past: n.past,
		Recall: n.recall})
	w.nodes[place] = n
	for _, m := range testModels {
		table := n.model(m).table
		said := table.changed
		table.changed = func(kind change, r *record) {
			n.note(m, kind, r)
			said(kind, r)
		}
	}
}

// watch keeps what it is told of: each request is new once, then changes, and ends.
func (n *simNode) watch(m Model, r *Request) {
	if n.watched[m] == nil {
		n.watched[m] = map[Key]*Request{}
	}
	known := n.watched[m][r.Key] != nil
	switch {
	case r.New && known || !r.New && !known && !r.Ended:
		n.wrong = fmt.Errorf("node %d is told of %+v; it is known: %v", n.place, r, known)
	case r.Age < 0 || r.Age > n.w.limits.Expiry:
		n.wrong = fmt.Errorf("node %d is told of %+v of this age", n.place, r)
	case r.Ended:
		delete(n.watched[m], r.Key)
		n.recall(m, r)
	default:
		n.watched[m][r.Key] = r
	}
}

// past yields what n remembers.
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

// checkWatched compares what Watch told with the table.
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
			return fmt.Errorf("watched %+v, there is %+v", q, r)
		}
	}
	if under != len(n.watched[m]) {
		return fmt.Errorf("watched %d requests, there are %d", len(n.watched[m]), under)
	}
	return n.wrong
}

func (n *simNode) note(m Model, kind change, r *record) {
	all := n.w.truth[m]
	if kind == booked {
		all[r.key] = &truth{id: r.id, deadline: n.w.now + n.w.limits.Expiry}
	}
	s := saying{by: n, kind: kind, state: r.state}
	s.outs, s.runs = slices.Clone(r.outs), slices.Clone(r.runs)
	all[r.key].said = append(all[r.key].said, s)
}

// run lets time pass.
func (w *world) run(d time.Duration) {
	for end := w.now + d; ; {
		next := end
		for _, n := range w.nodes {
			next = min(next, n.Wake())
		}
		if len(w.flight) > 0 {
			next = min(next, w.flight[0].at)
		}
		w.now = max(w.now, next)
		for len(w.flight) > 0 && w.flight[0].at <= w.now {
			f := heap.Pop(&w.flight).(flight)
			if err := w.nodes[f.to].Receive(w.now, f.data); err != nil {
				panic(err)
			}
		}
		for _, n := range w.nodes {
			if n.Wake() <= w.now {
				for _, m := range n.Step(w.now) {
					w.publish(n, m.Data)
				}
			}
		}
		if w.now >= end {
			return
		}
	}
}

func (w *world) publish(from *simNode, data []byte) {
	if w.bytes += len(data); w.record {
		w.published = append(w.published, data)
	}
	for i, n := range w.nodes {
		if n.group != from.group {
			continue // its own echo comes too
		}
		for copies := 1 + w.chance(w.twice); copies > 0; copies-- {
			if w.chance(w.loss) == 0 {
				w.serial++
				at := w.now + time.Duration(w.Int64N(int64(w.delay)))
				heap.Push(&w.flight, flight{at, w.serial, i, data})
			}
		}
	}
}

func (w *world) chance(p float64) int {
	if w.Float64() < p {
		return 1
	}
	return 0
}

// op does something at a random node.
func (w *world) op() {
	n, m := w.nodes[w.IntN(len(w.nodes))], testModels[w.IntN(len(testModels))]
	id := fmt.Sprint("r", w.IntN(60))
	switch w.IntN(20) {
	case 0, 1, 2, 3, 4, 5, 6:
		_ = n.Book(w.now, m, Booking{ID: id, Rank: rankKey(w.IntN(6)), Hashes: prompt(w), NoReuse: w.IntN(5) == 0,
			PrefillTokens: int64(w.IntN(3) * 100)})
	case 7, 8, 9:
		_ = n.PrefillComplete(w.now, m, id)
	case 10, 11, 12, 13, 14:
		_ = n.OutputBlock(w.now, m, id, float64(w.IntN(18)-1)/16)
	case 15, 16, 17, 18:
		_ = n.Free(w.now, m, id)
	case 19:
		if w.IntN(5) == 0 {
			n.RemoveRank(w.now, rankKey(w.IntN(6)))
		}
	}
}

// heal ends all faults; what is in flight arrives.
func (w *world) heal() {
	w.loss, w.twice, w.delay = 0, 0, 2*time.Millisecond
	for _, n := range w.nodes {
		n.group = 0
	}
	for i := range w.flight {
		w.flight[i].at = min(w.flight[i].at, w.now+w.delay)
	}
	heap.Init(&w.flight)
}

// check compares all tables with each other and with what was said. Bookings that were, or are, near their expiry may
// be there or not.
func (w *world) check(late time.Duration) error {
	for _, m := range testModels {
		first := w.nodes[0].Table(m)
		near := false
		for _, n := range w.nodes {
			t := n.Table(m)
			if err := errors.Join(t.Check(), n.checkWatched(m)); err != nil {
				return fmt.Errorf("node %d: %w", n.place, err)
			}
			if len(t.rivals) > 0 {
				return fmt.Errorf("node %d: ids of two requests: %v", n.place, t.rivals)
			}
			for key, r := range t.records {
				if w.truth[m][key] == nil {
					return fmt.Errorf("node %d: nobody booked %v", n.place, key)
				}
				if r.id != w.truth[m][key].id {
					return fmt.Errorf("node %d: %v is of %q", n.place, key, r.id)
				}
			}
		}
		for key, is := range w.truth[m] {
			if is.deadline > w.now-late && is.deadline < w.now+50*time.Millisecond {
				near = true
				continue
			}
			for _, n := range w.nodes[1:] {
				a, b := first.records[key], n.Table(m).records[key]
				if (a == nil) != (b == nil) || a != nil && !a.state.equal(&b.state) {
					return fmt.Errorf("of %v nodes 0 and %d have %+v and %+v", key, n.place, a, b)
				}
			}
			if err := is.agrees(first.records[key], w.now); err != nil {
				return fmt.Errorf("%v of %q: %w", key, is.id, err)
			}
		}
		if near {
			continue
		}
		rows := naive(first)
		for _, n := range w.nodes {
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
				return fmt.Errorf("loads of node %d are %v, want %v", n.place, others, rows)
			}
		}
	}
	return nil
}

// naive computes the loads of a table from its requests alone, by rank.
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

// agrees compares a record, nil if there is none, with what was said.
func (is *truth) agrees(r *record, now time.Duration) error {
	var sure, all state // joined
	known, freed, maybe := false, false, false
	outs := [2]map[uint64]uint32{{}, {}}
	for _, s := range is.said {
		if s.kind == 3 {
			freed, maybe = freed || !s.by.dead, true
			continue
		}
		known = known || !s.by.dead
		for i, to := range []*state{&sure, &all} {
			if i == 0 && s.by.dead {
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
	expired := is.deadline <= now
	switch {
	case r == nil && known && !maybe && !expired:
		return errors.New("it is missing")
	case r == nil:
		return nil
	case expired:
		return fmt.Errorf("it should have expired at %v", is.deadline)
	case freed:
		return errors.New("it was freed")
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

// TestReplicas lets nodes work while messages are lost, late, twice and out of order, nodes are cut off from each other
// and restarted. Two seconds after that has ended all tables are equal, and what was said; and when all has expired
// they are empty.
func TestReplicas(t *testing.T) {
	var tables Counts
	var replicas ReplicaCounts
	for round := range uint64(*rounds) {
		if err := history(*seed+round, &tables, &replicas); err != nil {
			t.Errorf("-seed=%d -rounds=1: %v", *seed+round, err)
		}
	}
	t.Logf("%+v", tables)
	t.Logf("%+v", replicas)
	if *rounds >= 100 && (tables.Rivals == 0 || tables.Superseded == 0 || tables.Stray == 0 || tables.Expired == 0 ||
		tables.Gone == 0 || tables.Conflicts == 0 || replicas.Healed == 0 || replicas.Pushed == 0) {
		t.Error("some of what should happen did not")
	}
}

func history(seed uint64, tables *Counts, replicas *ReplicaCounts) error {
	r := rand.New(rand.NewPCG(seed, 3))
	expiry := []time.Duration{8 * time.Second, 300 * time.Second}[r.IntN(2)]
	w := newWorld(seed, 3+r.IntN(3), Limits{Expiry: expiry})
	w.run(2 * time.Second)
	late := time.Duration(0)
	for range 4 + r.IntN(8) {
		switch r.IntN(6) {
		case 0:
			w.loss = r.Float64() * 0.7
		case 1:
			w.twice = r.Float64()
		case 2:
			w.delay = time.Duration(1+r.IntN(3000)) * time.Millisecond
			late = max(late, w.delay)
		case 3:
			for _, n := range w.nodes {
				n.group = r.IntN(3)
			}
		case 4:
			w.start(r.IntN(len(w.nodes)))
		case 5:
			w.heal()
		}
		for range r.IntN(80) {
			w.op()
			w.run(time.Duration(r.IntN(60)) * time.Millisecond)
		}
	}
	w.heal()
	w.run(2 * time.Second)
	// A booking whose node has died lives, with those who heard of it, for as long as it was under way longer.
	late = 4*late + 3*time.Second
	if err := w.check(late); err != nil {
		return fmt.Errorf("%d nodes, after the faults: %w", len(w.nodes), err)
	}
	w.run(expiry + late)
	for _, n := range w.nodes {
		replicas.Exchanges += n.Counts.Exchanges
		replicas.Pushed += n.Counts.Pushed
		replicas.Healed += n.Counts.Healed
		replicas.Unsynced += n.Counts.Unsynced
		for _, m := range testModels {
			c := n.Table(m).Counts
			tables.Booked += c.Booked
			tables.PrefillDone += c.PrefillDone
			tables.OutputBlocks += c.OutputBlocks
			tables.Freed += c.Freed
			tables.Conflicts += c.Conflicts
			tables.Expired += c.Expired
			tables.Gone += c.Gone
			tables.Rivals += c.Rivals
			tables.Superseded += c.Superseded
			tables.Stray += c.Stray
			if t := n.Table(m); t.Len() > 0 || t.Blocks() > 0 || t.Digest() != (Digest{}) || t.Check() != nil {
				return fmt.Errorf("node %d has %d requests after all have expired, %v", n.place, t.Len(), t.Check())
			}
		}
		if !n.Ready() || n.Counts.Malformed > 0 {
			return fmt.Errorf("node %d: ready %v, %+v", n.place, n.Ready(), n.Counts)
		}
	}
	return nil
}

// quiet is a world of ready nodes without faults.
func quiet(t *testing.T, n int) *world {
	w := newWorld(*seed, n, Limits{})
	w.run(2 * time.Second)
	for _, n := range w.nodes {
		if !n.Ready() {
			t.Fatalf("node %d is not ready", n.place)
		}
	}
	return w
}

// TestEventsSuffice has no faults: all tables are equal a few milliseconds after each operation.
func TestEventsSuffice(t *testing.T) {
	w := quiet(t, 4)
	for range 1000 {
		w.op()
		w.run(5 * time.Millisecond)
		if err := w.check(0); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range w.nodes { // a digest may be older than events on their way
		if n.Counts.Exchanges > 20 || n.Counts.Pushed > 20 {
			t.Errorf("node %d: %+v", n.place, n.Counts)
		}
	}
}

func TestDuplicateIsAConflictEverywhere(t *testing.T) {
	w := quiet(t, 3)
	m := testModels[0]
	book := func(place int) error { return w.nodes[place].Book(w.now, m, Booking{ID: "r", Rank: rankKey(place)}) }
	if err := book(0); err != nil {
		t.Fatal(err)
	}
	w.run(5 * time.Millisecond)
	for i := range w.nodes {
		if err := book(i); !errors.Is(err, ErrConflict) {
			t.Errorf("node %d: %v", i, err)
		}
	}
	// Cut off from each other, each of two may book it. One stays: that of the lesser key, everywhere.
	if err := w.nodes[1].Free(w.now, m, "r"); err != nil {
		t.Fatal(err)
	}
	w.run(5 * time.Millisecond)
	w.nodes[2].group = 1
	for _, i := range []int{0, 2} {
		if err := book(i); err != nil {
			t.Fatal(err)
		}
	}
	w.run(10 * time.Second)
	w.heal()
	w.run(2 * time.Second)
	if err := w.check(0); err != nil {
		t.Fatal(err)
	}
	winner := rankKey(0)
	if w.nodes[2].cfg.Origin < w.nodes[0].cfg.Origin {
		winner = rankKey(2)
	}
	rivals := uint64(0)
	for _, n := range w.nodes {
		rivals += n.Table(m).Counts.Rivals
		if r := n.Table(m).ids["r"]; n.Table(m).Len() != 1 || r.rank != winner {
			t.Errorf("node %d has %+v, want that of %v", n.place, r, winner)
		}
	}
	if rivals == 0 {
		t.Error("nobody counted it")
	}
}

// TestWhoEndsARivalDies has an id that two nodes have booked. A third is the first to end one of the two bookings, and
// is killed: tables are equal, and who lives has ended nothing.
func TestWhoEndsARivalDies(t *testing.T) {
	w := quiet(t, 3)
	m := testModels[0]
	for _, i := range []int{0, 2} {
		if err := w.nodes[i].Book(w.now, m, Booking{ID: "r", Rank: rankKey(i)}); err != nil {
			t.Fatal(err)
		}
		w.nodes[i].nextBeat = w.now + 2*rivalGrace
	}
	w.nodes[1].nextBeat = w.now + rivalGrace + 10*time.Millisecond
	w.run(rivalGrace + 20*time.Millisecond)
	if n := w.nodes[1].Table(m).Counts.Rivals; n != 1 {
		t.Errorf("it ended %d bookings", n)
	}
	w.start(1)
	w.run(2 * time.Second)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	for _, n := range w.nodes {
		if c := n.Table(m).Counts; n.Table(m).Len() != 1 || c.Rivals != 0 {
			t.Errorf("node %d has %d requests, %+v", n.place, n.Table(m).Len(), c)
		}
	}
}

// TestStart has a node that starts among others: it is not ready before it has what they have, though much is lost.
func TestStart(t *testing.T) {
	for _, loss := range []float64{0, 0.3} {
		w := quiet(t, 3)
		for i := range 2000 {
			err := w.nodes[i%3].Book(w.now, testModels[i%2], Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 8),
				Hashes: prompt(w)})
			if err != nil {
				t.Fatal(err)
			}
		}
		w.run(2 * time.Second)
		for i := 0; i < 2000; i += 3 {
			if err := w.nodes[i%3].Free(w.now, testModels[i%2], fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
		}
		w.run(2 * time.Second)
		w.start(2) // what the one before has booked stays
		w.run(7 * time.Second)
		w.loss = loss
		w.start(1)
		n := w.nodes[1]
		began := w.now
		for !n.Ready() {
			w.run(time.Millisecond)
		}
		took := w.now - began
		if n.Counts.Unsynced > 0 || loss == 0 && took > 50*time.Millisecond {
			t.Errorf("loss %v: ready after %v, %+v", loss, took, n.Counts)
		}
		for _, m := range testModels {
			if a, b := n.Table(m).Digest(), w.nodes[0].Table(m).Digest(); a != b {
				t.Errorf("loss %v: ready with %+v, others have %+v", loss, a, b)
			}
			if got, want := len(n.ended[m]), len(w.nodes[0].ended[m]); loss == 0 && got != want {
				t.Errorf("ready with %d of %d requests that had ended", got, want)
			}
		}
	}
}

// TestAlone has a node that hears nobody, and one that is told that there is nobody. What is booked meanwhile is not
// sent, and found by who comes later.
func TestAlone(t *testing.T) {
	w := newWorld(*seed, 1, Limits{})
	n, m := w.nodes[0], testModels[0]
	if n.Alone(); !n.Ready() {
		t.Error("not ready though alone")
	}
	w.start(0)
	n = w.nodes[0]
	if w.run(time.Second); n.Ready() {
		t.Error("ready before anybody could say anything")
	}
	if w.run(time.Second); !n.Ready() {
		t.Error("not ready though nobody is there")
	}
	w.run(10 * time.Second)
	before := w.bytes
	for i := range 100 {
		if err := n.Book(w.now, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(0), Hashes: prompt(w)}); err != nil {
			t.Fatal(err)
		}
	}
	w.run(100 * time.Millisecond)
	if w.bytes-before > 200 {
		t.Errorf("%d bytes were sent to nobody", w.bytes-before)
	}
	w.nodes = append(w.nodes, nil)
	w.start(1)
	for !w.nodes[1].Ready() {
		w.run(time.Millisecond)
	}
	if got := w.nodes[1].Table(m).Len(); got != 100 {
		t.Errorf("ready with %d of 100 requests", got)
	}
}

// TestBatches has at most 256 events in a message, no message much larger than its bound, and none later than 1 ms.
func TestBatches(t *testing.T) {
	w := quiet(t, 2)
	n, m := w.nodes[0], testModels[0]
	w.record, w.published = true, nil
	for i := range 1000 {
		if err := n.Book(w.now, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(0)}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		err := n.Book(w.now, m, Booking{ID: fmt.Sprint("long", i), Rank: rankKey(0), Hashes: make([]events.SeqHash, 10_000),
			NoReuse: i%2 == 0})
		if err != nil {
			t.Fatal(err)
		}
	}
	w.run(time.Millisecond)
	list := 0
	for _, data := range w.published {
		if m, err := decode(data, 0); err != nil || len(m.events) > maxEvents || len(data) > batchBytes+100_000 {
			t.Errorf("%d events in %d bytes, %v", len(m.events), len(data), err)
		} else {
			list += len(m.events)
		}
	}
	if list != 1020 {
		t.Errorf("%d events were published", list)
	}
	for i := range 300 {
		if err := n.Book(w.now, Model{Name: fmt.Sprint(i)}, Booking{ID: "x", Rank: rankKey(0)}); i < 254 && err != nil ||
			i >= 254 && !errors.Is(err, ErrFull) {
			t.Fatalf("model %d: %v", i, err)
		}
	}
}

// TestAnyOrder gives the events of one node to another in any order, twice: what has ended stays so, and after updates
// that came before their booking have come again the tables are equal, without a digest.
func TestAnyOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 4))
	for range 50 {
		var list []event
		from, to := NewTable(1, Limits{}), NewTable(2, Limits{})
		from.changed = func(kind change, rec *record) {
			e := event{kind: kind, record: *rec, left: rec.deadline}
			e.outs, e.runs = slices.Clone(rec.outs), slices.Clone(rec.runs)
			e.row, e.tail, e.rival = nil, nil, nil
			list = append(list, e)
		}
		for range 200 {
			id := fmt.Sprint(r.IntN(20))
			switch r.IntN(6) {
			case 0, 1:
				_ = from.Book(0, Booking{ID: id, Rank: rankKey(r.IntN(3)), Hashes: prompt(r), PrefillTokens: 10})
			case 2:
				_ = from.PrefillComplete(0, id)
			case 3, 4:
				_ = from.OutputBlock(0, id, float64(r.IntN(18)-1)/16)
			case 5:
				_ = from.Free(0, id)
			}
		}
		order := slices.Concat(r.Perm(len(list)), r.Perm(len(list)))
		ended := map[Key]bool{}
		m := replica{table: to}
		give := func(e event) {
			m.take(0, []event{e})
			ended[e.key] = ended[e.key] || e.kind == freed
			if ended[e.key] && to.records[e.key] != nil {
				t.Fatalf("%v is under way again", e.key)
			}
			if err := to.Check(); err != nil {
				t.Fatal(err)
			}
		}
		for _, i := range order {
			give(list[i])
		}
		for _, e := range list {
			if e.kind == updated {
				give(e)
			}
		}
		if from.Digest() != to.Digest() || !maps.Equal(naive(from), naive(to)) {
			t.Fatalf("%+v, want %+v", to.Digest(), from.Digest())
		}
	}
}

// TestANodeUsesAnIDAgain has a node whose first request's end was not heard when it books under the same id again.
func TestANodeUsesAnIDAgain(t *testing.T) {
	for _, order := range [][]uint64{{5, 9}, {9, 5}} {
		table := NewTable(1, Limits{})
		for _, seq := range order {
			table.put(0, &event{kind: booked, left: time.Minute, record: record{key: Key{7, seq}, id: "r",
				rank: rankKey(int(seq))}})
		}
		if r := table.ids["r"]; table.Len() != 1 || r.key.Seq != 9 || table.Counts.Superseded != 1 || len(table.rivals) > 0 {
			t.Errorf("in order %v: %+v of %d", order, r.key, table.Len())
		}
		if err := table.Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestTheShortestLifeCounts has a booking that comes twice, by ways that took longer and less long.
func TestTheShortestLifeCounts(t *testing.T) {
	table := NewTable(1, Limits{})
	for _, left := range []time.Duration{20, 10, 30} {
		table.put(0, &event{kind: booked, left: left * time.Second, record: record{key: Key{7, 1}, id: "r",
			rank: rankKey(0)}})
	}
	if table.Tick(9 * time.Second); table.Len() != 1 {
		t.Error("it is forgotten early")
	}
	if table.Tick(10 * time.Second); table.Len() != 0 {
		t.Error("it is forgotten late")
	}
}

// churn lets time pass. If the tables are to be busy the nodes book and free a request of their own each millisecond.
func (w *world) churn(d time.Duration, busy bool, nodes ...*simNode) {
	for end := w.now + d; w.now < end; w.run(time.Millisecond) {
		for i, n := range nodes {
			id, m := fmt.Sprint("busy", i), testModels[0]
			if busy && n.Book(w.now, m, Booking{ID: id, Rank: rankKey(0)}) != nil {
				_ = n.Free(w.now, m, id)
			}
		}
	}
}

// TestUnmissed has differences of which no missed message tells. They are gone within two seconds, whether tables
// change meanwhile or not.
func TestUnmissed(t *testing.T) {
	for name, do := range map[string]func(w *world, m Model) (last *simNode, is func(t *Table) bool){
		"a node dies when its last booking has reached one of two": func(w *world, m Model) (*simNode,
			func(*Table) bool) {
			w.nodes[1].group = 1
			if err := w.nodes[2].Book(w.now, m, Booking{ID: "last", Rank: rankKey(1)}); err != nil {
				t.Fatal(err)
			}
			w.run(2 * time.Millisecond)
			w.nodes[1].group = 0
			w.nodes[2].group = 2
			return w.nodes[1], func(t *Table) bool { return t.Has("last") }
		},
		"an update overtakes the booking": func(w *world, m Model) (*simNode, func(*Table) bool) {
			if err := w.nodes[0].Book(w.now, m, Booking{ID: "late", Rank: rankKey(1)}); err != nil {
				t.Fatal(err)
			}
			w.now += batchDelay
			booking := w.nodes[0].Step(w.now)
			give(t, booking, w.nodes[1].Replica)
			if err := w.nodes[1].PrefillComplete(w.now, m, "late"); err != nil {
				t.Fatal(err)
			}
			w.now += batchDelay
			update := w.nodes[1].Step(w.now)
			give(t, update, w.nodes[0].Replica)
			give(t, update, w.nodes[2].Replica)
			give(t, booking, w.nodes[2].Replica)
			return w.nodes[2], func(t *Table) bool { return t.Has("late") && t.ids["late"].done }
		},
	} {
		for _, busy := range []bool{false, true} {
			w, m := quiet(t, 3), testModels[0]
			w.delay = 1 // else a beat may overtake events, which looks like a loss
			w.churn(2*time.Second, busy, w.nodes[:2]...)
			last, is := do(w, m)
			if is(last.Table(m)) {
				t.Errorf("%s: it has it already", name)
			}
			w.churn(2*time.Second, busy, w.nodes[:2]...)
			if !is(last.Table(m)) {
				t.Errorf("%s, busy %v: it lacks it", name, busy)
			}
		}
	}
}

// TestDigestsAreCompared changes one table and tells nobody, as only a fault of this program can. The digests show it.
func TestDigestsAreCompared(t *testing.T) {
	for _, busy := range []bool{false, true} {
		w, m := quiet(t, 3), testModels[0]
		w.delay = 1
		if err := w.nodes[0].Book(w.now, m, Booking{ID: "r", Rank: rankKey(1)}); err != nil {
			t.Fatal(err)
		}
		w.churn(2*time.Second, busy, w.nodes...)
		table := w.nodes[1].Table(m)
		next := table.ids["r"].state
		next.done = true
		table.replace(table.ids["r"], next)
		patience := 2 * time.Second
		if busy {
			patience += doubtMost
		}
		w.churn(patience, busy, w.nodes...)
		for _, n := range w.nodes {
			if !n.Table(m).ids["r"].done {
				t.Errorf("busy %v: node %d does not know it", busy, n.place)
			}
		}
	}
}

// TestBusy has tables that change each millisecond. That alone makes nobody exchange summaries, though digests are
// never equal; when something is lost it is healed meanwhile.
func TestBusy(t *testing.T) {
	w := quiet(t, 3)
	work := func(d time.Duration) {
		for end := w.now + d; w.now < end; w.run(time.Millisecond) {
			w.op()
		}
	}
	exchanges := func() (n uint64) {
		for _, n2 := range w.nodes {
			n += n2.Counts.Exchanges
		}
		return n
	}
	w.delay = 200 * time.Microsecond
	work(5 * time.Second)
	if n := exchanges(); n > 1 { // where a request goes on on another node before its booking came to a third
		t.Errorf("%d exchanges though nothing was lost", n)
	}
	before := exchanges()
	w.loss = 1
	work(20 * time.Millisecond)
	w.loss = 0
	work(1500 * time.Millisecond)
	if exchanges() == before {
		t.Error("what was lost was not missed")
	}
	w.run(5 * time.Millisecond)
	for _, m := range testModels {
		for _, n := range w.nodes {
			if got, want := n.Table(m).Digest(), w.nodes[0].Table(m).Digest(); got != want {
				t.Errorf("node %d: %+v, want %+v", n.place, got, want)
			}
		}
	}
}

// TestAnAnswerClaimsNoMoreThanIsInIt loses what a node sends beside its answer to a summary. That is missed at the next
// beat, though tables change.
func TestAnAnswerClaimsNoMoreThanIsInIt(t *testing.T) {
	m, now := testModels[0], time.Duration(0)
	a, b := NewReplica(0, ReplicaConfig{Origin: 1}), NewReplica(0, ReplicaConfig{Origin: 2})
	a.Alone()
	b.Alone()
	give(t, a.Step(0), b)
	give(t, b.Step(0), a)
	b.model(m)
	for i := range 2 * maxEvents { // whole messages
		if err := a.Book(now, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(0)}); err != nil {
			t.Fatal(err)
		}
	}
	a.Step(now + batchDelay) // is lost
	for round := range uint64(3) {
		now += beatPeriod
		a.now, b.now = now, now
		if err := b.Book(now, m, Booking{ID: fmt.Sprint("b", round), Rank: rankKey(0)}); err != nil { // it is not calm
			t.Fatal(err)
		}
		beat := a.Step(now)
		give(t, beat[len(beat)-1:], b)
		if b.Counts.Exchanges != round+1 {
			t.Fatalf("round %d: %d exchanges", round, b.Counts.Exchanges)
		}
		give(t, b.Step(now), a)
		for _, answer := range a.Step(now + batchDelay) {
			if read, _ := decode(answer.Data, 0); read.kind == kindSummary {
				give(t, []Message{answer}, b)
			}
		}
	}
}

// TestWhatWasBookedAloneIsMissed has nodes that began cut off from each other, and whose tables change.
func TestWhatWasBookedAloneIsMissed(t *testing.T) {
	m := testModels[0]
	a, b := NewReplica(0, ReplicaConfig{Origin: 1}), NewReplica(0, ReplicaConfig{Origin: 2})
	a.Alone()
	b.Alone()
	for i, r := range []*Replica{a, b} {
		if err := r.Book(0, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(0)}); err != nil {
			t.Fatal(err)
		}
	}
	give(t, a.Step(0), b)
	if b.Counts.Exchanges != 1 {
		t.Errorf("%d exchanges", b.Counts.Exchanges)
	}
}
