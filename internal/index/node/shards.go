package node

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// shard is one of a node's indexes, with the goroutine that writes to it. Partitions are dealt out among shards by
// turns: what a partition's ranks hold is in one shard, and events of partitions in different shards are applied at the
// same time. A query is hashed once, and asks all shards that have ranks of its model.
type shard struct {
	number  int
	index   *radix.Index
	machine *Machine
	work    chan work
	claims  chan struct{}           // of [Node.ClaimsChanged]
	figures atomic.Pointer[figures] // which the writer counted last
}

func (n *Node) newShard(number int) *shard {
	x := radix.New(n.cfg.Index)
	s := &shard{number: number, index: x, machine: NewMachine(x, len(n.parts)), work: make(chan work, 16),
		claims: make(chan struct{}, 1)}
	s.machine.shard, s.machine.spaces = number, &n.spaces
	s.machine.published = func(v *View) { n.views.publish(number, v) }
	s.machine.decoded = n.cfg.Decoded
	if n.cfg.Source != nil {
		s.machine.source = n.cfg.Source
	}
	if n.cfg.Claimed != nil {
		s.machine.claimed = n.cfg.Claimed
	}
	if n.cfg.BlockSize != nil {
		s.machine.size = n.cfg.BlockSize
	}
	s.figures.Store(s.machine.figures(radix.Stats{}))
	return s
}

// shard is the one that a partition is in.
func (n *Node) shard(p events.Partition) *shard { return n.shards[int(p)%len(n.shards)] }

// partitions are those in a shard, kept or not.
func (n *Node) partitions(s *shard) (list []events.Partition) {
	for p := s.number; p < len(n.parts); p += len(n.shards) {
		list = append(list, events.Partition(p))
	}
	return list
}

// recheckPause is the least time between two looks at all ranks of a shard after changes of claims.
const recheckPause = 20 * time.Millisecond

// ClaimsChanged has writers look whether [Config.Claimed] now hides or shows a rank. It does not block.
func (n *Node) ClaimsChanged() {
	for _, s := range n.shards {
		loop.Wake(s.claims)
	}
}

// write does a shard's work until ctx ends.
func (n *Node) write(ctx context.Context, s *shard) {
	var census radix.Census
	due := time.NewTimer(0) // a part of the census
	defer due.Stop()
	claims, pause := (<-chan struct{})(s.claims), time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-due.C:
			due.Reset(s.count(&census))
		case <-pause.C:
			claims = s.claims
		case <-claims:
			claims = nil
			pause.Reset(recheckPause)
			before := s.machine.View()
			if s.machine.Recheck(); s.machine.View() != before {
				loop.Wake(n.modelsChanged)
			}
		case w := <-s.work:
			if w.do != nil {
				w.run(s.machine)
			} else {
				before := s.machine.View()
				n.apply(s.machine, w)
				if s.machine.View() != before {
					loop.Wake(n.modelsChanged)
				}
			}
			n.notifier.notify()
		}
	}
}

// do runs f in the shard's writer, and waits until it has. If it returns an error f does not run, now or later.
func (s *shard) do(ctx context.Context, f func(*Machine)) error {
	w := work{do: f, taken: new(atomic.Bool), done: make(chan struct{})}
	select {
	case s.work <- w:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
	}
	if w.taken.CompareAndSwap(false, true) {
		return ctx.Err()
	}
	<-w.done // the writer is at it
	return nil
}

// do runs f in the writer of a partition's shard, and waits until it has.
func (n *Node) do(ctx context.Context, p events.Partition, f func(*Machine)) error {
	return n.shard(p).do(ctx, f)
}

// onShards runs f in the writer of each shard, one after the other.
func (n *Node) onShards(ctx context.Context, f func(*shard, *Machine)) error {
	for _, s := range n.shards {
		if err := s.do(ctx, func(m *Machine) { f(s, m) }); err != nil {
			return err
		}
	}
	return nil
}

// count counts a part of what is in the index, publishes figures when all is counted, and returns after how long the
// next part is due. The writer calls it.
func (s *shard) count(c *radix.Census) (next time.Duration) {
	begun := time.Now()
	stats, done := s.index.Count(c, censusPart)
	if done {
		s.figures.Store(s.machine.figures(stats))
		next = censusPause
	}
	return max(next, censusShare*time.Since(begun))
}

// spaces numbers the models and block sizes of a node, for all its shards.
type spaces struct {
	mu   sync.Mutex
	of   map[spaceKey]uint32
	last uint32
}

// number returns the number of a model and block size. A new one gets want, if that is free and not 0.
func (s *spaces) number(key spaceKey, want uint32) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.of[key]; ok {
		return n
	}
	for _, n := range s.of {
		if n == want {
			want = 0
		}
	}
	if want == 0 {
		want = s.last + 1
	}
	if s.of == nil {
		s.of = map[spaceKey]uint32{}
	}
	s.of[key], s.last = want, max(s.last, want)
	return want
}

