package source

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Sources with many workers, and the source of a shared store, as values of --source.
const (
	Lines    = "ndjson"
	NATS     = "dynamo-nats"
	ZeroMQ   = "dynamo-zmq"
	Mooncake = "mooncake"
)

// Settings configure a Source beside the settings of its shims.
type Settings struct {
	// EngineNATS is the NATS server of a Dynamo fleet; without addresses it is the server of the log.
	EngineNATS jetstream.ConnOptions

	Etcd Etcd        // of Dynamo's discovery in etcd
	Kube kube.Config // of Dynamo's discovery in Kubernetes
	Rule *dial.Rule  // of addresses in Dynamo's discovery

	MaxEngines uint32 // ranks of engines at a common socket
}

// Source runs the shims of the ranks of a source, one for every rank.
type Source struct {
	*host.Shim
	Settings

	ns  *jetstream.Namespace
	log *slog.Logger
	ctx context.Context
	all *errgroup.Group

	bad, full, passed, unnamed host.Limiter

	mu    sync.Mutex
	feeds map[events.RankKey]chan shim.Frame

	watch *watch
}

// Named reports whether the events of a source, a value of --source, contain their ranks.
func Named(source string) bool { return source == Lines || source == NATS || source == ZeroMQ }

// Check checks the settings of the source. The error is a usage error.
func (f *Source) Check() error {
	var wrong usage.Complaints
	switch {
	case !Named(f.Source):
		f.CheckNames(&wrong, "--worker", "--model", "--block-size")
		f.CheckEngine(&wrong)
	default:
		f.CheckNames(&wrong, "--worker")
		path, isPath := strings.CutPrefix(f.Engine, "ipc://")
		wrong.When(f.Source == Lines && f.Engine != "" && f.Engine != "-" && (!isPath || path == ""),
			"--engine %q is neither - nor ipc://PATH", natsurl.Shown(f.Engine))
		f.CheckRanks(&wrong)
	}
	f.ReadFacts(&wrong)
	return wrong.Usage()
}

// Run shims all ranks of the source until the source or ctx ends.
func (f *Source) Run(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	ns, err := f.Join(ctx, conn, log)
	if err != nil {
		return host.IgnoreEnd(ctx, err)
	}
	subject, err := jetstream.Names(ns.Name()).Engine(events.WorkerID(f.Worker))
	if err != nil {
		return err
	}
	f.all, f.ctx = errgroup.WithContext(ctx)
	f.ns, f.log, f.feeds = ns, log, map[events.RankKey]chan shim.Frame{}
	f.watch = newWatch(f.Shim, conn, subject, api.QuietSource{Model: f.Model, Advice: f.silenceAdvice()}, log)
	for _, l := range []*host.Limiter{&f.bad, &f.full, &f.passed, &f.unnamed} {
		l.Every = f.LogRepeat
	}
	f.all.Go(func() error {
		defer f.end()
		return f.receive()
	})
	f.all.Go(func() error {
		f.watch.run(f.ctx)
		return nil
	})
	return f.all.Wait()
}

// receive receives the events of the source until it or f.ctx ends.
func (f *Source) receive() error {
	switch {
	case !Named(f.Source):
		return f.serveTopics()
	case f.Source == NATS:
		return f.subscribe()
	case f.Source == ZeroMQ:
		return f.followDiscovery()
	case f.Engine == "-":
		return f.lines(os.Stdin, "standard input")
	}
	return f.listen(strings.TrimPrefix(f.Engine, "ipc://"))
}

// silenceAdvice returns possible causes for a source that publishes nothing.
func (f *Source) silenceAdvice() string {
	const idle = "or send the fleet a request: workers without requests publish nothing"
	switch f.Source {
	case Lines:
		return "check the program with router events, one a line, for --engine; " + idle
	case NATS:
		return "check --engine, the subject of Dynamo's workers: " +
			"namespace.N.component.C.endpoint.E.kv-events since 1.0, namespace.N.component.C.kv-events before; and the event " +
			"plane: NATS (DYN_EVENT_PLANE=nats), on the server of --engine-nats; " + idle
	case ZeroMQ:
		return "check --engine, the discovery of Dynamo's workers, their event plane (ZeroMQ), and --topic, the beginning of " +
			"their NAMESPACE.COMPONENT.ENDPOINT; " + idle
	}
	return "check that engines connect to --engine and publish KV-cache events; " + idle
}

