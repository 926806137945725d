package zmtp

import (
	"context"
	"fmt"
	"sync"
)

const (
	// maxTopic bounds a topic; it must fit into a command.
	maxTopic = maxCommand - 32

	// maxTopicBytes bounds all topics of one subscriber, so that a peer cannot fill our memory with them.
	maxTopicBytes = 1 << 20
)

// Pub sends each message to those subscribers that asked for its topic, which is how its first frame begins. What
// does not fit into a subscriber's queue is dropped and counted.
type Pub struct {
	socket
	sent    uint64 // under mu, as what follows
	dropped uint64 // for subscribers that are gone

	watchMu sync.Mutex
	changed chan struct{} // closed and replaced when a subscription came or went
}

// ListenPub opens a Pub at endpoint. It lives until ctx ends or Stop is called.
func ListenPub(ctx context.Context, endpoint string, cfg Config) (*Pub, error) {
	p := &Pub{changed: make(chan struct{})}
	if err := p.init(ctx, "PUB", endpoint, cfg); err != nil {
		return nil, err
	}
	if err := p.listen(p.serve); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Pub) serve(c *conn) {
	c.in.maxBytes = maxCommand // a subscriber has nothing longer to say
	p.cfg.Hooks.connected(c.peer)
	c.run(func(frames [][]byte) error {
		if f := frames[0]; len(frames) == 1 && len(f) > 0 && f[0] <= 1 { // as in 3.0
			return p.subscribe(c, f[0] == 1, string(f[1:]))
		}
		return nil // what an XSUB sends upstream is none of ours
	}, func(name string, data []byte) error {
		if name == "SUBSCRIBE" || name == "CANCEL" {
			return p.subscribe(c, name == "SUBSCRIBE", string(data))
		}
		return nil
	})
	p.mu.Lock()
	p.dropped += c.dropped.Swap(0)
	p.mu.Unlock()
	c.subs.clear()
	p.notify()
}

func (p *Pub) subscribe(c *conn, on bool, topic string) error {
	if err := c.subs.set(on, topic); err != nil {
		return err
	}
	p.notify()
	return nil
}

func (p *Pub) notify() {
	p.watchMu.Lock()
	defer p.watchMu.Unlock()
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
	if p.stopped || p.ctx.Err() != nil {
		return ErrStopped
	}
	p.sent++
	var wire []byte
	for c := range p.conns {
		if !c.subs.match(topic) {
			continue
		}
		if wire == nil {
			wire = encode(frames)
		}
		_ = c.send(wire) // a full queue is counted; a closed one is no subscriber any more
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
	for c := range p.conns {
		s.Dropped += c.dropped.Load()
		if c.subs.any() {
			s.Subscribers++
		}
	}
	return s
}

// WaitSubscribers waits until n connections or more have a subscription: what is sent after that, they get.
func (p *Pub) WaitSubscribers(ctx context.Context, n int) error {
	for {
		p.watchMu.Lock()
		changed := p.changed
		p.watchMu.Unlock()
		got := p.Stats().Subscribers
		if got >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("zmtp: %d of %d subscribers: %w", got, n, context.Cause(ctx))
		case <-p.ctx.Done():
			return stopCause(p.ctx)
		}
	}
}

// topics is what one subscriber asked for. A topic may be asked for several times and is then cancelled as often.
type topics struct {
	mu    sync.RWMutex
	count map[string]int
	bytes int
}

func (t *topics) set(on bool, topic string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !on {
		if t.count[topic] > 1 {
			t.count[topic]--
		} else if t.count[topic] == 1 {
			delete(t.count, topic)
			t.bytes -= len(topic) + perFrame
		}
		return nil
	}
	if t.count[topic] == 0 {
		if t.bytes += len(topic) + perFrame; t.bytes > maxTopicBytes {
			return fmt.Errorf("%w: subscriptions of more than %d bytes", ErrTooLarge, maxTopicBytes)
		}
	}
	if t.count == nil {
		t.count = make(map[string]int)
	}
	t.count[topic]++
	return nil
}

func (t *topics) match(topic []byte) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for want := range t.count {
		if len(topic) >= len(want) && string(topic[:len(want)]) == want {
			return true
		}
	}
	return false
}

func (t *topics) any() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.count) > 0
}

func (t *topics) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count, t.bytes = nil, 0
}
