package routing

import (
	"math"
	"time"
)

// Pace measures how fast a rank prefills, from the requests that were sent to it and their first tokens. The zero
// value has measured nothing. It belongs to one goroutine at a time.
//
// A rank works on a request from when the request was sent, or from the first token of the request before it,
// whichever is later, until its own first token. Requests that are prefilled together divide that time in the order
// of their first tokens, so that the sum is right. A request that ends without one counts as if its end were its
// first token.
type Pace struct {
	tokens, ms    float64       // prefilled, and in how long
	busy, watched float64       // milliseconds with work, and all
	lives, ended  float64       // milliseconds that requests took, and how many
	at            time.Duration // of watched; 0: no request has been sent
	done          time.Duration // the last first token
}

const (
	// PriorPrefillRate is how many tokens a rank is taken to prefill in a millisecond before anything is measured.
	PriorPrefillRate = 10.0

	// PriorBusy is the share of time in which a rank is taken to have work before anything is measured.
	PriorBusy = 0.5

	priorWork   = 1000.0    // milliseconds of work that PriorPrefillRate counts as
	fleetWork   = 60_000.0  // milliseconds of work that the fleet's rate counts as: most ranks of a fleet are equal
	priorTime   = 5000.0    // milliseconds that PriorBusy counts as
	window      = 100_000.0 // milliseconds after which a measurement weighs 1/e: of work, and of time
	leastRate   = 0.01      // tokens per millisecond
	mostRate    = 10_000.0
	mostLife    = 600_000.0 // of one request, in milliseconds
	mostElapsed = 60_000.0  // of one request: an engine that stood still says little about its rate
)

// Prefilled tells that the first token of a request has come, of which so many tokens were to be prefilled. Times are
// of one monotonic clock and above 0.
func (p *Pace) Prefilled(now, sent time.Duration, tokens int64) {
	if p.at == 0 {
		p.at = sent
	}
	elapsed := min(ms(now-max(sent, p.done)), mostElapsed)
	p.done = max(p.done, now)
	if elapsed < 0 || tokens <= 0 {
		return
	}
	keep := math.Exp(-elapsed / window)
	p.tokens, p.ms = p.tokens*keep+float64(tokens), p.ms*keep+elapsed
	p.Tick(now)
	p.busy += elapsed
}

// Ended tells that a request has ended. The 100 before it weigh 1/e of those after them.
func (p *Pace) Ended(now, sent time.Duration) {
	const keep = 0.99
	p.lives, p.ended = p.lives*keep+min(max(ms(now-sent), 0), mostLife), p.ended*keep+1
}

// Life returns how many milliseconds a request takes on average; 0 if none has ended.
func (p *Pace) Life() float64 {
	if p.ended == 0 {
		return 0
	}
	return p.lives / p.ended
}

// Tick lets time pass.
func (p *Pace) Tick(now time.Duration) {
	if p.at == 0 || now <= p.at {
		return
	}
	passed := ms(now - p.at)
	keep := math.Exp(-passed / window)
	p.busy, p.watched, p.at = p.busy*keep, p.watched*keep+passed, now
}

// Working returns for how many milliseconds a rank has worked on a request since the last first token, if it has had
// requests since then.
func (p *Pace) Working(now, since time.Duration) float64 { return max(ms(now-max(p.done, since)), 0) }

// Add adds what was measured of another rank, for the mean of a fleet.
func (p *Pace) Add(o *Pace) {
	p.tokens, p.ms = p.tokens+o.tokens, p.ms+o.ms
	p.lives, p.ended = p.lives+o.lives, p.ended+o.ended
}

// Rate returns how many tokens the rank prefills in a millisecond. The less was measured, the more counts the rate of
// its fleet, in the same unit; 0: the rank is a fleet of its own.
func (p *Pace) Rate(fleet float64) float64 {
	prior, work := fleet, fleetWork
	if fleet <= 0 {
		prior, work = PriorPrefillRate, priorWork
	}
	return min(max((prior*work+p.tokens)/(work+p.ms), leastRate), mostRate)
}

// Measured reports whether a request has been prefilled since the measurement began.
func (p *Pace) Measured() bool { return p.ms > 0 }

// Busy returns the share of time in which the rank had prefill to do, from 0 to 1.
func (p *Pace) Busy() float64 { return min((p.busy+PriorBusy*priorTime)/(p.watched+priorTime), 1) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
