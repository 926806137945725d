package radix

import (
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Hostile streams. The tests limit counted work and memory, not time.

func chain(salt uint64, n int) (locals []events.LocalHash, names []events.BlockHash) {
	for i := range uint64(n) {
		locals = append(locals, events.LocalHash(mix(salt<<32|i)))
		names = append(names, events.BlockHash(mix(salt<<32|i|1<<63)))
	}
	return locals, names
}

func stored(locals []events.LocalHash, names []events.BlockHash, parent ...events.BlockHash) events.Event {
	e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: locals, Blocks: names}
	if len(parent) > 0 {
		e.HasParent, e.Parent = true, parent[0]
	}
	return e
}

func removed(names ...events.BlockHash) events.Event {
	return events.Event{Kind: events.Removed, Tier: events.Device, Blocks: names}
}

// changes returns how often nodes were opened for a change: the writer's work in the tree.
func changes(x *Index) (n int) {
	for i := range x.v.nodes {
		n += int(x.v.nodes[i].version / 2)
	}
	return n
}

func healthy(t *testing.T, x *Index) Stats {
	t.Helper()
	if err := x.Check(); err != nil {
		t.Fatal(err)
	}
	return x.Stats()
}

// TestBlockByBlock stores a block per event, as engines announce answers: the run grows in place.
func TestBlockByBlock(t *testing.T) {
	x := New(Config{})
	id := x.AddRank(0, 16)
	const n = 20000
	locals, names := chain(1, n)
	for i := range n {
		e := stored(locals[i:i+1], names[i:i+1])
		if i > 0 {
			e.HasParent, e.Parent = true, names[i-1]
		}
		x.Apply(id, 0, []events.Event{e})
	}
	s := healthy(t, x)
	if s.Nodes != 1 || s.Blocks != n || s.Splits != 0 || changes(x) > 8*n {
		t.Errorf("a run has %+v, %d changes", s, changes(x))
	}
	var a Answer
	if x.Match(0, locals, nil, &a); len(a.Ranks) != 1 || a.Ranks[0].Depth[0] != n {
		t.Errorf("%+v", a.Ranks)
	}
}

// TestSideBySide: two ranks that grow side by side share the arena. Neither of them may need a node for every block.
func TestSideBySide(t *testing.T) {
	x := New(Config{})
	const n, ranks = 2000, 50
	var ids []RankID
	var locals [ranks][]events.LocalHash
	var names [ranks][]events.BlockHash
	for r := range ranks {
		ids = append(ids, x.AddRank(0, 16))
		locals[r], names[r] = chain(uint64(r+1), n)
	}
	for i := range n {
		for r := range ranks {
			e := stored(locals[r][i:i+1], names[r][i:i+1])
			if i > 0 {
				e.HasParent, e.Parent = true, names[r][i-1]
			}
			x.Apply(ids[r], 0, []events.Event{e})
		}
	}
	if s := healthy(t, x); s.Nodes > ranks*(n/slabBlocks+1) || changes(x) > 8*n*ranks {
		t.Errorf("%d nodes and %d changes for %d blocks", s.Nodes, changes(x), s.Blocks)
	}
}

// TestBranchEverywhere: other prompts leave a prompt at every block. Each causes a split, and a repeated prompt causes
// none.
func TestBranchEverywhere(t *testing.T) {
	x := New(Config{})
	id := x.AddRank(0, 16)
	const n = 3000
	locals, names := chain(1, n)
	x.Apply(id, 0, []events.Event{stored(locals, names)})
	for round := range 2 {
		for i := 1; i < n; i++ {
			x.Apply(id, 0, []events.Event{stored([]events.LocalHash{events.LocalHash(mix(uint64(i)))},
				[]events.BlockHash{events.BlockHash(mix(uint64(i) | 1<<40))}, names[i-1])})
		}
		if s := healthy(t, x); s.Splits != n-1 || s.Nodes != 2*(n-1)+1 || changes(x) > 16*(round+1)*n {
			t.Errorf("round %d: %+v, %d changes", round, s, changes(x))
		}
	}
}

