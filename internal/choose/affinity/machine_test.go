package affinity

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/simnet"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	seed   = flag.Uint64("seed", 18, "of random tests")
	rounds = flag.Int("rounds", testkit.Rounds(100), "histories of TestNodes")
)

func rank(i int) events.RankKey {
	return events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i/2)), Rank: events.Rank(i % 2)}
}

func session(i int) Key { return Key{fmt.Sprint("m", i%2), fmt.Sprint("s", i)} }

// check verifies the invariants of a machine.
func (m *Machine) check() error {
	total := uint64(0)
	prompts := 0
	for key, b := range m.bindings {
		if last, ok := key.end(); ok {
			if prompts++; m.ends[key.Model][last] != b {
				return fmt.Errorf("%v is not among the ends", key)
			}
		}
		total += b.sum()
		if m.entries[b.at] != b {
			return fmt.Errorf("%v is not under its entry %v", key, b.at)
		}
		switch {
		case b.key != key, b.is.Seq == 0, b.is.Seq > m.clock, b.used.Seq > m.clock, b.used.Seq < b.is.Seq:
			return fmt.Errorf("%+v under %v, clock %d", b, key, m.clock)
		case b.ends < m.soonest:
			return fmt.Errorf("%+v ends before %v", b, m.soonest)
		case b.dirty && !slices.Contains(m.dirty, b):
			return fmt.Errorf("no publication is due for the use of %+v", b)
		}
		if _, leased := m.leased[b]; leased != (len(b.leases) > 0) {
			return fmt.Errorf("%+v is leased: %v", b, leased)
		}
	}
	for b := range m.leased {
		if m.bindings[b.key] != b {
			return fmt.Errorf("%+v has ended and is leased", b)
		}
	}
	for model, ends := range m.ends {
		if prompts -= len(ends); len(ends) == 0 {
			return fmt.Errorf("%s has no ends and a map of them", model)
		}
	}
	if prompts != 0 {
		return fmt.Errorf("%d more bindings of ends than ends", prompts)
	}
	if total != m.total || len(m.entries) != len(m.bindings) {
		return fmt.Errorf("sum %x, want %x; %d entries of %d bindings", m.total, total, len(m.entries), len(m.bindings))
	}
	return nil
}

