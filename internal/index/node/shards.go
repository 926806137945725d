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

// shard is an index of the node with the writer goroutine. Partitions are distributed over shards in turn, so one shard
// has all ranks of a partition, and events of partitions in different shards are applied in parallel. A query is hashed
// once and searches all shards with ranks of the query's model.
type shard struct {
	number  int
	index   *radix.Index
	machine *Machine
	work    chan work
	claims  chan struct{}           // of [Node.ClaimsChanged]
	figures atomic.Pointer[figures] // the writer's last counts
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

// shard returns the shard of a partition.
func (n *Node) shard(p events.Partition) *shard { return n.shards[int(p)%len(n.shards)] }

// partitions returns the partitions of a shard, kept or not.
func (n *Node) partitions(s *shard) (list []events.Partition) {
	for p := s.number; p < len(n.parts); p += len(n.shards) {
		list = append(list, events.Partition(p))
	}
	return list
}

// recheckPause is the minimum time between two checks of all ranks of a shard after changes of claims.
const recheckPause = 20 * time.Millisecond

// ClaimsChanged makes writers check whether [Config.Claimed] now hides or shows a rank. ClaimsChanged does not block.
func (n *Node) ClaimsChanged() {
	for _, s := range n.shards {
		loop.Wake(s.claims)
	}
}

// write processes a shard's queue until ctx ends.
func (n *Node) write(ctx context.Context, s *shard) {
	var census radix.Census
	due := time.NewTimer(0) // the next part of the census
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

// do runs f in the shard's writer and waits for the end of f. After an error f does not run, now or later.
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
	<-w.done // the writer runs f
	return nil
}

// do runs f in the writer of a partition's shard and waits for the end of f.
func (n *Node) do(ctx context.Context, p events.Partition, f func(*Machine)) error {
	return n.shard(p).do(ctx, f)
}

// onShards runs f in the writer of every shard, in turn.
func (n *Node) onShards(ctx context.Context, f func(*shard, *Machine)) error {
	for _, s := range n.shards {
		if err := s.do(ctx, func(m *Machine) { f(s, m) }); err != nil {
			return err
		}
	}
	return nil
}

// count counts a part of the index, publishes figures after the last part, and returns the time until the next part is
// due. The writer calls count.
func (s *shard) count(c *radix.Census) (next time.Duration) {
	begun := time.Now()
	stats, done := s.index.Count(c, censusPart)
	if done {
		s.figures.Store(s.machine.figures(stats))
		next = censusPause
	}
	return max(next, censusShare*time.Since(begun))
}

// spaces numbers the pairs of model and block size of a node, for all shards.
type spaces struct {
	mu   sync.Mutex
	of   map[spaceKey]uint32
	last uint32
}

// number returns the number of a model and block size. A new pair gets want, if want is free and not 0.
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

// View holds the ranks and models visible to queries. A View does not change; a later View replaces an earlier View.
type View struct {
	Models map[string][]*Served // by model; one per block size
	Hidden []HiddenRank         // in the index, but in no answer
	slots  [][]*RankOfView      // by shard and radix.RankID.Slot; nil: no rank
}

// Rank returns the rank with an id in a shard; nil if the rank started or ended outside the view.
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

// HiddenRank is a rank outside the view: the worker has not claimed the announced model.
type HiddenRank struct {
	Key       events.RankKey
	Model     string
	Partition events.Partition
}

// Served is a model at a block size.
type Served struct {
	BlockSize  uint32
	Space      uint32
	Lookaheads []uint32           // of the ranks, without duplicates, ascending
	Ranks      []*RankOfView      // ordered by instance and rank
	Partitions []events.Partition // of Ranks, ascending
	Shards     []int              // of Ranks, ascending
}

// RankOfView is a rank in a View.
type RankOfView struct {
	Key       events.RankKey
	Shard     int
	ID        radix.RankID // in the shard's index
	Partition events.Partition
	Lookahead uint32 // tokens beyond a block that the engine hashes with the block; see events.Event
	Bounded   bool   // depths are an upper bound; see [radix.Index.Bounded]

	memory *deviceMemory
}

// deviceMemory has the result of [radix.Index.DeviceMemory] for a rank after the last message. The writer stores the
// result, and queries load the result.
type deviceMemory struct{ figures atomic.Uint64 }

func (d *deviceMemory) store(held, full int64) {
	d.figures.Store(uint64(min(held, math.MaxUint32))<<32 | uint64(min(full, math.MaxUint32)))
}

func (d *deviceMemory) load() (held, full uint32) {
	x := d.figures.Load()
	return uint32(x >> 32), uint32(x)
}

// add adds a rank to a new view.
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

// include inserts x into an ascending list without duplicates.
func include[T ~int | ~uint32](list []T, x T) []T {
	at, found := slices.BinarySearch(list, x)
	if found {
		return list
	}
	return slices.Insert(list, at, x)
}

// order sorts a new view.
func (v *View) order() {
	for _, list := range v.Models {
		slices.SortFunc(list, func(a, b *Served) int { return int(a.BlockSize) - int(b.BlockSize) })
		for _, s := range list {
			slices.SortFunc(s.Ranks, func(a, b *RankOfView) int { return a.Key.Compare(b.Key) })
		}
	}
}

// views are the views of a node's shards, and the union of the views.
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

// joined returns the union of several shards' views.
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