// TestWideFanOut: very many prompts that differ in the first block, and very many children of a block, leave in any
// order.
func TestWideFanOut(t *testing.T) {
	testkit.Sequential(t)
	for name, deep := range map[string]bool{"roots": false, "children": true} {
		x := New(Config{MaxTombstones: -1})
		id := x.AddRank(0, 16)
		const n = 50000
		locals, names := chain(1, n)
		_, top := chain(2, 1)
		if deep {
			x.Apply(id, 0, []events.Event{stored([]events.LocalHash{7}, top)})
		}
		for i := range n {
			e := stored(locals[i:i+1], names[i:i+1])
			e.HasParent, e.Parent = deep, top[0]
			x.Apply(id, 0, []events.Event{e})
		}
		probes := 0
		for i, e := range x.v.edges { // distance of edges from their home
			if c := uint32(e); e != 0 && e != edgeGone {
				n := &x.v.nodes[c]
				probes += (i - int(edgeHash(n.parent, x.v.locals[n.start]))) & (len(x.v.edges) - 1)
			}
		}
		if probes > 8*n {
			t.Errorf("%s: %d probes for %d edges", name, probes, n)
		}
		order := rand.New(rand.NewPCG(1, 1)).Perm(n)
		for _, i := range order {
			x.Apply(id, 0, []events.Event{removed(names[i])})
		}
		if s := healthy(t, x); s.Nodes > 1 {
			t.Errorf("%s: %d nodes remain", name, s.Nodes)
		}
	}
}

// TestAlternatingHoles: every other block leaves and returns, for many ranks. The holes need bitmaps, and no more
// nodes.
func TestAlternatingHoles(t *testing.T) {
	testkit.Sequential(t)
	x := New(Config{})
	const n, ranks = 1000, 100
	locals, names := chain(1, n)
	var ids []RankID
	for range ranks {
		id := x.AddRank(0, 16)
		ids = append(ids, id)
		x.Apply(id, 0, []events.Event{stored(locals, names)})
	}
	for round := range 6 {
		for _, id := range ids {
			for i := round % 2; i < n; i += 2 {
				x.Apply(id, 0, []events.Event{removed(names[i])})
			}
		}
		s := healthy(t, x)
		if s.Nodes != 1 || s.Splits != 0 || s.Bytes.Holes > ranks*3*n/8+ranks*64 {
			t.Errorf("round %d: with holes: %+v", round, s)
		}
		for _, id := range ids {
			for i := round % 2; i < n; i += 2 {
				e := stored(locals[i:i+1], names[i:i+1])
				if i > 0 {
					e.HasParent, e.Parent = true, names[i-1]
				}
				x.Apply(id, 0, []events.Event{e})
			}
		}
		if s := healthy(t, x); s.Nodes != 1 || x.partSpace.used != 0 || x.bitSpace.used != 0 {
			t.Errorf("round %d: after the return of all: %+v", round, s)
		}
	}
}

// TestNamesThatCollide uses similar names: consecutive names, names that differ only in high bits, and zero.
func TestNamesThatCollide(t *testing.T) {
	for name, f := range map[string]func(i uint64) uint64{
		"consecutive": func(i uint64) uint64 { return i },
		"high bits":   func(i uint64) uint64 { return i << 44 },
		"multiples":   func(i uint64) uint64 { return i * 0x9e3779b97f4a7c15 },
		"inverse":     func(i uint64) uint64 { return i * 0xf1de83e19937733d },
	} {
		x := New(Config{})
		id := x.AddRank(0, 16)
		const n = 100000
		for i := uint64(0); i < n; i += 1000 {
			locals, names := chain(i, 1000)
			for j := range names {
				names[j] = events.BlockHash(f(i + uint64(j)))
			}
			if c := x.Apply(id, 0, []events.Event{stored(locals, names)}); c.Stored != 1000 {
				t.Fatalf("%s: %+v", name, c)
			}
		}
		far := uint64(0)
		for i, v := range x.names.slots.s {
			if v != 0 {
				far += uint64(i) - x.names.home(v>>32)
			}
		}
		if healthy(t, x); far > 8*n {
			t.Errorf("%s: names are %d slots from home, %d in all", name, far, n)
		}
	}
}

