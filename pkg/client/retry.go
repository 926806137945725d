package client

import "time"

// Times of retries.
const (
	neverSlow  = 10 * time.Millisecond  // shortest wait for an answer
	firstPause = 20 * time.Millisecond  // pause after the first failure; the pause doubles with each failure
	longPause  = 250 * time.Millisecond // longest pause
)

// retry is the state of a request with retries: the time of the next attempt, and the end of the request. It is a
// stepped state machine; times count from the start of the request. A single goroutine owns it.
//
// Invariants:
//  1. If no attempt is pending, the field due is the time of the next attempt.
//  2. If an attempt is pending, due is the time of a hedged request, and the wait doubles. Before that time, and at
//     that time for a request without retries, the caller checks transport.refused.
type retry struct {
	left  time.Duration // deadline of the request
	bound time.Duration // limit of retries while no node can answer
	once  bool          // no retry, unless no node has received the request

	pending     int // attempts that may get a reply
	sent        int // attempts in all
	undelivered int // attempts that no node received
	due         time.Duration
	slow        time.Duration // wait until the reply to the next attempt is late
	pause       time.Duration // pause after the next failure
	why         string        // reason of the last attempt; empty for the first
	absentSince time.Duration // start of the current row of failures without an available node; negative: none
}

func newRetry(left time.Duration, o *Options, once bool) retry {
	return retry{
		left: left, bound: min(o.Absent, left/2), once: once,
		slow: min(o.HedgeAfter, max(left/4, neverSlow)), pause: firstPause, absentSince: -1,
	}
}

// started records the start of an attempt.
func (r *retry) started(now time.Duration) {
	r.pending++
	r.sent++
	r.due = now + r.slow
}

// late records a late answer. allowed reports whether the budget permits a hedged request.
func (r *retry) late(now time.Duration, allowed bool) {
	r.due = now + r.slow
	if allowed {
		r.due, r.slow, r.why = now, 2*r.slow, AgainSlow
	}
}

// failed records a failed attempt. A lost connection fails all attempts.
func (r *retry) failed(now time.Duration, why string) {
	switch r.pending--; why {
	case AgainLost:
		r.pending = 0
	case AgainAbsent:
		r.undelivered++
	}
	switch {
	case why == AgainLost:
		r.absentSince = -1
	case r.absentSince < 0:
		r.absentSince = now
	}
	if r.pending <= 0 {
		r.pending, r.why = 0, why
		r.due = now + r.pause
		r.pause = min(2*r.pause, longPause)
	}
}

// over reports whether the request has failed: further retries are forbidden, or past the limit of r.bound. A retry
// that was due within the limit takes place, even if a busy machine wakes the caller later.
func (r *retry) over(now time.Duration) bool {
	if r.pending > 0 {
		return false
	}
	return r.once && r.sent > r.undelivered || r.absentSince >= 0 && min(now, r.due)-r.absentSince >= r.bound
}
