package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Engines that dial one --listen shim without --worker are told apart by the topics of their messages, kv@POD@MODEL.
// Each topic and rank is a stream with a shim, a lease and a registration of its own:
//
//	first message ──▶ running ──no connection for goneAfter──▶ ending ──all is in the log──▶ its lease is ended
//	                     └──the shim cannot go on──▶ refused ──refusedFor──▶ forgotten
//
// A stream is forgotten at its end, so a later message of the topic begins a new one.
//
// A connection does not say whose it is until it speaks, and an idle engine says nothing. So a stream that has lost its
// connection adopts one that has not spoken and comes from the same host, if no other stream of that host waits too:
// the engine has dialled again, or its host has started another. Its blocks are cleared, and it may be chosen.

const (
	// defaultEngines is how many ranks a shim serves where topics name the workers.
	defaultEngines = 256

	// defaultTopicGone is how long an engine without a connection counts as alive. ZeroMQ dials again after a tenth of a
	// second.
	defaultTopicGone = 2 * time.Second

	// refusedFor is how long a topic is not served after its shim has failed.
	refusedFor = 30 * time.Second

	// Each engine may have at least leastQueue bytes waiting for NATS, and inboxBytes waiting for its shim.
	leastQueue = 4 << 20
	inboxBytes = 4 << 20
	inboxMost  = 1024

	// routesMost bounds the topics that are remembered of a connection.
	routesMost = 64
)

// byTopic reports whether the topics of engines that dial in name the workers.
func (r *running) byTopic() bool {
	return r.listen && r.instance == "" && !r.fleet() && r.engineHTTP == ""
}

// ownQueue is how many bytes of one rank may wait for NATS. Engines that share a shim share --queue-bytes.
func (r *running) ownQueue() int {
	if r.byTopic() {
		return max(leastQueue, r.queueBytes/int(r.maxEngines))
	}
	return r.queueBytes
}

// checkTopics refuses flags that say nothing where topics name the workers.
func (r *running) checkTopics(wrong *cli.Complaints) {
	wrong.When(r.maxEngines == 0 || r.maxEngines > maxRanks, "--max-engines %d is not from 1 to %d", r.maxEngines,
		maxRanks)
	if !r.byTopic() {
		wrong.When(r.maxEngines != defaultEngines, "--max-engines is for --listen without --worker")
		return
	}
	for _, f := range []struct {
		name string
		set  bool
	}{{"--replay", r.replay != ""}, {"--engine-snapshot", r.engineSnapshot != ""},
		{"--serving-endpoint", r.worker.Said("serving-endpoint")},
		{"--stable-routing-id", r.worker.Said("stable-routing-id")}, {"--on-engine-refused", r.onRefused != "clear"}} {
		wrong.When(f.set, "%s is for one engine: give --worker, or leave it out where topics name the workers", f.name)
	}
}

// topics is the engines that dial in.
type topics struct {
	*fleet
	plain, taken, most, stray, failed limiter

	mu       sync.Mutex
	streams  map[events.RankKey]*stream
	silent   map[*caller]struct{} // connections that have not spoken
	lastConn uint64
}

// stream is the shim of one topic and rank. topics.mu guards what changes.
type stream struct {
	key   events.RankKey
	topic string
	inbox *zmtp.Inbox
	done  chan struct{} // closed at the end of the shim

	host    string    // of the connection that spoke last
	conns   int       // open connections that have spoken for it, or that it has adopted
	left    time.Time // when the last one ended
	ending  bool      // the inbox is closed
	refused time.Time // until then nothing is served; zero: the shim runs
}

// hearTopics serves the engines that dial --engine until ctx ends.
func (f *fleet) hearTopics() error {
	t := &topics{fleet: f, streams: map[events.RankKey]*stream{}, silent: map[*caller]struct{}{}}
	for _, l := range []*limiter{&t.plain, &t.taken, &t.most, &t.stray, &t.failed} {
		l.every = f.cfg.logWindow
	}
	sockets := zmtp.Config{Heartbeat: f.cfg.silentAfter / 4, HeartbeatTimeout: f.cfg.silentAfter,
		MaxConns: 2 * int(f.cfg.maxEngines), Hooks: zmtp.Hooks{Failed: func(p zmtp.Peer, err error) {
			t.failed.warn(f.log, "a connection to this shim came to nothing", "from", p.Remote, "error", err, "what_to_do",
				"see that only engines dial this port, and that they publish with ZeroMQ")
		}}}
	for i := range f.cfg.ranks {
		one, err := f.cfg.ofRank(i)
		if err != nil {
			return err
		}
		sub, err := zmtp.ListenEach(f.ctx, one.engine, []string{f.cfg.topic}, sockets, func(p *zmtp.Peer) zmtp.Handler {
			return t.accept(p, events.Rank(one.rank))
		})
		if err != nil {
			return fmt.Errorf("--engine: %w", err)
		}
		defer sub.Stop()
		f.log.Info("engines may dial in; each topic kv@POD@MODEL is a worker", "listen", sub.Addr(), "rank", one.rank,
			"at_most", f.cfg.maxEngines)
	}
	loop.Every(f.ctx, f.cfg.topicGone()/4, t.retire)
	return nil
}

