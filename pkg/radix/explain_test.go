package radix

import (
	"runtime"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestExplainHalfWritten: a reader that sees a part with more blocks than the node does not crash. It then starts
// again.
func TestExplainHalfWritten(t *testing.T) {
	p := RankPath{Overlap: Overlap{Depth: [events.NumTiers]uint32{310}}, Blocks: make([]TierSet, 300)}
	(&walk{}).explainCut(&p, &reuse{}, [events.NumTiers]uint32{299})
}

// TestExplainBesideGrowth explains a rank with a draft model that drops a block, while a node grows and shrinks.
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

// TestExplainEnds has a writer that changes the root all the time. After several failed walks, Explain blocks the
// writer, and the next walk is consistent.
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
			t.Fatalf("Explain returned during a change of the root: %+v", ex)
		default:
			runtime.Gosched()
		}
	}
	x.unlock(root)
	if ex := <-done; ex.Known != 20 || len(ex.Ranks) != 1 || ex.Ranks[0].Rank != r {
		t.Errorf("%+v", ex)
	}
}
