package scatter

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Wanted is a partition that is to be looked at, and who can.
type Wanted struct {
	Partition events.Partition
	Serving   []string // best first
	Fit       int      // that many of them are as good as each other
}

// maxServing is how many nodes of one partition a round considers.
const maxServing = 64

// Request is a request that is to be sent, or, if its node is the round's own, to be answered here.
type Request struct {
	ID         int // counted from 0 in each round
	Node       string
	Partitions []events.Partition
	Kind       Kind
}

// Kind is why a request is made.
type Kind uint8

const (
	First      Kind = iota // nobody was asked before
	Next                   // somebody failed, or said that he does not serve it, or was given up
	Hedge                  // somebody is slow
	Forwarding             // the query, to be finished there
)

func (k Kind) String() string { return [...]string{"first", "next", "hedge", "forward"}[k] }

// Round has each wanted partition answered by one node, as long as there are nodes to ask and time. It is stepped:
// whoever steps it sends what it returns, tells it what comes back, and calls Tick when Next says. One goroutine owns
// it.
//
// Invariants:
//  1. A partition is taken from at most one answer.
//  2. A partition that is neither taken nor missing has been asked of a node that may still answer.
//  3. No node is asked twice for the same partition.
type Round struct {
	peers *Peers
	self  string
	until time.Duration

	// Patient says that nodes were asked to wait: nothing is learnt from how long they take, and nobody is hedged.
	patient bool

	parts    []part
	attempts []attempt
	open     int // parts neither taken nor missing
	batch    []Request
	list     []int

	HedgesDenied int // hedges that were due and beyond the budget
}

type part struct {
	Wanted
	tried   uint64 // which of Serving
	waiting int    // requests that may still be answered
	fresh   int    // those of them that are not given up
	over    bool   // taken or missing
	missing bool
}

type attempt struct {
	node    string
	parts   []int
	sent    time.Duration
	slow    time.Duration // when a hedge is due
	giveUp  time.Duration
	hedged  bool // or gets no hedge
	givenUp bool
	closed  bool
}

// NewRound returns a round that asks until a time, on behalf of a node. With patient, nodes were asked to wait for
// something.
func NewRound(peers *Peers, self string, until time.Duration, patient bool) *Round {
	return &Round{peers: peers, self: self, until: until, patient: patient}
}

// Begin asks for all that is wanted.
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

// Answer tells that a request was answered; not lists the asked partitions that its node does not serve. What is taken
// are those that nobody else answered before; the rest of the answer is to be ignored.
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

// Fail tells that a request was refused or could not be sent. penalise says that others should rather not ask this
// node.
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

// Tick goes on to now.
func (r *Round) Tick(now time.Duration) (requests []Request) {
	if now >= r.until {
		for i := range r.parts {
			r.miss(&r.parts[i])
		}
		return nil
	}
	for id := range r.attempts { // those that are added meanwhile are not due
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

// hedge asks others for what a slow node was asked, if there are others and the budget allows it.
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

// untried reports whether a partition can be asked of another node yet.
func (r *Round) untried(p *part) bool {
	for k, node := range p.Serving {
		if p.tried&(1<<k) == 0 && node != r.self {
			return true
		}
	}
	return false
}

// assign asks for partitions of whoever is best for each and has not been asked, unless somebody is being asked who is
// not given up. Partitions of one node go into one request.
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

// choose returns which of a partition's nodes is to be asked: the own one; then one that the batch, which begins at a
// request, asks already; then the first; those that are not fit, and then those that are penalised, only where there is
// no other.
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

// Done reports whether every partition is taken or missing.
func (r *Round) Done() bool { return r.open == 0 }

// Next is when Tick has something to do.
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

// End is called when nobody waits any more. Slow nodes that others have overtaken are penalised until they answer.
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

// Missing lists the partitions that nobody answered, in ascending order.
func (r *Round) Missing() (list []events.Partition) {
	for i := range r.parts {
		if r.parts[i].missing {
			list = append(list, r.parts[i].Partition)
		}
	}
	slices.Sort(list)
	return list
}
