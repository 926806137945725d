package radix

import (
	"fmt"
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Index is the whole: a tree of blocks and what each rank holds of it.
type Index struct {
	cfg Config

	mu     sync.RWMutex
	blocks []block // by number; 0 is not used
	free   []uint32
	roots  map[rootKey]uint32
	slots  []*rank // by slot
	gens   []uint32
	unused []int // slots to use again
}

type rootKey struct {
	space uint32
	local events.LocalHash
}

// block is one block of a path. It is kept while anything refers to it.
type block struct {
	parent   uint32 // 0: none
	space    uint32
	local    events.LocalHash
	children map[events.LocalHash]uint32
	refs     int // children, names of ranks, removals
}

// rank is the state of one (worker, rank): a function of its own events and their times.
type rank struct {
	id     RankID
	space  uint32
	clock  events.Millis
	groups []events.GroupKind // by group
	parked parking
	gone   removals
	sets   map[copyKey]uint32

	names  map[events.BlockHash]*named
	held   map[heldKey]uint32
	copies [events.NumTiers]uint64
}

type heldKey struct {
	tier  events.Tier
	group events.GroupIndex
	block uint32
}

// named is what a rank holds under one name, and where.
type named struct {
	block  uint32
	copies []tierCopies
}

type tierCopies struct {
	tier  events.Tier
	group events.GroupIndex
	n     uint32
}

// New returns an empty index.
func New(cfg Config) *Index {
	return &Index{cfg: cfg.withDefaults(), blocks: make([]block, 1), roots: map[rootKey]uint32{}}
}

// AddRank makes room for a rank that holds nothing. Only ranks of one space can match the same query: space is the
// caller's number for one (model, block size).
func (x *Index) AddRank(space uint32) RankID {
	x.mu.Lock()
	defer x.mu.Unlock()
	var i int
	if n := len(x.unused); n > 0 {
		i, x.unused = x.unused[n-1], x.unused[:n-1]
		x.gens[i]++
	} else {
		i = len(x.slots)
		if i == maxSlots {
			panic("radix: more than 2^20 ranks at a time")
		}
		x.slots, x.gens = append(x.slots, nil), append(x.gens, 1)
	}
	r := &rank{id: RankID(x.gens[i]<<slotBits | uint32(i)), space: space}
	x.slots[i] = r
	r.reset()
	return r.id
}

func (r *rank) reset() {
	r.groups, r.parked, r.gone = nil, parking{}, removals{}
	r.sets, r.names, r.held = map[copyKey]uint32{}, map[events.BlockHash]*named{}, map[heldKey]uint32{}
}

// DropRank forgets a rank and all that it holds. Its id is never given out again within 4,096 uses of its slot.
func (x *Index) DropRank(id RankID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r := x.rank(id)
	var c Counts
	x.clear(r, events.AllTiers, &c)
	x.slots[id.Slot()] = nil
	x.unused = append(x.unused, id.Slot())
}

func (x *Index) rank(id RankID) *rank {
	if i := id.Slot(); i < len(x.slots) && x.slots[i] != nil && x.slots[i].id == id {
		return x.slots[i]
	}
	panic(fmt.Sprintf("radix: rank %#x is not in this index", uint32(id)))
}

// child finds or makes the block that follows parent (0: starts a prompt).
func (x *Index) child(space, parent uint32, local events.LocalHash) uint32 {
	if parent == 0 {
		if b, ok := x.roots[rootKey{space, local}]; ok {
			return b
		}
	} else if b, ok := x.blocks[parent].children[local]; ok {
		return b
	}
	var b uint32
	if n := len(x.free); n > 0 {
		b, x.free = x.free[n-1], x.free[:n-1]
	} else {
		b = uint32(len(x.blocks))
		x.blocks = append(x.blocks, block{})
	}
	x.blocks[b] = block{parent: parent, space: space, local: local}
	if parent == 0 {
		x.roots[rootKey{space, local}] = b
	} else {
		p := &x.blocks[parent]
		if p.children == nil {
			p.children = map[events.LocalHash]uint32{}
		}
		p.children[local] = b
		p.refs++
	}
	return b
}

// unref takes a reference away; a block without any goes, and so may its parents.
func (x *Index) unref(b uint32) {
	x.blocks[b].refs--
	x.prune(b)
}

func (x *Index) prune(b uint32) {
	for b != 0 && x.blocks[b].refs == 0 {
		k := x.blocks[b]
		x.blocks[b] = block{}
		x.free = append(x.free, b)
		if k.parent == 0 {
			delete(x.roots, rootKey{k.space, k.local})
			return
		}
		delete(x.blocks[k.parent].children, k.local)
		x.blocks[k.parent].refs--
		b = k.parent
	}
}

// Stats counts what there is. It visits every rank.
func (x *Index) Stats() (s Stats) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s.Blocks = int64(len(x.blocks) - 1 - len(x.free))
	alive := map[uint32]bool{}
	for _, r := range x.slots {
		if r == nil {
			continue
		}
		s.Ranks++
		tiers := map[heldKey]bool{}
		for k := range r.held {
			tiers[heldKey{tier: k.tier, block: k.block}] = true
			alive[k.block] = true
		}
		for k := range tiers {
			s.Holdings[k.tier-1]++
		}
		s.Parked += int64(r.parked.blocks)
		s.Remembered += int64(r.gone.len())
		s.SetBlocks += int64(len(r.sets))
		s.Bytes.Names += int64(len(r.names)) * 100
		s.Bytes.Ranks += int64(r.parked.blocks)*200 + int64(len(r.gone.ring))*28 + int64(len(r.sets))*40
	}
	s.Dead = s.Blocks - int64(len(alive))
	s.Nodes = s.Blocks
	s.Bytes.Blocks = int64(len(x.blocks)) * 100
	s.Bytes.Total = s.Bytes.Blocks + s.Bytes.Names + s.Bytes.Ranks
	return s
}

