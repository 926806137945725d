package zmtp

import (
	"context"
	"fmt"
	"slices"
)

// Dealer sends requests to a router and receives the replies. A Dealer ends with its connection: replies that were
// pending on a broken connection never arrive, so the caller dials again and repeats the request.
type Dealer struct {
	socket
	conn *Conn
	in   *queue[[][]byte]
}

// DialDealer connects and performs the handshake before it returns. ctx bounds only these two steps.
func DialDealer(ctx context.Context, endpoint string, cfg Config) (*Dealer, error) {
	d := &Dealer{}
	cfg.Identity = slices.Clone(cfg.Identity)
	if err := d.init(context.WithoutCancel(ctx), "DEALER", endpoint, cfg); err != nil {
		return nil, err
	}
	if err := d.dial(ctx); err != nil {
		d.cancel(err)
		return nil, fmt.Errorf("zmtp: dial %s: %w", endpoint, err)
	}
	d.in = newQueue[[][]byte](d.cfg.RecvQueue, d.cfg.RecvBytes)
	context.AfterFunc(d.ctx, func() { d.conn.End(ErrStopped) })
	d.wg.Go(d.serve)
	return d, nil
}

func (d *Dealer) dial(ctx context.Context) error {
	if err := d.ep.dialable(); err != nil {
		return err
	}
	nc, err := d.ep.dial(ctx, d.cfg.ConnectTimeout, d.cfg.Rule)
	if err != nil {
		return err
	}
	c, _, err := newConn(ctx, nc, &d.cfg, d.ep, d.kind)
	if err != nil {
		return err
	}
	c.peer.Conn = 1
	d.conn = c
	return nil
}

func (d *Dealer) serve() {
	cause := d.conn.Run(func(frames [][]byte) error {
		if err := d.in.receive(d.ctx, frames, size(frames)); err != nil {
			return ErrStopped
		}
		return nil
	}, ignoreCommand)
	d.in.close(fmt.Errorf("zmtp: connection to %s has ended: %w", d.conn.peer, cause))
	d.cfg.Disconnected(d.conn.peer, cause)
	d.cancel(cause)
}

// Send queues one message and waits while the queue is full. A queued message is not yet delivered.
func (d *Dealer) Send(ctx context.Context, frames ...[]byte) error {
	return d.conn.Send(ctx, Encode(frames))
}

// Recv waits for the next message. After the connection's end it returns the remaining messages, then the reason; see
// [Config].Disconnected.
func (d *Dealer) Recv(ctx context.Context) ([][]byte, error) { return d.in.get(ctx) }