// TestNamesOfOneHash: the table is right even if all names of several owners have the same hash.
func TestNamesOfOneHash(t *testing.T) {
	engines, slabs := array[uint64]{s: make([]uint64, 5000)}, array[slab]{s: make([]slab, 5000/slabBlocks+1)}
	tab := &names{engines: &engines, slabs: &slabs}
	m := &memory{limits: usualLimits}
	hashes := []uint64{0, 1<<32 - 1, 1 << 31}
	const owners = 3 // the first has names in the arena; the others have the same names
	each := func(f func(hash uint64, owner, block uint32)) {
		for _, h := range hashes {
			for i := range uint32(600) {
				for owner := range uint32(owners) {
					f(h, owner, uint32(h>>30)*1000+i+1)
				}
			}
		}
	}
	refs := map[uint32][owners]uint32{} // by block
	each(func(h uint64, owner, b uint32) {
		tab.room(m, 1)
		r := refs[b]
		if r[owner] = b; owner == 0 {
			engines.s[b] = h<<20 | uint64(b)
		} else {
			r[owner] = tab.aliases.add(m, alias{engines.s[b], b, owner}) | aliasBit
		}
		refs[b] = r
		name, hash, ref := engines.s[b:b+1], []uint64{h}, []uint32{r[owner]}
		if n, at, there := tab.enterAll(m, name, hash, owner, ref); n != 1 || there {
			t.Fatalf("%d of owner %d exists at %d", b, owner, at)
		}
		if n, at, there := tab.enterAll(m, name, hash, owner, ref); n != 0 || !there || at != b {
			t.Fatalf("%d of owner %d is missing, or at %d", b, owner, at)
		}
	})
	for gone := range uint32(owners + 1) {
		each(func(h uint64, owner, b uint32) {
			at, _, ok := tab.find(engines.s[b], h, owner)
			if ok != (owner >= gone) || ok && at != refs[b][owner] {
				t.Fatalf("%d of owner %d: found %v at %#x, when owners up to %d are gone", b, owner, ok, at, gone)
			}
		})
		if gone == owners {
			break
		}
		each(func(h uint64, owner, b uint32) {
			if owner == gone {
				tab.removeAll([]uint64{h}, []uint32{refs[b][owner]})
			}
		})
	}
	if tab.n != 0 {
		t.Errorf("%d names remain", tab.n)
	}
}

// TestOrphans: unlimited orphans and removals stay within the limits.
func TestOrphans(t *testing.T) {
	testkit.Sequential(t)
	x := New(Config{MaxPending: 1000, MaxTombstones: 100})
	id := x.AddRank(0, 16)
	var c Counts
	locals, names := chain(1, 100000)
	for i := range names {
		c.Add(x.Apply(id, 0, []events.Event{stored(locals[i:i+1], names[i:i+1], 12345)}))
	}
	if s := healthy(t, x); s.Pending != 1000 || c.Overflowed != 99000 || s.Blocks != 0 || s.Bytes.Total > 1<<20 {
		t.Errorf("%+v, %+v", s, c)
	}
	root, top := chain(3, 1)
	top[0] = 12345
	if c := x.Apply(id, 0, []events.Event{stored(root, top)}); c.Attached != 1000 || c.Stored != 1001 {
		t.Errorf("attached: %+v", c)
	}
	healthy(t, x)
}

// TestChurn: a million blocks with changing contents go through a small capacity. The memory stays constant.
func TestChurn(t *testing.T) {
	const ranks, rounds = 8, 10
	capacity, requests := 3000, testkit.Rounds(1500)
	if testing.Short() {
		capacity, requests = 800, 300
	}
	x := New(Config{MaxTombstones: 64})
	var ids []RankID
	for range ranks {
		ids = append(ids, x.AddRank(0, 16))
	}
	rng := rand.New(rand.NewPCG(5, 5))
	var settled int64
	for round := range rounds {
		for _, id := range ids {
			x.Apply(id, 0, []events.Event{{Kind: events.Cleared, Tier: events.AllTiers}})
		}
		held := make([][]events.BlockHash, ranks)
		for range requests {
			r := rng.IntN(ranks)
			// A prompt that shares its first blocks with others of the round, and then continues alone.
			locals, names := chain(uint64(round)<<16|uint64(rng.IntN(5)), 16+rng.IntN(200))
			own, ownNames := chain(uint64(round)<<40|rng.Uint64()>>30<<8, 1+rng.IntN(100))
			locals, names = append(locals, own...), append(names, ownNames...)
			x.Apply(ids[r], 0, []events.Event{stored(locals, names)})
			held[r] = append(held[r], names...)
			for len(held[r]) > capacity { // any block leaves, also copies and middles
				i := rng.IntN(len(held[r]))
				x.Apply(ids[r], 0, []events.Event{removed(held[r][i])})
				held[r][i] = held[r][len(held[r])-1]
				held[r] = held[r][:len(held[r])-1]
			}
		}
		total := healthy(t, x).Bytes.Total
		if round == 2 {
			settled = total
		} else if round > 2 && total > settled+settled/20 {
			t.Errorf("round %d uses %d bytes, round 2 used %d", round, total, settled)
		}
	}
}

