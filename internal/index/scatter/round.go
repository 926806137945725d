package scatter

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Wanted is a partition to search, with the serving nodes.
type Wanted struct {
	Partition events.Partition
	Serving   []string // best first
	Fit       int      // number of equally good nodes
}

// maxServing bounds the nodes of a partition in a round.
const maxServing = 64

// Request is a request to send, or, for the round's own node, to answer here.
type Request struct {
	ID         int // from 0 in each round
	Node       string
	Partitions []events.Partition
	Kind       Kind
}

// Kind is the reason for a request.
type Kind uint8

const (
	First      Kind = iota // the first for its partitions
	Next                   // after a failure, a missing partition, or a timeout
	Hedge                  // beside a slow node
	Forwarding             // the query, to be finished by the node
)

func (k Kind) String() string { return [...]string{"first", "next", "hedge", "forward"}[k] }

// Round gets an answer of a node for every wanted partition, as long as there are nodes and time. A round is stepped:
// the caller sends the returned requests, passes the replies to the round, and calls Tick at the time of Next. A single
// goroutine owns a round.
//
// Invariants:
// 1. A partition is taken from at most one answer.
// 2. A partition that is neither taken nor missing has a pending request.
// 3. No node gets two requests for the same partition.
type Round struct {
	peers *Peers
	self  string
	until time.Duration

	// Patient: nodes wait for an event, so their reply times do not count, and there are no hedges.
	patient bool

	parts    []part
	attempts []attempt
	open     int // open parts: neither taken nor missing
	batch    []Request
	list     []int

	HedgesDenied int // due hedges beyond the budget
}

type part struct {
	Wanted
	tried   uint64 // bits of Serving
	waiting int    // pending requests
	fresh   int    // pending requests that have not timed out
	over    bool   // taken or missing
	missing bool
}

type attempt struct {
	node    string
	parts   []int
	sent    time.Duration
	slow    time.Duration // time of the hedge
	giveUp  time.Duration
	hedged  bool // or has no hedge
	givenUp bool
	closed  bool
}

// NewRound returns a round for a node that ends at a time. patient: nodes wait for an event.
func NewRound(peers *Peers, self string, until time.Duration, patient bool) *Round {
	return &Round{peers: peers, self: self, until: until, patient: patient}
}

// Begin returns the requests for all wanted partitions.
func (r *Round) Begin(now time.Duration, wanted []Wanted) []Request {
	r.parts = make([]part, len(wanted))
	r.open = len(wanted)
	list := make([]int, len(wanted))
	first := 0
	if len(wanted) > 0 {
		first = int(r.peers.next() % uint(len(wanted)))
	}
	for i := range wanted {
		r.parts[i].Wanted = wanted[i]
		if len(wanted[i].Serving) > maxServing {
			r.parts[i].Serving = wanted[i].Serving[:maxServing]
		}
		list[i] = (first + i) % len(wanted)
	}
	return r.assign(now, list, First)
}

// Answer records the answer to a request; not has requested partitions without service by the node. taken has the
// partitions without an earlier answer; the rest of the answer must be ignored.
func (r *Round) Answer(now time.Duration, id int, not []events.Partition,
) (taken []events.Partition, requests []Request) {
	a := &r.attempts[id]
	if a.closed {
		return nil, nil
	}
	r.close(a)
	if !r.patient && a.node != r.self {
		r.peers.Answered(a.node, now-a.sent)
	}
	again := r.list[:0]
	for _, i := range a.parts {
		p := &r.parts[i]
		switch {
		case p.over:
		case slices.Contains(not, p.Partition):
			again = append(again, i)
		default:
			p.over = true
			r.open--
			taken = append(taken, p.Partition)
		}
	}
	r.list = again
	slices.Sort(taken)
	return taken, r.assign(now, again, Next)
}

// Fail records a refused or unsent request. penalise: other queries should avoid the node.
func (r *Round) Fail(now time.Duration, id int, penalise bool) []Request {
	a := &r.attempts[id]
	if a.closed {
		return nil
	}
	r.close(a)
	if penalise && a.node != r.self {
		r.peers.Penalise(a.node, now)
	}
	return r.assign(now, a.parts, Next)
}

func (r *Round) close(a *attempt) {
	a.closed = true
	for _, i := range a.parts {
		p := &r.parts[i]
		p.waiting--
		if !a.givenUp {
			p.fresh--
		}
	}
}

// Tick advances the time to now.
func (r *Round) Tick(now time.Duration) (requests []Request) {
	if now >= r.until {
		for i := range r.parts {
			r.miss(&r.parts[i])
		}
		return nil
	}
	for id := range r.attempts { // new ones are not due
		a := &r.attempts[id]
		if a.closed || a.givenUp {
			continue
		}
		if now >= a.giveUp {
			a.givenUp = true
			if !r.patient {
				r.peers.Penalise(a.node, now)
			}
			for _, i := range a.parts {
				r.parts[i].fresh--
			}
			requests = append(requests, r.assign(now, a.parts, Next)...)
		} else if !a.hedged && now >= a.slow {
			a.hedged = true
			requests = append(requests, r.hedge(now, a)...)
		}
	}
	return requests
}

