package zmtpserver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

const (
	// maxMessage bounds what a subscriber may say: it has nothing longer.
	maxMessage = 64 << 10

	// maxTopicBytes bounds all topics of one subscriber, so that a peer cannot fill our memory with them. Each costs
	// perTopic beside its bytes.
	maxTopicBytes = 1 << 20
	perTopic      = 64
)

// Pub sends each message to those subscribers that asked for its topic, which is how its first frame begins. What
// does not fit into a subscriber's queue is dropped and counted.
type Pub struct {
	*zmtp.Listener

	mu      sync.Mutex
	subs    map[*zmtp.Conn]*subscriber
	sent    uint64
	dropped uint64        // for subscribers that are gone
	changed chan struct{} // closed and replaced when a subscription came or went
}

// subscriber is one connection. Guarded by Pub.mu.
type subscriber struct {
	topics
	dropped uint64
}

// ListenPub opens a Pub at endpoint. It lives until ctx ends or Stop is called.
func ListenPub(ctx context.Context, endpoint string, cfg zmtp.Config) (*Pub, error) {
	return open(ctx, zmtp.Listen, endpoint, cfg)
}

// DialPub opens a Pub that keeps one connection to a subscriber which listens at endpoint.
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
		return nil // what an XSUB sends upstream is none of ours
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

// notify wakes who waits for subscribers. p.mu is held.
func (p *Pub) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Send queues one message for each subscriber of its topic. It does not wait.
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

// PubStats counts what a Pub did.
type PubStats struct {
	Sent        uint64 // calls of Send
	Dropped     uint64 // messages that a subscriber's full queue did not take, one for each such subscriber
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

// Has reports whether a subscriber has asked for a topic.
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

// WaitSubscribers waits until n connections or more have a subscription. A connection with several topics counts from
// the first of them; [Pub.Has] tells of each.
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

// topics is what one subscriber asked for. A topic may be asked for several times and is then cancelled as often.
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
