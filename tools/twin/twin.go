// Package twin is a naive twin of a rank's part of the index: maps of sets with copy counts. The code favours clarity
// over speed and memory. All random tests of pkg/radix and the demonstration compare results with the twin.
//
// The state of a [Rank] depends only on the rank's events and their times. A fleet is several ranks. A Rank is not safe
// for concurrent use and has no identity.
package twin

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config limits the state of a rank beside the holdings. The fields are equal to the fields of radix.Config.
type Config struct {
	MaxPending      int           // blocks
	MaxPendingBytes int           // bytes, counted as in radix; 0: no limit
	PendingFor      events.Millis // age of a parked event at which the event is dropped; 0: never
	MaxTombstones   int           // removals
	TombstoneFor    events.Millis // age at which a removal is dropped
}

// Counts counts the results of a list of events by block. The fields are equal to the fields of radix.Counts.
type Counts struct {
	Stored, Duplicates, Removed, UnknownRemovals                      uint64
	Conflicts, KindConflicts                                          uint64
	Pending, Attached, Cancelled, Expired, Overflowed, ClearedWaiting uint64
	Cleared, OtherStored, OtherRemoved, Malformed                     uint64
}

// copyOf identifies the copies that a rank can distinguish.
type copyOf struct {
	tier  events.Tier
	group events.GroupIndex
	name  events.BlockHash
}

// holding is a block of a prefix in a tier, for a group.
type holding struct {
	tier  events.Tier
	group events.GroupIndex
	seq   events.SeqHash
}

type removal struct {
	name  events.BlockHash
	seq   events.SeqHash
	since events.Millis
}

// origin is the link from a place to the place before.
type origin struct {
	parent events.SeqHash
	root   bool // whether the place starts a prompt
	local  events.LocalHash
}

// The charged bytes of radix for a parked event and for each of its blocks.
const (
	parkedEventBytes = 288
	parkedBlockBytes = 128
)

type parked struct {
	since     events.Millis
	event     events.Event
	cancelled []bool // an element for every block of event.Blocks
}

func (p *parked) waiting() (n uint64) {
	for _, c := range p.cancelled {
		if !c {
			n++
		}
	}
	return n
}

// Rank is the state of a (worker, rank).
type Rank struct {
	cfg    Config
	clock  events.Millis
	block  uint32                                 // tokens
	kinds  map[events.GroupIndex]events.Attention // from the first stored event of a group
	window map[events.GroupIndex]uint32           // tokens, from the first stored event with a window
	drops  map[events.GroupIndex]bool             // set by a stored event
	copies map[copyOf]int                         // of main groups, by name
	held   map[holding]int                        // the same copies, by place
	place  map[events.BlockHash]events.SeqHash    // of every name in copies
	path   map[events.SeqHash]origin              // of every place that was ever held
	// how the engine loads copies below the device
	loading events.Loading
	gone    []removal      // the last names without copies, oldest first
	parked  []parked       // oldest first
	sets    map[copyOf]int // copies of the other groups
	counts  Counts
}

// New returns an empty rank. block is the block size in tokens.
func New(cfg Config, block uint32) *Rank {
	r := &Rank{cfg: cfg, block: block, path: map[events.SeqHash]origin{}}
	r.reset()
	return r
}

func (r *Rank) reset() {
	r.kinds, r.window, r.drops = map[events.GroupIndex]events.Attention{}, map[events.GroupIndex]uint32{},
		map[events.GroupIndex]bool{}
	r.copies, r.held, r.sets = map[copyOf]int{}, map[holding]int{}, map[copyOf]int{}
	r.place = map[events.BlockHash]events.SeqHash{}
	r.gone, r.parked, r.loading = nil, nil, events.Loading{}
}

// Apply applies events that reached the log at now. A time before an earlier now counts as the earlier now.
func (r *Rank) Apply(now events.Millis, evs []events.Event) Counts {
	r.counts = Counts{}
	r.clock = max(r.clock, now)
	for r.cfg.PendingFor > 0 && len(r.parked) > 0 && r.parked[0].since+r.cfg.PendingFor <= r.clock {
		r.counts.Expired += r.parked[0].waiting()
		r.parked = r.parked[1:]
	}
	for len(r.gone) > 0 && r.gone[0].since+r.cfg.TombstoneFor <= r.clock {
		r.gone = r.gone[1:]
	}
	for i := range evs {
		e := &evs[i]
		switch {
		case e.Kind == events.Stored && e.Tier.Valid() && wellFormed(e):
			r.stored(e)
		case e.Kind == events.Removed && e.Tier.Valid():
			r.removed(e)
		case e.Kind == events.Cleared && (e.Tier == events.AllTiers || e.Tier.Valid()):
			r.cleared(e.Tier)
		default:
			r.counts.Malformed++
		}
	}
	r.gone = r.gone[max(0, len(r.gone)-r.cfg.MaxTombstones):]
	return r.counts
}

