package radix

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Index is the whole: a tree of runs of blocks, and what each rank holds of it.
type Index struct {
	cfg    Config
	memory *memory

	// What readers go by. The writer's view is v; view is the same, once it is published.
	v    *view
	view atomic.Pointer[view]

	// hidden is the rank and the tiers that a clear is taking away: slot<<8 | a bit for each tier | hiding; 0 if none.
	// To readers they are gone from its first moment.
	hidden atomic.Uint64

	passing passing // readers by the writer

	// The arena. locals are the view's.
	locals, engines array[uint64]
	slabs           array[slab]
	slabEnd         uint32 // those from here on were never used
	freeSlab        idSet
	slabHand        uint32

	freeNodes idSet
	nodeEnd   uint32
	nodes     int // in use, roots included
	kin       []kin
	edgeCount int
	edgeUsed  int // places in the table, those of edges that are gone included
	partSpace allocator
	bitSpace  allocator
	splits    uint64

	// The writer holds it while it changes anything; of readers, only those that look names up. See bynames.go.
	naming sync.RWMutex

	// See naming.go.
	names      names
	sharedMask []uint64          // ranks that share names, by slot
	sharedElse map[uint32]uint32 // by block: where its shared name stands, if the arena has another's

	slots      []*rank
	unused     []int
	exactRanks int

	exports []*Export // under way

	// Scratch of the event in hand.
	segs              []seg
	queue             []stretch
	chains, blocks    []uint32
	lost              []uint64
	drops             drops
	keys              []uint64
	hashes            []uint64
	refs              []uint32
	likely            [group]uint32
	touched           uint64
	trims             bool // removals beyond MaxTombstones are forgotten at once
	spots             []spot
	marksOn, marksOff []uint64
	ends              []end // that are not known, to be worked out
	found, told, kept []usable
	most              []usable
}

const hiding = 1 << 63

// naming is how a rank's engine hashes are kept.
type naming uint8

const (
	namesShared naming = iota // shared: it calls every block as the others do
	namesOwn                  // as its own
	namesExact                // in its exact counts: it has several main groups, or two names for one block
)

// rank is the state of one (worker, rank): a function of its own events and their times.
type rank struct {
	id         RankID
	space      uint32
	block      uint32 // tokens
	clock      events.Millis
	groups     []events.GroupKind // by group
	reuse      *reuse             // what they want; nil: nothing but their blocks
	loading    events.Loading
	pending    pendingEvents
	tombstones tombstones
	sets       map[copyKey]uint32

	naming   naming
	group    events.GroupIndex // the main group, if there is one
	hasGroup bool
	exact    *exact

	held   [events.NumTiers]int64    // blocks; with exact counts, by whatever main group
	extra  [events.NumTiers]countMap // copies above one
	nodes  []uint32                  // where it holds something; some may be stale or come twice
	unseen bool                      // by readers
	tidyAt int
}

func (r *rank) slot() uint32 { return uint32(r.id.Slot()) }

// New returns an empty index. It needs no closing.
func New(cfg Config) *Index { return newIndex(cfg, usualLimits) }

func newIndex(cfg Config, l limits) *Index {
	x := &Index{cfg: cfg.withDefaults(), memory: &memory{limits: l}, slabEnd: 1, nodeEnd: firstNode}
	x.v = &view{stride: 1, planes: events.NumTiers}
	x.bitSpace.end = 1
	x.growNodes()
	x.useTier(device)
	x.rehashEdges()
	x.growBlocks()
	x.names = names{engines: &x.engines, slabs: &x.slabs, seed: rand.Uint64()}
	runtime.AddCleanup(x, func(m *memory) { m.release() }, x.memory)
	return x
}

// AddRank makes room for a rank that holds nothing. Only ranks of one space can match the same query: space is the
// caller's number for one (model, block size). block is that size in tokens, by which windows are measured.
func (x *Index) AddRank(space, block uint32) RankID {
	x.naming.Lock()
	defer x.naming.Unlock()
	var i int
	gen := uint32(1)
	if n := len(x.unused); n > 0 {
		i, x.unused = x.unused[n-1], x.unused[:n-1]
		gen = x.v.ids[i]>>slotBits + 1
	} else {
		i = len(x.slots)
		if i == maxSlots {
			panic("radix: more than 2^20 ranks at a time")
		}
		x.slots = append(x.slots, nil)
		x.sharedMask = append(x.sharedMask, make([]uint64, i>>6+1-len(x.sharedMask))...)
		x.widen(uint32(i)) // first, for readers go by ids
		x.publish(func(v *view) { v.ids = append(slices.Clone(v.ids), 0) })
	}
	r := &rank{id: RankID(gen<<slotBits | uint32(i)), space: space, block: block}
	atomic.StoreUint32(&x.v.ids[i], uint32(r.id))
	x.slots[i] = r
	x.sharedMask[i>>6] |= 1 << (i & 63)
	if x.v.root(space) == 0 {
		above := x.newRoot()
		x.publish(func(v *view) { v.roots = append(slices.Clone(v.roots), root{space, above}) })
	}
	return r.id
}

