package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// How a question is asked again.
const (
	// without an answer, or a quarter of the time; after that twice as long, and so on
	askSlow  = 250 * time.Millisecond
	askSoon  = 10 * time.Millisecond  // no answer is late before
	askPause = 20 * time.Millisecond  // after the first failure, doubled with each further one
	askRest  = 250 * time.Millisecond // the longest pause

	// Of all questions of a connection a tenth may be asked again because the answer is late, and so many at once after
	// a time without.
	askBurst  = 100
	askBudget = 10 // questions for one of those
)

// Why a question was asked again.
const (
	AgainLost    = "lost"    // the connection was, or there is none yet
	AgainAbsent  = "absent"  // nobody served the subject at that moment
	AgainRefused = "refused" // an instance said that it cannot answer now (503): it is being stopped, or not ready
	AgainSlow    = "slow"    // no answer yet: another instance is asked too
)

// question is a question under way: it says when it is to be sent, and when it has failed. It is stepped; times are
// since it began. One goroutine owns it.
//
// Invariants:
//  1. While no request may be answered any more, at is when the next is sent.
//  2. While one may, at is when another is sent beside it, each time after twice as long.
type question struct {
	left  time.Duration // until nobody waits for the answer
	bound time.Duration // how long it is asked while nobody can answer

	out    int // requests that may still be answered
	sent   int // requests, in all
	at     time.Duration
	slow   time.Duration // after which the answer to the next request is late
	pause  time.Duration // after the next failure
	why    string        // it was asked last; empty: it was the first time
	absent time.Duration // since when nobody can answer; negative: somebody may
}

func newQuestion(left, absent time.Duration) question {
	return question{left: left, bound: min(absent, left/2), slow: min(askSlow, max(left/4, askSoon)), pause: askPause,
		absent: -1}
}

// sends tells that a request is sent.
func (q *question) sends(now time.Duration) {
	q.out++
	q.sent++
	q.at = now + q.slow
}

// late tells that the answer is late, and whether it may be asked again.
func (q *question) late(now time.Duration, may bool) {
	q.at = now + q.slow
	if may {
		q.at, q.slow, q.why = now, 2*q.slow, AgainSlow
	}
}

// failed tells that a request will not be answered; none will, if the connection is lost.
func (q *question) failed(now time.Duration, why string) {
	if q.out--; why == AgainLost {
		q.out = 0
	}
	switch {
	case why == AgainLost:
		q.absent = -1
	case q.absent < 0:
		q.absent = now
	}
	if q.out <= 0 {
		q.out, q.why = 0, why
		q.at = now + q.pause
		q.pause = min(2*q.pause, askRest)
	}
}

// nobody reports whether nobody could answer for so long that nobody will.
func (q *question) nobody(now time.Duration) bool {
	return q.out == 0 && q.absent >= 0 && now-q.absent >= q.bound
}

// ask is where the answers to one question arrive.
type ask struct {
	news  chan news
	timer *time.Timer
}

type news struct {
	reply Reply
	err   error // ErrNoResponder, a *ServiceError, or why the attempt ended
	ended bool  // the attempt, not by an answer
}

var asks = sync.Pool{New: func() any {
	a := &ask{news: make(chan news, 16), timer: time.NewTimer(time.Hour)}
	a.timer.Stop()
	return a
}}

// put never waits. There is room for all the answers that are due; what finds none is one failure more.
func (a *ask) put(n news) {
	select {
	case a.news <- n:
	default:
	}
}

