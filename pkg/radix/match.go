package radix

import (
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Answer is the result of a query. It is reusable: the fields are valid until the next match.
type Answer struct {
	Ranks []Overlap // all ranks that hold the first block in any tier, in any order

	// Sets is set before a match. For each of these sets of tiers, Within has the number of leading blocks that a
	// rank's engine can use from these tiers alone; each block may be in any of them. Within has len(Sets) numbers for
	// each of Ranks, in order. The answer then also has ranks with a zero Depth, if Within is not zero.
	Sets   []TierSet
	Within []uint32

	walk walk
}

// walk is a reader's path through the tree, with the state that must be unchanged at the end.
type walk struct {
	v       *view
	hidden  uint64
	path    []stop
	active  []uint64
	whole   []uint64 // ranks that hold the query's part of a node that extends beyond the query
	removal []ended
	todo    []candidates // of ranks with windows
	states  []state
	rows    []row
	used    [events.NumTiers][]uint64 // ranks with any block in a tier on the path, valid if usedIn is tries
	usedIn  [events.NumTiers]uint32
	tries   uint32
}

// stop is a node on the path.
type stop struct {
	id, version uint32
	start       uint32
	base        uint32 // number of the query's blocks before the node
	len         uint32 // length of the node
	match       uint32 // number of matching blocks
	parts       uint32
	nparts      uint32
	hint        uint32 // the part of the last search
}

// ended is the end of a rank's prefix in a tier, at block off of stop at.
type ended struct{ slot, at, off uint32 }

// promptAhead is the number of a prompt's first hashes to prefetch during the search for the first block.
const promptAhead = 64

// Match finds the prefix that every rank of a space holds. allowed, if not nil, restricts the ranks. Match is safe for
// concurrent use, with separate Answers. A reused Answer needs no allocation.
func (x *Index) Match(space uint32, locals []events.LocalHash, allowed *RankSet, out *Answer) {
	q := unsafe.Slice((*uint64)(unsafe.SliceData(locals)), len(locals))
	if len(q) > 0 {
		prefetchWords(&q[0], min(len(q), promptAhead))
	}
	var t turn
	for !x.walkOnce(space, q, allowed, out) {
		t.failed(&x.passing)
	}
	t.done(&x.passing)
	out.walk.v = nil
	runtime.KeepAlive(x)
}

// ending is the treatment of a rank after the end of its prefix in device.
type ending uint8

const (
	plain   ending = iota // the rank is added to the answer
	limited               // the rank is added after the limits of its groups
	further               // the prefix may continue in other tiers
)

// walkOnce is a walk. It returns false if the writer interfered; the answer is then invalid. Any value may be half
// written, so the code checks each value before it uses it as an index.
func (x *Index) walkOnce(space uint32, q []uint64, allowed *RankSet, out *Answer) bool {
	w := &out.walk
	w.v, w.hidden = x.view.Load(), x.hidden.Load()
	w.tries++
	out.Ranks, out.Within, w.path, w.removal = out.Ranks[:0], out.Within[:0], w.path[:0], w.removal[:0]
	if w.v.deviceOnly() {
		e := plain
		if len(w.v.kinds) > 0 {
			e = limited
		}
		ok := w.device(space, q, allowed, out, e) && x.validate(w)
		if len(out.Sets) > 0 {
			out.withinDevice()
		}
		return ok
	}
	if !w.device(space, q, allowed, out, further) {
		return false
	}
	w.others(allowed, out)
	if len(out.Sets) > 0 {
		w.within(out)
	}
	if w.v.reuse != nil {
		w.cut(out)
	}
	return x.validate(w)
}

// withinDevice sets Within if all blocks are in device.
func (a *Answer) withinDevice() {
	for i := range a.Ranks {
		for _, tiers := range a.Sets {
			a.Within = append(a.Within, a.Ranks[i].Depth[device]*uint32(tiers>>device&1))
		}
	}
}

// within sets Within for ranks with uncut prefixes.
func (w *walk) within(out *Answer) {
	for i := range out.Ranks {
		slot := uint32(out.Ranks[i].Rank.Slot())
		for _, tiers := range out.Sets {
			tiers &= w.seen(slot)
			n := uint32(0)
			if l := w.loading(slot); l.Chunked() {
				n = w.heldInChunks(l, slot, tiers)
			} else {
				n = w.held(slot, tiers)
			}
			if u := w.limit(slot); u != nil && n > u.most {
				n = w.usable(u, slot, tiers, n, n-u.most)
			} else if u != nil {
				n = 0
			}
			out.Within = append(out.Within, n)
		}
	}
}

// held returns the number of leading blocks of the path that a rank holds, each in any of some tiers.
func (w *walk) held(slot uint32, tiers TierSet) (n uint32) {
	for i := range w.path[1:] {
		s := &w.path[1+i]
		var parts [events.NumTiers]*part
		k, full := 0, false
		for rest := tiers; rest != 0 && !full; rest &= rest - 1 {
			t := bits.TrailingZeros8(uint8(rest))
			if full = w.v.hasAll(s, t, slot); w.v.masks[t] == nil || full {
				continue
			}
			if parts[k] = s.part(w.v, keyOf(slot, t)); parts[k] != nil {
				k++
			}
		}
		end := s.match
		if !full {
			end = w.v.firstGap(parts[:k], 0, s.match)
		}
		if n = s.base + end; end < s.len {
			break
		}
	}
	return n
}

// validate is the reader's side of the seqlocks. It reports whether all visited nodes and the view are unchanged, so
// that the answer is valid for this moment.
func (x *Index) validate(w *walk) bool {
	if x.hidden.Load() != w.hidden || x.view.Load() != w.v {
		return false
	}
	for i := range w.path {
		s := &w.path[i]
		if atomic.LoadUint32(&w.v.nodes[s.id].version) != s.version {
			return false
		}
	}
	return true
}

// visit opens the stop of a node that begins after base blocks of the query.
func (w *walk) visit(id, base uint32) (s *stop, ok bool) {
	n := &w.v.nodes[id]
	version := atomic.LoadUint32(&n.version)
	if version&1 != 0 {
		return nil, false
	}
	w.path = append(w.path, stop{
		id: id, version: version, base: base,
		start: atomic.LoadUint32(&n.start), len: atomic.LoadUint32(&n.len),
		parts: atomic.LoadUint32(&n.parts), nparts: atomic.LoadUint32(&n.nparts),
	})
	s = &w.path[len(w.path)-1]
	if uint64(s.start)+uint64(s.len) > uint64(len(w.v.locals)) ||
		uint64(s.parts)+uint64(s.nparts) > uint64(len(w.v.parts)) {
		return nil, false
	}
	return s, true
}

// compare counts the blocks of a stop, up to most, that equal the query's.
func (w *walk) compare(s *stop, most uint32, q []uint64) {
	rest := q[s.base:]
	n := min(int(s.len), len(rest), int(most))
	s.match = uint32(sameRun(w.v.locals[s.start:s.start+s.len], rest[:n]))
}

// device follows all ranks together while they hold the prefix in device, and adds ranks at the end of their prefix to
// the answer. If prefixes may continue in other tiers, it adds the ranks to w.leaving, and follows the path as far as
// the index has it.
func (w *walk) device(space uint32, q []uint64, allowed *RankSet, out *Answer, e ending) bool {
	more := e == further
	v := w.v
	at := v.root(space)
	if at == 0 {
		return true
	}
	w.active = w.active[:0]
	for i := range v.stride {
		word := ^uint64(0)
		if allowed != nil {
			word = 0
			if i < len(allowed.words) {
				word = allowed.words[i]
			}
		}
		w.active = append(w.active, word)
	}
	w.hide(device)
	if _, ok := w.visit(at, 0); !ok {
		return false
	}
	some := true // some rank is active
	for base := uint32(0); int(base) < len(q); {
		_, at = v.edge(at, q[base])
		if at == 0 {
			break
		}
		s, ok := w.visit(at, base)
		if !ok || s.len == 0 {
			return false
		}
		mask := v.masks[device][int(at)*v.stride:][:v.stride]
		all := uint64(0)
		for i := range w.active {
			all |= w.active[i] & atomic.LoadUint64(&mask[i])
		}
		far := s.len // blocks without a holder need no comparison
		if all == 0 && !more {
			far = 0
			parts := v.parts[s.parts : s.parts+s.nparts]
			for i := range parts {
				key := atomic.LoadUint32(&parts[i].key)
				if planeOf(key) != device {
					break
				}
				if lead := atomic.LoadUint32(&parts[i].lead); lead > far && w.isActive(slotOf(key)) {
					far = lead
				}
			}
		}
		w.compare(s, far, q)
		if some {
			some = w.split(s, mask, out, e)
		}
		base += s.match
		if s.match < s.len || !some && !more {
			break
		}
	}
	if end := len(w.path) - 1; some && end > 0 {
		for i, word := range w.active {
			if word != 0 {
				w.endAll(i, word, uint32(end), w.path[end].match, out, e)
			}
		}
	}
	return true
}

// split removes the ranks from the active ranks that do not hold all of the query's part of a stop's node. It reports
// whether any rank stays.
func (w *walk) split(s *stop, mask []uint64, out *Answer, e ending) (some bool) {
	at := uint32(len(w.path) - 1)
	parts := w.v.parts[s.parts : s.parts+s.nparts]
	several := len(parts) > 0
	if several {
		w.whole = append(w.whole[:0], w.active...)
		clear(w.whole)
		w.splitParts(s, at, parts, out, e)
	}
	for i, active := range w.active {
		stay := active & atomic.LoadUint64(&mask[i])
		gone := active &^ stay
		if several {
			stay |= w.whole[i]
		}
		w.active[i] = stay
		some = some || stay != 0
		if s.base == 0 {
			if e != further {
				continue
			}
			gone &= w.elsewhere(s, i)
		}
		if gone != 0 {
			w.endAll(i, gone, at, 0, out, e)
		}
	}
	return some
}

// splitParts removes the ranks with a part of a stop's node from the active ranks. It adds the ranks that hold all of
// the query's part to w.whole.
func (w *walk) splitParts(s *stop, at uint32, parts []part, out *Answer, e ending) {
	if planeOf(atomic.LoadUint32(&parts[len(parts)-1].key)) != device {
		parts = parts[:search(parts, keyOf(0, device+1))]
	}
	ids, n := w.v.ids, len(out.Ranks)
	ranks := slices.Grow(out.Ranks, len(parts))
	ranks = ranks[:cap(ranks)]
	word, active, taken := 0, w.active[0], uint64(0)
	for i := range parts {
		p := &parts[i]
		slot := atomic.LoadUint32(&p.key) // device is plane 0
		if int(slot>>6) != word {
			w.active[word] &^= taken
			if word = int(slot >> 6); word >= len(w.active) {
				word = 0
				active, taken = 0, 0
				continue
			}
			active, taken = w.active[word], 0
		}
		if bit := uint64(1) << (slot & 63); active&bit != 0 {
			taken |= bit
			off := atomic.LoadUint32(&p.lead)
			depth := s.base + off
			if fit := atomic.LoadUint32(&p.fit); e == limited && fit > 0 && off <= s.match {
				depth = fit - 1
			} else if off >= s.match && s.match < s.len {
				w.whole[word] |= bit
				continue
			} else if e == further {
				w.removal = append(w.removal, ended{slot, at, off})
				continue
			} else if u := w.limit(slot); u != nil {
				depth = w.longest(u, slot, 1, int(at), depth-min(depth, u.most))
			}
			if depth > 0 && int(slot) < len(ids) {
				ranks[n].Rank = RankID(atomic.LoadUint32(&ids[slot]))
				ranks[n].Depth = [events.NumTiers]uint32{depth}
				n++
			}
		}
	}
	w.active[word] &^= taken
	out.Ranks = ranks[:n]
}

// endAll ends the prefix in device for the ranks of a word.
func (w *walk) endAll(word int, set uint64, at, off uint32, out *Answer, e ending) {
	if e == further {
		for ; set != 0; set &= set - 1 {
			w.removal = append(w.removal, ended{uint32(word<<6 + bits.TrailingZeros64(set)), at, off})
		}
		return
	}
	held := w.path[at].base + off
	if held == 0 {
		return
	}
	for i := 0; e == limited && i < len(w.v.kinds); i++ {
		if k := &w.v.kinds[i]; set&k.ranks[word] != 0 {
			w.endLimited(k.reuse, word, set&k.ranks[word], at, held, out)
			set &^= k.ranks[word]
		}
	}
	w.emit(word, set, held, out)
}

// emit adds ranks of a word with the given number of blocks in device to the answer.
func (w *walk) emit(word int, set uint64, blocks uint32, out *Answer) {
	if len(w.v.ids) < word<<6+64 {
		set &= 1<<max(0, len(w.v.ids)-word<<6) - 1
	}
	n := len(out.Ranks)
	out.Ranks = slices.Grow(out.Ranks, 64)[:n+bits.OnesCount64(set)]
	to, ids := out.Ranks[n:], w.v.ids[min(len(w.v.ids), word<<6):]
	depth := [events.NumTiers]uint32{blocks}
	for i := range to {
		to[i].Rank = RankID(atomic.LoadUint32(&ids[bits.TrailingZeros64(set)]))
		to[i].Depth = depth
		set &= set - 1
	}
}

// elsewhere returns the ranks of a word that hold blocks of a stop's node in another tier than device. It includes all
// ranks with engines that load chunks, because the blocks of a chunk have no mark.
func (w *walk) elsewhere(s *stop, word int) (set uint64) {
	set = w.v.chunkedRanks(word)
	for _, m := range w.v.masks[device+1 : events.NumTiers] {
		if m != nil {
			set |= atomic.LoadUint64(&m[int(s.id)*w.v.stride+word])
		}
	}
	for i := range s.nparts {
		key := atomic.LoadUint32(&w.v.parts[s.parts+i].key)
		if t := planeOf(key); t != device && t < events.NumTiers && int(slotOf(key)>>6) == word {
			set |= 1 << (key & 63)
		}
	}
	return set
}

func (w *walk) isActive(slot uint32) bool {
	return int(slot>>6) < len(w.active) && w.active[slot>>6]>>(slot&63)&1 != 0
}

// hide removes a rank that is being cleared in a tier from the active ranks.
func (w *walk) hide(tier int) {
	if w.hidden&hiding == 0 || w.hidden>>tier&1 == 0 {
		return
	}
	if slot := w.hidden &^ hiding >> 8; int(slot>>6) < len(w.active) {
		w.active[slot>>6] &^= 1 << (slot & 63)
	}
}

// endOne ends a rank's prefix in device.
func (w *walk) endOne(slot, depth uint32, out *Answer) {
	if depth > 0 && int(slot) < len(w.v.ids) {
		out.Ranks = append(out.Ranks, Overlap{Rank: RankID(atomic.LoadUint32(&w.v.ids[slot])),
			Depth: [events.NumTiers]uint32{depth}})
	}
}

// others continues the prefix of every rank through the other tiers.
func (w *walk) others(allowed *RankSet, out *Answer) {
	if w.hidden&hiding != 0 && w.hidden>>device&1 != 0 { // the rank was not active
		slot := uint32(w.hidden &^ hiding >> 8)
		if len(w.path) > 1 && (allowed == nil || int(slot>>6) < len(allowed.words) &&
			allowed.words[slot>>6]>>(slot&63)&1 != 0) {
			w.removal = append(w.removal, ended{slot, 1, 0})
		}
	}
	for _, l := range w.removal {
		if int(l.slot) >= len(w.v.ids) {
			continue
		}
		o := Overlap{Depth: [events.NumTiers]uint32{w.path[l.at].base + l.off}}
		at, off := l.at, l.off
		if c := w.loading(l.slot); c.Chunked() {
			w.othersInChunks(&o, c, l.slot)
			at = uint32(len(w.path)) // no more stops
		}
		for t := device + 1; t < events.NumTiers; t++ {
			if w.v.masks[t] == nil || w.hidden&hiding != 0 && w.hidden>>t&1 != 0 &&
				uint32(w.hidden&^hiding>>8) == l.slot {
				continue
			}
			for int(at) < len(w.path) {
				s := &w.path[at]
				n := uint32(0)
				if off < s.match {
					n = w.run(s, off, t, l.slot)
				}
				o.Depth[t] += n
				if off += n; off < s.len {
					break
				}
				at, off = at+1, 0
			}
		}
		if o.Blocks() > 0 {
			o.Rank = RankID(atomic.LoadUint32(&w.v.ids[l.slot]))
			out.Ranks = append(out.Ranks, o)
		}
	}
}

// run returns the number of a stop's matching blocks from off on that a rank holds in a tier.
func (w *walk) run(s *stop, off uint32, tier int, slot uint32) uint32 {
	v := w.v
	if v.hasAll(s, tier, slot) {
		return s.match - off
	}
	if p := s.part(v, keyOf(slot, tier)); p != nil {
		return v.run(p, off, s.match)
	}
	return 0
}