func wellFormed(e *events.Event) bool {
	if e.Own {
		return len(e.Blocks) == 1 && len(e.Locals) > 0 && uint32(len(e.Locals)) == e.Chunk
	}
	return len(e.Locals) == 0 || len(e.Locals) == len(e.Blocks)
}

func (r *Rank) stored(e *events.Event) {
	kind, seen := r.kinds[e.Group]
	if !seen && e.Attention == events.AttentionUnknown && len(e.Locals) == 0 && !e.Own { // a later event has the kind
		for i := range e.Blocks {
			one := *e
			one.Blocks, one.HasParent, one.Parent = e.Blocks[i:i+1], false, 0
			r.park(one)
		}
		return
	}
	switch {
	case !seen:
		r.kinds[e.Group] = e.Attention
		if !e.Attention.Main() {
			r.unparkBeside(e.Group)
		}
	case e.Attention == events.AttentionUnknown:
	case e.Attention.Main() != kind.Main():
		r.counts.KindConflicts += uint64(len(e.Blocks))
		return
	case kind == events.AttentionUnknown:
		r.kinds[e.Group] = e.Attention
	}
	if r.window[e.Group] == 0 {
		r.window[e.Group] = e.Window
	}
	r.drops[e.Group] = r.drops[e.Group] || e.Drops
	switch {
	case !r.kinds[e.Group].Main():
		for _, name := range e.Blocks {
			r.sets[copyOf{e.Tier, e.Group, name}]++
		}
		r.counts.OtherStored += uint64(len(e.Blocks))
	case len(e.Locals) == 0 && !e.Own: // every block waits separately
		for i := range e.Blocks {
			one := *e
			one.Blocks, one.HasParent, one.Parent = e.Blocks[i:i+1], false, 0
			r.placeOrPark(one)
		}
	case len(e.Blocks) > 0:
		r.placeOrPark(*e)
	}
	for i := 0; i < len(r.parked); { // apply the oldest ready event first, until no event is ready
		if p := r.parked[i]; r.ready(&p.event) {
			r.parked = slices.Delete(r.parked, i, i+1)
			r.counts.Attached += p.waiting()
			r.put(&p.event, p.cancelled)
			i = 0
		} else {
			i++
		}
	}
}

// known returns the place of a name: of a held copy, otherwise of the last removed copy.
func (r *Rank) known(name events.BlockHash) (events.SeqHash, bool) {
	if seq, ok := r.place[name]; ok {
		return seq, true
	}
	for _, g := range slices.Backward(r.gone) {
		if g.name == name {
			return g.seq, true
		}
	}
	return 0, false
}

func (r *Rank) ready(e *events.Event) bool {
	if e.Own {
		_, _, ok := r.ownPlace(e)
		return ok
	}
	if _, seen := r.kinds[e.Group]; !seen {
		return false
	}
	name := e.Parent
	if len(e.Locals) == 0 {
		name = e.Blocks[0]
	} else if !e.HasParent {
		return true
	}
	_, ok := r.known(name)
	return ok
}

func (r *Rank) placeOrPark(e events.Event) {
	if r.ready(&e) {
		r.put(&e, make([]bool, len(e.Blocks)))
		return
	}
	if e.Own && e.HasParent && e.Parent == 0 { // the event does not wait
		r.counts.Pending++
		r.counts.Overflowed++
		return
	}
	r.park(e)
}

// unparkBeside adds the parked blocks of a group to the group's set after the kind is known.
func (r *Rank) unparkBeside(group events.GroupIndex) {
	r.parked = slices.DeleteFunc(r.parked, func(p parked) bool {
		if p.event.Group != group {
			return false
		}
		r.sets[copyOf{p.event.Tier, group, p.event.Blocks[0]}]++
		r.counts.Attached++
		r.counts.OtherStored++
		return true
	})
}

func (r *Rank) park(e events.Event) {
	e.Blocks, e.Locals, e.Attention = slices.Clone(e.Blocks), slices.Clone(e.Locals), 0
	r.parked = append(r.parked, parked{r.clock, e, make([]bool, len(e.Blocks))})
	r.counts.Pending += uint64(len(e.Blocks))
	for r.tooMuchParked() {
		r.counts.Overflowed += r.parked[0].waiting()
		r.parked = r.parked[1:]
	}
}

func (r *Rank) tooMuchParked() bool {
	blocks := 0
	for _, p := range r.parked {
		blocks += len(p.event.Blocks)
	}
	bytes := parkedEventBytes*len(r.parked) + parkedBlockBytes*blocks
	return blocks > r.cfg.MaxPending || r.cfg.MaxPendingBytes > 0 && bytes > r.cfg.MaxPendingBytes
}

