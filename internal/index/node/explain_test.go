package node

import (
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// TestPathOf expands the runs of random paths again, block by block.
func TestPathOf(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 7))
	for range 2000 {
		p := &radix.RankPath{Stop: radix.StopAbsent, Behind: rng.Uint32(), Blocks: make([]radix.TierSet, rng.IntN(40))}
		for i := range p.Blocks {
			if i > 0 && rng.IntN(3) > 0 {
				p.Blocks[i] = p.Blocks[i-1]
			} else {
				p.Blocks[i] = radix.TierSet(rng.IntN(16))
			}
		}
		most := 1 + rng.IntN(12)
		path := pathOf(p, p.Stop.String(), most)
		got := make([]radix.TierSet, len(p.Blocks))
		for i, r := range path.Held {
			if r.From >= r.To || len(r.Tiers) == 0 || i > 0 && r.From < path.Held[i-1].To {
				t.Fatalf("runs %+v", path.Held)
			}
			for b := r.From; b < r.To; b++ {
				for _, name := range r.Tiers {
					for tier := events.Device; tier <= events.External; tier++ {
						if tier.String() == name {
							got[b] |= 1 << (tier - 1)
						}
					}
				}
			}
		}
		end := len(p.Blocks)
		if path.More {
			if len(path.Held) != most {
				t.Fatalf("cut at %d runs, not at %d", len(path.Held), most)
			}
			end = int(path.Held[most-1].To)
		}
		for b := range end {
			if got[b] != p.Blocks[b] {
				t.Fatalf("block %d of %v: %b in %+v", b, p.Blocks, got[b], path.Held)
			}
		}
		if path.Stop != "not_held" || path.Behind != p.Behind {
			t.Fatalf("%+v", path)
		}
	}
}

// TestExplainedAnswer: an explained answer has the depths of the plain one, its paths agree block by block, and it
// includes ranks without blocks.
func TestExplainedAnswer(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	plain, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
	w.must(err)
	a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt, Explain: true, Idle: true})
	w.must(err)
	if len(a.Workers) != 1 || a.Workers[0].Total() != plain.Workers[0].Total() {
		t.Fatalf("%+v, and not explained %+v", a.Workers, plain.Workers)
	}
	o := a.Workers[0]
	if p := o.Path; p == nil || len(p.Held) != 1 || p.Held[0].To != o.Total() || p.Stop != "query_ends" &&
		p.Stop != "unknown_block" {
		t.Errorf("%+v of %+v", o.Path, o)
	}
	a, err = w.node.Find(w.ctx, &api.Query{Model: "m", Hashes: api.Hashes{1, 2, 3}, Explain: true, Idle: true})
	w.must(err)
	if len(a.Workers) != 1 || a.Workers[0].Path == nil || a.Workers[0].Path.Stop != "unknown_block" ||
		a.Reason != api.ReasonNotCached {
		t.Errorf("%+v", a)
	}
	if a, err = w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: api.Tokens{}, Explain: true,
		Idle: true}); err != nil || a.Reason != api.ReasonNoBlocks {
		t.Errorf("%+v, %v", a, err)
	}
}