// topicGone is how long an engine without a connection counts as alive.
func (r *running) topicGone() time.Duration {
	if r.goneAfter == 0 {
		return defaultTopicGone
	}
	return r.goneAfter
}

// caller is one connection. Its own goroutine has it, but for what topics.mu guards.
type caller struct {
	*topics
	peer   zmtp.Peer // its number is unique among the sockets of all ranks
	host   string
	rank   events.Rank
	routes map[string]*route

	// topics.mu guards these.
	spoken  map[*stream]struct{} // it counts among their connections
	adopted *stream              // the one that it has not spoken for; nil: none
}

// route is where the messages of a topic belong.
type route struct {
	events.Topic
	named bool        // the topic names an engine
	rank  events.Rank // of the last message
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

// handle handles a message of the connection. Its error is ctx's.
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
			c.stray.warn(c.log, "a message that is no engine's event message; is this the right port?", "from",
				c.peer.Remote, "frames", len(m.Frames))
			return nil
		}
		return c.data(ctx, m)
	}
	return nil
}

// leave notes that the connection of a stream has ended.
func (c *caller) leave(ctx context.Context, s *stream, m zmtp.Message) {
	_ = s.inbox.Put(ctx, m) // it fails if the stream has ended
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.spoken, s)
	s.conns--
	s.left = time.Now()
}

