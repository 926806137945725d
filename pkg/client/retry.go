package client

import "time"

// When a request is asked again.
const (
	slowAfter  = 250 * time.Millisecond // without an answer, or a quarter of the time; then twice as long, and so on
	neverSlow  = 10 * time.Millisecond  // no answer is late before
	firstPause = 20 * time.Millisecond  // after the first failure, doubled with each further one
	longPause  = 250 * time.Millisecond // the longest
)

// retry is the state of a request that may be asked several times: when the next attempt is due, and when it has
// failed. It is stepped; times are since it began. One goroutine owns it.
//
// Invariants:
//  1. While no attempt may be answered any more, at is when the next one is due.
//  2. While one may, at is when another is due beside it (a hedged request), each time after twice as long. Before
//     that, and at that time of a request that is sent once, whoever carries requests is asked whether it refused.
type retry struct {
	left  time.Duration // until nobody waits for the answer
	bound time.Duration // how long it is asked while nobody can answer
	once  bool          // it is not asked again, unless it has reached nobody

	pending     int // attempts that may still be answered
	sent        int // attempts in all
	unheard     int // of these, that have reached nobody
	at          time.Duration
	slow        time.Duration // after which the answer to the next attempt is late
	pause       time.Duration // after the next failure
	why         string        // of the last attempt; empty: it was the first
	absentSince time.Duration // when nobody could answer for the first time in a row; negative: somebody may
}

func newRetry(left, absent time.Duration, once bool) retry {
	return retry{
		left: left, bound: min(absent, left/2), once: once,
		slow: min(slowAfter, max(left/4, neverSlow)), pause: firstPause, absentSince: -1,
	}
}

// sends tells that an attempt is sent.
func (r *retry) sends(now time.Duration) {
	r.pending++
	r.sent++
	r.at = now + r.slow
}

// late tells that the answer is late, and whether the budget allows a hedged request.
func (r *retry) late(now time.Duration, allowed bool) {
	r.at = now + r.slow
	if allowed {
		r.at, r.slow, r.why = now, 2*r.slow, AgainSlow
	}
}

// failed tells that an attempt will not be answered; none will, if the connection is lost.
func (r *retry) failed(now time.Duration, why string) {
	switch r.pending--; why {
	case AgainLost:
		r.pending = 0
	case AgainAbsent:
		r.unheard++
	}
	switch {
	case why == AgainLost:
		r.absentSince = -1
	case r.absentSince < 0:
		r.absentSince = now
	}
	if r.pending <= 0 {
		r.pending, r.why = 0, why
		r.at = now + r.pause
		r.pause = min(2*r.pause, longPause)
	}
}

// over reports whether nobody could answer for so long that nobody will.
func (r *retry) over(now time.Duration) bool {
	return r.pending == 0 && (r.once && r.sent > r.unheard || r.absentSince >= 0 && now-r.absentSince >= r.bound)
}
