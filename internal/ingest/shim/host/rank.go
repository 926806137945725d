package host

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// NewDecoder returns a decoder of an engine's messages. store is the shared store of the worker; nil: none.
func NewDecoder(source string, blockSize uint32, groups []events.GroupSpec, store *hicache.Config,
	unnamedAdapters bool) (*events.Decoder, error) {
	engine, err := events.EngineOf(source)
	if err != nil {
		return nil, err
	}
	return events.NewDecoder(events.DecoderConfig{Engine: engine, BlockSize: blockSize, Groups: groups,
		Store: store != nil && store.VLLM != nil, UnnamedAdapters: unnamedAdapters})
}

// RunRank runs the shim of the rank with the given sockets or feed, until ctx ends or the shim cannot go on. The log,
// the lease and the figures of the process contain its state. stop is the request to stop, which ends before ctx or is
// ctx. The end of a feed leaves the lease as it is: the source may come back. begin is called before the shim runs, and
// returns a function that is called after it; nil: none.
func (s *Shim) RunRank(ctx, stop context.Context, ns *jetstream.Namespace, r Rank, log *slog.Logger,
	begin func(*shim.Report, *shim.Config) (end func())) error {
	w := newWatcher(s, log)
	claimed, end := false, (func())(nil)
	prepared := func(report *shim.Report, cfg *shim.Config) {
		claimed, w.report = true, report
		end = begin(report, cfg)
	}
	ended := func(err error) {
		if err == nil && (stop.Err() != nil || ctx.Err() == nil && r.Config.Feed == nil) {
			s.leave(ctx, stop, w.report, log)
		}
		if end != nil {
			end()
		}
	}
	r.Record = s.record(log)
	r.Config.Limits = shim.Limits{QueueBytes: s.QueueBytes}
	r.Config.Tracer, r.Config.QuietAfter = s.Tracer, s.Silence
	err := Run(ctx, r, Env{Namespace: ns, Reconnects: &s.Reconnects, Observer: w, Prepared: prepared, Ended: ended,
		Claim: func(context.Context) (*shim.ControlServer, error) { return s.claim(stop, ns, log) }})
	if !claimed {
		return IgnoreEnd(stop, err)
	}
	s.Figures.end(w)
	return err
}

// serve runs the shim of one rank of an engine until ctx ends, or until stop has ended and the engine is gone.
func (s *Shim) serve(ctx, stop context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	decoder, err := NewDecoder(s.Source, s.BlockSize, s.groups, s.l3, s.unnamedAdapters)
	if err != nil {
		return err
	}
	onRefused, err := shim.ParseOnRefused(s.OnRefused)
	if err != nil {
		return err
	}
	serving := ""
	if s.Messages == nil { // the engines that share a shim would need too many connections
		serving, _ = dial.ServingAddress(s.spec.Endpoint)
	}
	return s.RunRank(ctx, stop, ns, Rank{Decoder: decoder, Config: shim.Config{
		Engine: s.Engine, Listen: s.Listen, Topics: []string{s.Topic}, Messages: s.Messages, Replay: s.Replay,
		ClearUnreadable: s.OnUnreadable == UnreadableClear, ReplayTimeout: s.ReplayTimeout,
		IdleCheck: s.IdleCheck, OnRefused: onRefused, SilentAfter: s.SilentAfter, GoneAfter: s.GoneAfter,
		Stop: stop.Done(), Serving: serving,
	}}, log, func(report *shim.Report, cfg *shim.Config) (end func()) {
		log.Info("starting", "engine", s.Engine, "replay", s.Replay, "model", s.Model, "block_size", s.BlockSize, "nats",
			ns.Conn().ServerURL())
		if s.poll != nil {
			cfg.Sleep, end = s.poll.serve(report)
		}
		return end
	})
}

// ServeMessages serves the rank of an engine whose messages arrive at a shared socket, until ctx ends. learned means
// that an event contained the block size: then a registered block size of the model has priority.
func (s *Shim) ServeMessages(ctx context.Context, ns *jetstream.Namespace, messages shim.Receiver, learned bool,
	log *slog.Logger) error {
	one := *s
	one.Messages, one.spec = messages, nil
	if err := one.registerModel(ctx, ns, learned); err != nil {
		return err
	}
	if err := errors.Join(one.readSpec(), one.readGroups()); err != nil {
		return err
	}
	return one.serve(ctx, ctx, ns, log)
}

// key names the rank.
func (s *Shim) key() events.RankKey {
	return events.RankKey{Instance: events.WorkerID(s.Worker), Rank: events.Rank(s.Rank)}
}

// record returns the registration of the rank.
func (s *Shim) record(log *slog.Logger) registry.Record {
	l3 := s.l3
	switch {
	case l3 == nil:
	case l3.Open():
		l3 = nil
		log.Info("the shared store is registered when the engine has announced its KV-cache groups")
	default:
		if why := l3.Usable(s.BlockSize); why != "" {
			log.Warn("nothing of the shared store can be credited to this worker", "why", why)
		}
	}
	return registry.Record{
		Instance: events.WorkerID(s.Worker), Rank: events.Rank(s.Rank), Model: s.Model, BlockSize: s.BlockSize,
		Source: s.Source, LeaseMS: s.Lease.Milliseconds(), L3: l3, Worker: s.spec,
	}
}

