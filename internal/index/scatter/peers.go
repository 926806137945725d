package scatter

import (
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// When another node is asked beside one that is slow (a hedged request), and instead of it.
const (
	hedgePercentile = 0.95                   // of a node's recent replies: one that takes longer is slow
	leastHedge      = 2 * time.Millisecond   // no reply is slow before
	firstHedge      = 20 * time.Millisecond  // while a node has hardly answered yet
	giveUpAfter     = 250 * time.Millisecond // or half of the time: then the next is asked, budget or not
	penaltyTime     = time.Second            // how long one that failed is asked only where there is no other
)

// How a node's reply times are remembered.
const (
	recent   = 128 // that many
	reckoned = 16  // after that many more the percentile is reckoned anew; and with fewer there is none
	maxPeers = 1024
)

// Peers is what is remembered of other nodes from one query to the next: how long they take, who is to be avoided, and
// how many hedges may be made. Any goroutine may use it. Times are of one monotonic clock.
type Peers struct {
	hedges *rpc.Budget

	mu    sync.Mutex
	nodes map[string]*peer
	turn  uint
	work  [recent]time.Duration
}

type peer struct {
	times   [recent]time.Duration // the last ones, in a ring
	count   int                   // of replies ever
	slow    time.Duration         // the percentile of times; 0: too few
	penalty time.Duration         // until then the node is asked where there is no other; 0: it is not
	decline time.Duration         // until then nothing is forwarded to the node; 0: it has declined nothing
}

// NewPeers returns a memory of nobody. Hedged requests are taken from the budget.
func NewPeers(hedges *rpc.Budget) *Peers { return &Peers{hedges: hedges, nodes: map[string]*peer{}} }

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

// Answered tells that a node answered after a time. It is no longer penalised.
func (p *Peers) Answered(node string, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(node)
	n.penalty = 0
	n.times[n.count%recent] = took
	n.count++
	if n.count%reckoned == 0 {
		have := p.work[:copy(p.work[:], n.times[:min(n.count, recent)])]
		slices.Sort(have)
		n.slow = have[min(int(hedgePercentile*float64(len(have))), len(have)-1)]
	}
}

// Penalise tells that a node failed or was overtaken.
func (p *Peers) Penalise(node string, now time.Duration) {
	p.mu.Lock()
	p.of(node).penalty = now + penaltyTime
	p.mu.Unlock()
}

// Declined tells that a node could not finish a query that was forwarded to it. For a while it gets no other.
func (p *Peers) Declined(node string, now time.Duration) {
	p.mu.Lock()
	p.of(node).decline = now + penaltyTime
	p.mu.Unlock()
}

// finishes reports whether a query may be forwarded to a node. Whether one that was penalised is back is found out with
// a request: if nobody is there, that is known at once.
func (p *Peers) finishes(node string, now time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	return n == nil || n.penalty == 0 && now >= n.decline
}

// penalised reports whether a node is to be avoided.
func (p *Peers) penalised(node string, now time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	return n != nil && now < n.penalty
}

// sent tells of a request, and returns after which time its node is slow. One that was penalised is so again for all
// others until it answers: one request tries it.
func (p *Peers) sent(node string, now time.Duration, kind Kind) time.Duration {
	if kind != Hedge {
		p.hedges.Earn()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	switch {
	case n == nil:
		return firstHedge
	case n.penalty != 0:
		n.penalty = now + penaltyTime
	}
	if n.slow == 0 {
		return firstHedge
	}
	return max(n.slow, leastHedge)
}

// next is another number each time, so that queries begin at different partitions.
func (p *Peers) next() uint {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn++
	return p.turn
}