var requestsWithoutEnd = flag.Int("requests", testkit.Rounds(250_000), "number of requests of TestRequestsWithoutEnd")

// TestRequestsWithoutEnd: unlimited requests go through a small capacity, and no rank is ever cleared. A rank stores
// the missing blocks of a prompt. The oldest blocks leave, and sometimes any block. Removals are remembered until they
// expire. The memory stays constant.
func TestRequestsWithoutEnd(t *testing.T) {
	const ranks, capacity, every = 8, 2000, 10 // ranks, blocks of each, milliseconds between requests
	requests := *requestsWithoutEnd
	if testing.Short() {
		requests = min(requests, 50_000)
	}
	x := New(Config{TombstoneFor: 5000})
	var ids []RankID
	held := make([][]events.BlockHash, ranks) // oldest first
	has := make([]map[events.BlockHash]bool, ranks)
	for i := range ranks {
		ids, has[i] = append(ids, x.AddRank(0, 16)), map[events.BlockHash]bool{}
	}
	rng := rand.New(rand.NewPCG(6, 6))
	var settled Stats
	for n := range requests {
		r, now := rng.IntN(ranks), events.Millis(n*every)
		// prompts that are frequent for a while
		locals, names := chain(uint64(n>>12)<<8|uint64(rng.IntN(50)), 1+rng.IntN(12))
		own, ownNames := chain(1<<30|uint64(n), 1+rng.IntN(4))
		locals, names = append(locals, own...), append(names, ownNames...)
		from := 0
		for has[r][names[from]] {
			from++
		}
		e := stored(locals[from:], names[from:])
		if from > 0 {
			e.HasParent, e.Parent = true, names[from-1]
		}
		x.Apply(ids[r], now, []events.Event{e})
		for _, name := range names[from:] {
			if !has[r][name] { // a hole was filled in between
				has[r][name], held[r] = true, append(held[r], name)
			} else {
				x.Apply(ids[r], now, []events.Event{removed(name)})
			}
		}
		if over := len(held[r]) - capacity; over > 0 {
			gone := held[r][:over]
			if at := rng.IntN(len(held[r])); n%16 == 0 {
				held[r][at], held[r][0] = held[r][0], held[r][at]
			}
			x.Apply(ids[r], now, []events.Event{removed(gone...)})
			for _, name := range gone {
				delete(has[r], name)
			}
			held[r] = held[r][over:]
		}
		if n%(requests/10) == 0 {
			s := healthy(t, x)
			switch {
			case n < max(requests/5, 40_000): // arrays may still grow by a quarter
			case settled.Blocks == 0:
				settled = s
			case s.Bytes.Total > settled.Bytes.Total*21/20 || s.Blocks > settled.Blocks*6/5 ||
				s.Nodes > settled.Nodes*6/5:
				t.Errorf("after %d requests: %+v, settled at %+v", n, s, settled)
			}
		}
	}
	for _, id := range ids {
		x.Apply(id, events.Millis(requests*every+5001), nil)
	}
	if s := healthy(t, x); s.Tombstones != 0 {
		t.Errorf("%+v: removals are remembered beyond TombstoneFor", s)
	}
}

// TestClearCostsItsOwn: a clear of a rank visits only the nodes of the rank.
func TestClearCostsItsOwn(t *testing.T) {
	x := New(Config{})
	small := x.AddRank(0, 16)
	for i := range uint64(2000) {
		locals, names := chain(i+10, 20)
		x.Apply(x.AddRank(0, 16), 0, []events.Event{stored(locals, names)})
	}
	locals, names := chain(1, 20)
	x.Apply(small, 0, []events.Event{stored(locals, names)})
	before := make([]uint32, len(x.v.nodes))
	for i := range before {
		before[i] = x.v.nodes[i].version
	}
	x.Apply(small, 0, []events.Event{{Kind: events.Cleared, Tier: events.AllTiers}})
	touched := 0
	for i := range before {
		if x.v.nodes[i].version != before[i] {
			touched++
		}
	}
	if touched > 2 { // its node, and the node above that loses an edge
		t.Errorf("a rank with one node touched %d", touched)
	}
	healthy(t, x)
}