// View is what queries know of ranks and models. It does not change; a later one replaces it.
type View struct {
	Models map[string][]*Served // by model; one for each block size
	Hidden []HiddenRank         // in the index, and in no answer
	slots  [][]*RankOfView      // by shard and radix.RankID.Slot; nil where no rank is
}

// Rank returns the rank with an id in a shard, or nil if the view does not have it: it came later or went before.
func (v *View) Rank(shard int, id radix.RankID) *RankOfView {
	if shard >= len(v.slots) {
		return nil
	}
	slots := v.slots[shard]
	if i := id.Slot(); i < len(slots) && slots[i] != nil && slots[i].ID == id {
		return slots[i]
	}
	return nil
}

// HiddenRank is a rank that the view leaves out: its worker has not claimed the model that it announces.
type HiddenRank struct {
	Key       events.RankKey
	Model     string
	Partition events.Partition
}

// Served is one model at one block size.
type Served struct {
	BlockSize  uint32
	Space      uint32
	Lookaheads []uint32           // what its ranks have, each once, ascending
	Ranks      []*RankOfView      // ordered by instance and rank
	Partitions []events.Partition // those that these ranks are in, ascending
	Shards     []int              // the same
}

// RankOfView is a rank as queries know it.
type RankOfView struct {
	Key       events.RankKey
	Shard     int
	ID        radix.RankID // in the shard's index
	Partition events.Partition
	Lookahead uint32 // how many tokens beyond a block its engine hashes with the block; see events.Event
	Bounded   bool   // its depths are an upper bound; see [radix.Index.Bounded]

	memory *deviceMemory
}

// deviceMemory has what [radix.Index.DeviceMemory] returned for a rank after its last message. The writer stores it,
// and queries load it.
type deviceMemory struct{ figures atomic.Uint64 }

func (d *deviceMemory) store(held, full int64) {
	d.figures.Store(uint64(min(held, math.MaxUint32))<<32 | uint64(min(full, math.MaxUint32)))
}

func (d *deviceMemory) load() (held, full uint32) {
	x := d.figures.Load()
	return uint32(x >> 32), uint32(x)
}

// add puts a rank into a view that is being made.
func (v *View) add(key spaceKey, space uint32, r *RankOfView) {
	list := v.Models[key.model]
	at := slices.IndexFunc(list, func(s *Served) bool { return s.BlockSize == key.blockSize })
	if at < 0 {
		at = len(list)
		v.Models[key.model] = append(list, &Served{BlockSize: key.blockSize, Space: space})
	}
	s := v.Models[key.model][at]
	s.Ranks = append(s.Ranks, r)
	s.Lookaheads = include(s.Lookaheads, r.Lookahead)
	s.Partitions = include(s.Partitions, r.Partition)
	s.Shards = include(s.Shards, r.Shard)
	for len(v.slots) <= r.Shard {
		v.slots = append(v.slots, nil)
	}
	for len(v.slots[r.Shard]) <= r.ID.Slot() {
		v.slots[r.Shard] = append(v.slots[r.Shard], nil)
	}
	v.slots[r.Shard][r.ID.Slot()] = r
}

// include puts x into an ascending list that has each value once.
func include[T ~int | ~uint32](list []T, x T) []T {
	at, found := slices.BinarySearch(list, x)
	if found {
		return list
	}
	return slices.Insert(list, at, x)
}

// order ends the making of a view.
func (v *View) order() {
	for _, list := range v.Models {
		slices.SortFunc(list, func(a, b *Served) int { return int(a.BlockSize) - int(b.BlockSize) })
		for _, s := range list {
			slices.SortFunc(s.Ranks, func(a, b *RankOfView) int { return a.Key.Compare(b.Key) })
		}
	}
}

// views are those of a node's shards, and what they are together.
type views struct {
	mu  sync.Mutex
	of  []*View
	all atomic.Pointer[View]
}

// publish replaces a shard's view.
func (vs *views) publish(shard int, v *View) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.of[shard] = v
	if len(vs.of) > 1 {
		v = joined(vs.of)
	}
	vs.all.Store(v)
}

// joined is one view of several shards.
func joined(list []*View) *View {
	all := &View{Models: map[string][]*Served{}}
	for _, v := range list {
		all.Hidden = append(all.Hidden, v.Hidden...)
		for model, list := range v.Models {
			for _, s := range list {
				for _, r := range s.Ranks {
					all.add(spaceKey{model, s.BlockSize}, s.Space, r)
				}
			}
		}
	}
	all.order()
	return all
}
