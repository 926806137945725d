package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Three sources carry many workers and ranks at once, as router events with ids that are consecutive within each rank:
// lines of JSON, and what Dynamo's workers publish over NATS or ZeroMQ. An id that is missing clears its rank, and one
// that goes back begins a new incarnation of it, unless the rank can be asked again: over ZeroMQ it can.
const (
	sourceLines  = "ndjson"
	sourceDynamo = "dynamo-nats"
	sourcePlane  = "dynamo-zmq"
)

const maxLine = 16 << 20

func (r *running) fleet() bool {
	return r.source == sourceLines || r.source == sourceDynamo || r.source == sourcePlane
}

func (r *running) checkFleet(wrong *cli.Complaints) {
	for _, f := range []struct {
		name string
		set  bool
	}{{"--replay", r.replay != ""}, {"--engine-snapshot", r.engineSnapshot != ""}, {"--topic",
		r.topic != "" && r.source != sourcePlane}, {"--listen", r.listen}, {"--ranks", r.ranks != 1},
		{"--on-unreadable", r.onUnreadable != unreadablePass},
		{"--serving-endpoint", r.instance == "" && r.worker.Said("serving-endpoint")},
		{"--stable-routing-id", r.instance == "" && r.worker.Said("stable-routing-id")},
		{"--on-engine-refused", r.onRefused != "clear"}, {"--engine-gone-after", r.goneAfter != 0}} {
		wrong.When(f.set, "%s is not for --source %s", f.name, r.source)
	}
	path, isPath := strings.CutPrefix(r.engine, "ipc://")
	wrong.When(r.source == sourceLines && r.engine != "" && r.engine != "-" && (!isPath || path == ""),
		"--engine %q is neither - nor ipc://PATH", jetstream.ShownAddress(r.engine))
}

// fleet is the ranks that were heard of, each with a shim of its own.
type fleet struct {
	cfg *running
	ns  *jetstream.Namespace
	log *slog.Logger
	ctx context.Context
	all *errgroup.Group

	bad, full, passed, unnamed limiter

	mu    sync.Mutex
	feeds map[events.RankKey]chan shim.Frame

	watch *sourceWatch
}

// runFleet shims all ranks that the source tells of, until it or ctx ends.
func (r *running) runFleet(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	subject, err := jetstream.EngineSubject(ns.Name(), events.WorkerID(r.instance))
	if err != nil {
		return err
	}
	all, ctx := errgroup.WithContext(ctx)
	f := &fleet{cfg: r, ns: ns, log: log, ctx: ctx, all: all, feeds: map[events.RankKey]chan shim.Frame{},
		watch: r.watchSource(ns.Conn(), subject, api.QuietSource{Model: r.model, Advice: r.silenceAdvice()}, log)}
	for _, l := range []*limiter{&f.bad, &f.full, &f.passed, &f.unnamed} {
		l.every = r.logWindow
	}
	all.Go(func() error {
		defer f.end()
		switch {
		case r.byTopic():
			return f.hearTopics()
		case r.source == sourceDynamo:
			return f.hearDynamo()
		case r.source == sourcePlane:
			return f.hearPlane()
		case r.engine == "-":
			return f.lines(os.Stdin, "standard input")
		}
		return f.listen(strings.TrimPrefix(r.engine, "ipc://"))
	})
	all.Go(func() error {
		f.watch.run(ctx)
		return nil
	})
	return all.Wait()
}

// end says that nothing more will come.
func (f *fleet) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, feed := range f.feeds {
		close(feed)
	}
	f.watch.heard() // nothing more will be waited for
}

// deliver hands an event to its rank's shim. The digest is of what the source sent.
func (f *fleet) deliver(e events.RouterEvent, digest uint64) {
	f.watch.heard()
	e.Key = f.named(e.Key)
	read := &shim.Read{Digest: digest} // the id of what is passed over counts all the same
	if e.Skipped == "" {
		read.Events = e.Events()
	}
	var bad error
	f.mu.Lock()
	feed := f.feeds[e.Key]
	if feed == nil {
		bad = checkRank(e.Key)
	}
	if feed == nil && bad == nil && len(f.feeds) < maxRanks {
		feed = make(chan shim.Frame, 64)
		f.feeds[e.Key] = feed
		f.all.Go(func() error { return f.serve(e.Key, feed, nil, nil) })
	}
	f.mu.Unlock()
	if bad != nil {
		f.unnamed.warn(f.log, "router events passed over: their worker_id or dp_rank cannot be a worker's", "error", bad,
			"what_to_do", nameAdvice)
		return
	}
	if feed == nil {
		f.full.do(func(n uint64) {
			f.log.Error("too many workers and ranks for one shim; events passed over", "at_most", maxRanks, "worker",
				e.Key.Instance, "times", n, "what_to_do",
				"run several, each with the subject or socket of a part of the fleet")
		})
		return
	}
	shim.Give(f.ctx, feed, shim.Frame{Seq: events.EngineSeq(e.ID), Read: read})
}

