package zmtp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Kind is the kind of a [Message].
type Kind uint8

const (
	Data   Kind = iota // frames from a publisher
	Opened             // a connection begins; earlier messages of the publisher are not available here
	Closed             // a connection has ended; Err is the reason
)

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

var kindNames = [...]string{"data", "opened", "closed"}

// Message is an item of a [Sub]: the frames of one message, or the beginning or end of a connection.
type Message struct {
	Kind   Kind
	Peer   *Peer // the sender; all messages of a connection share it. Read-only
	Frames [][]byte
	Err    error // of Closed
}

// Sub receives messages of publishers. Recv is meant for one goroutine; several goroutines lose the order.
type Sub struct {
	socket
	topics []string
	in     *Inbox
	accept func(*Peer) Handler // returns the handler of a new connection
	now    chan struct{}       // receives the calls of DialNow
}

// Handler handles the messages of one connection, in order, from the goroutine that reads the connection. The
// connection is not read until Handler returns. An error ends the connection. ctx is done when the socket stops.
type Handler func(ctx context.Context, m Message) error

// maxTopic bounds a topic. A topic must fit into a command.
const maxTopic = maxCommand - 32

// DialSub returns a Sub that keeps one connection to the publisher at endpoint until ctx ends or Stop is called. The
// publisher may start later. The Sub subscribes to messages that begin with a topic; "" matches every message. The
// error concerns endpoint or cfg; hooks report connection errors.
func DialSub(ctx context.Context, endpoint string, topics []string, cfg Config) (*Sub, error) {
	s, err := newSub(ctx, endpoint, topics, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.ep.dialable(); err != nil {
		s.cancel(err)
		return nil, err
	}
	s.wg.Go(func() { s.keepDialling(s.serve, s.now) })
	s.wg.Go(s.closeAtEnd)
	return s, nil
}

// ListenSub returns a Sub that accepts any number of publishers until ctx ends or Stop is called. Message.Peer
// identifies the publisher.
func ListenSub(ctx context.Context, endpoint string, topics []string, cfg Config) (*Sub, error) {
	s, err := newSub(ctx, endpoint, topics, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.listen(s.serve); err != nil {
		return nil, err
	}
	s.wg.Go(s.closeAtEnd)
	return s, nil
}

// ListenEach returns a Sub like [ListenSub], but with a handler for each connection instead of a shared queue. accept
// returns the handler of a new connection. The handler receives Opened, the data, and Closed. A slow handler delays
// only its own publisher. Recv blocks until the end of the socket.
func ListenEach(ctx context.Context, endpoint string, topics []string, cfg Config, accept func(*Peer) Handler) (*Sub,
	error) {
	s, err := newSub(ctx, endpoint, topics, cfg)
	if err != nil {
		return nil, err
	}
	s.accept = accept
	if err := s.listen(s.serve); err != nil {
		return nil, err
	}
	s.wg.Go(s.closeAtEnd)
	return s, nil
}

func newSub(ctx context.Context, endpoint string, topics []string, cfg Config) (*Sub, error) {
	if len(topics) == 0 {
		return nil, errors.New("zmtp: a SUB without topics receives nothing; \"\" is every topic")
	}
	for _, t := range topics {
		if len(t) > maxTopic {
			return nil, fmt.Errorf("zmtp: topic of %d bytes; at most %d", len(t), maxTopic)
		}
	}
	s := &Sub{topics: slices.Clone(topics), now: make(chan struct{}, 1)}
	if err := s.init(ctx, "SUB", endpoint, cfg); err != nil {
		return nil, err
	}
	s.in = NewInbox(s.cfg.RecvQueue, s.cfg.RecvBytes)
	s.accept = func(*Peer) Handler { return s.in.Put }
	return s, nil
}

// closeAtEnd closes the queue after the end of the socket's context, so Recv returns.
func (s *Sub) closeAtEnd() {
	<-s.ctx.Done()
	s.in.close(stopCause(s.ctx))
}

// bound returns the longest pause after an attempt to connect. err is nil if the attempt made a connection.
func (c *Config) bound(err error) time.Duration {
	if err == nil || Refuses(err) {
		return c.BackoffReachable
	}
	return c.BackoffMax
}

// DialNow ends the pause before the next attempt to connect, because the caller expects the publisher to be back.
// During a connection it has no effect, except that the pause after the connection may be skipped.
func (s *Sub) DialNow() { loop.Wake(s.now) }

func (s *Sub) serve(c *Conn) {
	peer := c.peer
	if err := c.TrySend(s.subscriptions(&peer)); err != nil {
		c.End(err)
	}
	handle := s.accept(&peer)
	if err := handle(s.ctx, Message{Kind: Opened, Peer: &peer}); err != nil {
		c.End(ErrStopped)
	}
	cause := c.Run(func(frames [][]byte) error {
		if err := handle(s.ctx, Message{Peer: &peer, Frames: frames}); err != nil {
			return ErrStopped
		}
		return nil
	}, ignoreCommand)
	// An error means that the socket has ended. Recv returns the reason.
	_ = handle(s.ctx, Message{Kind: Closed, Peer: &peer, Err: cause})
}

// subscriptions returns the subscriptions in the peer's form: a SUBSCRIBE command for 3.1, a message of byte 1 and the
// topic for 3.0.
func (s *Sub) subscriptions(p *Peer) []byte {
	var b []byte
	for _, t := range s.topics {
		if p.Minor >= 1 {
			b = appendCommand(b, "SUBSCRIBE", []byte(t))
		} else {
			b = appendFrame(b, 0, append([]byte{1}, t...))
		}
	}
	return b
}

// Recv waits for the next message. It returns the error of ctx, or [ErrStopped] after the last queued message of a
// stopped socket.
func (s *Sub) Recv(ctx context.Context) (Message, error) { return s.in.Recv(ctx) }

// Ready receives a value after a message has arrived, and at the end of the socket. Then the caller calls TryRecv.
func (s *Sub) Ready() <-chan struct{} { return s.in.Ready() }

// TryRecv returns the next received message, see [Inbox.TryRecv].
func (s *Sub) TryRecv() (m Message, ok bool, err error) { return s.in.TryRecv() }

// Queued returns the number of messages that wait for Recv.
func (s *Sub) Queued() int { return s.in.length() }

// Inbox is a queue of messages, bounded in messages and bytes. It is safe for concurrent use.
type Inbox struct{ *queue[Message] }

// NewInbox returns an empty inbox. An empty inbox accepts a message of any size.
func NewInbox(maxMessages, maxBytes int) *Inbox {
	return &Inbox{newQueue[Message](maxMessages, maxBytes)}
}

// Put appends a message. It waits for room, and after a message as large as the whole inbox until the inbox has room
// again. It returns the error of ctx, or [ErrStopped] after Close.
func (b *Inbox) Put(ctx context.Context, m Message) error { return b.receive(ctx, m, size(m.Frames)) }

// Recv waits for the next message. It returns the error of ctx, or [ErrStopped] if the inbox is closed and empty.
func (b *Inbox) Recv(ctx context.Context) (Message, error) { return b.get(ctx) }

// Ready receives a value after a message was put, and after Close. Then the caller calls TryRecv.
func (b *Inbox) Ready() <-chan struct{} { return b.ready }

// TryRecv returns the next message. ok is false for an empty inbox. The error is [ErrStopped] if the inbox is closed
// and empty.
func (b *Inbox) TryRecv() (m Message, ok bool, err error) { return b.tryGet() }

// Close rejects further messages.
func (b *Inbox) Close() { b.close(ErrStopped) }

// perFrame is the cost of a frame beside its bytes, so empty frames are not free.
const perFrame = 64

func size(frames [][]byte) int {
	n := perFrame * len(frames)
	for _, f := range frames {
		n += len(f)
	}
	return n
}

// ignoreCommand skips irrelevant commands, as RFC 37 requires.
func ignoreCommand(string, []byte) error { return nil }
