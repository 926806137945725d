package hot

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Planner decides which copies are made without an operator. The zero value makes none. It is a state machine; one
// goroutine uses it at a time.
type Planner struct {
	PerMinute int // copies in a minute at most; 0: none

	made  []time.Duration // of the last minute
	tried map[attempt]time.Duration
	under map[events.SeqHash]bool // prefixes with a copy under way
}

// attempt is a copy that was made or has failed.
type attempt struct {
	hash   events.SeqHash
	worker events.WorkerID
}

const (
	// payback is the time in which a copy must save more than it costs.
	payback = time.Minute

	// leastHelped is the least number of requests as evidence. A few requests of one conversation are no demand.
	leastHelped = 16

	// retryAfter is the time before the same copy is made again.
	retryAfter = 5 * time.Minute
)

// Candidate is a possible copy, with the figures of a [Prefix].
type Candidate struct {
	Hash        events.SeqHash
	Worker      events.WorkerID
	Helped      float64
	SavesMSPerS float64
	CostMS      float64 // of the copy: see [Target]
}

// Worth reports whether a copy would have helped enough recent requests, and saves more in a minute than it costs.
func (c *Candidate) Worth() bool {
	return c.Helped >= leastHelped && c.SavesMSPerS*payback.Seconds() > c.CostMS
}

// Take reports whether a copy should be made now, and counts the copy. The caller calls Done after the copy.
func (p *Planner) Take(now time.Duration, c *Candidate) bool {
	for len(p.made) > 0 && now-p.made[0] >= time.Minute {
		p.made = p.made[1:]
	}
	for a, at := range p.tried {
		if now-at >= retryAfter {
			delete(p.tried, a)
		}
	}
	a := attempt{c.Hash, c.Worker}
	if _, tried := p.tried[a]; tried || p.under[a.hash] || len(p.made) >= p.PerMinute || !c.Worth() {
		return false
	}
	if p.tried == nil {
		p.tried, p.under = map[attempt]time.Duration{}, map[events.SeqHash]bool{}
	}
	p.under[a.hash] = true
	p.made, p.tried[a] = append(p.made, now), now
	return true
}

// Done ends a copy, with or without success.
func (p *Planner) Done(hash events.SeqHash) { delete(p.under, hash) }
