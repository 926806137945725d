package radix

import (
	"container/heap"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// copyKey identifies copies that a rank can distinguish.
type copyKey struct {
	tier  events.Tier
	group events.GroupIndex
	name  events.BlockHash
}

// waiter is a pending event.
type waiter struct {
	id        uint64 // increases: the order of arrival
	since     events.Millis
	event     events.Event
	cancelled []bool // by block
	left      int    // number of blocks that are not cancelled
}

// wants returns the name that a pending event waits for. A chunk with content waits for it or for its parent.
func wants(e *events.Event) events.BlockHash {
	if !e.Places() {
		return e.Blocks[0]
	}
	return e.Parent
}

// eachWish calls f for every name that may make the waiter ready.
func (w *waiter) eachWish(f func(events.BlockHash)) {
	e := &w.event
	f(wants(e))
	if e.Own && e.HasParent && e.Parent != e.Blocks[0] {
		f(e.Parent)
	}
}

// pendingEvents has the events of a rank without a known place, in order of arrival. It finds events by the missing
// name and by the stored names. Its size is limited, so it is on the heap in plain maps.
type pendingEvents struct {
	byID   map[uint64]*waiter
	order  []uint64 // ids, oldest first; ids without an entry in byID are skipped
	next   uint64
	blocks int // of all waiters, including cancelled blocks
	want   map[events.BlockHash][]uint64
	// waiters for a chunk's content: by the last local hash
	content map[events.LocalHash][]uint64
	inside  map[copyKey][]uint64 // an entry for each block that is not cancelled; ascending
	ready   idHeap
}

func (p *pendingEvents) len() int { return len(p.byID) }

// bytes returns the memory of all waiters, as Config.MaxPendingBytes counts it. It depends only on the events, so all
// replicas drop the same events.
func (p *pendingEvents) bytes() int {
	return len(p.byID)*pendingEventBytes + p.blocks*pendingBlockBytes
}

func (p *pendingEvents) add(since events.Millis, e *events.Event, cancelled []uint32) *waiter {
	if p.byID == nil {
		p.byID, p.want, p.inside = map[uint64]*waiter{}, map[events.BlockHash][]uint64{}, map[copyKey][]uint64{}
	}
	w := &waiter{id: p.next, since: since, event: *e, cancelled: make([]bool, len(e.Blocks)), left: len(e.Blocks)}
	p.next++
	w.event.Blocks, w.event.Locals, w.event.Attention = slices.Clone(e.Blocks), slices.Clone(e.Locals), 0
	w.event.Window, w.event.Drops = 0, false
	for _, i := range cancelled {
		if int(i) < len(w.cancelled) && !w.cancelled[i] {
			w.cancelled[i] = true
			w.left--
		}
	}
	p.byID[w.id] = w
	p.order = append(p.order, w.id)
	p.blocks += len(e.Blocks)
	w.eachWish(func(name events.BlockHash) { p.want[name] = append(p.want[name], w.id) })
	p.waitsForContent(w)
	for i, name := range e.Blocks {
		if !w.cancelled[i] {
			k := copyKey{e.Tier, e.Group, name}
			p.inside[k] = append(p.inside[k], w.id)
		}
	}
	return w
}

// oldest returns the first waiter, or nil.
func (p *pendingEvents) oldest() *waiter {
	for len(p.order) > 0 {
		if w := p.byID[p.order[0]]; w != nil {
			return w
		}
		p.order = p.order[1:]
	}
	return nil
}

func (p *pendingEvents) remove(w *waiter) {
	delete(p.byID, w.id)
	p.blocks -= len(w.event.Blocks)
	w.eachWish(func(name events.BlockHash) { unlist(p.want, name, w.id) })
	if w.event.Own {
		unlist(p.content, w.event.Locals[len(w.event.Locals)-1], w.id)
	}
	for i, name := range w.event.Blocks {
		if !w.cancelled[i] {
			unlist(p.inside, copyKey{w.event.Tier, w.event.Group, name}, w.id)
		}
	}
	switch {
	case len(p.byID) == 0:
		*p = pendingEvents{next: p.next, ready: p.ready}
	case len(p.order) > 2*len(p.byID)+16:
		p.order = slices.DeleteFunc(p.order, func(id uint64) bool { return p.byID[id] == nil })
	}
}

func unlist[K comparable](m map[K][]uint64, k K, id uint64) {
	l := m[k]
	i, ok := slices.BinarySearch(l, id)
	switch {
	case !ok:
	case len(l) == 1:
		delete(m, k)
	default:
		m[k] = slices.Delete(l, i, i+1)
	}
}

// cancel cancels the oldest pending copy. It returns false without one.
func (p *pendingEvents) cancel(k copyKey) bool {
	l := p.inside[k]
	if len(l) == 0 {
		return false
	}
	w := p.byID[l[0]]
	for i, name := range w.event.Blocks {
		if name == k.name && !w.cancelled[i] {
			unlist(p.inside, k, w.id)
			w.cancelled[i] = true
			w.left--
			break
		}
	}
	if w.left == 0 {
		p.remove(w)
	}
	return true
}

// named marks the waiters for a name as ready, because the place of the name is known.
func (p *pendingEvents) named(name events.BlockHash) {
	for _, id := range p.want[name] {
		heap.Push(&p.ready, id)
	}
}

// nextReady removes and returns the oldest waiter with a known place, or nil.
func (p *pendingEvents) nextReady(placeable func(*events.Event) bool) *waiter {
	for len(p.ready) > 0 {
		id := heap.Pop(&p.ready).(uint64)
		if w := p.byID[id]; w != nil && placeable(&w.event) {
			p.remove(w)
			return w
		}
	}
	return nil
}

// all returns the waiters, oldest first.
func (p *pendingEvents) all() []*waiter {
	var ws []*waiter
	for _, id := range p.order {
		if w := p.byID[id]; w != nil {
			ws = append(ws, w)
		}
	}
	return ws
}

type idHeap []uint64

func (h idHeap) Len() int           { return len(h) }
func (h idHeap) Less(i, j int) bool { return h[i] < h[j] }
func (h idHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *idHeap) Push(v any)        { *h = append(*h, v.(uint64)) }
func (h *idHeap) Pop() any {
	v := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return v
}