// Ask is [Conn.Request] for what may be asked more than once. It asks again as long as there is time when the
// connection is lost or not there yet; for [ConnOptions.Absent], or half of the time, when nobody serves the subject or
// an instance says that it cannot answer now (code 503): then that is the error; and when there is no answer after 250
// ms, or a quarter of the time, and after twice as long again, and so on: then another instance may be asked beside the
// first, which is done for a tenth of all questions of a connection. The first answer counts. [ConnHooks.AskedAgain] is
// told each time.
func (c *Conn) Ask(ctx context.Context, subject, contentType string, body []byte) (Reply, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(5 * time.Second)
	}
	begun := time.Now()
	q := newQuestion(deadline.Sub(begun), c.absent)
	if q.left < time.Millisecond {
		return Reply{}, fmt.Errorf("ask %s: %w", subject, ErrTimeout)
	}
	a := asks.Get().(*ask)
	id, box, err := c.beginAsk(subject, a)
	defer c.endAsk(id, a)
	if err != nil {
		return Reply{}, err
	}
	var last news // that says why nobody answers
	for {
		now := time.Since(begun)
		switch {
		case now >= q.left:
			return q.over(subject, last)
		case q.nobody(now):
			return last.reply, fmt.Errorf("ask %s: %w", subject, last.err)
		case now >= q.at:
			if q.out > 0 {
				may := c.spendAsk()
				if q.late(now, may); !may {
					continue
				}
			}
			if q.sent > 0 && c.hooks.AskedAgain != nil {
				c.hooks.AskedAgain(q.why)
			}
			q.sends(now)
			if err := box.Send(id, subject, contentType, q.left-now, body); err != nil {
				if classOf(err) != ErrUnavailable || c.nc.IsClosed() {
					return Reply{}, err
				}
				q.failed(now, AgainLost)
			}
			continue
		}
		a.timer.Reset(min(q.at, q.left) - now)
		select {
		case n := <-a.news:
			now = time.Since(begun)
			var refused *ServiceError
			switch {
			case n.ended && errors.Is(n.err, errDisconnected):
				q.failed(now, AgainLost)
			case n.ended:
				return Reply{}, failed("ask "+subject, n.err)
			case errors.Is(n.err, ErrNoResponder):
				last = n
				q.failed(now, AgainAbsent)
			case errors.As(n.err, &refused) && refused.Code == CodeStopping:
				last = n
				q.failed(now, AgainRefused)
			case n.err != nil:
				return n.reply, fmt.Errorf("ask %s: %w", subject, n.err)
			default:
				return n.reply, nil
			}
		case <-a.timer.C:
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return Reply{}, failed("ask "+subject, ctx.Err())
			}
			return q.over(subject, last)
		}
	}
}

// over is what becomes of a question whose time has passed.
func (q *question) over(subject string, last news) (Reply, error) {
	switch {
	case q.out > 0 || q.why == "":
		return Reply{}, fmt.Errorf("ask %s, %d times: %w", subject, q.sent, ErrTimeout)
	case q.why == AgainLost:
		return Reply{}, fmt.Errorf("ask %s, %d times: %w: %w", subject, q.sent, ErrUnavailable, errDisconnected)
	}
	return last.reply, fmt.Errorf("ask %s, %d times: %w", subject, q.sent, last.err)
}

// beginAsk makes answers to a question's id arrive.
func (c *Conn) beginAsk(subject string, a *ask) (id uint64, box *Outbox, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked == nil {
		box, err := c.OpenOutbox(c.takeAnswer)
		if err != nil {
			return 0, nil, err
		}
		c.asked = box
	}
	if c.noInbox != nil {
		return 0, nil, failed("ask "+subject, c.noInbox)
	}
	c.lastAsk++
	c.spareAsks = min(c.spareAsks+1, askBurst*askBudget)
	c.asking[c.lastAsk] = asked{a, &waiter{subject: subject,
		cancel: func(err error) { a.put(news{err: err, ended: true}) }}}
	c.waiting[c.asking[c.lastAsk].waiter] = struct{}{}
	return c.lastAsk, c.asked, nil
}

// asked is a question under way.
type asked struct {
	ask    *ask
	waiter *waiter
}

// takeAnswer is told of each answer.
func (c *Conn) takeAnswer(id uint64, r Reply, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a, waits := c.asking[id]; waits {
		a.ask.put(news{reply: r, err: err})
	}
}

// endAsk lets go of a question: what comes later is not told.
func (c *Conn) endAsk(id uint64, a *ask) {
	c.mu.Lock()
	delete(c.waiting, c.asking[id].waiter)
	delete(c.asking, id)
	c.mu.Unlock()
	a.timer.Stop()
	for len(a.news) > 0 {
		<-a.news
	}
	asks.Put(a)
}

// spendAsk takes from the budget what it takes to ask again before there is an answer.
func (c *Conn) spendAsk() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.spareAsks < askBudget {
		return false
	}
	c.spareAsks -= askBudget
	return true
}
