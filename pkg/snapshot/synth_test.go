package snapshot

import (
	"fmt"
	"math/rand/v2"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// synth generates images like the images of real fleets.
type synth struct {
	rng  *rand.Rand
	im   *image
	next uint64       // of hashes
	ids  events.RunID // all ids so far
	free []events.RunID
}

func newSynth(workers int) *synth {
	s := &synth{rng: rand.New(rand.NewPCG(1, 2)), im: new(image)}
	for i := range workers {
		s.im.ranks = append(s.im.ranks, RankState{Instance: Text(fmt.Sprintf("worker-%03d.fleet.example:8000", i)),
			Model: "meta-llama/Llama-3.1-70B", BlockSize: 16,
			Incarnation: events.Incarnation(1763712000000000000 + i), LastID: events.EventID(100000 + i),
			Cursor:   CursorOf(events.Cursor{Known: true, Seq: events.EngineSeq(50000 + i), Digest: mix(uint64(i))}),
			Checksum: Hex64(mix(uint64(i) + 99))})
		s.im.states = append(s.im.states, events.RankImage{Clock: 1763712000000,
			Groups: []events.GroupKind{{Group: 0, Kind: events.AttentionFull}}})
	}
	return s
}

// run adds a run of n blocks without holders.
func (s *synth) run(n int, parent *events.Run) *events.Run {
	r := events.Run{ID: s.ids, Space: 1, Parent: events.NoRun}
	if k := len(s.free); k > 0 {
		r.ID, s.free = s.free[k-1], s.free[:k-1]
	} else {
		s.ids++
	}
	if parent != nil {
		r.Parent, r.Offset = parent.ID, uint32(len(parent.Locals))
	}
	for range n {
		s.next++
		r.Locals = append(r.Locals, events.LocalHash(mix(s.next)))
		r.Names = append(r.Names, events.BlockHash(mix(s.next<<1|1<<63)))
	}
	s.im.runs = append(s.im.runs, r)
	return &s.im.runs[len(s.im.runs)-1]
}

func addHolding(r *events.Run, rank int, lead int) {
	r.Holdings = append(r.Holdings, events.Holding{Rank: uint32(rank), Tier: events.Device, Lead: uint32(lead)})
}

// conversations returns an image in which a worker holds its own conversations, parts of others, and a common
// beginning. The order of ids is mixed over the workers.
func conversations(workers, each int) *synth {
	s := newSynth(workers)
	root := *s.run(32, nil)
	for i := range workers {
		addHolding(&s.im.runs[0], i, 32)
	}
	for range each / 285 {
		for w := range workers {
			s.conversation(w, &root)
		}
	}
	return s
}

func (s *synth) conversation(w int, root *events.Run) {
	r := s.run(100+s.rng.IntN(371), root)
	n := len(r.Locals)
	addHolding(r, w, n)
	if s.rng.IntN(6) == 0 {
		if other := s.rng.IntN(len(s.im.ranks)); other != w {
			addHolding(r, other, 1+s.rng.IntN(n))
		}
	}
}

// churn lets a worker evict the given share of the conversations, shorten as many, and start new conversations.
func (s *synth) churn(w int, share float64) {
	var kept []events.Run
	for _, r := range s.im.runs {
		at := -1
		for i := range r.Holdings {
			if r.Holdings[i].Rank == uint32(w) {
				at = i
			}
		}
		if at < 0 || r.ID == 0 || s.rng.Float64() >= 2*share {
			kept = append(kept, r)
			continue
		}
		r.Holdings = append([]events.Holding(nil), r.Holdings...)
		if s.rng.IntN(2) == 0 { // evicted
			r.Holdings = append(r.Holdings[:at], r.Holdings[at+1:]...)
		} else {
			r.Holdings[at].Lead = (r.Holdings[at].Lead + 1) / 2
		}
		longest := uint32(0)
		for _, h := range r.Holdings {
			longest = max(longest, h.Lead)
		}
		if longest == 0 {
			s.free = append(s.free, r.ID)
			continue
		}
		r.Locals, r.Names = r.Locals[:longest], r.Names[:longest]
		kept = append(kept, r)
	}
	s.im.runs = kept
	for range int(share * float64(len(kept)) / float64(len(s.im.ranks))) {
		s.conversation(w, &s.im.runs[0])
	}
	s.im.ranks[w].LastID++
}

// sharedByAll returns an image in which all workers hold all runs.
func sharedByAll(workers, runs, n int) *synth {
	s := newSynth(workers)
	for range runs {
		r := s.run(n, nil)
		for w := range workers {
			addHolding(r, w, n)
		}
	}
	return s
}

// holey returns an image in which a worker holds somewhat more than half of the blocks of each run, some more than
// once.
func holey(workers, each int) *synth {
	s := newSynth(workers)
	for range each / 200 {
		for w := range workers {
			n := 200 + s.rng.IntN(340)
			r := s.run(n, nil)
			h := events.Holding{Rank: uint32(w), Tier: events.Device, Bits: make([]uint64, (n+63)/64)}
			for i := range n {
				if s.rng.IntN(100) < 54 {
					h.Bits[i/64] |= 1 << (i % 64)
					if s.rng.IntN(10) == 0 {
						h.Copies = append(h.Copies,
							events.BlockCount{Block: uint32(i), Count: uint32(2 + s.rng.IntN(3))})
					}
				} else {
					r.Names[i] = 0
				}
			}
			r.Holdings = append(r.Holdings, h)
		}
	}
	return s
}

// private returns the image of sharedByAll with separate names for each worker.
func private(workers, runs, n int) *synth {
	s := sharedByAll(workers, runs, n)
	for i := range s.im.runs {
		r := &s.im.runs[i]
		for j := 1; j < len(r.Holdings); j++ {
			for b := range r.Locals {
				r.Holdings[j].Names = append(r.Holdings[j].Names,
					events.BlockName{Block: uint32(b), Name: events.BlockHash(mix(uint64(r.Locals[b]) ^ uint64(j)))})
			}
		}
	}
	return s
}

// addTombstones adds tombstones of n held blocks to every rank.
func (s *synth) addTombstones(n int) {
	for w := range s.im.states {
		for i := range n {
			r := &s.im.runs[(w+i/100*len(s.im.ranks))%len(s.im.runs)]
			s.im.states[w].Tombstones = append(s.im.states[w].Tombstones,
				events.Tombstone{Name: events.BlockHash(mix(uint64(i) ^ uint64(w)<<32)),
					Run: r.ID, Block: uint32(100 - i%100), Since: events.Millis(1763712000000 + i)})
		}
	}
}
