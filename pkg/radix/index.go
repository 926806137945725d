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

// Index is a tree of runs of blocks, with the blocks that each rank holds.
type Index struct {
	cfg    Config
	memory *memory

	// The view of readers. v is the writer's view; view is the same, after publication.
	v    *view
	view atomic.Pointer[view]

	// hidden is the rank and the tiers that a clear is removing: slot<<8 | a bit for each tier | hiding; 0 without a
	// clear. Readers do not see them from the start of the clear.
	hidden atomic.Uint64

	passing passing // lets readers pass the writer

	// The arena. The view has locals.
	locals, engines array[uint64]
	slabs           array[slab]
	slabEnd         uint32 // later slabs were never used
	freeSlab        idSet
	slabHand        uint32

	freeNodes idSet
	nodeEnd   uint32
	nodes     int // nodes in use, including roots
	kin       []kin
	edgeCount int
	edgeUsed  int // used places in the table, including removed edges
	partSpace allocator
	bitSpace  allocator
	splits    uint64

	// The writer holds naming while it changes anything. Of the readers, only lookups of names lock it. See bynames.go.
	naming sync.RWMutex

	// See naming.go.
	names      names
	sharedMask []uint64          // ranks that share names, by slot
	sharedElse map[uint32]uint32 // by block: the place of the shared name, if the arena has another name

	slots      []*rank
	unused     []int
	exactRanks int

	exports []*Export // active exports

	spare []tombstone // a ring of a rank after a message with many removals

	// Scratch memory of the current event.
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
	trims             bool // deletes removals beyond MaxTombstones at once
	spots             []spot
	marksOn, marksOff []uint64
	ends              []end // unknown ends to resolve
	found, read, kept []usable
	most              []usable
}

const hiding = 1 << 63

// naming selects the names of a rank.
type naming uint8

const (
	namesShared naming = iota // shared: the rank names every block like the others
	namesOwn                  // own names
	namesExact                // names in exact counts: several main groups, or two names for a block
)

// rank is the state of a rank: a function of the rank's events and their times.
type rank struct {
	id         RankID
	space      uint32
	block      uint32 // tokens
	clock      events.Millis
	groups     []events.GroupKind // by group
	reuse      *reuse             // needs of the groups; nil: only the blocks
	loading    events.Loading
	pending    pendingEvents
	tombstones tombstones
	sets       map[copyKey]uint32

	naming   naming
	group    events.GroupIndex // the main group, if one exists
	hasGroup bool
	exact    *exact

	held   [events.NumTiers]int64    // blocks; with exact counts, of any main group
	extra  [events.NumTiers]countMap // copies above one
	nodes  []uint32                  // nodes with blocks of the rank; may have outdated entries and duplicates
	unseen bool                      // readers do not see the rank
	tidyAt int
	evicts bool  // the message in hand has removed blocks of device memory
	full   int64 // the most blocks of held[device] after such a message; 0: there was none
}

func (r *rank) slot() uint32 { return uint32(r.id.Slot()) }

// New returns an empty index. An index need not be closed.
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

// AddRank adds an empty rank. Only ranks of the same space match the same query: space is the caller's number for a
// pair of model and block size. block is the block size in tokens, which measures windows.
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
		x.widen(uint32(i)) // first, because readers use ids
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

// DropRank removes a rank and all that it holds. The index reuses the id only after 4,095 uses of the slot.
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

// pin keeps a block in memory, with or without holders.
func (x *Index) pin(block uint32) { x.slabs.s[block/slabBlocks].pins++ }

func (x *Index) unpin(block uint32) { x.unpinSlab(block/slabBlocks, 1) }

// unpinSlab removes n pins from a slab.
func (x *Index) unpinSlab(slab, n uint32) {
	g := &x.slabs.s[slab]
	if g.pins -= n; g.pins == 0 {
		x.reclaim(g.node)
	}
}

// remember adds a tombstone for a name without copies. The caller has pinned the block. See trim.
func (x *Index) remember(r *rank, since events.Millis, name events.BlockHash, block uint32) {
	r.tombstones.push(tombstone{name: name, since: since, block: block})
}

// Checksum returns the sum, modulo 2^64, of two sets of hashes. For every (tier, block) that the rank holds for any
// main group, the hash covers tier, sequence hash and number of copies. For every (tier, group, name) of the other
// groups, it also covers the number of copies. Equal contents have equal sums on all replicas, for any history.
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

// seqEnd returns the sequence hash of a node's last block. It is meaningless for a root.
func (x *Index) seqEnd(ends map[uint32]uint64, id uint32) uint64 {
	if seq, ok := ends[id]; ok || x.v.nodes[id].parent == 0 {
		return seq
	}
	seq := x.seqAt(ends, id, x.v.nodes[id].len-1)
	ends[id] = seq
	return seq
}

func (x *Index) seqAt(ends map[uint32]uint64, id, off uint32) uint64 {
	var path []uint32 // nodes above with an unknown end, lowest first
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
