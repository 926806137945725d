package scatter

import (
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
)

// Times of hedged requests and of replacements.
const (
	hedgePercentile = 0.95                   // of a node's recent replies: a longer one is slow
	leastHedge      = 2 * time.Millisecond   // no reply is slow before
	firstHedge      = 20 * time.Millisecond  // before a node has enough replies
	giveUpAfter     = 250 * time.Millisecond // or half of the time: then the next node is used
	penaltyTime     = time.Second            // a failed node gets requests only without an alternative for this time
)

// The history of reply times.
const (
	recent   = 128 // number of kept times
	reckoned = 16  // the percentile is computed again after this number of replies; with fewer there is none
	maxPeers = 1024
)

// Peers has the state of other nodes between queries: reply times, penalties, and the budget of hedges. Peers is safe
// for concurrent use. Times are of one monotonic clock.
type Peers struct {
	hedges *rpc.Budget

	mu    sync.Mutex
	nodes map[string]*peer
	turn  uint
	work  [recent]time.Duration
}

type peer struct {
	times   [recent]time.Duration // a ring of the last ones
	count   int                   // number of all replies
	slow    time.Duration         // the percentile of times; 0: too few
	penalty time.Duration         // until then only without an alternative; 0: no penalty
	decline time.Duration         // until then no forwards; 0: none declined
}

// NewPeers returns Peers without nodes. Hedged requests use the budget.
func NewPeers(hedges *rpc.Budget) *Peers { return &Peers{hedges: hedges, nodes: map[string]*peer{}} }

// state returns the state of a node. p.mu is held.
func (p *Peers) state(node string) *peer {
	n := p.nodes[node]
	if n == nil {
		if len(p.nodes) >= maxPeers { // names of former nodes
			clear(p.nodes)
		}
		n = &peer{}
		p.nodes[node] = n
	}
	return n
}

// Answered records a node's answer and its time, and ends a penalty.
func (p *Peers) Answered(node string, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.state(node)
	n.penalty = 0
	n.times[n.count%recent] = took
	n.count++
	if n.count%reckoned == 0 {
		have := p.work[:copy(p.work[:], n.times[:min(n.count, recent)])]
		slices.Sort(have)
		n.slow = have[min(int(hedgePercentile*float64(len(have))), len(have)-1)]
	}
}

// Penalise records that a node failed or was overtaken.
func (p *Peers) Penalise(node string, now time.Duration) {
	p.mu.Lock()
	p.state(node).penalty = now + penaltyTime
	p.mu.Unlock()
}

// Declined records that a node could not finish a forwarded query. The node gets no further query for a while.
func (p *Peers) Declined(node string, now time.Duration) {
	p.mu.Lock()
	p.state(node).decline = now + penaltyTime
	p.mu.Unlock()
}

// finishes reports whether a query may be forwarded to a node. Only requests test whether a penalised node is back,
// since a request to a missing node fails at once.
func (p *Peers) finishes(node string, now time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	return n == nil || n.penalty == 0 && now >= n.decline
}

// penalised reports whether a node should be avoided.
func (p *Peers) penalised(node string, now time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[node]
	return n != nil && now < n.penalty
}

// sent records a request, and returns the time after which the node is slow. A penalised node stays penalised for all
// other queries until an answer: a single request tries the node.
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

// next returns consecutive numbers, so that queries begin at different partitions.
func (p *Peers) next() uint {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn++
	return p.turn
}
