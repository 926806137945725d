package radix

import (
	"math/bits"
	"runtime"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// EachHeld calls do for each run of a space with the first block of the run's prompts, and the number of holdings of
// some ranks in the run: each rank and tier of a block counts. It visits every run of the index. It is safe for
// concurrent use, and never blocks the writer. A run that changes meanwhile counts as it was at a moment.
func (x *Index) EachHeld(space uint32, among *RankSet, do func(first events.LocalHash, holdings uint64)) {
	for id := uint32(firstNode); int(id) < len(x.view.Load().nodes); id++ {
		for range 64 {
			first, holdings, ok := x.heldRun(id, space, among)
			if ok {
				if holdings > 0 {
					do(first, holdings)
				}
				break
			}
			runtime.Gosched()
		}
	}
	runtime.KeepAlive(x)
}

// heldRun reads the holdings of a run. It returns false for half-written data.
func (x *Index) heldRun(id, space uint32, among *RankSet) (first events.LocalHash, holdings uint64, ok bool) {
	v, hidden := x.view.Load(), x.hidden.Load()
	n := &v.nodes[id]
	version := atomic.LoadUint32(&n.version)
	unchanged := func() bool {
		return version&1 == 0 && atomic.LoadUint32(&n.version) == version && x.view.Load() == v && x.hidden.Load() == hidden
	}
	blocks := atomic.LoadUint32(&n.len)
	if atomic.LoadUint32(&n.parent) == 0 || blocks == 0 {
		return 0, 0, unchanged()
	}
	top := id
	for steps := 0; ; steps++ {
		up := atomic.LoadUint32(&v.nodes[top].parent)
		if int(up) >= len(v.nodes) || steps == 1<<20 { // longer than any path; a half-written path may be a circle
			return 0, 0, false
		}
		if up == 0 || atomic.LoadUint32(&v.nodes[up].parent) == 0 {
			if len(v.roots) != 1 && up != v.root(space) || len(v.roots) == 1 && v.roots[0].space != space {
				return 0, 0, unchanged()
			}
			break
		}
		top = up
	}
	start := atomic.LoadUint32(&v.nodes[top].start)
	if int(start) >= len(v.locals) {
		return 0, 0, false
	}
	first = events.LocalHash(atomic.LoadUint64(&v.locals[start]))
	for t, m := range v.masks {
		for i := range v.stride {
			if m == nil {
				break
			}
			word := atomic.LoadUint64(&m[int(id)*v.stride+i]) & among.word(i)
			if slot := uint32(hidden &^ hiding >> 8); isHidden(hidden, slot, t) && int(slot>>6) == i {
				word &^= 1 << (slot & 63)
			}
			holdings += uint64(bits.OnesCount64(word)) * uint64(blocks)
		}
	}
	parts, count := atomic.LoadUint32(&n.parts), atomic.LoadUint32(&n.nparts)
	if uint64(parts)+uint64(count) > uint64(len(v.parts)) {
		return 0, 0, false
	}
	for i := range count {
		p := &v.parts[parts+i]
		key := atomic.LoadUint32(&p.key)
		slot, t := slotOf(key), planeOf(key)
		if int(slot) >= len(v.ids) || int(slot>>6) >= v.stride || t >= events.NumTiers {
			return 0, 0, false
		}
		if isHidden(hidden, slot, t) || among.word(int(slot>>6))>>(slot&63)&1 == 0 {
			continue
		}
		held, intact := v.heldOf(p, blocks)
		if !intact {
			return 0, 0, false
		}
		holdings += held
	}
	return first, holdings, unchanged()
}

// heldOf returns the number of held blocks in a part of a run with n blocks. It returns false for half-written data.
func (v *view) heldOf(p *part, n uint32) (held uint64, ok bool) {
	lead, first, words := atomic.LoadUint32(&p.lead), atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
	if first != 0 && uint64(first)+uint64(words) > uint64(len(v.bits)) {
		return 0, false
	}
	lead = min(lead, n)
	held = uint64(lead)
	if first == 0 {
		return held, true
	}
	for i := lead >> 6; i < words && i<<6 < n; i++ {
		word := atomic.LoadUint64(&v.bits[first+i])
		if i == lead>>6 {
			word &^= 1<<(lead&63) - 1
		}
		if left := n - i<<6; left < 64 {
			word &= 1<<left - 1
		}
		held += uint64(bits.OnesCount64(word))
	}
	return held, true
}
