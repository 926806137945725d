package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The topics of messages, kv@POD@MODEL, separate the engines at a --listen shim without --worker. A topic and a rank
// together are a stream with a shim, a lease and a registration:
//
//	first message ──▶ running ──no connection for goneAfter──▶ ending ──all is in the log──▶ its lease is ended
//	                     └──the shim cannot go on──▶ refused ──host.RetryAfter──▶ removed
//
// A stream is removed at its end, so a later message of the topic begins a new stream.
//
// The first message identifies the engine of a connection, and an idle engine sends no messages. Therefore a stream
// without a connection adopts a silent connection from the same host, unless another stream of the host also waits: the
// engine has dialled again, or its host has started another engine. The blocks are cleared, and routers may choose the
// worker.

const (
	// DefaultEngines is the default of Settings.MaxEngines.
	DefaultEngines = 256

	// defaultGone is the default time without a connection after which an engine is gone. ZeroMQ dials again after a tenth
	// of a second.
	defaultGone = 2 * time.Second

	// inboxBytes and inboxMost bound the waiting messages of an engine.
	inboxBytes = 4 << 20
	inboxMost  = 1024

	// routesMost bounds the cached topics of a connection.
	routesMost = 64
)

// RankQueue returns the memory for the waiting events of one rank. Engines at a common socket share --queue-bytes.
func (f *Source) RankQueue() int { return max(host.LeastQueue, f.QueueBytes/int(f.MaxEngines)) }

// topics serves the engines that dial in.
type topics struct {
	*Source
	plain, taken, most, stray, failed host.Limiter

	mu       sync.Mutex
	streams  map[events.RankKey]*stream
	silent   map[*caller]struct{} // connections without a message
	lastConn uint64
}

// stream is the shim of one topic and rank. topics.mu guards the fields below done.
type stream struct {
	key   events.RankKey
	topic string
	inbox *zmtp.Inbox
	done  chan struct{} // closed at the end of the shim

	host    string    // of the connection with the latest message
	conns   int       // open connections with messages for the stream, or adopted
	left    time.Time // end of the last connection
	ending  bool      // the inbox is closed
	refused time.Time // no shim until then; zero: the shim runs
}

// serveTopics serves the engines that dial --engine until ctx ends.
func (f *Source) serveTopics() error {
	t := &topics{Source: f, streams: map[events.RankKey]*stream{}, silent: map[*caller]struct{}{}}
	for _, l := range []*host.Limiter{&t.plain, &t.taken, &t.most, &t.stray, &t.failed} {
		l.Every = f.LogRepeat
	}
	sockets := zmtp.Config{Heartbeat: f.SilentAfter / 4, HeartbeatTimeout: f.SilentAfter,
		MaxConns: 2 * int(f.MaxEngines), Failed: func(p zmtp.Peer, err error) {
			t.failed.WarnTo(f.log, "a connection to this shim came to nothing", "from", p.Remote, "error", err, "what_to_do",
				"check the clients of this port: engines with a ZeroMQ publisher")
		}}
	for i := range f.Ranks {
		one, err := f.OfRank(i)
		if err != nil {
			return err
		}
		sub, err := zmtp.ListenEach(f.ctx, one.Engine, []string{f.Topic}, sockets, func(p *zmtp.Peer) zmtp.Handler {
			return t.accept(p, events.Rank(one.Rank))
		})
		if err != nil {
			return fmt.Errorf("--engine: %w", err)
		}
		defer sub.Stop()
		f.log.Info("engines may dial in; each topic kv@POD@MODEL is a worker", "listen", sub.Addr(), "rank", one.Rank,
			"at_most", f.MaxEngines)
	}
	loop.Every(f.ctx, t.gone()/4, t.retire)
	return nil
}

// gone returns the time without a connection after which an engine is gone.
func (t *topics) gone() time.Duration { return cmp.Or(t.GoneAfter, defaultGone) }

// caller is a connection. The connection's goroutine owns the fields above topics.mu.
type caller struct {
	*topics
	peer   zmtp.Peer // with a number that is unique among the sockets of all ranks
	host   string
	rank   events.Rank
	routes map[string]*route

	// topics.mu guards the fields below.
	spoken  map[*stream]struct{} // streams with messages of this connection
	adopted *stream              // by which the connection is adopted; nil: none
}

// route is the destination of a topic's messages.
type route struct {
	topicName
	named bool        // the topic names an engine
	rank  events.Rank // of the latest message
}

