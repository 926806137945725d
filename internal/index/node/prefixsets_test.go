package node

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// heldWorld applies the same random events to an index and to sets: by rank, the copies of blocks by sequence hash.
type heldWorld struct {
	*rand.Rand
	x       *radix.Index
	ranks   []radix.RankID
	holds   []map[events.SeqHash]int
	prompts [][]events.LocalHash
}

func newHeldWorld(seed uint64, ranks int) *heldWorld {
	w := &heldWorld{Rand: rand.New(rand.NewPCG(seed, 21)), x: radix.New(radix.Config{})}
	for range ranks {
		w.ranks = append(w.ranks, w.x.AddRank(1, 16))
		w.holds = append(w.holds, map[events.SeqHash]int{})
	}
	return w
}

// store makes a rank hold a new prompt, which may branch off an earlier one.
func (w *heldWorld) store() {
	prompt := make([]events.LocalHash, 1+w.IntN(60))
	for i := range prompt {
		prompt[i] = events.LocalHash(w.Uint64())
	}
	if len(w.prompts) > 0 && w.IntN(4) > 0 {
		other := w.prompts[w.IntN(len(w.prompts))]
		copy(prompt, other[:w.IntN(min(len(other), len(prompt))+1)])
	}
	w.prompts = append(w.prompts, prompt)
	rank := w.IntN(len(w.ranks))
	e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: prompt}
	for _, h := range events.SeqHashes(nil, prompt) {
		e.Blocks = append(e.Blocks, events.BlockHash(h))
		w.holds[rank][h]++
	}
	w.x.Apply(w.ranks[rank], 0, []events.Event{e})
}

// remove removes some blocks of a rank, which may leave holes.
func (w *heldWorld) remove() {
	rank := w.IntN(len(w.ranks))
	e := events.Event{Kind: events.Removed, Tier: events.Device}
	for _, h := range slices.Sorted(maps.Keys(w.holds[rank])) {
		if w.IntN(20) == 0 {
			e.Blocks = append(e.Blocks, events.BlockHash(h))
			if w.holds[rank][h]--; w.holds[rank][h] == 0 {
				delete(w.holds[rank], h)
			}
		}
	}
	w.x.Apply(w.ranks[rank], 0, []events.Event{e})
}

// reachable returns the blocks up to which one of the ranks holds a whole prompt.
func (w *heldWorld) reachable(ranks []int) map[events.SeqHash]bool {
	all := map[events.SeqHash]bool{}
	for _, prompt := range w.prompts {
		seqs := events.SeqHashes(nil, prompt)
		for _, rank := range ranks {
			for _, h := range seqs {
				if w.holds[rank][h] == 0 {
					break
				}
				all[h] = true
			}
		}
	}
	return all
}

// TestPrefixSetsAgainstSets: the hashes of an index are those of the blocks up to which a rank holds a whole prompt.
// Without room for all, they are a part that is closed under prefixes.
func TestPrefixSetsAgainstSets(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testkit.Rounds(120)) {
		w := newHeldWorld(seed, 1+int(seed%5))
		for range 1 + w.IntN(60) {
			if w.store(); w.IntN(4) == 0 {
				w.remove()
			}
		}
		var among []int
		p := &prefixPart{index: w.x, space: 1, room: 1 << 20}
		for i, id := range w.ranks {
			if w.IntN(5) > 0 {
				among = append(among, i)
				p.ranks.Add(id)
			}
		}
		want := w.reachable(among)
		list, left := p.appendHashes(nil)
		got := map[events.SeqHash]bool{}
		for _, h := range list {
			if got[h] {
				t.Fatalf("seed %d: a hash is there twice", seed)
			}
			got[h] = true
		}
		if !maps.Equal(got, want) || left != 0 {
			t.Fatalf("seed %d: %d hashes, want %d; %d are left", seed, len(got), len(want), left)
		}
		if len(want) == 0 {
			continue
		}
		p.room = 1 + w.IntN(len(want))
		var hot []events.SeqHash // the held part of a prompt, as far as there is room
		if w.IntN(2) == 0 {
			p.hot = [][]events.LocalHash{w.prompts[w.IntN(len(w.prompts))]}
			for _, h := range events.SeqHashes(nil, p.hot[0]) {
				if want[h] && len(hot) < p.room {
					hot = append(hot, h)
				}
			}
		}
		list, left = p.appendHashes(nil)
		part := map[events.SeqHash]bool{}
		for _, h := range list {
			part[h] = true
		}
		if len(list) > p.room || len(part) < len(want) && left == 0 {
			t.Fatalf("seed %d: %d of %d hashes in a room of %d, %d are left", seed, len(list), len(want), p.room, left)
		}
		if len(list) < len(hot) || !slices.Equal(list[:len(hot)], hot) || len(part) != len(list) {
			t.Fatalf("seed %d: the hot prompt is not first, or a hash is there twice", seed)
		}
		for _, prompt := range w.prompts {
			ended := false
			for _, h := range events.SeqHashes(nil, prompt) {
				if part[h] && (ended || !want[h]) {
					t.Fatalf("seed %d: a hash that the whole list lacks, or without the blocks before it", seed)
				}
				ended = ended || !part[h]
			}
		}
	}
}

