package hicache

import (
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// onlyLane returns the only lane of a configuration.
func onlyLane(s *SGLang, tokens []uint32, space Space) Lane {
	lanes, _, _ := s.lanes(tokens, space)
	if len(lanes) != 1 {
		panic("not one lane")
	}
	return lanes[0]
}

// restorable is MooncakeStore.batch_exists_v2, line by line: the longest prefix of the requested pages, by the pool of
// keys and values (nil: none) and the others.
func restorable(pages int, kv []bool, pools []Pool, there [][]bool) int {
	kvPages := pages
	if kv != nil {
		kvPages = 0
		for kvPages < pages && kv[kvPages] {
			kvPages++
		}
	}
	longest := 0
	for n := 1; n <= kvPages; n++ {
		good := true
		for i, p := range pools {
			for at := max(0, n-p.TrailingPages); at < n; at++ {
				good = good && there[i][at]
			}
		}
		if good {
			longest = n
		}
	}
	return longest
}

// TestTrailingAgainstTwin: for any pools and any end of the own pages, a rank loads the pages that the engine's own
// loops find.
func TestTrailingAgainstTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(23, 7))
	groups, loaded := 0, 0
	for range testkit.Rounds(20_000) {
		pages := 1 + rng.IntN(40)
		mask := func(missing int) (list []bool, present Bitmap) {
			present = NewBitmap(pages)
			for i := range pages {
				list = append(list, rng.IntN(missing) > 0)
				if list[i] {
					present.Set(i)
				}
			}
			return list, present
		}
		known := NewBitmap(pages)
		for i := range pages {
			known.Set(i)
		}
		p := &Prompt{blockSize: 1, tokens: pages, free: rng.IntN(3) == 0}
		var kv []bool
		var found []Found
		if !p.free {
			list, present := mask(60)
			kv, found = list, []Found{{Present: present, Known: known}}
			p.Lanes = append(p.Lanes, Lane{Pages: pages})
		}
		var there [][]bool
		for range 1 + rng.IntN(3) {
			list, present := mask(2 + rng.IntN(12))
			there, found = append(there, list), append(found, Found{Present: present, Known: known})
			p.trailing = append(p.trailing, Pool{TrailingPages: 1 + rng.IntN(9)})
			p.Lanes = append(p.Lanes, Lane{Pages: pages})
		}
		m := p.Map(found)
		own := rng.IntN(pages + 1)
		behind := make([][]bool, len(there))
		for i := range there {
			behind[i] = there[i][own:]
		}
		if kv != nil {
			kv = kv[own:]
		}
		want := restorable(pages-own, kv, p.trailing, behind)
		got, why := m.Load(uint32(own), Rule{most: noBound})
		if int(got) != want {
			t.Fatalf("%d of %d pages own: %d, want %d (%s)\nkv %v pools %+v %v", own, pages, got, want, why, kv,
				p.trailing, there)
		}
		if why == BeyondGroups {
			groups++
		}
		if got > 0 {
			loaded++
		}
		most := uint32(rng.IntN(20))
		capped := restorable(min(pages-own, int(most)), kv, p.trailing, behind)
		if got, _ := m.Load(uint32(own), Rule{most: most}); int(got) != capped {
			t.Fatalf("at most %d: %d, want %d", most, got, capped)
		}
		if got, why := m.Load(uint32(own), Rule{least: 5, most: noBound}); int(got) != want && (want >= 5 || got != 0 ||
			why != beyondThreshold) {
			t.Fatalf("at least 5: %d %s, want %d", got, why, want)
		}
	}
	if least := testkit.Rounds(1000); groups < least || loaded < least {
		t.Errorf("pools limit only %d, %d load pages", groups, loaded)
	}
}

// TestTrailingUnknown: an unknown page of a pool counts as missing, and the reason is unknown.
func TestTrailingUnknown(t *testing.T) {
	p := &Prompt{blockSize: 1, tokens: 4, trailing: []Pool{{TrailingPages: 2}},
		Lanes: []Lane{{Pages: 4}, {Pages: 4}}}
	all := Found{Present: Bitmap{0b1111}, Known: Bitmap{0b1111}}
	for known, want := range map[uint64]struct {
		blocks uint32
		why    Beyond
	}{0b1111: {4, beyondEnd}, 0b0111: {3, beyondUnknown}, 0b1011: {2, beyondUnknown}, 0b0000: {0, beyondUnknown}} {
		m := p.Map([]Found{all, {Present: Bitmap{0b1111}, Known: Bitmap{known}}})
		if blocks, why := m.Load(0, Rule{most: noBound}); blocks != want.blocks || why != want.why {
			t.Errorf("%b: %d %s, want %+v", known, blocks, why, want)
		}
	}
}

// BenchmarkTrailing computes the loads of 256 ranks for a prompt of 4,096 pages, with a window and a state.
func BenchmarkTrailing(b *testing.B) {
	const pages = 4096
	rng := rand.New(rand.NewPCG(1, 2))
	p := &Prompt{blockSize: 1, tokens: pages, trailing: []Pool{{TrailingPages: 64}, {TrailingPages: 1}},
		Lanes: []Lane{{Pages: pages}, {Pages: pages}, {Pages: pages}}}
	found := make([]Found, 3)
	for i := range found {
		found[i] = Found{Present: NewBitmap(pages), Known: NewBitmap(pages)}
		for at := range pages {
			found[i].Known.Set(at)
			if i == 0 || rng.IntN(200) > 0 {
				found[i].Present.Set(at)
			}
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		m := p.Map(found)
		for rank := range uint32(256) {
			m.Load(rank*16, Rule{most: noBound})
		}
	}
}