func (t *topics) accept(p *zmtp.Peer, rank events.Rank) zmtp.Handler {
	c := &caller{topics: t, peer: *p, rank: rank, routes: map[string]*route{}, spoken: map[*stream]struct{}{}}
	if host, _, err := net.SplitHostPort(p.Remote); err == nil {
		c.host = host
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lastConn++
	c.peer.Conn = t.lastConn
	t.silent[c] = struct{}{}
	return c.handle
}

// handle handles a message of the connection. An error is the error of ctx.
func (c *caller) handle(ctx context.Context, m zmtp.Message) error {
	m.Peer = &c.peer
	switch m.Kind {
	case zmtp.Opened:
		c.log.Info("an engine has dialled in", "from", c.peer.Remote)
	case zmtp.Closed:
		c.mu.Lock()
		delete(c.silent, c)
		spoken := slices.Collect(maps.Keys(c.spoken))
		c.mu.Unlock()
		for _, s := range spoken {
			c.leave(ctx, s, m)
		}
	case zmtp.Data:
		if len(m.Frames) != 3 || len(m.Frames[1]) != 8 {
			c.stray.WarnTo(c.log, "received a message that is no engine event; check the port", "from",
				c.peer.Remote, "frames", len(m.Frames))
			return nil
		}
		return c.data(ctx, m)
	}
	return nil
}

// leave records the end of a stream's connection.
func (c *caller) leave(ctx context.Context, s *stream, m zmtp.Message) {
	_ = s.inbox.Put(ctx, m) // an error means that the stream has ended
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.spoken, s)
	s.conns--
	s.left = time.Now()
}

