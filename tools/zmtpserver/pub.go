package zmtpserver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

const (
	// maxMessage is the maximum size of a subscriber's message.
	maxMessage = 64 << 10

	// maxTopicBytes limits the memory for the topics of a subscriber. A topic costs perTopic and its bytes.
	maxTopicBytes = 1 << 20
	perTopic      = 64
)

// Pub sends a message to the subscribers of the message's topic, which is a prefix of the first frame. Messages for a
// full subscriber queue are dropped and counted.
type Pub struct {
	*zmtp.Listener

	mu      sync.Mutex
	subs    map[*zmtp.Conn]*subscriber
	sent    uint64
	dropped uint64        // by ended subscribers
	changed chan struct{} // closed and replaced when a subscription came or went
}

// subscriber is a connection. Pub.mu guards it.
type subscriber struct {
	topics
	dropped uint64
}

// ListenPub opens a Pub at endpoint, until the end of ctx or a call of Stop.
func ListenPub(ctx context.Context, endpoint string, cfg zmtp.Config) (*Pub, error) {
	return open(ctx, zmtp.Listen, endpoint, cfg)
}

// DialPub opens a Pub that keeps a connection to a subscriber listening at endpoint.
func DialPub(ctx context.Context, endpoint string, cfg zmtp.Config) (*Pub, error) {
	return open(ctx, zmtp.Dial, endpoint, cfg)
}

func open(ctx context.Context, socket func(context.Context, string, string, zmtp.Config, func(*zmtp.Conn)) (
	*zmtp.Listener, error), endpoint string, cfg zmtp.Config) (*Pub, error) {
	p := &Pub{subs: make(map[*zmtp.Conn]*subscriber), changed: make(chan struct{})}
	cfg.MaxMessage = maxMessage
	var err error
	p.Listener, err = socket(ctx, "PUB", endpoint, cfg, p.serve)
	return p, err
}

func (p *Pub) serve(c *zmtp.Conn) {
	s := &subscriber{}
	p.mu.Lock()
	p.subs[c] = s
	p.mu.Unlock()
	c.Run(func(frames [][]byte) error {
		if f := frames[0]; len(frames) == 1 && len(f) > 0 && f[0] <= 1 { // as in 3.0
			return p.subscribe(s, f[0] == 1, string(f[1:]))
		}
		return nil // other upstream messages of an XSUB are ignored
	}, func(name string, data []byte) error {
		if name == "SUBSCRIBE" || name == "CANCEL" {
			return p.subscribe(s, name == "SUBSCRIBE", string(data))
		}
		return nil
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropped += s.dropped
	delete(p.subs, c)
	p.notify()
}

func (p *Pub) subscribe(s *subscriber, on bool, topic string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.set(on, topic); err != nil {
		return err
	}
	p.notify()
	return nil
}

// notify wakes the goroutines that wait for subscribers. The caller holds p.mu.
func (p *Pub) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Send queues a message for every subscriber of the topic. It does not block.
func (p *Pub) Send(frames ...[]byte) error {
	var topic []byte
	if len(frames) > 0 {
		topic = frames[0]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.Done():
		return zmtp.ErrStopped
	default:
	}
	p.sent++
	var wire []byte
	for c, s := range p.subs {
		if !s.match(topic) {
			continue
		}
		if wire == nil {
			wire = zmtp.Encode(frames)
		}
		if errors.Is(c.TrySend(wire), zmtp.ErrFull) { // a closed queue is no subscriber's any more
			s.dropped++
		}
	}
	return nil
}

// PubStats has the counters of a Pub.
type PubStats struct {
	Sent        uint64 // calls of Send
	Dropped     uint64 // messages dropped by full queues, counted for every subscriber
	Subscribers int    // connections with a subscription
}

// Stats counts.
func (p *Pub) Stats() PubStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := PubStats{Sent: p.sent, Dropped: p.dropped}
	for _, sub := range p.subs {
		s.Dropped += sub.dropped
		if len(sub.count) > 0 {
			s.Subscribers++
		}
	}
	return s
}

// Has reports whether a subscriber has subscribed to a topic.
func (p *Pub) Has(topic string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, sub := range p.subs {
		if sub.count[topic] > 0 {
			return true
		}
	}
	return false
}

// WaitSubscribers waits until at least n connections have a subscription. A connection with several topics counts from
// the first topic. [Pub.Has] reports single topics.
func (p *Pub) WaitSubscribers(ctx context.Context, n int) error {
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		got := p.Stats().Subscribers
		if got >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("zmtpserver: %d of %d subscribers: %w", got, n, context.Cause(ctx))
		case <-p.Done():
			return zmtp.ErrStopped
		}
	}
}

// topics are the subscriptions of a subscriber. A topic needs as many cancellations as subscriptions.
type topics struct {
	count map[string]int
	bytes int
}

func (t *topics) set(on bool, topic string) error {
	if !on {
		if t.count[topic] > 1 {
			t.count[topic]--
		} else if t.count[topic] == 1 {
			delete(t.count, topic)
			t.bytes -= len(topic) + perTopic
		}
		return nil
	}
	if t.count[topic] == 0 {
		if t.bytes += len(topic) + perTopic; t.bytes > maxTopicBytes {
			return fmt.Errorf("%w: subscriptions of more than %d bytes", zmtp.ErrTooLarge, maxTopicBytes)
		}
	}
	if t.count == nil {
		t.count = make(map[string]int)
	}
	t.count[topic]++
	return nil
}

func (t *topics) match(topic []byte) bool {
	for want := range t.count {
		if len(topic) >= len(want) && string(topic[:len(want)]) == want {
			return true
		}
	}
	return false
}
