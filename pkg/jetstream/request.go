package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Reply is the answer to a request.
type Reply struct {
	ContentType string
	Body        []byte

	// From is the rank of the [Names.Answer] of the answer; nil: the answer came on an inbox. A NATS server keeps a
	// shim from using another rank's subject.
	From *events.RankKey
}

// ServiceError is an answer of a failed request. The body, if any, is in [Reply.Body] as for a success.
type ServiceError = rpc.ServiceError

// Request sends one request and waits for one answer until the context ends. A context without a deadline gets
// [ops.Deadline]. The request carries the remaining time, so the service stops with the caller.
//
// Errors: [*ServiceError] from the service (with the reply), [ErrNoResponder] at once without a service, [ErrTimeout]
// after the deadline, [ErrUnavailable] without a connection, [ErrTooLarge], [ErrDenied].
func (c *Conn) Request(ctx context.Context, subject, contentType string, body []byte) (Reply, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, ops.Deadline)
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
	return Reply{ContentType: answer.ContentType, Body: answer.Body}, answer.Err
}

// Send publishes a message without an answer that may be lost: a hint. Messages that must arrive use a [Publisher] or a
// request.
func (c *Conn) Send(subject, contentType string, body []byte) error {
	return failed("send to "+subject, c.nc.PublishMsg(message(subject, contentType, body)))
}

// Forward sends a request with a foreign reply subject. The sender gets no reply. The request carries patience, and the
// header of a trace unless trace is empty. The receiving service must have [ServiceConfig.Forwarded].
func (c *Conn) Forward(
	subject, contentType string, patience time.Duration, trace, reply string, body []byte,
) error {
	m := message(subject, contentType, body)
	if crossesAccounts(reply) {
		m.Header[headerReply] = []string{reply}
	} else {
		m.Reply = reply
	}
	m.Header[headerDeadline] = []string{strconv.FormatInt(max(patience.Milliseconds(), 1), 10)}
	if trace != "" {
		m.Header[headerTrace] = []string{trace}
	}
	return failed("forward to "+subject, c.nc.PublishMsg(m))
}

// message returns a message with a content type, unless it is empty.
func message(subject, contentType string, body []byte) *nats.Msg {
	m := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	if contentType != "" {
		m.Header[headerContentType] = []string{contentType}
	}
	return m
}

// gather sends a request to all services on a subject without a queue group, and returns their answers within the wait.
// It returns at once if there is no service. It omits errors. The number of services is unknown, so late answers are
// not detected. Answers may also arrive on the subject more, if it is not empty.
func (c *Conn) gather(ctx context.Context, wait time.Duration, m *nats.Msg, more string) ([]Reply, error) {
	var replies []Reply
	answered := map[events.RankKey]bool{}
	err := c.collect(ctx, wait, m, more, func(a *nats.Msg) (bool, error) {
		switch r := rpc.ReadReply(a, m.Header.Get(headerContentType)); {
		case errors.Is(r.Err, ErrNoResponder):
			return false, nats.ErrNoResponders
		case r.Err == nil:
			reply := Reply{ContentType: r.ContentType, Body: r.Body}
			if from, is := parseAnswerSubject(a.Subject); is {
				if answered[from] {
					break // only the first answer of each rank counts
				}
				answered[from], reply.From = true, &from
			}
			replies = append(replies, reply)
		}
		return false, nil
	})
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errAttemptOver) {
		return replies, nil
	}
	return replies, failed("gather "+m.Subject, err)
}

// AskShims sends a request to all shims of a partition and returns the answers within the wait. A shim in another
// account does not know the caller's inbox, so shims answer on their [Names.Answer].
func (n *Namespace) AskShims(
	ctx context.Context, wait time.Duration, p events.Partition, body []byte,
) ([]Reply, error) {
	m, id := shimRequest(n.name.Control(p), body)
	return n.c.gather(ctx, wait, m, n.name.AnswerPrefix()+decimal(uint64(p))+".*.*."+id)
}

// AskShim sends a request to the shim of one rank and returns its answer; see [Namespace.AskShims]. Errors are as in
// [Conn.Request].
func (n *Namespace) AskShim(ctx context.Context, wait time.Duration, key events.RankKey, body []byte) (Reply, error) {
	p, err := n.PartitionOf(key.Instance)
	if err != nil {
		return Reply{}, err
	}
	subject, err := n.name.ControlRank(p, key)
	if err != nil {
		return Reply{}, err
	}
	m, id := shimRequest(subject, body)
	answers, err := n.name.Answer(p, key, id)
	if err != nil {
		return Reply{}, err
	}
	var answer rpc.Reply
	err = n.c.collect(ctx, wait, m, answers, func(a *nats.Msg) (bool, error) {
		answer = rpc.ReadReply(a, ContentJSON)
		return true, answer.Err
	})
	_, refused := errors.AsType[*ServiceError](err)
	switch {
	case err == nil, refused, errors.Is(err, ErrNoResponder):
	case errors.Is(err, errAttemptOver), errors.Is(err, context.DeadlineExceeded):
		err = ErrTimeout
	default:
		return Reply{}, failed("request "+subject, err)
	}
	if err != nil {
		err = fmt.Errorf("request %s: %w", subject, err)
	}
	return Reply{ContentType: answer.ContentType, Body: answer.Body}, err
}

func shimRequest(subject string, body []byte) (m *nats.Msg, id string) {
	m, id = message(subject, ContentJSON, body), nuid.Next()
	m.Header[headerAnswer] = []string{id}
	return m, id
}

// collect sends a message and calls receive with each answer, until receive returns true or an error, or the time ends.
// Answers arrive on an inbox, and on the subject more unless it is empty.
func (c *Conn) collect(ctx context.Context, wait time.Duration, m *nats.Msg, more string,
	receive func(*nats.Msg) (last bool, err error)) error {
	m.Reply = c.nc.NewInbox()
	answers := make(chan *nats.Msg, 1100)
	for _, subject := range []string{m.Reply, more} {
		if subject == "" {
			continue
		}
		sub, err := c.nc.ChanSubscribe(subject, answers)
		if err != nil {
			return err
		}
		defer func() { _ = sub.Unsubscribe() }() // fails only without a connection, and then no answer arrives
	}
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

// Store returns the used bytes of all streams and buckets of this account on the servers, and the account's limit (0:
// no limit of its own).
func (c *Conn) Store(ctx context.Context) (used, limit int64, err error) {
	var a struct {
		Storage int64 `json:"storage"`
		Limits  struct {
			MaxStorage int64 `json:"max_storage"`
		} `json:"limits"`
	}
	if err := c.call(ctx, "read the account's storage", "INFO", nil, &a); err != nil {
		return 0, 0, err
	}
	return a.Storage, max(a.Limits.MaxStorage, 0), nil
}