// nameAdvice is what to do about a rank that checkRank refuses.
const nameAdvice = "give the worker a name of 1 to 255 bytes (of a single one, --worker may say it), and ranks below 4096"

// checkRank says why a key cannot be a rank's. Who serves a rank would find out too late: its end is the fleet's.
func checkRank(key events.RankKey) error {
	if key.Instance == "" {
		return errors.New("the name is empty")
	}
	_, err := jetstream.WorkerKey(0, key)
	return err
}

// eventLine is what an event is known again by; empty of one that is passed over.
func (f *fleet) eventLine(e *events.RouterEvent) []byte {
	f.watch.heard()
	if e.Skipped != "" {
		f.passed.warn(f.log, "router events passed over", "reason", "unknown "+e.Skipped, "worker", e.Key.Instance,
			"event_id", e.ID)
		return nil
	}
	return events.AppendRouterEvent(nil, e.Key, events.EventID(e.ID), &e.Event, e.Groups...)
}

// serve shims a rank. decoder reads the payloads of its frames, and source is asked for what the feed misses; nil for
// frames that were read already.
func (f *fleet) serve(key events.RankKey, feed <-chan shim.Frame, decoder shim.Decoder, source shim.Source) error {
	one := *f.cfg
	one.instance, one.rank = string(key.Instance), uint32(key.Rank)
	log := f.log.With("worker", key.Instance, "rank", key.Rank)
	watch := &watcher{log: log, cfg: &one}
	claimed := false
	env := one.env(f.ctx, f.ns, watch)
	env.Watch.Prepared = func(report *shim.Report, _ *shim.Config) {
		claimed, watch.report = true, report
		log.Info("starting", "source", one.source, "model", one.model, "block_size", one.blockSize)
	}
	env.Watch.Ended = func(err error) {
		if err == nil && f.ctx.Err() != nil {
			one.leave(f.ctx, f.ctx, watch.report, log)
		}
	}
	err := host.Run(f.ctx, host.Rank{Record: one.record(key, log), Config: shim.Config{
		Feed: feed, Decoder: decoder, Source: source, Limits: shim.Limits{QueueBytes: one.queueBytes},
		Tracer: one.tracer, QuietAfter: one.silence,
	}}, env)
	if !claimed {
		return ignoreEnd(f.ctx, err)
	}
	f.cfg.figures.end(watch)
	return err
}

// listen takes lines from whoever connects. The lines of one connection stay in order.
func (f *fleet) listen(path string) error {
	l, err := zmtp.ListenUnix(f.ctx, path)
	if err != nil {
		return fmt.Errorf("--engine: %w", err)
	}
	var conns sync.WaitGroup
	defer conns.Wait()
	defer context.AfterFunc(f.ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if f.ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		conns.Go(func() {
			defer c.Close()
			if err := f.lines(c, path); err != nil {
				f.log.Warn("a connection has ended", "socket", path, "error", err)
			}
		})
	}
}

