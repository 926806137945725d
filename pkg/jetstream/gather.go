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
	action := "gather " + subject
	inbox := c.nc.NewInbox()
	answers := make(chan *nats.Msg, 1024)
	sub, err := c.nc.ChanSubscribe(inbox, answers)
	if err != nil {
		return nil, failed(action, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only without a connection, and then nothing comes
	m := &nats.Msg{Subject: subject, Reply: inbox, Data: body}
	if contentType != "" {
		m.Header = nats.Header{headerContentType: []string{contentType}}
	}
	var replies []Reply
	err = c.tryFor(ctx, wait, subject, func(ctx context.Context) error {
		if err := c.nc.PublishMsg(m); err != nil {
			return err
		}
		for {
			select {
			case a := <-answers:
				switch r := rpc.ReadReply(a); {
				case errors.Is(r.Err, ErrNoResponder):
					return nats.ErrNoResponders
				case r.Err == nil:
					replies = append(replies, Reply{ContentType: r.ContentType, Body: r.Body})
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errAttemptOver) {
		return replies, nil
	}
	return replies, failed(action, err)
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
