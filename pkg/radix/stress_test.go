package radix

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestReaders runs readers while a writer splits, extends, empties and frees the nodes that they read. Some ranks
// change only by whole events: a reader must see a whole event or nothing of it.
func TestReaders(t *testing.T) {
	for name, mem := range map[string]limits{"heap": memories[0], "mapped": memories[1]} {
		t.Run(name, func(t *testing.T) { readers(t, newIndex(Config{MaxTombstones: 20}, mem)) })
	}
}

func readers(t *testing.T, x *Index) {
	const long = 700
	rng := rand.New(rand.NewPCG(1, 2))
	var docs [][]events.LocalHash
	for i := range 8 {
		var doc []events.LocalHash
		if i > 0 {
			from := docs[rng.IntN(i)]
			doc = slices.Clone(from[:rng.IntN(len(from))])
		}
		for len(doc) < long {
			doc = append(doc, events.LocalHash(mix(uint64(i)<<32|uint64(len(doc)))))
		}
		docs = append(docs, doc)
	}
	names := func(doc []events.LocalHash) (out []events.BlockHash) {
		h := uint64(0)
		for _, l := range doc {
			h = mix(h ^ uint64(l))
			out = append(out, events.BlockHash(h))
		}
		return out
	}
	common := func(a, b []events.LocalHash) (n uint32) {
		for int(n) < len(a) && a[n] == b[n] {
			n++
		}
		return n
	}
	type steady struct {
		id  atomic.Uint32
		doc int
		// way of change: 0: a store and a removal, 1: and a clear, 2: in host after the device, 3: dropped and added,
		// 4: in the second of two groups, 5: in a window besides the prefix
		kind int
		on   bool
	}
	var ranks [24]steady
	window := func(names []events.BlockHash) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Device, Group: 1,
			Attention: events.AttentionSlidingWindow, Window: 500, Blocks: names}
	}
	store := func(id RankID, tier events.Tier, doc []events.LocalHash, from, to int) {
		e := events.Event{Kind: events.Stored, Tier: tier, Locals: doc[from:to], Blocks: names(doc)[from:to]}
		if from > 0 {
			e.HasParent, e.Parent = true, names(doc)[from-1]
		}
		x.Apply(id, 0, []events.Event{e})
	}
	for i := range ranks {
		r := &ranks[i]
		r.doc, r.kind = i%len(docs), i/len(docs)
		switch i % 5 {
		case 0:
			r.kind = 3
		case 1:
			r.kind = 4
		case 2:
			r.kind = 5
		}
		r.id.Store(uint32(x.AddRank(0, 16)))
		if r.kind == 2 {
			store(RankID(r.id.Load()), events.Device, docs[r.doc], 0, long/2)
		}
		if r.kind == 4 {
			store(RankID(r.id.Load()), events.Device, docs[r.doc], 0, long)
		}
		if r.kind == 5 {
			x.Apply(RankID(r.id.Load()), 0, []events.Event{window(nil)})
			store(RankID(r.id.Load()), events.Device, docs[r.doc], 0, long)
		}
	}
	restless := x.AddRank(0, 16)

	stop := make(chan struct{})
	var wg sync.WaitGroup
	var asked atomic.Int64
	for n := range 3 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(n), 3))
			var a Answer
			var named Named
			for {
				select {
				case <-stop:
					return
				default:
				}
				q := rng.IntN(len(docs))
				before := map[RankID]int{}
				for i := range ranks {
					before[RankID(ranks[i].id.Load())] = i
				}
				if x.Match(0, docs[q], nil, &a); asked.Add(1)%3 == 0 {
					x.MatchNames(0, names(docs[q]), nil, &named)
					a.Ranks = append(a.Ranks[:0], named.Ranks...)
				}
				for _, o := range a.Ranks {
					i, ok := before[o.Rank]
					if !ok {
						continue
					}
					r := &ranks[i]
					same := common(docs[r.doc], docs[q])
					want := [events.NumTiers]uint32{same}
					if r.kind == 2 {
						fixed := [events.NumTiers]uint32{min(same, long/2)}
						want = fixed
						want[1] = same - want[0]
						if o.Depth == fixed {
							continue
						}
					}
					if o.Depth != want {
						t.Errorf("rank %d of kind %d: %v, want %v or nothing", i, r.kind, o.Depth, want)
						return
					}
				}
				if n == 0 && asked.Load()%64 == 0 {
					x.Explain(0, docs[q], nil)
				}
			}
		})
	}
	until := time.Now().Add(1500 * time.Millisecond)
	if testing.Short() {
		until = time.Now().Add(500 * time.Millisecond)
	}
	for step := 0; (time.Now().Before(until) || asked.Load() == 0) && !t.Failed(); step++ {
		r := &ranks[rng.IntN(len(ranks))]
		id := RankID(r.id.Load())
		doc := docs[r.doc]
		switch {
		case !r.on && r.kind == 2:
			store(id, events.Host, doc, long/2, long)
		case !r.on && r.kind == 4:
			x.Apply(id, 0, []events.Event{{Kind: events.Stored, Tier: events.Device, Group: 2, Locals: doc,
				Blocks: names(doc)}})
		case !r.on && r.kind == 5:
			x.Apply(id, 0, []events.Event{window(names(doc))})
		case r.kind == 5:
			x.Apply(id, 0, []events.Event{{Kind: events.Removed, Tier: events.Device, Group: 1, Blocks: names(doc)}})
		case !r.on:
			store(id, events.Device, doc, 0, long)
		case r.kind == 1:
			x.Apply(id, 0, []events.Event{{Kind: events.Cleared, Tier: events.Device}})
		case r.kind == 3:
			x.DropRank(id)
			r.id.Store(uint32(x.AddRank(0, 16)))
		default:
			e := events.Event{Kind: events.Removed, Tier: events.Device, Blocks: names(doc)}
			if r.kind == 2 {
				e.Tier, e.Blocks = events.Host, e.Blocks[long/2:]
			}
			if r.kind == 4 {
				e.Group = 2
			}
			rng.Shuffle(len(e.Blocks), func(i, j int) { e.Blocks[i], e.Blocks[j] = e.Blocks[j], e.Blocks[i] })
			x.Apply(id, 0, []events.Event{e})
		}
		r.on = !r.on
		// A separate branch of a random document.
		doc = slices.Clone(docs[rng.IntN(len(docs))][:1+rng.IntN(long)])
		doc = append(doc, events.LocalHash(step))
		store(restless, events.Device, doc, 0, len(doc))
		if step%20 == 19 {
			x.Apply(restless, 0, []events.Event{{Kind: events.Cleared}})
		}
		if step%100 == 99 {
			if err := x.Check(); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if err := x.Check(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d queries", asked.Load())
}