// TestMachineAgainstTwin compares a machine with a map of uses.
func TestMachineAgainstTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seed, 1))
	const ttl, most = 10 * time.Second, 24
	type twin struct {
		rank events.RankKey
		used time.Duration
		live []string
	}
	is := map[Key]*twin{}
	alive := map[string]bool{}
	m := NewMachine(0, Config{Origin: 1, TTL: ttl, Sessions: most, Alive: func(_, id string) bool { return alive[id] }})
	m.Alone()
	now := time.Duration(0)
	var counts [4]int
	refused := map[error]int{}
	unbound := 0
	for step := range testkit.Rounds(30_000) {
		key := session(rng.IntN(40))
		switch rng.IntN(5) {
		case 4: // end a session
			if key.Session > "s3" {
				continue
			}
			before, bound := m.Get(now, key)
			ended, was := m.Unbind(now, key)
			if was != bound || was && (ended.Rank != before || ended.Key != key || ended.Left <= 0 ||
				ended.Idle+ended.Left != ttl) {
				t.Fatalf("step %d: ended %+v, %v; want %v, %v", step, ended, was, before, bound)
			}
			if was {
				unbound++
				delete(is, key)
			}
		case 0: // wait
			for to := now + time.Duration(rng.Int64N(int64(2*time.Second))); now < to; {
				now = min(max(m.Wake(), now), to)
				m.Step(now)
			}
		case 1: // end a request
			if ids := slices.Sorted(maps.Keys(alive)); len(ids) > 0 {
				delete(alive, ids[rng.IntN(len(ids))])
			}
		default:
			id, hard, where := "", rng.IntN(2) == 0, rank(rng.IntN(6))
			if rng.IntN(3) == 0 {
				id = fmt.Sprint("r", step)
				alive[id] = true
			}
			before, bound := m.Get(now, key)
			how, _, err := m.Bind(now, key, where, id, func(events.RankKey) bool { return !hard })
			want := Made
			switch {
			case bound && before == where:
				want = Kept
			case bound && !hard:
				want = Moved
			case bound:
				want = 0
			}
			full := errors.Is(err, ErrFull)
			if full && (bound || m.Len() < most) || !full && how != want || (err != nil) != (how == 0) {
				t.Fatalf("step %d: %v %v, want %v", step, how, err, want)
			}
			if counts[how]++; err != nil {
				refused[errors.Unwrap(err)]++
				continue
			}
			switch how {
			case Made:
				is[key] = &twin{rank: where}
			case Moved: // a request under way elsewhere also holds the session
				is[key].rank = where
			}
			if is[key].used = now; id != "" {
				is[key].live = append(is[key].live, id)
			}
		}
		for key, b := range is {
			if b.live = slices.DeleteFunc(b.live, func(id string) bool { return !alive[id] }); len(b.live) > 0 {
				b.used = now
			}
			got, bound := m.Get(now, key)
			// A machine checks requests periodically.
			switch {
			case now < b.used+ttl && (!bound || got != b.rank):
				t.Fatalf("step %d, %v: %v is bound to %v, %v; want %+v", step, now, key, got, bound, b)
			case now > b.used+ttl+m.usePeriod() && bound:
				t.Fatalf("step %d, %v: %v is bound still: %+v", step, now, key, b)
			case !bound:
				delete(is, key)
			}
		}
		for _, b := range m.Bound(now, func(Key) bool { return true }) {
			if got, bound := m.Get(now, b.Key); !bound || got != b.Rank {
				t.Fatalf("step %d: %+v is listed; it is bound to %v, %v", step, b, got, bound)
			}
		}
		if err := m.check(); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
	}
	t.Log(counts, unbound, refused, m.Counts)
	least := testkit.Rounds(100)
	if unbound < least {
		t.Errorf("%d sessions have been ended", unbound)
	}
	if slices.Min(counts[:]) < least || refused[ErrFull] < testkit.Rounds(10) || refused[ErrElsewhere] < least ||
		m.Counts.Expired < uint64(least) {
		t.Errorf("%v, %v, %+v", counts, refused, m.Counts)
	}
}

// said is a state by a node.
type said struct {
	rank     events.RankKey
	is, used version
	at       time.Duration
	by       *simNode
}

type simNode struct {
	*Machine
	simnet.Node
	w *world
}

// world has a few nodes in virtual time, and their network.
type world struct {
	simnet.Network[*simNode, shared.Message]
	ttl   time.Duration
	alive map[string]bool
	said  map[Key][]said
}

func newWorld(seed uint64, n int, ttl time.Duration) *world {
	w := &world{Network: simnet.New[*simNode, shared.Message](seed), ttl: ttl, alive: map[string]bool{},
		said: map[Key][]said{}}
	for i := range n {
		w.start(i)
	}
	return w
}

// start begins a new session of a node in place of the present one.
func (w *world) start(place int) {
	w.Start(place, &simNode{w: w, Machine: NewMachine(w.Now, Config{Origin: w.Uint64() | 1, TTL: w.ttl,
		Alive: func(_, id string) bool { return w.alive[id] }})})
}

func (n *simNode) Step(now time.Duration) []shared.Message {
	messages := n.Machine.Step(now)
	n.note()
	return messages
}

// note keeps the new changes of a node.
func (n *simNode) note() {
	for key, b := range n.bindings {
		s := said{b.rank, b.is, b.used, b.ends - n.w.ttl, n}
		list := n.w.said[key]
		if b.used.Writer == n.cfg.Origin &&
			!slices.ContainsFunc(list, func(o said) bool { return o.is == s.is && o.used == s.used }) {
			n.w.said[key] = append(list, s)
		}
	}
}

// unbound reports whether a node has ended the binding with a version.
func unbound(list []said, is version) bool {
	return slices.ContainsFunc(list, func(s said) bool { return s.is == is && s.used.Seq == math.MaxUint64 })
}

// unbind ends a session at a node, and keeps the ended binding.
func (w *world) unbind(n *simNode, key Key) {
	b := n.bindings[key]
	if _, bound := n.Unbind(w.Now, key); bound {
		w.said[key] = append(w.said[key], said{events.RankKey{Instance: nowhere}, b.is,
			version{math.MaxUint64, n.cfg.Origin}, w.Now, n})
	}
}