// data delivers a message to the stream of its topic and rank.
func (c *caller) data(ctx context.Context, m zmtp.Message) error {
	topic, payload := m.Frames[0], m.Frames[2]
	to := c.route(topic)
	if !to.named {
		c.skip(&c.plain, "messages with a topic without an engine are skipped", topic, "what_to_do",
			`give each engine "topic":"kv@IP:PORT@MODEL" in --kv-events-config, or a separate shim with --worker`)
		return nil
	}
	if rank, ok := payloadRank(payload); ok {
		to.rank = rank
	}
	c.watch.received()
	for ctx.Err() == nil {
		s := c.stream(to, string(topic), payload)
		if s == nil {
			return nil
		}
		if c.speak(ctx, s) == nil && s.inbox.Put(ctx, m) == nil {
			return nil
		}
		select { // the stream is ending
		case <-s.done:
			c.mu.Lock()
			delete(c.spoken, s)
			c.mu.Unlock()
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// speak records a message of the connection for a stream.
func (c *caller) speak(ctx context.Context, s *stream) error {
	c.mu.Lock()
	delete(c.silent, c)
	adopted := c.adopted
	c.adopted = nil
	_, is := c.spoken[s]
	ending := s.ending
	if !is && !ending {
		s.conns++
		s.host = c.host
		c.spoken[s] = struct{}{}
	}
	c.mu.Unlock()
	if adopted != nil && adopted != s {
		c.leave(ctx, adopted, zmtp.Message{Kind: zmtp.Closed, Peer: &c.peer, Err: errOtherEngine})
	}
	switch {
	case ending:
		return zmtp.ErrStopped
	case is:
		return nil
	}
	return s.inbox.Put(ctx, zmtp.Message{Kind: zmtp.Opened, Peer: &c.peer})
}

// errOtherEngine is the reason for the end of an adoption.
var errOtherEngine = errors.New("the connection is another engine's")

// route returns the destination of a topic.
func (c *caller) route(topic []byte) *route {
	if to := c.routes[string(topic)]; to != nil {
		return to
	}
	to := &route{rank: c.rank}
	to.topicName, to.named = parseTopic(string(topic))
	if to.Model == "" {
		to.Model = c.Model
	}
	to.named = to.named && to.Model != ""
	if len(c.routes) < routesMost {
		c.routes[string(topic)] = to
	}
	return to
}

// stream returns the running stream of a topic and rank, and begins a missing stream. nil: the rank is not served.
func (t *topics) stream(to *route, topic string, payload []byte) *stream {
	key := events.RankKey{Instance: to.Worker, Rank: to.rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.streams[key]
	switch {
	case s != nil && s.topic != topic:
		t.skip(&t.taken, "a worker's second topic; its messages are skipped", []byte(topic), "worker", key.Instance,
			"first_topic", s.topic, "what_to_do", "give every engine a topic with a different address")
		return nil
	case s != nil && !s.refused.IsZero():
		t.Figures.Foreign()
		return nil
	case s != nil:
		return s
	case t.Model != "" && to.Model != t.Model:
		t.skip(&t.taken, "an engine of another model than --model; its messages are skipped", []byte(topic), "model",
			t.Model, "what_to_do", "leave --model out to serve engines of all models")
		return nil
	case len(t.streams) >= int(t.MaxEngines):
		t.skip(&t.most, "too many engines for this shim; messages of further ones are skipped", []byte(topic), "at_most",
			t.MaxEngines, "what_to_do", "raise --max-engines, or run several shims, each for a part of the fleet")
		return nil
	}
	if err := checkRank(key); err != nil {
		t.skip(&t.unnamed, "messages of a rank that cannot be a worker's are skipped", []byte(topic), "error", err,
			"what_to_do", nameAdvice)
		return nil
	}
	size := t.BlockSize
	if size == 0 {
		if size = payloadBlockSize(payload); size == 0 {
			return nil // no blocks yet
		}
	}
	s = &stream{key: key, topic: topic, inbox: zmtp.NewInbox(inboxMost, inboxBytes), done: make(chan struct{})}
	t.streams[key] = s
	t.all.Go(func() error {
		t.serveStream(s, &to.topicName, size)
		return nil
	})
	return s
}

// skip counts and logs a skipped message.
func (t *topics) skip(l *host.Limiter, event string, topic []byte, args ...any) {
	t.Figures.Foreign()
	l.WarnTo(t.log, event, append([]any{"topic", fmt.Sprintf("%.128q", topic)}, args...)...)
}

// serveStream runs the shim of a stream to its end.
func (t *topics) serveStream(s *stream, topic *topicName, size uint32) {
	log := t.log.With("worker", s.key.Instance, "rank", s.key.Rank)
	err := t.runStream(s, topic, size, log)
	t.mu.Lock()
	defer t.mu.Unlock()
	defer close(s.done)
	s.ending = true
	s.inbox.Close()
	if err == nil || t.ctx.Err() != nil {
		delete(t.streams, s.key)
		return
	}
	s.refused = time.Now().Add(host.RetryAfter)
	log.Error("this engine cannot be served; it is tried again", "topic", s.topic, "after", host.RetryAfter, "error", err,
		"what_to_do", host.Advice(err, s.key.Instance, topic.Model))
}

// runStream runs the shim of a stream until the engine is gone or the shim cannot go on.
func (t *topics) runStream(s *stream, topic *topicName, size uint32, log *slog.Logger) error {
	one := *t.Shim
	one.Worker, one.Rank, one.Model, one.BlockSize = string(s.key.Instance), uint32(s.key.Rank), topic.Model, size
	one.QueueBytes = t.RankQueue()
	one.GoneAfter = t.gone()
	one.SilentAfter = one.GoneAfter / 2
	if address, ok := topic.Address(); ok {
		spec := *one.Spec
		spec.Endpoint = "http://" + address
		one.Spec = &spec
	}
	return one.ServeMessages(t.ctx, t.ns, s.inbox, t.BlockSize == 0, log)
}

// retire ends the streams of engines that are gone, and removes refused streams after host.RetryAfter.
func (t *topics) retire(now time.Time) {
	var adopters []*caller
	t.mu.Lock()
	for key, s := range t.streams {
		switch {
		case !s.refused.IsZero():
			if now.After(s.refused) {
				delete(t.streams, key)
			}
		case !s.ending && s.conns == 0 && !s.left.IsZero() && now.Sub(s.left) > t.gone()*3/2:
			if c := t.adopter(s); c != nil {
				c.adopted = s
				c.spoken[s] = struct{}{}
				s.conns++
				adopters = append(adopters, c)
				continue
			}
			s.ending = true
			s.inbox.Close()
		}
	}
	t.mu.Unlock()
	for _, c := range adopters {
		c.adopt(t.ctx)
	}
}

// adopter returns the connection that a stream without a connection adopts; nil: there is none. t.mu is held.
func (t *topics) adopter(s *stream) *caller {
	for _, other := range t.streams {
		if other != s && other.host == s.host && other.conns == 0 {
			return nil // the connection may belong to the other stream
		}
	}
	for c := range t.silent {
		if c.host == s.host && c.adopted == nil {
			return c
		}
	}
	return nil
}

// adopt opens an adopted connection for the stream.
func (c *caller) adopt(ctx context.Context) {
	c.mu.Lock()
	s := c.adopted
	c.mu.Unlock()
	if s != nil { // still no message
		_ = s.inbox.Put(ctx, zmtp.Message{Kind: zmtp.Opened, Peer: &c.peer}) // an error means that the stream has ended
	}
}