// DropRank forgets a rank and all that it holds. Its id is not given out again before its slot has been used 4,095
// times.
func (x *Index) DropRank(id RankID) {
	x.naming.Lock()
	defer x.naming.Unlock()
	r := x.rank(id)
	x.touchRank(r)
	var c Counts
	x.clear(r, events.AllTiers, &c)
	i := id.Slot()
	x.sharedMask[i>>6] &^= 1 << (i & 63)
	x.slots[i] = nil
	x.unused = append(x.unused, i)
}

func (x *Index) rank(id RankID) *rank {
	if i := id.Slot(); i < len(x.slots) && x.slots[i] != nil && x.slots[i].id == id {
		return x.slots[i]
	}
	panic(fmt.Sprintf("radix: rank %#x is not in this index", uint32(id)))
}

// pin keeps a block in memory, whoever holds it.
func (x *Index) pin(block uint32) { x.slabs.s[block/slabBlocks].pins++ }

func (x *Index) unpin(block uint32) { x.unpinSlab(block/slabBlocks, 1) }

// unpinSlab takes n pins from a slab.
func (x *Index) unpinSlab(slab, n uint32) {
	g := &x.slabs.s[slab]
	if g.pins -= n; g.pins == 0 {
		x.reclaim(g.node)
	}
}

// remember keeps the place of a name whose last copy was removed. The block has been pinned for it. See trim.
func (x *Index) remember(r *rank, since events.Millis, name events.BlockHash, block uint32) {
	r.tombstones.push(tombstone{name: name, since: since, block: block})
}

// Checksum is the sum, modulo 2^64, over every (tier, block) that the rank holds for whatever main group, of a hash of
// tier, sequence hash and number of copies; and over every (tier, group, name) that it holds for the other groups, of a
// hash of these and the number of copies. Equal contents have equal sums on every replica, whatever led there.
func (x *Index) Checksum(id RankID) (sum uint64) {
	r := x.rank(id)
	for k, n := range r.sets {
		sum += mix(uint64(k.name) ^ mix(mix(uint64(k.tier)<<32|uint64(k.group))^uint64(n)))
	}
	ends := map[uint32]uint64{} // sequence hash of a node's last block
	one := func(b uint32, seq uint64, tier int, copies uint64) {
		sum += mix(seq ^ mix(uint64(tier+1)<<56|copies))
	}
	if r.naming == namesExact {
		for k, n := range r.exact.totals() {
			id, nd := x.where(k.block)
			one(k.block, x.seqAt(ends, id, k.block-nd.start), int(k.tier)-1, uint64(n))
		}
		return sum
	}
	x.tidy(r)
	for _, id := range r.nodes {
		n := &x.v.nodes[id]
		seq := x.seqEnd(ends, n.parent)
		first := x.v.nodes[n.parent].parent == 0
		for off := range n.len {
			if l := x.v.locals[n.start+off]; first && off == 0 {
				seq = l
			} else {
				seq = nextSeq(seq, l)
			}
			for t := range events.NumTiers {
				if x.v.masks[t] != nil && x.v.holds(id, off, t, r.slot()) {
					one(n.start+off, seq, t, 1+uint64(r.extra[t].get(n.start+off)))
				}
			}
		}
	}
	return sum
}

// seqEnd is the sequence hash of a node's last block; of a root it means nothing.
func (x *Index) seqEnd(ends map[uint32]uint64, id uint32) uint64 {
	if seq, ok := ends[id]; ok || x.v.nodes[id].parent == 0 {
		return seq
	}
	seq := x.seqAt(ends, id, x.v.nodes[id].len-1)
	ends[id] = seq
	return seq
}

func (x *Index) seqAt(ends map[uint32]uint64, id, off uint32) uint64 {
	var path []uint32 // nodes above whose end is not known yet, lowest first
	up := x.v.nodes[id].parent
	for ; x.v.nodes[up].parent != 0; up = x.v.nodes[up].parent {
		if _, ok := ends[up]; ok {
			break
		}
		path = append(path, up)
	}
	seq := ends[up]
	through := func(n *node, to uint32) {
		for o := range to {
			if l := x.v.locals[n.start+o]; o == 0 && x.v.nodes[n.parent].parent == 0 {
				seq = l
			} else {
				seq = nextSeq(seq, l)
			}
		}
	}
	for _, p := range slices.Backward(path) {
		through(&x.v.nodes[p], x.v.nodes[p].len)
		ends[p] = seq
	}
	through(&x.v.nodes[id], off+1)
	return seq
}
