package jetstream

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// Gather asks everybody who serves a subject without a queue group, and returns what was answered within the wait; it
// returns at once if nobody serves it. Answers that are errors are left out. How many should answer nobody knows: who
// does not do so in time is not missed.
func (c *Conn) Gather(ctx context.Context, wait time.Duration, subject, contentType string, body []byte) ([]Reply,
	error) {
	var replies []Reply
	err := c.collect(ctx, wait, message(subject, contentType, body), func(a *nats.Msg) (bool, error) {
		switch r := rpc.ReadReply(a); {
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
