package shared

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/simnet"
)

var (
	seed   = flag.Uint64("seed", 1, "of random tests")
	rounds = flag.Int("rounds", testkit.Rounds(41), "histories of TestNodes")
)

// counters is a state that nodes change independently: a counter for each node, merged by the maximum.
type counters map[uint64]uint64

func (c counters) append(b []byte) []byte {
	b = msgp.AppendArrayHead(b, 2*len(c))
	for _, id := range slices.Sorted(maps.Keys(c)) {
		b = msgp.AppendUint(msgp.AppendUint(b, id), c[id])
	}
	return b
}

func (c counters) hash(k Key) uint64 { return xxh3.HashSeed(c.append(nil), k.Owner^k.Seq) }

// state is the state of an entry in the tests' messages.
type state struct {
	counters
	name string // only in the whole entry
	left time.Duration
}

func readState(r *Reader, k Key, whole bool) (s state, hash uint64) {
	s.left = time.Duration(r.Number(math.MaxInt64))
	s.counters = counters{}
	for range r.Pairs() {
		id := r.Number(math.MaxUint64)
		s.counters[id] = r.Number(math.MaxUint64)
	}
	if whole {
		s.name = r.Text(100)
		r.OK(s.name != "")
	}
	return s, s.counters.hash(k)
}

// row is an entry of a test's table.
type row struct {
	counters
	name  string
	until time.Duration
}

// life is one life of a node, with its table. Of entries with the same name, the one with the greatest key stays.
type life struct {
	*Machine[state]
	simnet.Node
	w      *world
	rows   map[Key]*row
	names  map[string]Key
	ended  map[Key]bool // entries that have ended on this node
	wrong  error
	memory []string
}

func (n *life) now() time.Duration { return n.w.Now + n.Skew }

func (n *life) Append(b []byte, now time.Duration, k Key, whole bool) []byte {
	r := n.rows[k]
	b = r.counters.append(msgp.AppendUint(b, uint64(max(r.until-now, 0))))
	if whole {
		b = msgp.AppendStr(b, r.name)
	}
	return b
}

func (n *life) Hash(k Key) (uint64, bool) {
	if r := n.rows[k]; r != nil {
		return r.counters.hash(k), true
	}
	return 0, false
}

func (n *life) Join(now time.Duration, k Key, s *state) bool {
	r := n.rows[k]
	if r == nil {
		if n.ended[k] {
			n.wrong = cmp.Or(n.wrong, fmt.Errorf("node %d: %v has ended here, and reappears", n.Place, k))
		}
		if s.name == "" {
			n.wrong = fmt.Errorf("node %d: %v is created without a name", n.Place, k)
		}
		if old, taken := n.names[s.name]; taken {
			if k.Compare(old) < 0 {
				n.ended[k] = true
				return false
			}
			n.drop(old)
			n.Machine.End(now, old, true)
		}
		r = &row{counters: counters{}, name: s.name, until: now + s.left}
		n.rows[k], n.names[s.name] = r, k
	}
	for id, v := range s.counters {
		r.counters[id] = max(r.counters[id], v)
	}
	r.until = min(r.until, now+s.left)
	return true
}

func (n *life) End(_ time.Duration, k Key) { n.drop(k) }

func (n *life) drop(k Key) {
	n.ended[k] = true
	if r := n.rows[k]; r != nil {
		delete(n.names, r.name)
		delete(n.rows, k)
	}
}

// Step ends entries by their age, and steps the machine.
func (n *life) Step(now time.Duration) []Message {
	for k, r := range n.rows {
		if r.until <= now {
			n.drop(k)
			n.Machine.End(now, k, true)
		}
	}
	return n.Machine.Step(now)
}

// Check verifies the invariants of a machine.
func (m *Machine[E]) Check() error {
	size := 0
	for id, o := range m.owners {
		count, sum := 0, uint64(0)
		for seq, e := range o.entries {
			k := Key{id, seq}
			hash, there := m.table.Hash(k)
			if !o.isKnown(seq) {
				return fmt.Errorf("%v is an entry and a hole", k)
			}
			if m.pending[k] == nil && (!e.published || !there || hash != e.hash) {
				return fmt.Errorf("%v is not pending: %+v, hash %x, %v", k, e, hash, there)
			}
			if e.published {
				count++
				sum += e.hash
			}
		}
		if size += len(o.entries); count != o.count || sum != o.sum {
			return fmt.Errorf("owner %x has %d entries, of sum %x; want %d, %x", id, o.count, o.sum, count, sum)
		}
		for i, p := range o.holes {
			if p.first == 0 || p.first > p.last || p.last > o.last || i > 0 && o.holes[i-1].last+1 >= p.first {
				return fmt.Errorf("owner %x has holes %v up to %d", id, o.holes, o.last)
			}
		}
	}
	for k := range m.pending {
		if o := m.owners[k.Owner]; o == nil || o.entries[k.Seq] == nil {
			return fmt.Errorf("%v is pending and no entry", k)
		}
	}
	if size != m.size {
		return fmt.Errorf("%d entries, want %d", m.size, size)
	}
	return nil
}

func (m *Machine[E]) Len() int { return m.size }

// fact is the test's record of an entry: the lives that received its creation, its end, or its counts.
type fact struct {
	name    string
	until   time.Duration
	created *life
	ended   []*life
	counted map[*life]uint64
}