// Check verifies the invariants.
func (x *Index) Check() error {
	x.mu.RLock()
	defer x.mu.RUnlock()
	refs := make([]int, len(x.blocks))
	for i, b := range x.blocks[1:] {
		if b.parent != 0 {
			refs[b.parent]++
			if x.blocks[b.parent].children[b.local] != uint32(i+1) {
				return fmt.Errorf("block %d is not its parent's child", i+1)
			}
		}
	}
	for _, r := range x.slots {
		if r == nil {
			continue
		}
		held := map[heldKey]uint32{}
		var copies [events.NumTiers]uint64
		for name, n := range r.names {
			refs[n.block]++
			for _, t := range n.copies {
				held[heldKey{t.tier, t.group, n.block}] += t.n
				copies[t.tier-1] += uint64(t.n)
				if t.n == 0 {
					return fmt.Errorf("rank %d: name %#x with no copies", r.id.Slot(), name)
				}
			}
		}
		if len(held) != len(r.held) {
			return fmt.Errorf("rank %d: %d held by name, %d by place", r.id.Slot(), len(held), len(r.held))
		}
		for k, n := range held {
			if r.held[k] != n {
				return fmt.Errorf("rank %d: %v: %d copies by name, %d by place", r.id.Slot(), k, n, r.held[k])
			}
		}
		if copies != r.copies {
			return fmt.Errorf("rank %d: %d copies, counted %d", r.id.Slot(), copies, r.copies)
		}
		for n := r.gone.first; n != r.gone.next; n++ {
			refs[r.gone.at(n).block]++
		}
		if r.gone.len() > x.cfg.MaxRemembered || r.parked.blocks > x.cfg.MaxParked {
			return fmt.Errorf("rank %d: %d removals, %d parked: over the bounds", r.id.Slot(), r.gone.len(), r.parked.blocks)
		}
	}
	free := map[uint32]bool{}
	for _, b := range x.free {
		free[b] = true
	}
	for i := 1; i < len(x.blocks); i++ {
		if refs[i] != x.blocks[i].refs || free[uint32(i)] != (refs[i] == 0) {
			return fmt.Errorf("block %d: %d references, counted %d, free %v", i, x.blocks[i].refs, refs[i], free[uint32(i)])
		}
	}
	return nil
}

// Checksum is the sum, modulo 2^64, over every (tier, block) that the rank holds for whatever main group, of a hash of tier,
// sequence hash and number of copies. Equal contents have equal sums on every replica, whatever led there.
func (x *Index) Checksum(id RankID) (sum uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.rank(id)
	seqs := map[uint32]uint64{}
	total := map[heldKey]uint32{}
	for k, n := range r.held {
		total[heldKey{tier: k.tier, block: k.block}] += n
	}
	for k, n := range total {
		sum += mix(x.seq(seqs, k.block) ^ mix(uint64(k.tier)<<56|uint64(n)))
	}
	return sum
}

func (x *Index) seq(known map[uint32]uint64, b uint32) uint64 {
	var path []uint32
	for ; b != 0; b = x.blocks[b].parent {
		if _, ok := known[b]; ok {
			break
		}
		path = append(path, b)
	}
	s := known[b]
	for _, p := range slices.Backward(path) {
		if x.blocks[p].parent == 0 {
			s = uint64(x.blocks[p].local)
		} else {
			s = nextSeq(s, uint64(x.blocks[p].local))
		}
		known[p] = s
	}
	return s
}