// end closes all feeds: no further events will arrive.
func (f *Source) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, feed := range f.feeds {
		close(feed)
	}
	f.watch.received()
}

// deliver delivers an event to the shim of its rank. digest is the digest of the received bytes.
func (f *Source) deliver(e events.RouterEvent, digest uint64) {
	f.watch.received()
	e.Key = f.named(e.Key)
	read := &shim.Read{Digest: digest} // a skipped event has an id too
	if e.Skipped == "" {
		read.Events = e.Events()
	}
	var bad error
	f.mu.Lock()
	feed := f.feeds[e.Key]
	if feed == nil {
		bad = checkRank(e.Key)
	}
	if feed == nil && bad == nil && len(f.feeds) < host.MaxRanks {
		feed = make(chan shim.Frame, 64)
		f.feeds[e.Key] = feed
		f.all.Go(func() error { return f.serve(e.Key, dynamo.Card{}, feed, nil, nil) })
	}
	f.mu.Unlock()
	if bad != nil {
		f.unnamed.WarnTo(f.log, "router events passed over: their worker_id or dp_rank cannot be a worker's", "error", bad,
			"what_to_do", nameAdvice)
		return
	}
	if feed == nil {
		f.full.Do(func(n uint64) {
			f.log.Error("too many workers and ranks for one shim; events passed over", "at_most", host.MaxRanks, "worker",
				e.Key.Instance, "times", n, "what_to_do",
				"run several, each with the subject or socket of a part of the fleet")
		})
		return
	}
	shim.Give(f.ctx, feed, shim.Frame{Seq: events.EngineSeq(e.ID), Read: read})
}

// nameAdvice is the remedy for the errors of checkRank.
const nameAdvice = "give the worker a name of 1 to 255 bytes (a single worker: with --worker), and ranks below 4096"

// checkRank checks the key of a rank before its shim starts: the error of a shim would end the whole source.
func checkRank(key events.RankKey) error {
	if key.Instance == "" {
		return errors.New("the name is empty")
	}
	_, err := jetstream.WorkerKey(0, key)
	return err
}

// named returns a rank's key with the name of --worker, if it is set.
func (f *Source) named(key events.RankKey) events.RankKey {
	if f.Worker != "" {
		key.Instance = events.WorkerID(f.Worker)
	}
	return key
}

// eventLine returns the canonical line of an event, which identifies a repeated event. It is empty for a skipped event.
func (f *Source) eventLine(e *events.RouterEvent) []byte {
	f.watch.received()
	if e.Skipped != "" {
		f.passed.WarnTo(f.log, "router events passed over", "reason", "unknown "+e.Skipped, "worker", e.Key.Instance,
			"event_id", e.ID)
		return nil
	}
	return events.AppendRouterEvent(nil, e.Key, events.EventID(e.ID), &e.Event, e.Groups...)
}

// serve runs the shim of a rank, with the facts of the worker's card. decoder decodes the payloads of its frames, and
// again repeats missing events; both are nil for frames with decoded events.
func (f *Source) serve(key events.RankKey, card dynamo.Card, feed <-chan shim.Frame, decoder shim.Decoder,
	again shim.Source) error {
	one := f.Shim.WithFacts(&api.WorkerSpec{Role: api.Role(card.Role), BootstrapPort: card.BootstrapPort,
		TotalKVBlocks: card.TotalKVBlocks, MaxBatchedTokens: card.MaxBatchedTokens})
	one.Worker, one.Rank = string(key.Instance), uint32(key.Rank)
	if f.Source == ZeroMQ {
		one.QuietAdvice = "check that Dynamo's worker publishes KV-cache events"
	}
	log := f.log.With("worker", key.Instance, "rank", key.Rank)
	return one.RunRank(f.ctx, f.ctx, f.ns, host.Rank{Config: shim.Config{Feed: feed, Decoder: decoder, Source: again}},
		log, func(*shim.Report, *shim.Config) func() {
			log.Info("starting", "source", one.Source, "model", one.Model, "block_size", one.BlockSize)
			return nil
		})
}