// data hands a message to the stream of its topic and rank.
func (c *caller) data(ctx context.Context, m zmtp.Message) error {
	topic, payload := m.Frames[0], m.Frames[2]
	to := c.route(topic)
	if !to.named {
		c.pass(&c.plain, "messages whose topic names no engine are skipped", topic, "what_to_do",
			`give each engine "topic":"kv@IP:PORT@MODEL" in --kv-events-config, or a shim of its own with --worker`)
		return nil
	}
	if rank, ok := events.PayloadRank(payload); ok {
		to.rank = rank
	}
	c.watch.heard()
	for ctx.Err() == nil {
		s := c.stream(to, string(topic), payload)
		if s == nil {
			return nil
		}
		if c.speak(ctx, s) == nil && s.inbox.Put(ctx, m) == nil {
			return nil
		}
		select { // it is ending
		case <-s.done:
			c.mu.Lock()
			delete(c.spoken, s)
			c.mu.Unlock()
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// speak notes that the connection speaks for a stream.
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

// errOtherEngine is why an adopted connection is left.
var errOtherEngine = errors.New("the connection is another engine's")

// route returns what a topic names.
func (c *caller) route(topic []byte) *route {
	if to := c.routes[string(topic)]; to != nil {
		return to
	}
	to := &route{rank: c.rank}
	to.Topic, to.named = events.ParseTopic(string(topic))
	if to.Model == "" {
		to.Model = c.cfg.model
	}
	to.named = to.named && to.Model != ""
	if len(c.routes) < routesMost {
		c.routes[string(topic)] = to
	}
	return to
}

// stream returns the running stream of a topic and rank, and begins it if there is none. nil: it is not served.
func (t *topics) stream(to *route, topic string, payload []byte) *stream {
	key := events.RankKey{Instance: to.Worker, Rank: to.rank}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.streams[key]
	switch {
	case s != nil && s.topic != topic:
		t.pass(&t.taken, "a worker's second topic; its messages are skipped", []byte(topic), "worker", key.Instance,
			"first_topic", s.topic, "what_to_do", "give each engine a topic with an address of its own")
		return nil
	case s != nil && !s.refused.IsZero():
		t.cfg.figures.foreign()
		return nil
	case s != nil:
		return s
	case t.cfg.model != "" && to.Model != t.cfg.model:
		t.pass(&t.taken, "an engine of another model than --model; its messages are skipped", []byte(topic), "model",
			t.cfg.model, "what_to_do", "leave --model out to serve engines of all models")
		return nil
	case len(t.streams) >= int(t.cfg.maxEngines):
		t.pass(&t.most, "too many engines for this shim; messages of further ones are skipped", []byte(topic), "at_most",
			t.cfg.maxEngines, "what_to_do", "raise --max-engines, or run several shims, each for a part of the fleet")
		return nil
	}
	if err := checkRank(key); err != nil {
		t.pass(&t.unnamed, "messages of a rank that cannot be a worker's are skipped", []byte(topic), "error", err,
			"what_to_do", nameAdvice)
		return nil
	}
	size := t.cfg.blockSize
	if size == 0 {
		if size = events.PayloadBlockSize(payload); size == 0 {
			return nil // no blocks so far
		}
	}
	s = &stream{key: key, topic: topic, inbox: zmtp.NewInbox(inboxMost, inboxBytes), done: make(chan struct{})}
	t.streams[key] = s
	t.all.Go(func() error {
		t.serveStream(s, &to.Topic, size)
		return nil
	})
	return s
}

// pass counts and logs a message that is skipped.
func (t *topics) pass(l *limiter, what string, topic []byte, args ...any) {
	t.cfg.figures.foreign()
	l.warn(t.log, what, append([]any{"topic", fmt.Sprintf("%.128q", topic)}, args...)...)
}

// serveStream runs the shim of a stream to its end.
func (t *topics) serveStream(s *stream, topic *events.Topic, size uint32) {
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
	s.refused = time.Now().Add(refusedFor)
	log.Error("this engine cannot be served; it is tried again", "topic", s.topic, "after", refusedFor, "error", err,
		"what_to_do", streamAdvice(err, s.key.Instance, topic.Model))
}

// streamAdvice is what to do about an engine whose shim cannot go on.
func streamAdvice(err error, worker events.WorkerID, model string) string {
	switch {
	case errors.Is(err, jetstream.ErrMismatch):
		return wrongBlockSize(0, worker, model)
	case errors.Is(err, shim.ErrFenced):
		return "stop the other shim of this worker, or give the engine another topic"
	case errors.Is(err, jetstream.ErrDenied):
		return "permit this shim's NATS user every worker and model: indexer auth example --pool NAME --model " +
			escape.Shell(model)
	}
	return "see the error"
}

func (t *topics) runStream(s *stream, topic *events.Topic, size uint32, log *slog.Logger) error {
	one := *t.cfg
	one.instance, one.rank, one.model, one.blockSize = string(s.key.Instance), uint32(s.key.Rank), topic.Model, size
	one.messages = s.inbox
	one.queueBytes = t.cfg.ownQueue()
	one.goneAfter = t.cfg.topicGone()
	one.silentAfter = one.goneAfter / 2
	spec := *t.cfg.spec
	if address, ok := topic.Address(); ok {
		spec.Endpoint = "http://" + address
	}
	one.spec = &spec
	if err := one.registerModel(t.ctx, t.ns, t.cfg.blockSize == 0); err != nil {
		return err
	}
	return one.serve(t.ctx, t.ctx, t.ns, log)
}

// registerModel registers the model of a stream. Where the block size was learned from an event, a size that is
// registered already counts more.
func (r *running) registerModel(ctx context.Context, ns *jetstream.Namespace, learned bool) error {
	for {
		trying, cancel := context.WithTimeout(ctx, openPatience)
		err := r.tryModel(trying, ns, learned)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable) {
			return err
		}
		loop.Wait(ctx, time.Second)
	}
}

func (r *running) tryModel(ctx context.Context, ns *jetstream.Namespace, learned bool) error {
	if learned {
		m, err := ns.Model(ctx, r.model)
		if err == nil {
			r.blockSize = m.BlockSize
			return nil
		}
		if !errors.Is(err, jetstream.ErrNotFound) {
			return err
		}
	}
	return ns.RegisterModel(ctx, jetstream.Model{Name: r.model, BlockSize: r.blockSize})
}

// retire ends the streams whose engines are gone, and forgets those that were refused long ago.
func (t *topics) retire(now time.Time) {
	var adopters []*caller
	t.mu.Lock()
	for key, s := range t.streams {
		switch {
		case !s.refused.IsZero():
			if now.After(s.refused) {
				delete(t.streams, key)
			}
		case !s.ending && s.conns == 0 && !s.left.IsZero() && now.Sub(s.left) > t.cfg.topicGone()*3/2:
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

// adopter returns the connection that a stream without one adopts; nil: there is none. t.mu is held.
func (t *topics) adopter(s *stream) *caller {
	for _, other := range t.streams {
		if other != s && other.host == s.host && other.conns == 0 {
			return nil // it may be the other's
		}
	}
	for c := range t.silent {
		if c.host == s.host && c.adopted == nil {
			return c
		}
	}
	return nil
}

// adopt has the stream that has adopted the connection begin anew with it.
func (c *caller) adopt(ctx context.Context) {
	c.mu.Lock()
	s := c.adopted
	c.mu.Unlock()
	if s != nil { // it has not spoken meanwhile
		_ = s.inbox.Put(ctx, zmtp.Message{Kind: zmtp.Opened, Peer: &c.peer}) // it fails if the stream has ended
	}
}
