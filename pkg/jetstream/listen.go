package jetstream

import (
	"context"

	"github.com/nats-io/nats.go"
)

// Listen calls heard with each message on a subject, one at a time, until ctx ends; it then returns ctx's error. While
// heard works messages wait in memory, up to the client's bounds of 64 MiB; beyond, they are dropped and
// ConnHooks.AsyncError is told. What is published while there is no connection is not heard.
func (c *Conn) Listen(ctx context.Context, subject string, heard func(data []byte)) error {
	next := make(chan []byte)
	sub, err := c.nc.Subscribe(subject, func(m *nats.Msg) {
		select {
		case next <- m.Data:
		case <-ctx.Done():
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // where the connection is closed, which ends it too
	for {
		select {
		case data := <-next:
			heard(data)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
