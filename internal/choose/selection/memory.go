package selection

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// memories are the device memories of candidates, for the eviction cost of the policy kvatlas. Answers of the index
// have the figures of ranks that hold a part of the prompt, also of ranks in partitions of other nodes. These figures
// count until newer ones arrive. Every eighth choice updates them, unless another one does so at the same time.
type memories struct {
	choices atomic.Uint64
	shown   atomic.Pointer[[]*routing.Memory] // of candidates.list; nil: no rank has evicted anything

	mu    sync.Mutex
	ranks []rankMemory  // of candidates.list
	due   time.Duration // when shown is to be replaced, by the clock of loads
}

// rankMemory is what answers have shown of one rank.
type rankMemory struct {
	held, full uint32
	tiered     bool
	unique     routing.Unique
}

const (
	memoryChoices = 8           // of so many choices one updates the figures
	memoryLife    = time.Second // of the memories that choices read
)

// carry copies the figures of candidates that were there before.
func (of *candidates) carry(before *candidates) {
	of.memories.ranks = make([]rankMemory, len(of.list))
	if before == nil {
		return
	}
	before.memories.mu.Lock()
	defer before.memories.mu.Unlock()
	for rank, at := range before.at {
		if to, ok := of.at[rank]; ok && len(before.memories.ranks) > 0 {
			of.memories.ranks[to] = before.memories.ranks[at]
		}
	}
}

// observe updates the figures from an answer. list has the candidates with what the answer says that they hold.
func (of *candidates) observe(a *api.Answer, list []routing.Candidate) {
	m := &of.memories
	if m.choices.Add(1)%memoryChoices != 1 || !m.mu.TryLock() {
		return
	}
	defer m.mu.Unlock()
	if len(m.ranks) == 0 {
		return // candidates of one request
	}
	for i := range a.Workers {
		o := &a.Workers[i]
		if at, ok := of.place(o); ok {
			r := &m.ranks[at]
			r.held, r.full, r.tiered = o.Held, o.Full, r.tiered || o.Host+o.Disk+o.External > 0
		}
	}
	routing.Longest(list, func(i int, alone bool) { m.ranks[i].unique.Longest(alone) })
}

// remember writes the memories of candidates into list, whose rates are set. It calculates them once in memoryLife.
func (of *candidates) remember(t *load.Table, now time.Duration, list []routing.Candidate) {
	m := &of.memories
	if m.mu.TryLock() {
		if len(m.ranks) > 0 && now >= m.due {
			m.due = now + memoryLife
			m.shown.Store(of.calculate(t, list))
		}
		m.mu.Unlock()
	}
	if shown := m.shown.Load(); shown != nil {
		for i := range list {
			list[i].Memory = (*shown)[i]
		}
	}
}

// calculate returns the memories of candidates whose rates are set; nil if no rank has evicted anything.
func (of *candidates) calculate(t *load.Table, list []routing.Candidate) *[]*routing.Memory {
	shown, some := make([]*routing.Memory, len(list)), false
	for i := range list {
		r, c := &of.memories.ranks[i], &list[i]
		if r.full == 0 {
			continue
		}
		age := routing.EvictionAge(uint64(r.full), of.blockSize, c.PrefillRate, c.Busy)
		shown[i], some = &routing.Memory{Free: uint64(r.full - min(r.held, r.full)), Unique: r.unique.Share(),
			Again: t.Reuse().Again(age), Tiered: r.tiered}, true
	}
	if !some {
		return nil
	}
	return &shown
}