// hedge returns requests to further nodes beside a slow one, within the budget.
func (r *Round) hedge(now time.Duration, a *attempt) []Request {
	list := r.list[:0]
	for _, i := range a.parts {
		if p := &r.parts[i]; !p.over && p.fresh == 1 && r.untried(p) {
			list = append(list, i)
		}
	}
	r.list = list
	switch {
	case len(list) == 0:
		return nil
	case !r.peers.hedges.Spend():
		r.HedgesDenied++
		return nil
	}
	return r.assign(now, list, Hedge)
}

// untried reports whether a further node serves the partition.
func (r *Round) untried(p *part) bool {
	for k, node := range p.Serving {
		if p.tried&(1<<k) == 0 && node != r.self {
			return true
		}
	}
	return false
}

// assign requests partitions from the best unused nodes, unless a request is pending within its time. Partitions of a
// node are a single request.
func (r *Round) assign(now time.Duration, list []int, kind Kind) []Request {
	r.batch = r.batch[:0]
	begin := len(r.attempts)
	for _, i := range list {
		p := &r.parts[i]
		if p.over || kind != Hedge && p.fresh > 0 {
			continue
		}
		k := r.choose(now, p, begin)
		if k < 0 {
			if p.waiting == 0 {
				r.miss(p)
			}
			continue
		}
		p.tried |= 1 << k
		p.waiting++
		p.fresh++
		node := p.Serving[k]
		at := slices.IndexFunc(r.attempts[begin:], func(a attempt) bool { return a.node == node })
		if at < 0 {
			at = len(r.attempts) - begin
			r.attempts = append(r.attempts, r.request(now, node, kind))
			r.batch = append(r.batch, Request{ID: len(r.attempts) - 1, Node: node, Kind: kind})
		}
		r.attempts[begin+at].parts = append(r.attempts[begin+at].parts, i)
		r.batch[at].Partitions = append(r.batch[at].Partitions, p.Partition)
	}
	return r.batch
}

// request returns a request to a node, with its times.
func (r *Round) request(now time.Duration, node string, kind Kind) attempt {
	if node == r.self {
		return attempt{node: node, sent: now, slow: r.until, giveUp: r.until, hedged: true}
	}
	return attempt{
		node: node, sent: now, slow: now + r.peers.sent(node, now, kind),
		giveUp: now + min(giveUpAfter, (r.until-now)/2),
		hedged: r.patient || kind == Hedge,
	}
}

// choose returns the index of the best node of a partition: this node; then a node in the batch, which begins at a
// request; then the first node. Nodes that are not fit, and then penalised nodes, are used only without an alternative.
func (r *Round) choose(now time.Duration, p *part, begin int) int {
	best, bestRank := -1, 5
	for k, node := range p.Serving {
		if p.tried&(1<<k) != 0 {
			continue
		}
		rank := 2
		switch {
		case node == r.self:
			rank = 0
		case slices.ContainsFunc(r.attempts[begin:], func(a attempt) bool { return a.node == node }):
			rank = 1
		case r.peers.penalised(node, now):
			rank = 4
		}
		if k >= p.Fit && rank < 3 {
			rank = 3
		}
		if rank < bestRank {
			best, bestRank = k, rank
		}
	}
	return best
}

func (r *Round) miss(p *part) {
	if !p.over {
		p.over, p.missing = true, true
		r.open--
	}
}

// Done reports whether no partition is open.
func (r *Round) Done() bool { return r.open == 0 }

// Next returns the time of the next Tick.
func (r *Round) Next() time.Duration {
	at := r.until
	for i := range r.attempts {
		a := &r.attempts[i]
		if a.closed || a.givenUp {
			continue
		}
		at = min(at, a.giveUp)
		if !a.hedged {
			at = min(at, a.slow)
		}
	}
	return at
}

// End ends the round. Slow, overtaken nodes are penalised until they answer.
func (r *Round) End(now time.Duration) {
	if r.patient {
		return
	}
	for i := range r.attempts {
		if a := &r.attempts[i]; !a.closed && !a.givenUp && a.node != r.self && now >= a.slow {
			r.peers.Penalise(a.node, now)
		}
	}
}

// Missing returns the partitions without an answer, in ascending order.
func (r *Round) Missing() (list []events.Partition) {
	for i := range r.parts {
		if r.parts[i].missing {
			list = append(list, r.parts[i].Partition)
		}
	}
	slices.Sort(list)
	return list
}
