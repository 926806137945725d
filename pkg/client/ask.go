package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// transport sends the attempts of requests.
type transport interface {
	// send sends an attempt. The request receives the outcome. An error is an outcome too.
	send(ctx context.Context, r *request, patience time.Duration) (outcome, error)

	// end discards all attempts of a request.
	end(r *request)

	// refused returns an error if the NATS server forbids the request. No reply reports a denial.
	refused(r *request) error

	lost() <-chan struct{} // closed if no pending attempt gets a reply; nil if each attempt reports the loss
	budget() *rpc.Budget
	close()
}

// request is a request in flight. Transports keep their state in it.
type request struct {
	op    string
	about events.WorkerID // over HTTP: the worker in the path
	body  []byte

	outcomes chan outcome
	timer    *time.Timer

	// Over NATS.
	flights []uint64
	since   error  // the last error of the connection before the request
	absent  string // error text if no node serves the request

	// Over HTTP.
	attempt int
	cancel  context.CancelFunc // of all attempts
	ctx     context.Context
}

// outcome is the result of an attempt.
type outcome struct {
	reply []byte
	err   error  // set without a reply
	again string // reason for a retry; empty: the outcome of the request
}

var requests = sync.Pool{New: func() any {
	r := &request{outcomes: make(chan outcome, 16), timer: time.NewTimer(time.Hour)}
	r.timer.Stop()
	return r
}}

// put never blocks. The channel has room for all expected outcomes, and put drops further failures.
func (r *request) put(o outcome) {
	select {
	case r.outcomes <- o:
	default:
	}
}

// ask sends a request and retries it unless once is set. The package comment has the rules for retries.
func (c *Client) ask(
	ctx context.Context, op string, about events.WorkerID, body []byte, once bool,
) ([]byte, error) {
	if err := ctx.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("ask %s: %w", op, err)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(ops.Deadline)
	}
	begun := time.Now()
	try := newRetry(deadline.Sub(begun), &c.o, once)
	if try.left < time.Millisecond {
		return nil, failed(api.CodeUnavailable, context.DeadlineExceeded, "the deadline passed before the request %s", op)
	}
	r := requests.Get().(*request)
	r.op, r.about, r.body = op, about, body
	defer c.end(r)
	c.to.budget().Earn()
	var last outcome // the latest failure
	lost := c.to.lost()
	for {
		now := time.Since(begun)
		switch {
		case now >= try.left:
			return try.expired(op, last)
		case try.over(now):
			return last.reply, last.err
		case now >= try.due:
			if try.pending > 0 {
				if err := c.to.refused(r); err != nil {
					return nil, err
				}
				// every copy of a select may wait for a worker
				allowed := !try.once && op != ops.Select && c.to.budget().Spend()
				if try.late(now, allowed); !allowed {
					continue
				}
			}
			if try.sent > 0 {
				c.o.AskedAgain(try.why)
			}
			if try.pending == 0 {
				lost = c.to.lost()
			}
			try.started(now)
			o, err := c.to.send(ctx, r, try.left-now)
			if err != nil && o.again == "" {
				return nil, err
			} else if err != nil {
				last = outcome{err: err}
				try.failed(now, o.again)
			}
			continue
		}
		r.timer.Reset(min(try.due, try.left) - now)
		select {
		case o := <-r.outcomes:
			if o.again == "" {
				return o.reply, o.err
			}
			last = o
			try.failed(time.Since(begun), o.again)
		case <-lost:
			last = outcome{err: failed(api.CodeUnavailable, rpc.ErrDisconnected, "ask %s", op)}
			try.failed(time.Since(begun), AgainLost)
			lost = c.to.lost()
		case <-r.timer.C:
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, fmt.Errorf("ask %s: %w", op, ctx.Err())
			}
			return try.expired(op, last)
		}
	}
}

// expired returns the outcome of a request after the deadline.
func (r *retry) expired(op string, last outcome) ([]byte, error) {
	if r.pending > 0 || last.err == nil && last.reply == nil {
		return nil, failed(api.CodeUnavailable, context.DeadlineExceeded,
			"no answer to %s within the deadline, requests sent: %d", op, r.sent)
	}
	return last.reply, last.err
}

// end discards a request and drops later outcomes.
func (c *Client) end(r *request) {
	c.to.end(r)
	r.timer.Stop()
	if r.outcomes == nil {
		return
	}
	for len(r.outcomes) > 0 {
		<-r.outcomes
	}
	*r = request{outcomes: r.outcomes, timer: r.timer, flights: r.flights[:0]}
	requests.Put(r)
}
