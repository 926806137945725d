package shim

import (
	"encoding/binary"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Relay decides which events of a shared store's master to forward, and when the stream is proven complete. It is
// stepped: a single goroutine calls it, and sends the results in order.
//
// The master's socket has no replay: missed events are lost, and a new session begins. Numbers show missing batches.
// Missing batches at the end show in the master's count of published batches over HTTP.
type Relay struct {
	NewSession func() uint64 // chooses the number of a session, at random

	session uint64 // 0: none has begun
	number  uint64 // of the last batch
	asking  bool   // a request for counts was sent in this session
	behind  bool   // at the last reply, published batches had not arrived
}

// Lost ends the session: the connection to the master has begun or ended, or a message cannot be forwarded.
func (r *Relay) Lost() []sharedstore.Message {
	if r.session == 0 {
		return nil
	}
	lost := sharedstore.Message{Kind: sharedstore.Lost, Session: r.session}
	*r = Relay{NewSession: r.NewSession}
	return []sharedstore.Message{lost}
}

// Batch processes a message of the master: an empty topic, a number of eight bytes, and the events. An error is the
// reason against forwarding.
func (r *Relay) Batch(frames [][]byte) (out []sharedstore.Message, err error) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return r.Lost(),
			fmt.Errorf("%w: a message of a store's master has 3 frames with a number of 8 bytes; this message has %d frames",
				events.ErrMalformed, len(frames))
	}
	number := binary.BigEndian.Uint64(frames[1])
	if number > 1<<63 {
		return r.Lost(), fmt.Errorf("%w: a batch of number %d", events.ErrMalformed, number)
	}
	if r.session != 0 && number != r.number+1 {
		err = fmt.Errorf("batches from %d to %d are missing", r.number+1, number-1)
		if number <= r.number {
			err = fmt.Errorf("batch %d came after batch %d", number, r.number)
		}
		out = r.Lost()
	}
	if r.session == 0 {
		r.session = max(1, r.NewSession())
	}
	r.number = number
	return append(out, sharedstore.Message{Kind: sharedstore.Batch, Session: r.session, Number: number,
		Payload: frames[2]}), err
}

// Ask records a request for the master's counts.
func (r *Relay) Ask() { r.asking = r.session != 0 }

// Checked processes the master's counts of published batches and dropped events. Dropped events use numbers too: a
// number for each event without room, fewer for events in an unsent batch. So no batch has a number beyond the sum. If
// the last number is smaller, no conclusion is possible. An error reports missing batches.
func (r *Relay) Checked(batches, dropped uint64) ([]sharedstore.Message, error) {
	if !r.asking { // the session of the request has ended
		return nil, nil
	}
	r.asking = false
	if batches+dropped > r.number {
		if !r.behind { // the batch may be in transit
			r.behind = true
			return nil, nil
		}
		return r.Lost(), fmt.Errorf(
			"the master has published %d batches and dropped %d events, and the last received batch is number %d",
			batches, dropped, r.number)
	}
	r.behind = false
	return []sharedstore.Message{{Kind: sharedstore.Alive, Session: r.session, Number: r.number}}, nil
}
