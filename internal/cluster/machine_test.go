package cluster

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestSetAsText(t *testing.T) {
	for text, list := range map[string][]events.Partition{"": nil, "0": {0}, "0-2,5,63-64": {0, 1, 2, 5, 63, 64}, "511": {511}} {
		s := SetOf(list...)
		if b, _ := s.MarshalText(); string(b) != text {
			t.Errorf("%v is written %q, want %q", list, b, text)
		}
		var back Set
		if err := back.UnmarshalText([]byte(text)); err != nil || !slices.Equal(back.List(), list) || back.Len() != len(list) {
			t.Errorf("%q is read as %v, %v", text, back.List(), err)
		}
	}
	for _, bad := range []string{",", "a", "2-1", "1-", "-", "0-4294967295", "99999"} {
		if err := new(Set).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
	var r Record
	if b, err := json.Marshal(Record{Node: "a", Standing: Standing{Ready: SetOf(1, 2)}}); err != nil || json.Unmarshal(b, &r) != nil || r.Ready.Len() != 2 {
		t.Errorf("%s, %v, %+v", b, err, r)
	}
}

// TestMovementIsBounded compares owners before and after a node joins: whoever was there takes nothing new, and loads differ little.
func TestMovementIsBounded(t *testing.T) {
	const partitions = 4096
	var nodes []string
	for n := 1; n <= 32; n++ {
		before, name := slices.Clone(nodes), fmt.Sprint("node-", n)
		nodes = append(nodes, name)
		copies := Replication(n, 2)
		moved, load := 0, map[string]int{}
		for p := range events.Partition(partitions) {
			now := Order(nodes, p)[:copies]
			for _, o := range now {
				load[o]++
			}
			if n <= 2 {
				continue
			}
			for _, o := range now {
				if o == name {
					moved++
				} else if !slices.Contains(Order(before, p)[:2], o) {
					t.Fatalf("%s joins and %s takes partition %d", name, o, p)
				}
			}
		}
		want := copies * partitions / n
		for o, k := range load {
			if k < want*3/4 || k > want*5/4 {
				t.Errorf("%d nodes: %s has %d, an equal share is %d", n, o, k, want)
			}
		}
		if n > 2 && moved > want*5/4 {
			t.Errorf("%s joins %d nodes and %d partitions move, an equal share is %d", name, n-1, moved, want)
		}
	}
	for n, want := range map[int]int{0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 64: 2} {
		if got := Replication(n, 0); got != want {
			t.Errorf("%d nodes: %d owners, want %d", n, got, want)
		}
	}
}

// TestOthersThatDoNotFit has nodes with another number of partitions or another version: they own nothing here, and are named.
func TestOthersThatDoNotFit(t *testing.T) {
	m := New(Config{Node: "a", Life: "1", Partitions: 4, Beat: time.Second, DeadAfter: 5 * time.Second})
	m.Announce(Standing{}, false)
	a := m.Step(time.Second, 1, &Look{Records: []Seen{
		{Record{Version: 1, Node: "b", Beat: 1, Partitions: 8}, 1}, {Record{Version: 2, Node: "c", Beat: 1, Partitions: 4}, 2},
	}})
	if len(a.Take) != 4 || len(m.Peers()) != 0 {
		t.Errorf("%+v, peers %+v", a, m.Peers())
	}
	if said := strings.Join(m.Problems(), "\n"); len(m.Problems()) != 2 || !strings.Contains(said, "node b writes records of version 1 for 8 partitions") || !strings.Contains(said, "node c writes records of version 2") {
		t.Errorf("it says %q", said)
	}
}

// TestSilenceOfNATSAgesNobody lets an hour pass in which nothing is acknowledged.
func TestSilenceOfNATSAgesNobody(t *testing.T) {
	m := New(Config{Node: "a", Life: "1", Partitions: 64, Replication: 1, Beat: time.Second, DeadAfter: 5 * time.Second})
	now, beat := time.Duration(0), uint64(0)
	other := Seen{Record{Version: RecordVersion, Node: "b", Beat: 1, Partitions: 64}, 1}
	taken := 0
	step := func(d time.Duration, heard bool) {
		now += d
		m.Announce(Standing{}, false)
		if beat++; heard {
			taken += len(m.Step(now, beat, &Look{Records: []Seen{other}}).Take)
		} else {
			m.Step(now, beat-1, nil)
		}
	}
	step(0, true)
	before := taken
	step(time.Hour, true) // as after SIGSTOP, or an election without end
	if taken != before || len(m.Peers()) != 1 {
		t.Fatalf("after an hour's silence it takes %d more", taken-before)
	}
	for range 5 {
		step(time.Second, true)
	}
	if taken != 64 || len(m.Peers()) != 0 {
		t.Errorf("of a node that is dead all is to be taken: %d of 64", taken)
	}
}

// TestTwoThatLetGoForEachOther has a node that leaves while the one that counts on it does not know: with looks from before their words were in
// the bucket, each sees the other ready. Neither may let go on such a look, and with those of the leader one of them stays.
func TestTwoThatLetGoForEachOther(t *testing.T) {
	name := Order([]string{"x", "y"}, 0) // the first owns partition 0
	all := Standing{Ready: SetOf(0)}
	var machines [2]*Machine
	bucket, beats, revision := [2]Seen{}, [2]uint64{}, uint64(0)
	now := time.Duration(0)
	announce := func(i int, leave bool) {
		revision++
		bucket[i] = Seen{machines[i].Announce(all, leave), revision}
		beats[i] = bucket[i].Beat
	}
	step := func(i int, records [2]Seen, after uint64) []events.Partition {
		now += time.Second
		return machines[i].Step(now, beats[i], &Look{Records: records[:], After: after}).Release
	}
	for i := range machines {
		machines[i] = New(Config{Node: name[i], Life: "1", Partitions: 1, Replication: 1, Beat: time.Second, DeadAfter: 10 * time.Second})
	}
	announce(1, false)
	step(1, [2]Seen{{Record: Record{Version: RecordVersion, Node: name[1], Partitions: 1}}, bucket[1]}, 0) // alone, it takes all
	for range 2 {                                                                                          // each sees the other's beat change
		announce(0, false)
		step(0, bucket, 0)
		announce(1, false)
		if gone := step(1, bucket, 0); gone != nil {
			t.Fatal("let go before it was said")
		}
	}
	stale := bucket
	announce(0, true) // it leaves
	step(0, stale, 0)
	announce(1, false)
	announce(0, true)
	if gone := append(step(0, stale, 0), step(1, stale, 0)...); gone != nil {
		t.Fatalf("%v let go on looks that were not the leader's", gone)
	}
	first, second := step(0, bucket, beats[0]), step(1, bucket, beats[1])
	if len(first)+len(second) > 1 {
		t.Fatal("both have let go")
	}
	for range 4 {
		announce(1, false)
		step(1, bucket, beats[1])
		announce(0, true)
		first = append(first, step(0, bucket, beats[0])...)
	}
	if held := machines[1].Held(); len(first) != 1 || held.Len() != 1 {
		t.Errorf("the one that leaves let %v go, the other holds %v", first, held.List())
	}
}

// world is a cluster in virtual time: one bucket, any number of nodes with the real machine.
type world struct {
	testing.TB
	rng        *rand.Rand
	now        time.Duration
	queue      queue
	partitions uint32
	copies     int
	revision   uint64
	bucket     map[string]Seen
	past       []map[string]Seen // the bucket at the last beats, for looks at a replica that is behind
	down       bool              // nothing is read or written
	nodes      []*simNode        // all that ever were
	died       map[events.Partition]time.Duration
	takes      int
	releases   int
	steps      int
	names      int
}

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

const (
	simBeat = 500 * time.Millisecond
	simDead = 3 * time.Second
)

// simNode is one life of a node.
type simNode struct {
	w       *world
	name    string
	machine *Machine
	serves  Set
	acked   uint64
	leave   bool
	ended   bool
	held    bool // by SIGSTOP
	waiting []func()
}

func (w *world) after(d time.Duration, do func()) {
	w.steps++
	heap.Push(&w.queue, event{w.now + d, w.steps, do})
}

// run goes on for a while.
func (w *world) run(d time.Duration) {
	end := w.now + d
	for len(w.queue) > 0 && w.queue[0].at <= end {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
	}
	w.now = end
}

func (w *world) between(a, b time.Duration) time.Duration {
	return a + time.Duration(w.rng.Int64N(int64(b-a)+1))
}

func (w *world) live() (list []*simNode) {
	for _, n := range w.nodes {
		if !n.ended {
			list = append(list, n)
		}
	}
	return list
}

func (w *world) start(name string) {
	w.names++
	n := &simNode{w: w, name: name, machine: New(Config{
		Node: name, Life: fmt.Sprint(w.names), Partitions: w.partitions, Replication: w.copies, Beat: simBeat, DeadAfter: simDead,
	})}
	w.nodes = append(w.nodes, n)
	n.after(w.between(0, simBeat), n.announce)
}

// after does something unless the life has ended; while it is held, later.
func (n *simNode) after(d time.Duration, do func()) {
	n.w.after(d, func() {
		switch {
		case n.ended:
		case n.held:
			n.waiting = append(n.waiting, do)
		default:
			do()
		}
	})
}

func (n *simNode) announce() {
	w := n.w
	r := n.machine.Announce(Standing{Ready: SetOf(n.serves.List()...)}, n.leave)
	lost := w.down || w.rng.IntN(50) == 0
	n.after(w.between(0, 40*time.Millisecond), func() { // the write reaches the bucket
		if !lost && !w.down {
			w.revision++
			w.bucket = maps.Clone(w.bucket)
			w.bucket[n.name] = Seen{r, w.revision}
		}
		n.after(w.between(0, 40*time.Millisecond), func() {
			if !lost {
				n.acked = r.Beat
			}
			n.look(r.Beat)
		})
	})
}

func (n *simNode) look(beat uint64) {
	w := n.w
	look := &Look{}
	from := w.bucket
	if n.machine.Releasing() {
		look.After = n.acked
	} else if len(w.past) > 0 && w.rng.IntN(3) == 0 {
		from = w.past[w.rng.IntN(len(w.past))]
	}
	for _, s := range from {
		look.Records = append(look.Records, s)
	}
	if w.down {
		look = nil
	}
	n.after(w.between(0, 40*time.Millisecond), func() {
		a := n.machine.Step(w.now, n.acked, look)
		for _, p := range a.Take {
			w.takes++
			n.after(w.between(20*time.Millisecond, 4*time.Second), func() {
				if n.machine.held.Has(p) {
					n.serves.Add(p)
				}
			})
		}
		for _, p := range a.Release {
			w.releases++
			n.serves.Remove(p)
			w.mustHaveOwner(p, n)
		}
		if n.leave && n.machine.Left() {
			n.end()
			delete(w.bucket, n.name)
			return
		}
		n.after(w.between(simBeat*9/10, simBeat*11/10), n.announce)
	})
}

// end ends a life: what it served is served no more, and the others learn of it later.
func (n *simNode) end() {
	n.ended = true
	for _, p := range n.serves.List() {
		n.w.died[p] = n.w.now
	}
}

// mustHaveOwner fails if a partition was let go and nobody has it, unless somebody who had it died a moment ago.
func (w *world) mustHaveOwner(p events.Partition, by *simNode) {
	for _, n := range w.live() {
		if n.serves.Has(p) {
			return
		}
	}
	if at, died := w.died[p]; died && w.now-at <= 4*simDead {
		return
	}
	w.Fatalf("at %v %s lets partition %d go, and nobody has it", w.now, by.name, p)
}

// settled says what is not as it is to be when nothing happens any more.
func (w *world) settled() error {
	var names []string
	serving := map[events.Partition][]string{}
	for _, n := range w.live() {
		names = append(names, n.name)
		for _, p := range n.serves.List() {
			serving[p] = append(serving[p], n.name)
		}
		if !slices.Equal(n.machine.Held().List(), n.serves.List()) || n.machine.Releasing() {
			return fmt.Errorf("%s holds %v, serves %v", n.name, n.machine.Held().List(), n.serves.List())
		}
	}
	copies := Replication(len(names), w.copies)
	live := w.live()
	var views []*View
	for _, n := range live {
		views = append(views, n.machine.View())
	}
	for p := range events.Partition(w.partitions) {
		want := Order(names, p)[:copies]
		slices.Sort(want)
		slices.Sort(serving[p])
		if !slices.Equal(serving[p], want) {
			return fmt.Errorf("partition %d is served by %v, not %v", p, serving[p], want)
		}
		writers := 0
		for i, n := range live {
			if views[i].Writer[p] == n.name {
				writers++
			}
		}
		if writers != 1 {
			return fmt.Errorf("partition %d has %d writers of snapshots", p, writers)
		}
	}
	return nil
}

// fault does one thing to the cluster.
func (w *world) fault(most int) {
	live := slices.DeleteFunc(w.live(), func(n *simNode) bool { return n.leave })
	if len(live) == 0 {
		w.start(fmt.Sprint("n", w.names))
		return
	}
	any := live[w.rng.IntN(len(live))]
	switch w.rng.IntN(6) {
	case 0, 1:
		if len(live) < most {
			w.start(fmt.Sprint("n", w.names))
		}
	case 2:
		if len(live) > 1 {
			any.end()
			if w.rng.IntN(2) == 0 { // and comes back under its name, with its old record still there
				w.after(w.between(0, 8*time.Second), func() { w.start(any.name) })
			}
		}
	case 3:
		if len(live) > 1 {
			any.leave = true
		}
	case 4:
		any.held = true
		w.after(w.between(0, 20*time.Second), func() {
			any.held = false
			todo := any.waiting
			any.waiting = nil
			for _, do := range todo {
				any.after(0, do)
			}
		})
	case 5:
		w.down = true
		w.after(w.between(0, 12*time.Second), func() { w.down = false })
	}
}

func newWorld(t testing.TB, seed uint64, partitions uint32, copies int) *world {
	w := &world{
		TB: t, rng: rand.New(rand.NewPCG(seed, 1)), partitions: partitions, copies: copies,
		bucket: map[string]Seen{}, died: map[events.Partition]time.Duration{},
	}
	var remember func()
	remember = func() {
		if w.past = append(w.past, w.bucket); len(w.past) > 3 {
			w.past = w.past[1:]
		}
		w.after(200*time.Millisecond, remember)
	}
	remember()
	return w
}

// TestRandomly does things to clusters in virtual time: what is let go has another owner at every moment, and when nothing happens any more,
// everything is where it belongs.
func TestRandomly(t *testing.T) {
	seeds := 80
	if testing.Short() {
		seeds = 20
	}
	takes, releases := 0, 0
	for seed := range uint64(seeds) {
		w := newWorld(t, seed, 32, int(seed%4))
		for i := range 1 + int(seed%5) {
			w.start(fmt.Sprint("first-", i))
		}
		for range 4 {
			for range 1 + w.rng.IntN(12) {
				w.run(w.between(0, 6*time.Second))
				w.fault(8)
			}
			w.run(90 * time.Second)
			if err := w.settled(); err != nil {
				t.Fatalf("seed %d at %v: %v", seed, w.now, err)
			}
		}
		takes, releases = takes+w.takes, releases+w.releases
	}
	t.Logf("%d seeds: %d partitions taken, %d let go", seeds, takes, releases)
	if takes == 0 || releases == 0 {
		t.Error("nothing moved")
	}
}

// TestLarge runs 64 nodes with 512 partitions through faults.
func TestLarge(t *testing.T) {
	if testing.Short() {
		t.Skip("some seconds of CPU; run without -short")
	}
	w := newWorld(t, 7, 512, 2)
	for i := range 64 {
		w.start(fmt.Sprint("first-", i))
	}
	w.run(60 * time.Second)
	if err := w.settled(); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		w.run(w.between(0, 6*time.Second))
		w.fault(64)
	}
	w.run(90 * time.Second)
	if err := w.settled(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%v of virtual time: %d taken, %d let go", w.now, w.takes, w.releases)
}