// TestNoAllocation: a reused answer needs no allocation, for any query.
func TestNoAllocation(t *testing.T) {
	x := New(Config{})
	const n = 500
	var ids []RankID
	for i := range 100 {
		id := x.AddRank(0, 16)
		ids = append(ids, id)
		locals, names := chain(1, n)
		x.Apply(id, 0, []events.Event{stored(locals[:1+i*4], names[:1+i*4])})
		if i%3 == 0 {
			e := stored(locals[1+i*4:], names[1+i*4:], names[i*4])
			e.Tier = events.Host
			x.Apply(id, 0, []events.Event{e})
		}
	}
	locals, names := chain(1, n)
	var a Answer
	set := &RankSet{}
	set.Add(ids[3])
	ask := func() {
		x.Match(0, locals, nil, &a)
		x.Match(0, locals, set, &a)
	}
	ask()
	if k := testing.AllocsPerRun(100, ask); k != 0 {
		t.Errorf("%v allocations per query", k)
	}
	// Events that find all data in place do not allocate either.
	evs := []events.Event{removed(names[4]), stored(locals[4:5], names[4:5], names[3])}
	apply := func() { x.Apply(ids[90], 0, evs) }
	for range 1200 {
		apply()
	}
	if k := testing.AllocsPerRun(200, apply); k > 0.1 {
		t.Errorf("%v allocations per event", k)
	}
}

// TestWindowWithoutBlocks queries ranks with windows that have no block or a few, in an index without other marks.
func TestWindowWithoutBlocks(t *testing.T) {
	x := New(Config{})
	locals, names := chain(1, 100)
	var ids []RankID
	window := func(names []events.BlockHash) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Device, Group: 1,
			Attention: events.AttentionSlidingWindow, Window: 33, Blocks: names}
	}
	for i := range 3 {
		ids = append(ids, x.AddRank(0, 16))
		x.Apply(ids[i], 0, []events.Event{window(nil), stored(locals[:100-10*i], names[:100-10*i])})
	}
	depth := func() (got [3]uint32) {
		var a Answer
		x.Match(0, locals, nil, &a)
		for _, o := range a.Ranks {
			for i, id := range ids {
				if o.Rank == id {
					got[i] = o.Depth[0]
				}
			}
		}
		return got
	}
	if got := depth(); got != [3]uint32{} {
		t.Errorf("without a block of a window: %v", got)
	}
	x.Apply(ids[1], 0, []events.Event{window(names[40:42])})
	if got := depth(); got != [3]uint32{1: 42} {
		t.Errorf("with blocks 40 and 41: %v", got)
	}
	x.Apply(ids[1], 0, []events.Event{{Kind: events.Removed, Tier: events.Device, Group: 1, Blocks: names[41:42]}})
	if got := depth(); got != [3]uint32{} {
		t.Errorf("with block 40 alone: %v", got)
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}

// TestEndBeforeItIsKnown queries a rank with changed blocks, before the writer has resolved the usable part of its
// prefix.
func TestEndBeforeItIsKnown(t *testing.T) {
	x := New(Config{})
	locals, names := chain(1, 20)
	x.Apply(x.AddRank(0, 16), 0, []events.Event{stored(locals, names)})
	id := x.AddRank(0, 16)
	x.Apply(id, 0, []events.Event{stored(locals[:10], names[:10]), {Kind: events.Stored, Tier: events.Device, Group: 1,
		Attention: events.AttentionMamba, Blocks: []events.BlockHash{names[1], names[4], names[9]}}})
	for _, c := range []struct {
		e    events.Event
		want uint32
	}{
		{removed(names[3]), 2},
		{stored(locals[3:4], names[3:4], names[2]), 10},
		{removed(names[7:]...), 5},
		{stored(locals[7:12], names[7:12], names[6]), 10},
		{removed(names[0]), 0},
	} {
		x.change(x.rank(id), 0, []events.Event{c.e}, &Counts{})
		for range 2 {
			var a Answer
			x.Match(0, locals, nil, &a)
			got := uint32(0)
			for _, o := range a.Ranks {
				if o.Rank == id {
					got = o.Depth[0]
				}
			}
			if got != c.want {
				t.Errorf("after %v of %d blocks: %d, want %d", c.e.Kind, len(c.e.Blocks), got, c.want)
			}
			healthy(t, x)
			x.resolveEnds(1)
		}
	}
}
