package shim

import "context"

// size is about how many bytes of memory a frame takes.
func (f *Frame) size() int {
	n := len(f.Payload)
	if f.Read != nil {
		for i := range f.Read.Events {
			n += f.Read.Events[i].EncodedSize() + entrySize
		}
	}
	return n
}

// largeMessage is the size from which on only one message waits in a channel of messages.
const largeMessage = 64 << 10

// pace keeps large messages from piling up in a channel. After a large message the sender waits until the receiver is
// done with it.
type pace struct {
	next chan struct{}
	owed bool // the receiver has received a large message, and the sender waits
}

func newPace() pace { return pace{next: make(chan struct{})} }

// sent waits, if the message that was sent is large, until the receiver wants the next one. It returns false if ctx
// ends first.
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

// received notes the size of what was received.
func (p *pace) received(size int) { p.owed = p.owed || size >= largeMessage }

// due returns the channel to receive from to let the sender go on; nil while the sender does not wait.
func (p *pace) due() <-chan struct{} {
	if !p.owed {
		return nil
	}
	return p.next
}