// claim reserves the rank for this shim. It waits up to --claim-wait, since a predecessor may be draining. It returns
// nil if the NATS server permits no control subjects. Then the log alone separates two shims of a rank, and indexers
// cannot request the engine's events again.
func (s *Shim) claim(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) (*shim.ControlServer, error) {
	waiting := Limiter{Every: s.LogRepeat}
	giveUp := time.Now().Add(s.ClaimWait)
	for {
		server, err := shim.Claim(ctx, ns, s.key(), s.Replay != "")
		switch {
		case errors.Is(err, jetstream.ErrDenied):
			log.Warn("the NATS server does not permit control subjects", "error", err, "what_to_do",
				"grant it to this user: indexer auth example prints what each user needs")
			return nil, nil
		case errors.Is(err, shim.ErrFenced) && time.Now().Before(giveUp):
			waiting.WarnTo(log, "waiting for the shim that has this rank to end", "error", err, "at_most", s.ClaimWait,
				"what_to_do", "stop that shim, or let it drain; or give this one another --worker or --rank")
		case err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable):
			return server, err
		default:
			waiting.WarnTo(log, "waiting for NATS", "error", err, "what_to_do",
				"see that the NATS server runs and that more than half of those with JetStream are up")
		}
		loop.Wait(ctx, time.Second)
	}
}

// registerModel registers the model of an engine whose first message has arrived. learned means that an event contained
// the block size: then a registered block size has priority.
func (s *Shim) registerModel(ctx context.Context, ns *jetstream.Namespace, learned bool) error {
	for {
		trying, cancel := context.WithTimeout(ctx, openPatience)
		err := s.tryModel(trying, ns, learned)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable) {
			return err
		}
		loop.Wait(ctx, time.Second)
	}
}

func (s *Shim) tryModel(ctx context.Context, ns *jetstream.Namespace, learned bool) error {
	if learned {
		m, err := ns.Model(ctx, s.Model)
		if err == nil {
			s.BlockSize = m.BlockSize
			return nil
		}
		if !errors.Is(err, jetstream.ErrNotFound) {
			return err
		}
	}
	return ns.RegisterModel(ctx, jetstream.Model{Name: s.Model, BlockSize: s.BlockSize})
}

// LeaseTaken logs that the rank is registered.
func (w *watcher) LeaseTaken() { w.log.Info("registered", "lease", w.cfg.Lease) }

// LeaseLost logs that the lease had expired.
func (w *watcher) LeaseLost() { w.log.Warn("the lease had expired; it is taken again") }

// Unclaimed logs that a name of the model cannot be claimed.
func (w *watcher) Unclaimed(name string, err error) {
	event := "the NATS server does not permit the claim of the model; indexers that require claims ignore this worker"
	if name != w.cfg.Model {
		event = "the NATS server does not permit the claim of a further name of the model; indexers that require " +
			"claims do not know the name"
	}
	w.log.Warn(event, "model", name, "error", err, "what_to_do", "grant it to this user: indexer auth example "+
		w.cfg.keyFlags()+" --model "+escape.Shell(name))
}

// LeaseFailed logs that the lease cannot be renewed.
func (w *watcher) LeaseFailed(err error) {
	w.leaseTrouble.WarnTo(w.log, "the lease cannot be renewed", "error", err, "what_to_do",
		"see that NATS answers and has room; until it is renewed nothing is lost, unless it expires")
}

// keyFlags returns the flag of indexer auth that makes a NATS key for this shim.
func (s *Shim) keyFlags() string {
	if s.Messages != nil {
		return "--pool NAME"
	}
	return "--shim " + escape.Shell(s.Worker)
}

// leaveTime bounds the last write of a lease at the end of the process.
const leaveTime = 2 * time.Second

// leave writes the end of the shim into the lease: an end with the engine or the pod, or, if ctx is done, an end while
// the engine runs on.
func (s *Shim) leave(ctx, stop context.Context, report *shim.Report, log *slog.Logger) {
	gone, within := errors.Is(context.Cause(stop), ErrEngineGone), leaveTime
	if gone {
		within = max(leaveTime, s.Lease) // the process continues, and hundreds of pods may end at once
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	if gone {
		defer context.AfterFunc(s.Process, func() { time.AfterFunc(leaveTime, cancel) })()
	}
	err, event := error(nil), "the engine is gone; its lease is ended"
	if ctx.Err() == nil || gone {
		err = report.End(last, stop.Err() != nil)
	} else {
		err = report.Leave(last)
		event = "the engine runs on; its registration stays for the next shim until the lease expires"
	}
	if err != nil {
		log.Warn("the end of this shim cannot be written into the lease", "error", err, "what_to_do",
			"see whether NATS runs; until the lease expires indexers may name this worker")
		return
	}
	log.Info(event)
}
