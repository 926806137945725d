package radix

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/twin"
)

func init() { flag.Set("rapid.seed", "1") } // the same cases in every run; `make explore` draws different cases

type rapidChooser struct{ t *rapid.T }

func (c rapidChooser) below(n int) int { return rapid.IntRange(0, n-1).Draw(c.t, "") }

type seeded struct{ *rand.Rand }

func (c seeded) below(n int) int { return c.IntN(n) }

// bytesChooser chooses from a fuzzer's bytes, until they are used up.
type bytesChooser struct{ data []byte }

func (c *bytesChooser) below(n int) int {
	v := 0
	for k := n; k > 1 && len(c.data) > 0; k >>= 8 {
		v, c.data = v<<8|int(c.data[0]), c.data[1:]
	}
	return v % n
}

func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(tb{t, rt}, rapidChooser{rt})
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			w.step()
		}
		w.check()
	})
}

// tb is a testing.TB that fails a rapid run, so that rapid shrinks the case.
type tb struct {
	testing.TB
	rt *rapid.T
}

func (t tb) Helper()                           {}
func (t tb) Log(args ...any)                   { t.rt.Log(args...) }
func (t tb) Fatalf(format string, args ...any) { t.rt.Fatalf(format, args...) }

var (
	histories = flag.Int("histories", testkit.Rounds(30), "number of seeded histories of TestLongHistories")
	firstSeed = flag.Uint64("seed", 1, "seed of the first; 0 reads the clock")
)

func TestLongHistories(t *testing.T) {
	seed := *firstSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	n := *histories
	if testing.Short() {
		n = min(n, 10)
	}
	seeds := []uint64{1795367083574960945, 1795366501088729217} // parts moved during their use
	for i := range uint64(n) {
		seeds = append(seeds, seed+i)
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := newWorld(t, seeded{rand.New(rand.NewPCG(seed, 1))})
			for j := range 400 {
				w.step()
				if j%50 == 49 {
					w.check()
				}
			}
		})
	}
}

// FuzzProgram runs programs of events and queries from bytes. Tables have a new seed in every run, so coverage varies:
// use -fuzzminimizetime 1x.
func FuzzProgram(f *testing.F) {
	for s := range uint64(8) {
		rng := rand.New(rand.NewPCG(s, 2))
		b := make([]byte, 600)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &bytesChooser{data}
		w := newWorld(t, c)
		for len(c.data) > 0 {
			w.step()
		}
		w.check()
	})
}

// TestWindowsOverManyNodes: ranks with several windows end all over a path of many nodes, shorter or longer than the
// windows, with random window blocks. Every depth equals the twin's.
func TestWindowsOverManyNodes(t *testing.T) {
	seed := *firstSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	for round := range uint64(testkit.Rounds(6)) {
		pick := rand.New(rand.NewPCG(seed, round))
		x := New(Config{})
		blocks := 200 + pick.IntN(300)
		locals, names := chain(1, blocks)
		windows := []uint32{16 * uint32(1+pick.IntN(60)), 16 * uint32(1+pick.IntN(200)), 0}[:1+pick.IntN(3)]
		draft, kind, every := pick.IntN(3) == 0, events.AttentionSlidingWindow, 8+pick.IntN(40)
		if round == 0 { // only chunks, of which a node has many
			draft, kind, every = false, events.AttentionChunkedLocal, 40+pick.IntN(400)
			windows = []uint32{16 * uint32(1+pick.IntN(20))}
		}
		var ranks []*member
		apply := func(m *member, e events.Event) {
			x.Apply(m.id, 0, []events.Event{e})
			m.twin.Apply(0, []events.Event{e})
		}
		for range 80 {
			m := &member{id: x.AddRank(0, blockTokens), twin: twin.New(twinConfig(Config{}), blockTokens)}
			ranks = append(ranks, m)
			n := blocks - pick.IntN(blocks/2)
			apply(m, stored(locals[:n], names[:n]))
			for g, window := range windows {
				e := events.Event{Kind: events.Stored, Tier: events.Device, Group: events.GroupIndex(g + 1),
					Attention: kind, Window: window, Drops: draft && window > 0}
				if window == 0 {
					e.Attention = events.AttentionMamba
				}
				apply(m, e)
				for at := pick.IntN(2) * pick.IntN(n); at < n; {
					to := min(n, at+1+pick.IntN(1+pick.IntN(2*n)))
					e.Blocks = names[at:to]
					apply(m, e)
					at = to + 1 + pick.IntN(1+pick.IntN(n))
				}
			}
		}
		branch(x, names, every)
		healthy(t, x)
		for _, q := range [][]events.LocalHash{locals, locals[:blocks-pick.IntN(blocks/2)]} {
			var a Answer
			x.Match(0, q, nil, &a)
			got := map[RankID][events.NumTiers]uint32{}
			for _, o := range a.Ranks {
				got[o.Rank] = o.Depth
			}
			for _, m := range ranks {
				if want := m.twin.Match(q); got[m.id] != want {
					t.Fatalf("seed %d, round %d, windows %v: rank %d of %v, want %v", seed, round, windows, m.id,
						got[m.id], want)
				}
			}
		}
	}
}

