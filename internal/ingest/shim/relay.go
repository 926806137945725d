package shim

import (
	"encoding/binary"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Relay decides what to pass on of the events of a shared store's master, and when it may be said that nothing of them
// was missed. It is stepped: one goroutine calls it, and sends what its methods return, in order.
//
// The master's socket has no replay: what is missed is lost, and a new session begins. Missing batches show in the
// numbers; those after which none came show in the count of published batches that the master gives over HTTP.
type Relay struct {
	NewSession func() uint64 // chooses the number of a session, at random

	session uint64 // 0: none has begun
	number  uint64 // of the last batch
	asking  bool   // the master was asked in this session
	behind  bool   // when it answered last, it had published what had not come
}

// Lost ends the session: the connection to the master has begun or ended, or what came cannot be passed on.
func (r *Relay) Lost() []events.StoreMessage {
	if r.session == 0 {
		return nil
	}
	lost := events.StoreMessage{Kind: events.StoreLost, Session: r.session}
	*r = Relay{NewSession: r.NewSession}
	return []events.StoreMessage{lost}
}

// Batch takes a message of the master: an empty topic, its number in eight bytes, and the events. An error says why it
// cannot be passed on.
func (r *Relay) Batch(frames [][]byte) (out []events.StoreMessage, err error) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return r.Lost(),
			fmt.Errorf("%w: a message of a store's master has 3 frames and 8 bytes of number; this has %d frames",
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
	return append(out, events.StoreMessage{Kind: events.StoreBatch, Session: r.session, Number: number,
		Payload: frames[2]}), err
}

// Ask says that the master is asked for its counts now.
func (r *Relay) Ask() { r.asking = r.session != 0 }

// Checked takes what the master answered: how many batches it has published, and how many events it has dropped.
// Dropped events take numbers too, one each if there was no room for them, fewer if they were in a batch that could not
// be sent; so no batch has a number beyond the sum. Where the last one's is smaller nothing can be said. An error says
// that something is missing.
func (r *Relay) Checked(batches, dropped uint64) ([]events.StoreMessage, error) {
	if !r.asking { // the session that was asked about is over
		return nil, nil
	}
	r.asking = false
	if batches+dropped > r.number {
		if !r.behind { // it may be on its way
			r.behind = true
			return nil, nil
		}
		return r.Lost(), fmt.Errorf(
			"the master has published %d batches and dropped %d events, and the last batch that came is number %d",
			batches, dropped, r.number)
	}
	r.behind = false
	return []events.StoreMessage{{Kind: events.StoreAlive, Session: r.session, Number: r.number}}, nil
}
