package shim

import "context"

// size returns the approximate memory of a frame in bytes.
func (f *Frame) size() int {
	n := len(f.Payload)
	if f.Read != nil {
		for i := range f.Read.Events {
			n += f.Read.Events[i].EncodedSize() + entrySize
		}
	}
	return n
}

// largeMessage is the size from which a channel of messages contains only a single message.
const largeMessage = 64 << 10

// pace prevents large messages from accumulating in a channel. After a large message the sender waits for the receiver.
type pace struct {
	next chan struct{}
	owed bool // the receiver has received a large message, and the sender waits
}

func newPace() pace { return pace{next: make(chan struct{})} }

// sent waits after a large message until the receiver is ready for the next. It returns false if ctx ends first.
func (p *pace) sent(ctx context.Context, size int) bool {
	if size < largeMessage {
		return true
	}
	select {
	case p.next <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// received records the size of a received message.
func (p *pace) received(size int) { p.owed = p.owed || size >= largeMessage }

// due returns the channel to receive from to let the sender go on; nil while the sender does not wait.
func (p *pace) due() <-chan struct{} {
	if !p.owed {
		return nil
	}
	return p.next
}