// put gives the blocks of a ready event their places, except for cancelled blocks. A name with copies at another place
// ends the event: neither this block nor the following blocks are stored.
func (r *Rank) put(e *events.Event, cancelled []bool) {
	if len(e.Locals) == 0 || e.Own {
		seq, byContent := events.SeqHash(0), false
		if e.Own {
			seq, byContent, _ = r.ownPlace(e)
		} else {
			seq, _ = r.known(e.Blocks[0])
		}
		r.hold(copyOf{e.Tier, e.Group, e.Blocks[0]}, seq)
		r.learnLoading(e, seq, byContent)
		return
	}
	var seq events.SeqHash
	root := !e.HasParent
	if !root {
		seq, _ = r.known(e.Parent)
	}
	for i, name := range e.Blocks {
		before := seq
		seq = Next(seq, root, e.Locals[i])
		r.path[seq] = origin{before, root, e.Locals[i]}
		root = false
		if cancelled[i] {
			continue
		}
		if at, ok := r.place[name]; ok && at != seq {
			for _, c := range cancelled[i:] {
				if !c {
					r.counts.Conflicts++
				}
			}
			return
		}
		r.hold(copyOf{e.Tier, e.Group, name}, seq)
	}
}

func (r *Rank) hold(c copyOf, seq events.SeqHash) {
	if r.copies[c]++; r.copies[c] == 1 {
		r.counts.Stored++
	} else {
		r.counts.Duplicates++
	}
	r.held[holding{c.tier, c.group, seq}]++
	r.place[c.name] = seq
}

func (r *Rank) removed(e *events.Event) {
	kind := r.kinds[e.Group] // a group never seen counts as main
	for _, name := range e.Blocks {
		c := copyOf{e.Tier, e.Group, name}
		switch {
		case !kind.Main() && r.sets[c] > 0:
			drop(r.sets, c, 1)
			r.counts.OtherRemoved++
		case kind.Main() && r.copies[c] > 0:
			seq := r.place[name]
			r.release(c, 1)
			r.counts.Removed++
			if _, ok := r.place[name]; !ok {
				r.gone = append(r.gone, removal{name, seq, r.clock})
			}
		case kind.Main() && r.cancel(c):
			r.counts.Cancelled++
		default:
			r.counts.UnknownRemovals++
		}
	}
}

// release removes n copies. The last copy in any tier and group removes the name's place.
func (r *Rank) release(c copyOf, n int) {
	drop(r.held, holding{c.tier, c.group, r.place[c.name]}, n)
	drop(r.copies, c, n)
	for group := range r.kinds {
		for tier := events.Device; tier <= events.External; tier++ {
			if r.copies[copyOf{tier, group, c.name}] > 0 {
				return
			}
		}
	}
	delete(r.place, c.name)
}

// cancel cancels the oldest parked copy of the same kind.
func (r *Rank) cancel(c copyOf) bool {
	for i := range r.parked {
		p := &r.parked[i]
		if p.event.Tier != c.tier || p.event.Group != c.group {
			continue
		}
		for j, name := range p.event.Blocks {
			if name == c.name && !p.cancelled[j] {
				p.cancelled[j] = true
				if p.waiting() == 0 {
					r.parked = slices.Delete(r.parked, i, i+1)
				}
				return true
			}
		}
	}
	return false
}

func (r *Rank) cleared(tier events.Tier) {
	spared := func(t events.Tier) bool { return tier != events.AllTiers && tier != t }
	for c, n := range maps.Clone(r.copies) {
		if !spared(c.tier) {
			r.counts.Cleared += uint64(n)
			r.release(c, n)
		}
	}
	for c, n := range r.sets {
		if !spared(c.tier) {
			r.counts.OtherRemoved += uint64(n)
			delete(r.sets, c)
		}
	}
	r.parked = slices.DeleteFunc(r.parked, func(p parked) bool {
		if !spared(p.event.Tier) {
			r.counts.ClearedWaiting += p.waiting()
		}
		return !spared(p.event.Tier)
	})
	if tier == events.AllTiers {
		r.reset()
	}
}

// Holds reports whether a tier holds a block: all announced main groups of the rank must have a copy.
func (r *Rank) Holds(tier events.Tier, seq events.SeqHash) bool {
	main := false
	for group, kind := range r.kinds {
		if kind.Main() {
			main = true
			if r.held[holding{tier, group, seq}] == 0 {
				return false
			}
		}
	}
	return main
}

