package load

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

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
		table.replace(0, table.ids["r"], next)
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

// TestLimitsThatDiffer: the node that books checks its own limit, against the requests of all nodes. The others take
// what it has booked, one with a lower limit and one that starts too, and refuse bookings of their own.
func TestLimitsThatDiffer(t *testing.T) {
	w := quiet(t, 3)
	few, many, m := w.nodes[0], w.nodes[1], testModels[0]
	few.model(m).table.limits = Limits{Requests: 2, Blocks: 2 * blocksEach, Prompt: maxPrompt, Expiry: time.Minute}
	book := func(n *simNode, id string) error {
		err := n.Book(w.now, m, Booking{ID: id, Rank: rankKey(0), Hashes: []events.SeqHash{1, 2, 3}})
		w.run(10 * time.Millisecond)
		return err
	}
	for i := range 5 {
		if err := book(many, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := book(few, "a"); !errors.Is(err, ErrFull) {
		t.Errorf("the node with the lower limit says %v", err)
	}
	if err := few.PrefillComplete(w.now, m, "0"); err != nil {
		t.Error(err)
	}
	w.run(10 * time.Millisecond)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	w.start(2)
	w.run(2 * time.Second)
	if n := w.nodes[2].Table(m).Len(); n != 5 {
		t.Errorf("a node that starts has %d requests", n)
	}
	for i := range 4 { // wherever they were booked
		if err := few.Free(w.now, m, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := book(few, "a"); err != nil {
		t.Errorf("below its limit again it says %v", err)
	}
	if err := w.check(0); err != nil {
		t.Error(err)
	}
}

func TestBlocksGrowWithRequests(t *testing.T) {
	for _, c := range []struct{ given, requests, blocks int }{
		{0, 1 << 16, 1 << 24}, {1000, 1000, 256_000}, {1 << 30, 1 << 20, 1 << 28},
	} {
		l := Limits{Requests: c.given}
		if l.setDefaults(); l.Requests != c.requests || l.Blocks != c.blocks {
			t.Errorf("%d requests: %+v", c.given, l)
		}
	}
}

// TestWhatANodeHasMissedIsSentOnce cuts a node off, for less and for longer than the others remember that it is there.
// When it is back one of them sends it what it lacks, and not each.
func TestWhatANodeHasMissedIsSentOnce(t *testing.T) {
	for _, away := range []time.Duration{3 * time.Second, 8 * time.Second} {
		w := quiet(t, 8)
		m := testModels[0]
		for i, n := range w.nodes {
			if err := n.Book(w.now, m, Booking{ID: fmt.Sprint("before", i), Rank: rankKey(i)}); err != nil {
				t.Fatal(err)
			}
		}
		w.run(time.Second)
		w.nodes[7].group = 1
		w.run(away)
		for i := range 700 {
			if err := w.nodes[i%7].Book(w.now, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 8)}); err != nil {
				t.Fatal(err)
			}
			w.run(time.Millisecond)
		}
		w.heal()
		w.run(2 * time.Second)
		if err := w.check(0); err != nil {
			t.Error(err)
		}
		pushed := uint64(0)
		for _, n := range w.nodes {
			pushed += n.Counts.Pushed
		}
		if pushed < 700 || pushed > 2100 { // by who was asked, and by its neighbours in the ring
			t.Errorf("away for %v: %d requests were sent, 700 are missed", away, pushed)
		}
	}
}

// TestNodesThatWereCutOffFromEachOther has sixteen nodes go on booking alone, as while NATS is away. When they hear
// each other again, and change all the time, each compares with about as many others as the number of nodes has bits,
// and not with each.
func TestNodesThatWereCutOffFromEachOther(t *testing.T) {
	const nodes, bits, each = 16, 4, 40
	w := quiet(t, nodes)
	w.delay = 1 // else a beat may overtake events, which looks like a loss
	m := testModels[0]
	exchanges := func() (began, pushed uint64) {
		for _, n := range w.nodes {
			began, pushed = began+n.Counts.Exchanges, pushed+n.Counts.Pushed
		}
		return began, pushed
	}
	book := func(what string) {
		for i, n := range w.nodes {
			for j := range each {
				id := fmt.Sprint(what, i, "/", j)
				if err := n.Book(w.now, m, Booking{ID: id, Rank: rankKey(i)}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	book("before")
	w.run(time.Second)
	for i, n := range w.nodes {
		n.group = i
	}
	book("alone")
	for i, n := range w.nodes {
		for j := range each {
			if err := n.Free(w.now, m, fmt.Sprint("before", i, "/", j)); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.run(8 * time.Second)
	began, pushed := exchanges()
	for _, n := range w.nodes {
		n.group = 0
	}
	w.churn(8*time.Second, true, w.nodes[:2]...)
	began2, pushed2 := exchanges()
	if n := began2 - began; n > nodes*2*bits {
		t.Errorf("%d exchanges of %d nodes, want %d for each at most", n, nodes, 2*bits)
	}
	if n := pushed2 - pushed; n < nodes*each || n > 4*nodes*each {
		t.Errorf("%d requests were sent, %d are missed", n, nodes*each)
	}
	w.run(50 * time.Millisecond)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
}

// TestEachRequestIsComparedOnce compares a table with a summary of several parts: each part is about some of the
// requests, and the others are not looked at.
func TestEachRequestIsComparedOnce(t *testing.T) {
	x, y, _ := pair(t)
	m := x.model(Model{Name: "m"})
	n := y.model(Model{Name: "m"})
	for _, r := range m.table.records {
		c := *r
		c.row, c.tail, c.rival = nil, nil, nil
		n.table.insert(0, &c)
	}
	all := uint64(m.table.Len())
	if parts := uint64(len(m.table.summary())); all/parts > partPoints || parts < 3 {
		t.Fatalf("%d requests in %d parts", all, parts)
	}
	x.summarize(m, 2, nil)
	give(t, x.Step(0), y)
	if y.Counts.Compared != all {
		t.Errorf("compared %d of %d requests", y.Counts.Compared, all)
	}
	give(t, y.Step(0), x)
	if x.Counts.Compared != all {
		t.Errorf("with the answer compared %d of %d requests", x.Counts.Compared, all)
	}
}

// TestAVectorCountsWithItsAnswer has a node get what a peer has heard of a third one before, after and without the
// summary that it belongs to.
func TestAVectorCountsWithItsAnswer(t *testing.T) {
	m := testModels[0]
	for _, order := range []string{"vector", "answer", "vector answer", "answer vector"} {
		var nodes []*Replica
		for i := range uint64(3) {
			r := NewReplica(0, ReplicaConfig{Origin: i + 1})
			r.Alone()
			r.model(m)
			nodes = append(nodes, r)
		}
		a, b, c := nodes[0], nodes[1], nodes[2]
		for _, from := range nodes {
			list := from.Step(0)
			for _, to := range nodes {
				give(t, list, to)
			}
		}
		if err := c.Book(0, m, Booking{ID: "r", Rank: rankKey(0)}); err != nil {
			t.Fatal(err)
		}
		give(t, c.Step(batchDelay), b) // a does not get it
		a.now, b.now = time.Second, time.Second
		a.summarize(a.byName[m], 2, nil)
		give(t, a.Step(time.Second)[:1], b) // and not its beat
		kinds := map[string][]Message{}
		for _, message := range b.Step(time.Second + batchDelay) {
			read, err := decode(message.Data, 0)
			if err != nil {
				t.Fatal(err)
			}
			kind := map[uint64]string{kindSummary: "answer", kindVersions: "vector", kindEvents: "events"}[read.kind]
			kinds[kind] = append(kinds[kind], message)
		}
		if len(kinds["answer"]) != 1 || len(kinds["vector"]) != 1 || len(kinds["events"]) != 1 {
			t.Fatalf("b sends %v", kinds)
		}
		for _, kind := range strings.Fields(order) {
			give(t, kinds[kind], a)
		}
		if got, want := a.byName[m].peer(3, 0).got.all(1), strings.Contains(order, " "); got != want {
			t.Errorf("after %q nothing of c is missed: %v, want %v", order, got, want)
		}
	}
}
