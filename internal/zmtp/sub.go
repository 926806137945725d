package zmtp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/loop"
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
	in     *queue[Message]
	now    chan struct{} // DialNow was called
}

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
	s.wg.Go(func() { s.keepDialling() })
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
	s.in = newQueue[Message](s.cfg.RecvQueue, s.cfg.RecvBytes)
	return s, nil
}

// closeAtEnd makes Recv return once the socket's context has ended.
func (s *Sub) closeAtEnd() {
	<-s.ctx.Done()
	s.in.close(stopCause(s.ctx))
}

func (s *Sub) keepDialling() {
	pause := backoff{min: s.cfg.BackoffMin, max: s.cfg.BackoffMax, now: s.now}
	for {
		nc, err := s.ep.dial(s.ctx, s.cfg.ConnectTimeout, s.cfg.Rule)
		if err == nil {
			began := time.Now()
			if s.shakeAndServe(nc, false, s.serve) == nil && time.Since(began) >= s.cfg.BackoffMax {
				pause.reset()
			}
		} else if s.ctx.Err() == nil {
			s.cfg.Hooks.Failed(Peer{Endpoint: s.ep.text}, err)
		}
		if !pause.wait(s.ctx, pause.pause(s.cfg.bound(err))) {
			return
		}
	}
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
	if err := s.in.put(s.ctx, Message{Kind: Opened, Peer: &peer}, 0); err != nil {
		c.End(ErrStopped)
	}
	cause := c.Run(func(frames [][]byte) error {
		if err := s.in.receive(s.ctx, Message{Peer: &peer, Frames: frames}, size(frames)); err != nil {
			return ErrStopped
		}
		return nil
	}, ignoreCommand)
	// Where the put fails, the socket is at its end and Recv says so.
	_ = s.in.put(s.ctx, Message{Kind: Closed, Peer: &peer, Err: cause}, 0)
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
func (s *Sub) Recv(ctx context.Context) (Message, error) { return s.in.get(ctx) }

// Queued is how many messages wait for Recv.
func (s *Sub) Queued() int { return s.in.length() }

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