// lines takes lines until their end. A bad one is counted and passed over.
func (f *fleet) lines(from io.ReadCloser, name string) error {
	defer context.AfterFunc(f.ctx, func() { from.Close() })()
	in := bufio.NewReaderSize(from, 1<<20)
	var line []byte
	for number := 1; ; {
		part, err := in.ReadSlice('\n')
		if len(line) <= maxLine {
			line = append(line, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if text := bytes.TrimSpace(line); len(text) > 0 && f.ctx.Err() == nil {
			if f.line(text, name, number) {
				return nil
			}
		}
		number++
		if line = line[:0]; cap(line) > 1<<20 {
			line = nil
		}
		switch {
		case f.ctx.Err() != nil || errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// line takes a line, and reports whether it is the last. Where --worker names the worker, a line need not.
func (f *fleet) line(text []byte, name string, number int) (last bool) {
	err := fmt.Errorf("longer than %d bytes", maxLine)
	if len(text) <= maxLine {
		last, err = events.ReadWorkerEvents(text, events.WorkerID(f.cfg.instance),
			func(e events.RouterEvent, text []byte) error {
				f.deliver(e, events.PayloadDigest(text))
				return nil
			})
	}
	if err != nil {
		f.bad.warn(f.log, "a line that is no router event; passed over", "from", name, "line", number, "error", err)
	}
	return last
}

// hearDynamo takes what Dynamo's workers publish on a subject.
func (f *fleet) hearDynamo() error {
	conn := f.ns.Conn()
	if f.cfg.engineNATS.URL != "" {
		c, err := f.connectEngine()
		if err != nil {
			return ignoreEnd(f.ctx, err)
		}
		defer c.Close()
		conn = c
	}
	f.all.Go(func() error {
		f.hearLoads(conn)
		return nil
	})
	hear := func(subject string) error {
		return conn.Listen(f.ctx, subject, func(data []byte) {
			// an envelope holds several events: each is known again by its own content
			err := events.ReadRouterEnvelope(data, func(e events.RouterEvent) {
				f.deliver(e, events.PayloadDigest(f.eventLine(&e)))
			})
			if err != nil {
				f.bad.warn(f.log, "a message that is none of Dynamo's router events; passed over", "subject", subject,
					"error", err)
			}
		})
	}
	if subject := ofEndpoints(f.cfg.engine); subject != "" {
		f.all.Go(func() error {
			if err := hear(subject); f.ctx.Err() == nil {
				f.log.Warn("cannot subscribe to the events of the component's endpoints", "subject", subject, "error", err,
					"what_to_do", "let this user subscribe to it: Dynamo publishes there since 1.0")
			}
			return nil
		})
	}
	return ignoreEnd(f.ctx, hear(f.cfg.engine))
}

// ofEndpoints returns the subject of the events of all endpoints of a component, where Dynamo publishes since 1.0, if
// subject is the component's own, where earlier releases publish. It is empty for any other subject.
func ofEndpoints(subject string) string {
	base, old := strings.CutSuffix(subject, ".kv-events")
	namespace, component, found := strings.Cut(base, ".component.")
	if !old || !found || !strings.HasPrefix(namespace, "namespace.") || strings.Contains(component, ".") {
		return ""
	}
	return base + ".endpoint.*.kv-events"
}

// engineNATSAdvice is what to do about --engine-nats that is not reached.
const engineNATSAdvice = "see that the Dynamo fleet's NATS server runs and that --engine-nats is its address; it is " +
	"dialled until it answers"

func (f *fleet) connectEngine() (*jetstream.Conn, error) {
	options, err := f.cfg.engineNATS.Options("kvatlas shim")
	if err != nil {
		return nil, err
	}
	waiting := limiter{every: f.cfg.logWindow}
	options.Core, options.Wait = true, true
	options.Hooks = jetstream.ConnHooks{
		Disconnected: func(err error) {
			f.watch.unreached("--engine-nats", err, engineNATSAdvice)
			f.log.Warn("the connection to --engine-nats is lost; what is published meanwhile will be missing", "error",
				err, "what_to_do", engineNATSAdvice)
		},
		Reconnected: func(url string) {
			f.watch.reached("--engine-nats")
			f.log.Info("the connection to --engine-nats is back", "server", url)
		},
		AsyncError: func(err error) { f.log.Error("--engine-nats", "error", err) },
		Waiting: func(err error) {
			f.watch.unreached("--engine-nats", err, engineNATSAdvice)
			waiting.warn(f.log, "waiting for --engine-nats", "nats", f.cfg.engineNATS.Shown(), "error", err,
				"what_to_do", engineNATSAdvice)
		},
	}
	c, err := jetstream.Connect(f.ctx, options)
	if err != nil {
		return nil, fmt.Errorf("--engine-nats: %w", err)
	}
	f.watch.reached("--engine-nats")
	f.log.Info("connected to --engine-nats", "server", c.ServerURL())
	return c, nil
}
