package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// defaultDeadline is for requests whose context has none.
const defaultDeadline = 5 * time.Second

// transport carries the attempts of requests.
type transport interface {
	// send sends an attempt, whose outcome is put into the request. An error is an outcome too.
	send(ctx context.Context, r *request, patience time.Duration) (outcome, error)

	// end lets go of all attempts of a request.
	end(r *request)

	// refused returns an error if whoever carries requests does not let this one pass, which is not told by a reply.
	refused(r *request) error

	lost() <-chan struct{} // closed when all that is pending will not be answered; nil: that is told of each attempt
	budget() *rpc.Budget
	close()
}

// request is a request under way. Transports keep theirs in it.
type request struct {
	op    string
	about events.WorkerID // over HTTP, the worker that the path names
	body  []byte

	outcomes chan outcome
	timer    *time.Timer

	// Over NATS.
	flights []uint64
	since   error  // the connection's last error before it was sent
	absent  string // what is said if nobody serves

	// Over HTTP.
	attempt int
	cancel  context.CancelFunc // of all attempts
	ctx     context.Context
}

// outcome is what becomes of an attempt.
type outcome struct {
	reply []byte
	err   error  // if there is no reply
	again string // why it may be asked again; empty: this is the outcome of the request
}

var requests = sync.Pool{New: func() any {
	r := &request{outcomes: make(chan outcome, 16), timer: time.NewTimer(time.Hour)}
	r.timer.Stop()
	return r
}}

// put never waits. There is room for all the outcomes that are due; what finds none is one failure more.
func (r *request) put(o outcome) {
	select {
	case r.outcomes <- o:
	default:
	}
}

// asksOnce has the operations of which a second request is not as good as the first; OpSelect only if it books.
var asksOnce = map[string]bool{
	api.OpVerify: true, api.OpSnapshot: true, api.OpRegisterWorker: true, api.OpRemoveWorker: true,
	api.OpSelect: true, api.OpBook: true, api.OpOutputBlock: true, api.OpFree: true,
	api.OpReport: true,
}

// ask sends a request, and again as long as that may help, unless it is sent once. See the package comment.
func (c *Client) ask(
	ctx context.Context, op string, about events.WorkerID, body []byte, once bool,
) ([]byte, error) {
	if err := ctx.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("ask %s: %w", op, err)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultDeadline)
	}
	begun := time.Now()
	try := newRetry(deadline.Sub(begun), c.o.Absent, once)
	if try.left < time.Millisecond {
		return nil, failed(api.CodeUnavailable, context.DeadlineExceeded, "no time is left to ask %s", op)
	}
	r := requests.Get().(*request)
	r.op, r.about, r.body = op, about, body
	defer c.end(r)
	c.to.budget().Earn()
	var last outcome // that says why nobody answers
	lost := c.to.lost()
	for {
		now := time.Since(begun)
		switch {
		case now >= try.left:
			return try.expired(op, last)
		case try.over(now):
			return last.reply, last.err
		case now >= try.at:
			if try.pending > 0 {
				if err := c.to.refused(r); err != nil {
					return nil, err
				}
				allowed := !try.once && c.to.budget().Spend()
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
			try.sends(now)
			o, err := c.to.send(ctx, r, try.left-now)
			if err != nil && o.again == "" {
				return nil, err
			} else if err != nil {
				last = outcome{err: err}
				try.failed(now, o.again)
			}
			continue
		}
		r.timer.Reset(min(try.at, try.left) - now)
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

// expired is what becomes of a request whose time has passed.
func (r *retry) expired(op string, last outcome) ([]byte, error) {
	if r.pending > 0 || last.err == nil && last.reply == nil {
		return nil, failed(api.CodeUnavailable, context.DeadlineExceeded,
			"no answer in time to %s, requests sent: %d", op, r.sent)
	}
	return last.reply, last.err
}

// end lets go of a request: what comes later is told to nobody.
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