// op performs a random operation at a random node.
func (w *world) op() {
	n := w.Nodes[w.IntN(len(w.Nodes))]
	if !n.Ready() {
		return // no request
	}
	if w.IntN(4) == 0 {
		if ids := slices.Sorted(maps.Keys(w.alive)); len(ids) > 0 {
			delete(w.alive, ids[w.IntN(len(ids))])
		}
		return
	}
	if w.IntN(8) == 0 {
		w.unbind(n, session(w.IntN(50)))
		return
	}
	id := ""
	if w.IntN(4) == 0 {
		id = fmt.Sprint("r", w.Uint64())
		w.alive[id] = true
	}
	if w.IntN(2) == 0 {
		prompt := "SSS" + fmt.Sprintf("%02d", w.IntN(20)) + "tttttttttt"[:w.IntN(10)]
		_, _, _ = n.BindPrompt(w.Now, "m0", hashesOf(prompt), rank(w.IntN(6)), id)
	} else {
		key, where := session(w.IntN(50)), rank(w.IntN(6))
		_, _, _ = n.Bind(w.Now, key, where, id, [...]func(events.RankKey) bool{never, always}[w.IntN(2)])
	}
	n.note()
}

// busy reports whether a recent use may still be in flight.
func (w *world) busy() bool {
	return slices.ContainsFunc(w.Nodes, func(n *simNode) bool {
		return w.Now-n.nextUse+n.usePeriod() < 10*time.Millisecond
	})
}

// compare compares the nodes with each other and with the changes. Entries near their end may be absent: late changes
// end later.
func (w *world) compare() error {
	const near = 700 * time.Millisecond
	for key, list := range w.said {
		ended := func(b *binding) bool { // in flight for a while, perhaps repeatedly
			i := slices.IndexFunc(list, func(s said) bool { return b != nil && s.is == b.is && s.used == b.used })
			return b != nil && b.ends < w.Now+near || i >= 0 && list[i].at+w.ttl < w.Now+near
		}
		var last, lost said
		for _, s := range list {
			greatest := &last
			if s.by.Dead {
				greatest = &lost
			}
			if s.is.compare(greatest.is) > 0 || s.is == greatest.is && s.used.compare(greatest.used) > 0 {
				*greatest = s
			}
		}
		for _, n := range w.Nodes {
			got, other := n.bindings[key], w.Nodes[0].bindings[key]
			if ended(got) || ended(other) {
				continue
			}
			if (got == nil) != (other == nil) || got != nil && (got.rank != other.rank || got.is != other.is ||
				got.used != other.used) {
				return fmt.Errorf("%v: nodes 0 and %d have %+v and %+v", key, n.Place, other, got)
			}
			switch {
			case got == nil && last.at+w.ttl > w.Now+near && last.by != nil && lost.is.compare(last.is) <= 0 &&
				w.ttl >= time.Minute && last.rank.Instance != nowhere && // otherwise a node may have ended it
				!unbound(list, last.is):
				return fmt.Errorf("%v: node %d has nothing, want %+v", key, n.Place, last)
			case got == nil:
			case unbound(slices.DeleteFunc(slices.Clone(list), func(s said) bool { return s.by.Dead }), got.is):
				return fmt.Errorf("%v: node %d has the ended %+v", key, n.Place, got)
			case got.is.compare(last.is) < 0 && last.at+w.ttl > w.Now+near && w.ttl >= time.Minute &&
				last.rank.Instance != nowhere:
				return fmt.Errorf("%v: node %d has %+v, want %+v", key, n.Place, got, last)
			case !slices.ContainsFunc(list, func(s said) bool { return s.is == got.is && s.rank == got.rank }):
				return fmt.Errorf("%v: node %d has %+v, which no node created", key, n.Place, got)
			}
		}
	}
	for _, n := range w.Nodes {
		if err := n.check(); err != nil {
			return fmt.Errorf("node %d: %w", n.Place, err)
		}
		if !n.Ready() {
			return fmt.Errorf("node %d is not ready", n.Place)
		}
	}
	return nil
}

