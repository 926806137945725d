package routing

import (
	"math"
	"time"
)

// Pace measures the prefill rate of a rank, from the rank's requests and their first tokens. The zero value has
// measured nothing. A Pace belongs to one goroutine at a time.
//
// The work on a request begins when the request is sent, or with the first token of the previous request if that is
// later. The work ends with the first token of the request. Requests in a common prefill share the time in the order of
// the first tokens, so the sum is right. The end of a request without a first token counts as the first token.
type Pace struct {
	tokens, ms    float64       // prefilled tokens, and the time
	busy, watched float64       // milliseconds with work, and all
	lives, ended  float64       // lifetimes of requests in milliseconds, and their number
	at            time.Duration // end of watched; 0: no request has been sent
	done          time.Duration // the last first token
}

const (
	// priorPrefillRate is the rate in tokens per millisecond before any measurement.
	priorPrefillRate = 10.0

	// PriorBusy is the share of time with prefill to do before any measurement.
	PriorBusy = 0.5

	priorWork   = 1000.0    // milliseconds of work that priorPrefillRate counts as
	fleetWork   = 60_000.0  // milliseconds of work that the fleet's rate counts as: most ranks of a fleet are equal
	priorTime   = 5000.0    // milliseconds that PriorBusy counts as
	window      = 100_000.0 // milliseconds after which a measurement weighs 1/e: of work, and of time
	leastRate   = 0.01      // tokens per millisecond
	mostRate    = 10_000.0
	mostLife    = 600_000.0 // of one request, in milliseconds
	mostElapsed = 60_000.0  // of one request: a longer time shows a stopped engine
)

// Prefilled adds a request with the first token and the number of prefilled tokens. Times are of one monotonic clock
// and above 0.
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

// Ended adds the end of a request. A lifetime decays by 1/e in 100 requests.
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

// Tick adds the time up to now to the whole time of Busy.
func (p *Pace) Tick(now time.Duration) {
	if p.at == 0 || now <= p.at {
		return
	}
	passed := ms(now - p.at)
	keep := math.Exp(-passed / window)
	p.busy, p.watched, p.at = p.busy*keep, p.watched*keep+passed, now
}

// Working returns the milliseconds of work on the present request: since the last first token, or since the given time
// of the rank's first request, whichever is later.
func (p *Pace) Working(now, since time.Duration) float64 { return max(ms(now-max(p.done, since)), 0) }

// Add adds the measurements of another rank, for the mean of a fleet.
func (p *Pace) Add(o *Pace) {
	p.tokens, p.ms = p.tokens+o.tokens, p.ms+o.ms
	p.lives, p.ended = p.lives+o.lives, p.ended+o.ended
}

// Rate returns the prefill rate in tokens per millisecond. fleet is the mean rate of the fleet, or 0. The mean has the
// weight of a minute of measurements of the rank.
func (p *Pace) Rate(fleet float64) float64 {
	prior, work := fleet, fleetWork
	if fleet <= 0 {
		prior, work = priorPrefillRate, priorWork
	}
	return min(max((prior*work+p.tokens)/(work+p.ms), leastRate), mostRate)
}

// Measured reports whether a request has been prefilled since the measurement began.
func (p *Pace) Measured() bool { return p.ms > 0 }

// Busy returns the share of time in which the rank had prefill to do, from 0 to 1.
func (p *Pace) Busy() float64 { return min((p.busy+PriorBusy*priorTime)/(p.watched+priorTime), 1) }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