// TestWindowsInATree: ranks with windows store, lose and clear blocks of a tree with a wide node and a very long path.
// After every step the depths equal the twin's, with known and with unknown ends.
func TestWindowsInATree(t *testing.T) {
	seed, steps := *firstSeed, testkit.Rounds(160)
	if seed == 0 {
		seed = rand.Uint64()
	}
	if testing.Short() {
		steps = 80
	}
	for round := range uint64(6) {
		pick := rand.New(rand.NewPCG(seed, round))
		x := New(Config{})
		type path struct {
			locals []events.LocalHash
			names  []events.BlockHash
		}
		grow := func(from path, n, salt int) path {
			locals, names := chain(uint64(salt), n)
			return path{append(slices.Clone(from.locals), locals...), append(slices.Clone(from.names), names...)}
		}
		cut := func(p path, n int) path { return path{p.locals[:n], p.names[:n]} }
		docs := []path{grow(path{}, 220, 1)}
		groups, every := 1+pick.IntN(3), 4
		if round%3 == 1 { // long nodes, and in half of these rounds only chunks
			every = 70
		}
		for at := 3; at < 220; at += every {
			docs = append(docs, grow(cut(docs[0], at), 1+pick.IntN(3), 100+at))
		}
		for i := range 20 {
			docs = append(docs, grow(cut(docs[0], 40), 1+pick.IntN(30), 400+i))
			docs = append(docs, grow(docs[len(docs)-1], 1+pick.IntN(30), 500+i))
		}
		var kinds []events.GroupKind
		if round == 4 {
			groups = 1
		}
		for g := range groups {
			k := events.GroupKind{Group: events.GroupIndex(g + 1), Window: 16 * uint32(1+pick.IntN(40)),
				Kind: []events.Attention{events.AttentionSlidingWindow, events.AttentionSlidingWindow,
					events.AttentionChunkedLocal, events.AttentionMamba}[pick.IntN(4)]}
			if k.Kind == events.AttentionMamba {
				k.Window = 0
			}
			k.Drops = pick.IntN(4) == 0
			if round == 4 {
				k.Kind, k.Window, k.Drops = events.AttentionChunkedLocal, 16*uint32(1+pick.IntN(10)), false
			}
			kinds = append(kinds, k)
		}
		var ranks []*member
		apply := func(m *member, e events.Event) {
			if x.change(x.rank(m.id), 0, []events.Event{e}, &Counts{}); pick.IntN(4) > 0 { // otherwise ends stay unknown
				x.resolveEnds(pick.IntN(40))
			}
			m.twin.Apply(0, []events.Event{e})
		}
		for range 10 {
			m := &member{id: x.AddRank(0, blockTokens), twin: twin.New(twinConfig(Config{}), blockTokens)}
			ranks = append(ranks, m)
			for _, k := range kinds {
				apply(m, events.Event{Kind: events.Stored, Tier: events.Device, Group: k.Group, Attention: k.Kind,
					Window: k.Window, Drops: k.Drops})
			}
		}
		for step := range steps {
			m, doc := ranks[pick.IntN(len(ranks))], docs[pick.IntN(len(docs))]
			switch pick.IntN(3) {
			case 0:
				doc = docs[0]
			case 1: // besides many others
				doc = docs[len(docs)-1-pick.IntN(40)]
			}
			n := len(doc.names)
			lo := pick.IntN(n)
			hi := lo + 1 + pick.IntN(n-lo)
			k := kinds[pick.IntN(len(kinds))]
			e := events.Event{Kind: events.Stored, Tier: events.Device, Group: k.Group, Attention: k.Kind,
				Blocks: doc.names[lo:hi]}
			if round%3 == 2 && pick.IntN(8) == 0 {
				e.Tier = events.Host
			}
			switch op := pick.IntN(20); {
			case op < 7:
				lo = pick.IntN(2) * lo
				tier := e.Tier
				e = stored(doc.locals[lo:], doc.names[lo:])
				if e.Tier = tier; lo > 0 {
					e.HasParent, e.Parent = true, doc.names[lo-1]
				}
			case op < 13:
			case op < 16:
				e.Kind, e.Attention = events.Removed, 0
			case op < 19:
				e = removed(doc.names[lo:]...)
				if pick.IntN(2) == 0 { // a hole
					e.Blocks = doc.names[lo:hi]
				}
			case pick.IntN(4) == 0:
				e = events.Event{Kind: events.Cleared, Tier: events.Tier(pick.IntN(3))}
			}
			apply(m, e)
			for range 3 {
				q := docs[pick.IntN(len(docs))].locals
				if pick.IntN(2) == 0 {
					q = doc.locals
				}
				if pick.IntN(2) == 0 {
					q = q[:1+pick.IntN(len(q))]
				}
				var a Answer
				x.Match(0, q, nil, &a)
				got := map[RankID][events.NumTiers]uint32{}
				for _, o := range a.Ranks {
					got[o.Rank] = o.Depth
				}
				for _, m := range ranks {
					if want := m.twin.Match(q); got[m.id] != want {
						t.Fatalf("seed %d, round %d, step %d, groups %v: rank %d has %v of %d blocks, want %v", seed, round,
							step, kinds, m.id, got[m.id], len(q), want)
					}
				}
			}
			if step%25 == 0 {
				healthy(t, x)
			}
		}
		healthy(t, x)
	}
}

// TestEndsAreKnown: in the fleets of hybridCases, the writer resolves all ends.
func TestEndsAreKnown(t *testing.T) {
	testkit.Sequential(t)
	for _, c := range hybridCases() {
		if c.ranks > 64 || len(c.groups) == 0 || c.keeps == "holes" {
			continue
		}
		x, _ := c.build()
		for i := range x.v.nodes {
			for slot, r := range x.slots {
				steps := x.knownEnd(uint32(i), uint32(slot))
				if x.v.any(uint32(i), device, uint32(slot)) && r.reuse.cuts() &&
					(len(steps) == 0 || steps[len(steps)-1].least > x.v.nodes[i].depth+1) {
					t.Fatalf("%v: node %d: of the end of slot %d only %v are known", c, i, slot, steps)
				}
			}
		}
	}
}
