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
// have the figures of ranks with a part of the prompt, also in partitions of other nodes. The figures are valid until
// newer ones arrive. Every eighth choice updates them, unless another choice does so at the same time.
type memories struct {
	choices atomic.Uint64
	shown   atomic.Pointer[[]*routing.Memory] // of candidates.list; nil: no rank has evicted a block

	mu    sync.Mutex
	ranks []rankMemory  // of candidates.list
	due   time.Duration // time of the next update of shown, by the clock of loads
}

// rankMemory has the figures of a rank from answers.
type rankMemory struct {
	held, full uint32
	tiered     bool
	unique     routing.Unique
}

const (
	memoryChoices = 8           // one of this number of choices updates the figures
	memoryLife    = time.Second // lifetime of the shown memories
)

// carry copies the figures of earlier candidates.
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

// observe updates the figures from an answer. list has the candidates with the depths of the answer.
func (of *candidates) observe(a *api.Answer, list []routing.Candidate) {
	m := &of.memories
	if m.choices.Add(1)%memoryChoices != 1 || !m.mu.TryLock() {
		return
	}
	defer m.mu.Unlock()
	if len(m.ranks) == 0 {
		return // candidates of a single request
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

// remember calculates the memories once in memoryLife, and writes new ones into list. The rates in list must be set.
func (of *candidates) remember(t *load.Table, now time.Duration, list []routing.Candidate) {
	m := &of.memories
	if !m.mu.TryLock() {
		return
	}
	defer m.mu.Unlock()
	if len(m.ranks) == 0 || now < m.due {
		return
	}
	m.due = now + memoryLife
	shown := of.calculate(t, list)
	m.shown.Store(shown)
	for i := range list {
		list[i].Memory = nil
		if shown != nil {
			list[i].Memory = (*shown)[i]
		}
	}
}

// calculate returns the memories of candidates with their rates; nil if no rank has evicted a block.
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
