package zmtp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Kind is what a [Message] of a [Sub] is.
type Kind uint8

const (
	Data   Kind = iota // frames from a publisher
	Opened             // a connection begins: what was published before is not to be had here
	Closed             // a connection has ended, for the reason in Err
)

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

var kindNames = [...]string{"data", "opened", "closed"}

// Message is what a [Sub] yields: the frames of one message, or the beginning or end of a connection.
type Message struct {
	Kind   Kind
	Peer   *Peer // whose; the same for all messages of one connection. Read only
	Frames [][]byte
	Err    error // of Closed
}

// Sub hears publishers. Recv is meant for one goroutine; with several, the order between them is lost.
type Sub struct {
	socket
	topics []string
	in     *Inbox
	accept func(*Peer) Handler // of a new connection
	now    chan struct{}       // DialNow was called
}

// Handler handles the messages of one connection, in order, from the goroutine that reads the connection. The
// connection is not read until Handler returns. An error ends the connection. ctx is done when the socket stops.
type Handler func(ctx context.Context, m Message) error

// maxTopic bounds a topic; it must fit into a command.
const maxTopic = maxCommand - 32

// DialSub makes a Sub that keeps one connection to the publisher at endpoint, which need not be there yet, until ctx
// ends or Stop is called. It subscribes to what begins with one of topics; "" is everything. The error is about
// endpoint or cfg; what becomes of connecting is told by hooks.
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

// ListenSub makes a Sub to which any number of publishers dial in, until ctx ends or Stop is called. Message.Peer tells
// them apart.
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

// ListenEach makes a Sub like [ListenSub] whose connections do not share a queue: accept returns the handler of a new
// connection, which receives Opened, the data, and Closed. A slow handler holds back its own publisher alone. Recv
// returns nothing before the end.
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
		return nil, errors.New("zmtp: a SUB without topics hears nothing; \"\" is every topic")
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

// closeAtEnd makes Recv return once the socket's context has ended.
func (s *Sub) closeAtEnd() {
	<-s.ctx.Done()
	s.in.close(stopCause(s.ctx))
}

// bound is the longest pause after an attempt to connect: err is why no connection was made, or nil if one was.
func (c *Config) bound(err error) time.Duration {
	if err == nil || Refuses(err) {
		return c.BackoffReachable
	}
	return c.BackoffMax
}

// DialNow ends the pause before the next attempt to connect: somebody has reason to think that the publisher is back.
// It does nothing while there is a connection, but the pause after it may be left out.
func (s *Sub) DialNow() { loop.Wake(s.now) }

func (s *Sub) serve(c *Conn) {
	peer := c.peer
	if err := c.TrySend(s.subscriptions(&peer)); err != nil {
		c.End(err)
	}
	s.cfg.Hooks.Connected(peer)
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
	// Where it fails, the socket is at its end and Recv says so.
	_ = handle(s.ctx, Message{Kind: Closed, Peer: &peer, Err: cause})
}

// subscriptions asks for our topics in the peer's form: a command since 3.1, before that a message of 1 and the topic.
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

// Recv waits for the next message. Its errors are ctx's, or [ErrStopped] after all that was received before the end has
// been taken.
func (s *Sub) Recv(ctx context.Context) (Message, error) { return s.in.Recv(ctx) }

// Ready has an element after a message was received, and at the end: then TryRecv is to be called.
func (s *Sub) Ready() <-chan struct{} { return s.in.Ready() }

// TryRecv is [Inbox.TryRecv] of what was received.
func (s *Sub) TryRecv() (m Message, ok bool, err error) { return s.in.TryRecv() }

// Queued is how many messages wait for Recv.
func (s *Sub) Queued() int { return s.in.length() }

// Inbox is a queue of messages, bounded in messages and bytes. Any goroutine may use it.
type Inbox struct{ *queue[Message] }

// NewInbox makes an empty inbox. One message always fits into it.
func NewInbox(maxMessages, maxBytes int) *Inbox {
	return &Inbox{newQueue[Message](maxMessages, maxBytes)}
}

// Put appends a message. It waits while there is no room, and after a message as large as the whole inbox until there
// is room again. The error is ctx's, or [ErrStopped] after Close.
func (b *Inbox) Put(ctx context.Context, m Message) error { return b.receive(ctx, m, size(m.Frames)) }

// Recv waits for the next message. The error is ctx's, or [ErrStopped] after Close when the inbox is empty.
func (b *Inbox) Recv(ctx context.Context) (Message, error) { return b.get(ctx) }

// Ready has an element after a message was put, and at the end: then TryRecv is to be called.
func (b *Inbox) Ready() <-chan struct{} { return b.ready }

// TryRecv takes the next message. ok is false if none waits. The error is [ErrStopped] after Close when the inbox is
// empty.
func (b *Inbox) TryRecv() (m Message, ok bool, err error) { return b.tryGet() }

// Close lets no more messages in.
func (b *Inbox) Close() { b.close(ErrStopped) }

// perFrame is what a frame costs beside its bytes, so that empty ones are not free.
const perFrame = 64

func size(frames [][]byte) int {
	n := perFrame * len(frames)
	for _, f := range frames {
		n += len(f)
	}
	return n
}

// ignoreCommand passes over commands that do not concern us, as RFC 37 asks.
func ignoreCommand(string, []byte) error { return nil }