// TestNodes binds and ends the same sessions on several nodes while messages are lost, late, duplicated and reordered,
// and nodes are cut off and killed. 2.5 s after the last fault, all nodes have the same bindings: the last created
// ones, and no ended ones. Without use, all bindings end.
func TestNodes(t *testing.T) {
	var total Counts
	var protocol shared.Counts
	for round := range *rounds {
		s := *seed + uint64(round)
		w := newWorld(s, 2+int(s%3), []time.Duration{time.Second, 5 * time.Second, time.Minute}[s%3])
		w.Run(2 * time.Second)
		for range 3 {
			w.Loss, w.Twice = w.Float64()*0.5, w.Float64()*0.3
			w.Delay = time.Duration(1 + w.Int64N(int64(300*time.Millisecond)))
			for range 60 {
				switch w.IntN(25) {
				case 0:
					w.start(w.IntN(len(w.Nodes)))
				case 1:
					w.Nodes[w.IntN(len(w.Nodes))].Group = w.IntN(2)
				default:
					w.op()
				}
				w.Run(time.Duration(w.Int64N(int64(100 * time.Millisecond))))
			}
			w.Heal()
			w.Run(2500 * time.Millisecond) // half a second for a change of the writer just before
			for w.busy() {
				w.Run(time.Millisecond)
			}
			if err := w.compare(); err != nil {
				t.Fatalf("seed %d at %v: %v", s, w.Now, err)
			}
			for range 50 { // without faults
				w.op()
				w.Run(time.Duration(w.Int64N(int64(20 * time.Millisecond))))
			}
		}
		clear(w.alive)
		for _, n := range w.Nodes {
			protocol.Healed += n.Machine.Machine.Counts.Healed
			total.Moved += n.Counts.Moved
			protocol.Exchanges += n.Machine.Machine.Counts.Exchanges
			total.Expired += n.Counts.Expired
		}
		w.Run(w.ttl + 6*time.Second)
		for _, n := range w.Nodes {
			if n.Len() > 0 || len(n.leased) > 0 {
				t.Fatalf("seed %d: node %d has %d bindings for ever", s, n.Place, n.Len())
			}
		}
	}
	t.Logf("%+v, %+v", total, protocol)
	if protocol.Healed < 10 || total.Moved < 100 || total.Expired < 100 {
		t.Errorf("%+v", total)
	}
}

// TestQuietNodesExchangeNothing: without faults, bindings reach all nodes without requests.
func TestQuietNodesExchangeNothing(t *testing.T) {
	w := newWorld(*seed, 3, time.Minute)
	w.Run(2 * time.Second)
	for range 2000 {
		w.op()
		w.Run(time.Duration(w.Int64N(int64(5 * time.Millisecond))))
	}
	w.Run(2 * time.Second)
	if err := w.compare(); err != nil {
		t.Fatal(err)
	}
	asked := uint64(0)
	for _, n := range w.Nodes {
		asked += n.Machine.Machine.Counts.Exchanges
	}
	before := w.Published
	w.Run(100 * time.Second)
	t.Logf("%d questions; %d bytes a second and node at rest", asked, (w.Published-before)/100/3)
	if asked > 40 { // messages overtake each other
		t.Errorf("%d questions", asked)
	}
}

// TestStart: a node has a peer's bindings when it is ready.
func TestStart(t *testing.T) {
	w := newWorld(*seed, 3, time.Hour)
	w.Nodes[2].Group = 9
	w.Run(2 * time.Second)
	for i := range 1500 {
		_, _, _ = w.Nodes[0].Bind(w.Now, session(i), rank(1), "", always)
	}
	w.Run(time.Second)
	w.start(2)
	w.Nodes[2].Group, w.Loss = 0, 0.15
	for !w.Nodes[2].Ready() {
		w.Run(time.Millisecond)
	}
	if n := w.Nodes[2]; n.Len() != 1500 || n.Machine.Machine.Counts.Unsynced > 0 || w.Now > 10*time.Second {
		t.Errorf("ready with %d bindings at %v", n.Len(), w.Now)
	}
	if err := w.Nodes[2].check(); err != nil {
		t.Error(err)
	}
}

// never and always are conditions of Begin and Bind.
func never(events.RankKey) bool  { return false }
func always(events.RankKey) bool { return true }
