package scatter

import (
	"slices"
	"sync"
	"time"
)

// Limits say how nodes are asked. The zero value of each is a good choice.
type Limits struct {
	// Hedge is how slow a reply must be, among its node's recent ones, before another node is asked too: the share of
	// them that came sooner. Default 0.95.
	Hedge float64

	// HedgeAfter is the least time before another node is asked too; default 2 ms. First, while a node has hardly
	// answered yet, stands for its times; default 20 ms.
	HedgeAfter, First time.Duration

	// Budget is how many of all requests may be hedges, as a share; default 0.1. Burst is how many may be at once after
	// a time without; default 10.
	Budget float64
	Burst  int

	// GiveUp is how long a node has until its partitions are asked of others, budget or not; default 250 ms, and never
	// more than half of the time that is left.
	GiveUp time.Duration

	// Shun is how long a node that failed, or was overtaken, is asked only where there is no other; an answer ends it.
	// Default 1 s.
	Shun time.Duration
}

func (l Limits) withDefaults() Limits {
	or := func(d *time.Duration, usual time.Duration) {
		if *d <= 0 {
			*d = usual
		}
	}
	if l.Hedge <= 0 || l.Hedge >= 1 {
		l.Hedge = 0.95
	}
	if l.Budget <= 0 {
		l.Budget = 0.1
	}
	if l.Burst <= 0 {
		l.Burst = 10
	}
	or(&l.HedgeAfter, 2*time.Millisecond)
	or(&l.First, 20*time.Millisecond)
	or(&l.GiveUp, 250*time.Millisecond)
	or(&l.Shun, time.Second)
	return l
}

// How a node's reply times are remembered.
const (
	recent   = 128 // that many
	reckoned = 16  // after that many more the percentile is reckoned anew; and with fewer there is none
	maxPeers = 1024
)

// Peers is what is remembered of other nodes from one query to the next: how long they take, who is to be avoided, and
// how many hedges may be made. Any goroutine may use it. Times are of one monotonic clock.
type Peers struct {
	limits Limits

	mu    sync.Mutex
	nodes map[string]*peer
	spare float64 // hedges that may be made now
	turn  uint
	work  [recent]time.Duration
}

type peer struct {
	times [recent]time.Duration // the last ones, in a ring
	count int                   // of replies ever
	slow  time.Duration         // the percentile of times; 0: too few
	shun  time.Duration         // until then the node is asked where there is no other; 0: it is not
}

// NewPeers returns a memory of nobody.
func NewPeers(l Limits) *Peers {
	l = l.withDefaults()
	return &Peers{limits: l, nodes: map[string]*peer{}, spare: float64(l.Burst)}
}

// of returns what is remembered of a node. Called with p.mu held.
func (p *Peers) of(node string) *peer {
	n := p.nodes[node]
	if n == nil {
		if len(p.nodes) >= maxPeers { // names of nodes that are long gone
			clear(p.nodes)
		}
		n = &peer{}
		p.nodes[node] = n
	}
	return n
}

// Answered tells that a node answered after a time. It is no longer shunned.
func (p *Peers) Answered(node string, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(node)
	n.shun = 0
	n.times[n.count%recent] = took
	n.count++
	if n.count%reckoned == 0 {
		have := p.work[:copy(p.work[:], n.times[:min(n.count, recent)])]
		slices.Sort(have)
		n.slow = have[min(int(p.limits.Hedge*float64(len(have))), len(have)-1)]
	}
}

// Shun tells that a node failed or was overtaken.
func (p *Peers) Shun(node string, now time.Duration) {
	p.mu.Lock()
	p.of(node).shun = now + p.limits.Shun
	p.mu.Unlock()
}

// shunned reports whether a node is to be avoided.
func (p *Peers) shunned(node string, now time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	return n != nil && now < n.shun
}

// asked tells of a request, and returns after which time its node is slow. One that was shunned is so again for all
// others until it answers: one request tries it.
func (p *Peers) asked(node string, now time.Duration, kind Kind) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if kind != Hedge {
		p.spare = min(p.spare+p.limits.Budget, float64(p.limits.Burst))
	}
	n := p.nodes[node]
	switch {
	case n == nil:
		return p.limits.First
	case n.shun != 0:
		n.shun = now + p.limits.Shun
	}
	if n.slow == 0 {
		return p.limits.First
	}
	return max(n.slow, p.limits.HedgeAfter)
}

// spend takes a hedge from the budget, if there is one.
func (p *Peers) spend() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.spare < 1 {
		return false
	}
	p.spare--
	return true
}

// next is another number each time, so that queries begin at different partitions.
func (p *Peers) next() uint {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn++
	return p.turn
}
