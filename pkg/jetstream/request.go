package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// Reply is the answer to a request.
type Reply struct {
	ContentType string
	Body        []byte
}

// ServiceError is an answer that says that a request failed. The body, if any, is in [Reply.Body] as for a success.
type ServiceError = rpc.ServiceError

// Request asks once and waits for one answer until the context ends; a context without a deadline gets 5 s. The
// remaining time travels with the request, so that nobody works on what nobody waits for.
//
// Errors: [*ServiceError] if the service says so (the reply is given too), [ErrNoResponder] at once if nobody serves
// the subject, [ErrTimeout] if the deadline passed, [ErrUnavailable] without a connection, [ErrTooLarge], [ErrDenied].
func (c *Conn) Request(ctx context.Context, subject, contentType string, body []byte) (Reply, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		deadline, _ = ctx.Deadline()
	}
	action := "request " + subject
	left := time.Until(deadline)
	if left < time.Millisecond {
		return Reply{}, fmt.Errorf("%s: %w", action, ErrTimeout)
	}
	m := message(subject, contentType, body)
	m.Header[headerDeadline] = []string{strconv.FormatInt(left.Milliseconds(), 10)}
	var reply *nats.Msg
	err := c.tryFor(ctx, left, subject, func(ctx context.Context) (err error) {
		reply, err = c.nc.RequestMsgWithContext(ctx, m)
		return err
	})
	switch {
	case err == nil:
	case errors.Is(err, nats.ErrNoResponders):
		return Reply{}, fmt.Errorf("%s: %w", action, ErrNoResponder)
	case errors.Is(err, errAttemptOver), errors.Is(err, context.DeadlineExceeded):
		return Reply{}, fmt.Errorf("%s: %w", action, ErrTimeout)
	default:
		return Reply{}, failed(action, err)
	}
	answer := rpc.ReadReply(reply, contentType)
	if answer.Err != nil {
		answer.Err = fmt.Errorf("%s: %w", action, answer.Err)
	}
	return Reply{answer.ContentType, answer.Body}, answer.Err
}

// Send publishes a message that nobody answers and that may be lost: a hint. Whatever must arrive goes through
// a [Publisher] or a request.
func (c *Conn) Send(subject, contentType string, body []byte) error {
	return failed("send to "+subject, c.nc.PublishMsg(message(subject, contentType, body)))
}

// Forward sends a request whose reply goes to another subject, where somebody waits for it: the sender hears nothing of
// it. patience travels with it, and so does the header of its trace, unless that is empty.
func (c *Conn) Forward(
	subject, contentType string, patience time.Duration, trace, reply string, body []byte,
) error {
	m := message(subject, contentType, body)
	m.Reply = reply
	m.Header[headerDeadline] = []string{strconv.FormatInt(max(patience.Milliseconds(), 1), 10)}
	if trace != "" {
		m.Header[headerTrace] = []string{trace}
	}
	return failed("forward to "+subject, c.nc.PublishMsg(m))
}

// MayForward reports whether a NATS server lets a client send a request whose reply goes to this subject. It does not
// if the request came from another account or cluster.
func MayForward(reply string) bool {
	for _, reserved := range []string{"_R_.", "_GR_.", "$GR.", "$JS.ACK."} {
		if strings.HasPrefix(reply, reserved) {
			return false
		}
	}
	return reply != ""
}

// message is a message with a content type, if that is not empty.
func message(subject, contentType string, body []byte) *nats.Msg {
	m := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	if contentType != "" {
		m.Header[headerContentType] = []string{contentType}
	}
	return m
}

// Gather asks everybody who serves a subject without a queue group, and returns what was answered within the wait; it
// returns at once if nobody serves it. Answers that are errors are left out. How many should answer nobody knows: who
// does not do so in time is not missed.
func (c *Conn) Gather(ctx context.Context, wait time.Duration, subject, contentType string, body []byte) ([]Reply,
	error) {
	var replies []Reply
	err := c.collect(ctx, wait, message(subject, contentType, body), func(a *nats.Msg) (bool, error) {
		switch r := rpc.ReadReply(a, contentType); {
		case errors.Is(r.Err, ErrNoResponder):
			return false, nats.ErrNoResponders
		case r.Err == nil:
			replies = append(replies, Reply{ContentType: r.ContentType, Body: r.Body})
		}
		return false, nil
	})
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errAttemptOver) {
		return replies, nil
	}
	return replies, failed("gather "+subject, err)
}

// collect sends a message and hands each answer to receive, until that reports the last one, or an error, or the time
// is over.
func (c *Conn) collect(ctx context.Context, wait time.Duration, m *nats.Msg,
	receive func(*nats.Msg) (last bool, err error)) error {
	m.Reply = c.nc.NewInbox()
	answers := make(chan *nats.Msg, 1100)
	sub, err := c.nc.ChanSubscribe(m.Reply, answers)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only without a connection, and then nothing comes
	return c.tryFor(ctx, wait, m.Subject, func(ctx context.Context) error {
		if err := c.nc.PublishMsg(m); err != nil {
			return err
		}
		for {
			select {
			case a := <-answers:
				if last, err := receive(a); last || err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}

// Store is how many bytes all streams and buckets of this account take on the servers, and may take (0: the account has
// no bound of its own).
func (c *Conn) Store(ctx context.Context) (used, limit int64, err error) {
	var a struct {
		Storage int64 `json:"storage"`
		Limits  struct {
			MaxStorage int64 `json:"max_storage"`
		} `json:"limits"`
	}
	if err := c.call(ctx, "ask for the account's storage", "INFO", nil, &a); err != nil {
		return 0, 0, err
	}
	return a.Storage, max(a.Limits.MaxStorage, 0), nil
}