// Match returns the number of leading blocks that an engine can use in device, and the additional blocks that follow
// directly in host, disk and external.
func (r *Rank) Match(locals []events.LocalHash) (depth [events.NumTiers]uint32) {
	held := r.Held(locals)
	if !r.bounded() {
		return held
	}
	p := r.prefix(locals)
	total, before := 0, 0
	for t := range held {
		total += int(held[t])
		n := p.usable(total, tiers[:t+1])
		depth[t], before = uint32(n-before), n
	}
	return depth
}

var tiers = []events.Tier{events.Device, events.Host, events.Disk, events.External}

// Within returns the number of leading blocks that an engine can use from the given tiers. Every block may be in any of
// the tiers.
func (r *Rank) Within(locals []events.LocalHash, tiers ...events.Tier) int {
	n := 0
	var seq events.SeqHash
	for i, l := range locals {
		seq = Next(seq, i == 0, l)
		if !slices.ContainsFunc(tiers, func(t events.Tier) bool { return r.Holds(t, seq) }) {
			break
		}
		n++
	}
	if r.loading.Chunked() {
		n = r.withinChunks(locals, tiers)
	}
	if r.bounded() {
		n = r.prefix(locals).usable(n, tiers)
	}
	return n
}

// Named returns the local hashes of the blocks with the given names in any tier. The first block must start a prompt,
// and every further block must follow the block before.
//
// The name of a chunk's last block identifies the whole chunk, because an engine's hash covers the blocks before.
func (r *Rank) Named(names []events.BlockHash) (locals []events.LocalHash) {
	if r.loading.Chunked() {
		for i, name := range slices.Backward(names) {
			if seq, ok := r.place[name]; ok && r.depth(seq) == uint32(i+1) {
				return r.localsTo(seq)
			}
		}
		return nil
	}
	var last events.SeqHash
	for i, name := range names {
		seq, ok := r.place[name]
		if from := r.path[seq]; !ok || from.root != (i == 0) || i > 0 && from.parent != last {
			break
		}
		last = seq
		locals = append(locals, r.path[seq].local)
	}
	return locals
}

// Held returns the number of leading blocks in device, and the blocks that follow directly in host, disk and external.
func (r *Rank) Held(locals []events.LocalHash) (depth [events.NumTiers]uint32) {
	tier := events.Device
	var seq events.SeqHash
	for i, l := range locals {
		seq = Next(seq, i == 0, l)
		for tier <= events.External && !r.Holds(tier, seq) {
			tier++
			if r.loading.Chunked() {
				break
			}
		}
		if tier > events.External || tier > events.Device && r.loading.Chunked() {
			break
		}
		depth[tier-1]++
	}
	if r.loading.Chunked() {
		r.heldInChunks(locals, &depth)
	}
	return depth
}

// Checksum returns the sum, modulo 2^64, of two hashes. For every (tier, block) of any main group, the hash covers the
// tier, the sequence hash and the number of copies. For every (tier, group, name) of other groups, the hash covers the
// triple and the number of copies.
func (r *Rank) Checksum() (sum uint64) {
	total := map[holding]int{}
	for h, n := range r.held {
		total[holding{tier: h.tier, seq: h.seq}] += n
	}
	for h, n := range total {
		sum += mix(uint64(h.seq) ^ mix(uint64(h.tier)<<56|uint64(n)))
	}
	for c, n := range r.sets {
		sum += mix(uint64(c.name) ^ mix(mix(uint64(c.tier)<<32|uint64(c.group))^uint64(n)))
	}
	return sum
}

// Copies counts the copies beyond the first of every block, by tier and main group.
func (r *Rank) Copies() (n int) {
	for _, count := range r.held {
		n += count - 1
	}
	return n
}

// Holdings returns the number of (tier, block) pairs of any main group.
func (r *Rank) Holdings() int {
	total := map[holding]bool{}
	for h := range r.held {
		total[holding{tier: h.tier, seq: h.seq}] = true
	}
	return len(total)
}

// SetCount returns the number of copies of a block for a group outside of the prefix.
func (r *Rank) SetCount(tier events.Tier, group events.GroupIndex, name events.BlockHash) int {
	return r.sets[copyOf{tier, group, name}]
}

// Next returns the sequence hash of a block from the parent's hash. root marks a block without a parent.
func Next(parent events.SeqHash, root bool, local events.LocalHash) events.SeqHash {
	if root {
		return events.SeqHash(local)
	}
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], uint64(parent))
	binary.LittleEndian.PutUint64(b[8:], uint64(local))
	return events.SeqHash(xxh3.HashSeed(b[:], 1337))
}

// mix is a step of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func drop[K comparable](m map[K]int, k K, n int) {
	if m[k] -= n; m[k] <= 0 {
		delete(m, k)
	}
}