// TestRoomIsShared: parts get the room that they need, or equal shares of the rest.
func TestRoomIsShared(t *testing.T) {
	for _, c := range []struct {
		most         int
		blocks, want []int
	}{
		{100, []int{10, 500, 20, 500}, []int{25, 35, 30, 35}},
		{100, []int{1, 2}, []int{50, 99}},
		{100, []int{1000}, []int{100}},
		{100, nil, nil},
	} {
		var parts []*prefixPart
		for _, n := range c.blocks {
			parts = append(parts, &prefixPart{blocks: n})
		}
		share(parts, c.most)
		var got []int
		sum := 0
		for _, p := range parts {
			got = append(got, p.room)
			sum += min(p.room, p.blocks)
		}
		if !slices.Equal(got, c.want) || sum > c.most {
			t.Errorf("%v blocks have rooms %v, want %v", c.blocks, got, c.want)
		}
	}
}

// TestPrefixSetsAreFindsPrefixes: the sets of a node have the prefix that a query finds. A partition that the caller
// does not cover, or that does not serve, is not in the sets.
func TestPrefixSetsAreFindsPrefixes(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(9)
	w.awaitAll()
	every := PrefixQuery{Covers: func(events.Partition) bool { return true }, Most: 1000}
	sets, covered := w.node.PrefixSets(every)
	a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
	w.must(err)
	if len(sets) != 1 || len(a.Workers) != 1 || !slices.Equal(covered, []events.Partition{0}) {
		t.Fatalf("%+v of %v, %+v", sets, covered, a)
	}
	locals, err := (&api.Query{Tokens: w.prompt}).Locals(nil, 4, 0)
	w.must(err)
	s := sets[0]
	want := events.SeqHashes(nil, locals[:a.Workers[0].Total()])
	if s.Model != "m" || s.BlockSize != 4 || s.Left != 0 || s.Bounded || !slices.Equal(s.Lookaheads, []uint32{0}) ||
		!slices.Equal(s.Hashes, want) {
		t.Errorf("%+v, want %v", s, want)
	}
	none := PrefixQuery{Covers: func(events.Partition) bool { return false }, Most: 1000}
	if sets, covered := w.node.PrefixSets(none); len(sets)+len(covered) > 0 {
		t.Errorf("%+v of %v", sets, covered)
	}
	w.node.put(0, &restoring{kept: &kept{}})
	if sets, covered := w.node.PrefixSets(every); len(sets)+len(covered) > 0 {
		t.Errorf("while the partition is restored: %+v of %v", sets, covered)
	}
}

// BenchmarkPrefixSets makes the hashes of a million blocks in sessions of 64 ranks that share a system prompt.
func BenchmarkPrefixSets(b *testing.B) {
	w := newHeldWorld(1, 64)
	system := make([]events.LocalHash, 100)
	for i := range system {
		system[i] = events.LocalHash(w.Uint64())
	}
	blocks := len(system)
	for n := 0; blocks < 1_000_000; n++ {
		prompt := slices.Clone(system)
		for range 100 + w.IntN(300) {
			prompt = append(prompt, events.LocalHash(w.Uint64()))
		}
		blocks += len(prompt) - len(system)
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: prompt}
		for _, h := range events.SeqHashes(nil, prompt) {
			e.Blocks = append(e.Blocks, events.BlockHash(h))
		}
		w.x.Apply(w.ranks[n%len(w.ranks)], 0, []events.Event{e})
	}
	p := &prefixPart{index: w.x, space: 1, room: 1 << 21}
	for _, id := range w.ranks {
		p.ranks.Add(id)
	}
	b.ReportAllocs()
	for b.Loop() {
		list, left := p.appendHashes(nil)
		if len(list) != blocks || left != 0 {
			b.Fatal(len(list), left, blocks)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(blocks), "ns/block")
}
