package radix

import (
	"runtime"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestExplainHalfWritten: a reader that meets a part which says more than the node had goes on to find that it must
// begin again.
func TestExplainHalfWritten(t *testing.T) {
	p := RankPath{Overlap: Overlap{Depth: [events.NumTiers]uint32{310}}, Blocks: make([]TierSet, 300)}
	(&walk{}).explainCut(&p, &reuse{}, [events.NumTiers]uint32{299})
}

// TestExplainBesideGrowth has a node grow and shrink while it is explained why a rank whose draft model drops a block
// can use less than it holds.
func TestExplainBesideGrowth(t *testing.T) {
	x := New(Config{MaxTombstones: -1})
	const n, more = 300, 30
	locals, names := chain(1, n+more)
	of := func(id RankID, from, to int) {
		e := stored(locals[from:to], names[from:to])
		if e.Drops, e.Attention = true, events.AttentionFull; from > 0 {
			e.HasParent, e.Parent = true, names[from-1]
		}
		x.Apply(id, 0, []events.Event{e})
	}
	gone := func(id RankID, from, to int) {
		e := removed()
		for i := to - 1; i >= from; i-- {
			e.Blocks = append(e.Blocks, names[i])
		}
		x.Apply(id, 0, []events.Event{e})
	}
	r, s, u := x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(0, 16)
	for _, id := range []RankID{r, s, u} {
		of(id, 0, n)
	}
	gone(r, n-2, n)
	gone(s, 0, n-1)
	gone(u, 0, n-1)
	done := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				for _, p := range x.Explain(0, locals[:n], nil).Ranks {
					if p.Rank == r && (p.Depth[device] != n-3 && p.Depth[device] != n-1 || len(p.Blocks) != n) {
						t.Errorf("%d blocks of %d", p.Depth[device], len(p.Blocks))
					}
				}
			}
		}
	})
	for range 5_000 {
		of(u, n, n+more)
		of(r, n-2, n+10)
		gone(r, n-2, n+10)
		gone(u, n, n+more)
	}
	close(done)
	reader.Wait()
}

// TestExplainEnds has a writer that changes the root for as long as nobody keeps it out: after some walks in vain it is
// kept out, and the next walk is of one moment.
func TestExplainEnds(t *testing.T) {
	x := New(Config{})
	locals, names := chain(1, 20)
	r := x.AddRank(0, 16)
	x.Apply(r, 0, []events.Event{stored(locals, names)})
	root := x.v.root(0)
	x.lock(root)
	done := make(chan *Explanation)
	go func() { done <- x.Explain(0, locals, nil) }()
	for x.naming.TryLock() { // as the writer does for each change
		x.naming.Unlock()
		select {
		case ex := <-done:
			t.Fatalf("a root that is being changed is explained: %+v", ex)
		default:
			runtime.Gosched()
		}
	}
	x.unlock(root)
	if ex := <-done; ex.Known != 20 || len(ex.Ranks) != 1 || ex.Ranks[0].Rank != r {
		t.Errorf("%+v", ex)
	}
}