// world has nodes in virtual time, and their network.
type world struct {
	simnet.Network[*life, Message]
	life   time.Duration // of an entry
	facts  map[Key]*fact
	names  int   // number of names
	skewed bool  // clocks run apart
	keys   []Key // of all created entries
}

func newWorld(seed uint64, n int, age time.Duration) *world {
	w := &world{Network: simnet.New[*life, Message](seed), life: age, facts: map[Key]*fact{}, names: 10_000}
	for i := range n {
		w.start(i)
	}
	return w
}

// start begins a new life of a node.
func (w *world) start(place int) *life {
	n := &life{w: w, rows: map[Key]*row{}, names: map[string]Key{}, ended: map[Key]bool{}}
	if w.skewed {
		n.Skew = time.Duration(w.Int64N(int64(time.Hour)))
	}
	n.Machine = NewMachine(n.now(), n, Config[state]{Origin: w.Uint64() | 1, Memory: 2 * w.life, Read: readState,
		Memories: []Memory{{
			Each: func(yield func([]byte) bool) {
				for _, s := range n.memory {
					if !yield([]byte(s)) {
						return
					}
				}
			},
			Take: func(b []byte) { n.memory = append(n.memory, string(b)) }}}})
	w.Start(place, n)
	return n
}

// create creates an entry on a node.
func (w *world) create(n *life) Key {
	name := fmt.Sprint("n", w.IntN(w.names))
	if _, taken := n.names[name]; taken {
		return Key{}
	}
	k := n.NewKey()
	n.rows[k], n.names[name] = &row{counters: counters{}, name: name, until: n.now() + w.life}, k
	n.Put(n.now(), k, false)
	w.facts[k] = &fact{name: name, until: w.Now + w.life, created: n, counted: map[*life]uint64{}}
	w.keys = append(w.keys, k)
	return k
}

func (w *world) end(n *life, k Key) {
	n.drop(k)
	n.Machine.End(n.now(), k, false)
	w.facts[k].ended = append(w.facts[k].ended, n)
}

func (w *world) count(n *life, k Key) {
	n.rows[k].counters[n.Origin()]++
	n.Put(n.now(), k, false)
	w.facts[k].counted[n]++
}

// op performs a random operation at a random node.
func (w *world) op() {
	n := w.Nodes[w.IntN(len(w.Nodes))]
	if !n.Ready() {
		return
	}
	what := w.IntN(10)
	if what < 4 || len(w.keys) == 0 {
		w.create(n)
		return
	}
	for range 10 {
		k := w.keys[w.IntN(len(w.keys))]
		if n.rows[k] == nil {
			continue
		}
		if what < 7 {
			w.count(n, k)
		} else {
			w.end(n, k)
		}
		return
	}
}

// heal ends all faults. Messages keep their order from then on.
func (w *world) heal() {
	w.Heal()
	w.Ordered = true
}

// differ returns a difference between nodes, if any. An entry near its end by age may be present or not.
func (w *world) differ(late time.Duration) error {
	near := func(k Key) bool { f := w.facts[k]; return f.until > w.Now-late && f.until < w.Now+late }
	for _, n := range w.Nodes {
		if err := cmp.Or(n.wrong, n.Check()); err != nil {
			return err
		}
		for _, pair := range [][2]*life{{w.Nodes[0], n}, {n, w.Nodes[0]}} {
			for k, r := range pair[0].rows {
				if o := pair[1].rows[k]; !near(k) && (o == nil || !maps.Equal(o.counters, r.counters) || o.name != r.name) {
					return fmt.Errorf("of %v nodes %d and %d have %+v and %+v", k, pair[0].Place, pair[1].Place, r, o)
				}
			}
		}
		for k := range n.pending {
			if !near(k) {
				return fmt.Errorf("node %d: %v is pending", n.Place, k)
			}
		}
	}
	return nil
}

// check compares the nodes with each other and with the facts. An entry near its end by age may be present or not.
func (w *world) check(late time.Duration) error {
	if err := w.differ(late); err != nil {
		return err
	}
	n := w.Nodes[0]
	for k, f := range w.facts {
		r := n.rows[k]
		old := f.until <= w.Now+late
		endedByLiving := slices.ContainsFunc(f.ended, func(n *life) bool { return !n.Dead })
		other, replaced := n.names[f.name]
		switch {
		case r != nil && f.until+late < w.Now:
			return fmt.Errorf("%v of %q lives %v longer than it may", k, f.name, w.Now-f.until)
		case r != nil && endedByLiving:
			return fmt.Errorf("%v of %q has ended and is there", k, f.name)
		case r == nil && !old && !f.created.Dead && len(f.ended) == 0 && !(replaced && other.Compare(k) > 0) &&
			!w.replaced(k, f):
			return fmt.Errorf("%v of %q is lost", k, f.name)
		case r != nil:
			for by, v := range f.counted {
				if got := r.counters[by.Origin()]; got > v || got < v && !by.Dead {
					return fmt.Errorf("%v of %q has count %d of %x, want %d", k, f.name, got, by.Origin(), v)
				}
			}
		}
	}
	return nil
}

// replaced reports whether another entry with the name may have ended an entry.
func (w *world) replaced(k Key, f *fact) bool {
	for other, g := range w.facts {
		if g.name == f.name && other.Compare(k) > 0 {
			return true
		}
	}
	return false
}
