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
// the lease and the figures of the process contain the state. stop is the request to stop: ctx, or a context that ends
// before ctx. The end of a feed leaves the lease unchanged, since the source may come back. begin is called before the
// shim runs, and returns a function to call afterwards. nil means none.
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
	if s.Messages == nil { // the engines of a shared shim would need too many connections
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
			cfg.Sleep, end = s.poll.serve(report, s, cfg.Control)
		}
		return end
	})
}

// ServeMessages serves the rank of an engine behind a shared socket, until ctx ends. learned means that an event
// contained the block size. Then a registered block size of the model has priority.
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
		log.Info("the shared store is registered after the first event with KV-cache groups")
	default:
		if why := l3.Usable(s.BlockSize); why != "" {
			log.Warn("the shared store adds no blocks to this worker", "why", why)
		}
	}
	return registry.Record{
		Instance: events.WorkerID(s.Worker), Rank: events.Rank(s.Rank), Model: s.Model, BlockSize: s.BlockSize,
		Source: s.Source, LeaseMS: s.Lease.Milliseconds(), L3: l3, Worker: s.spec,
	}
}

// claim reserves the rank for this shim. It waits up to --claim-wait, since a predecessor may be draining. claim
// returns nil if the NATS server permits no control subjects. Then only the log excludes a second shim, and indexers
// cannot request the engine's events again.
func (s *Shim) claim(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) (*shim.ControlServer, error) {
	waiting := Limiter{Every: s.LogRepeat}
	giveUp := time.Now().Add(s.ClaimWait)
	for {
		server, err := shim.Claim(ctx, ns, s.key(), s.Replay != "")
		switch {
		case errors.Is(err, jetstream.ErrDenied):
			log.Warn("the NATS server does not permit control subjects", "error", err, "what_to_do",
				"grant the permission to this user: indexer auth create prints the permissions of all users")
			return nil, nil
		case errors.Is(err, shim.ErrFenced) && time.Now().Before(giveUp):
			waiting.WarnTo(log, "waiting for the end of the rank's present shim", "error", err, "at_most", s.ClaimWait,
				"what_to_do", "stop the present shim, or let the shim drain; or set a free --worker or --rank here")
		case err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable):
			return server, err
		default:
			waiting.WarnTo(log, "waiting for NATS", "error", err, "what_to_do",
				"check that the NATS server runs, and that more than half of the JetStream servers are up")
		}
		loop.Wait(ctx, time.Second)
	}
}

// registerModel registers the model of an engine after the first message. learned means that an event contained the
// block size. Then a registered block size has priority.
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

// LeaseLost logs the expiry of the lease.
func (w *watcher) LeaseLost() { w.log.Warn("the lease had expired; the shim has registered again") }

// Unclaimed logs the refused claim of a name of the model.
func (w *watcher) Unclaimed(name string, err error) {
	event := "the NATS server does not permit the claim of the model; indexers with required claims ignore this worker"
	if name != w.cfg.Model {
		event = "the NATS server does not permit the claim of a further name of the model; indexers with required " +
			"claims ignore the name"
	}
	w.log.Warn(event, "model", name, "error", err, "what_to_do", "grant the permission to this user: indexer auth "+
		"example "+w.cfg.keyFlags()+" --model "+escape.Shell(name))
}

// LeaseFailed logs a failed renewal of the lease.
func (w *watcher) LeaseFailed(err error) {
	w.leaseTrouble.WarnTo(w.log, "the lease cannot be renewed", "error", err, "what_to_do",
		"check that NATS answers and has room; nothing is lost before the lease expires")
}

// keyFlags returns the flag of indexer auth for a NATS key of this shim.
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
	err, event := error(nil), "the engine is gone; the lease has ended"
	if ctx.Err() == nil || gone {
		err = report.End(last, stop.Err() != nil)
	} else {
		err = report.Leave(last)
		event = "the engine runs on; the registration stays for the next shim until the lease expires"
	}
	if err != nil {
		log.Warn("cannot write the shim's end into the lease", "error", err, "what_to_do",
			"check that NATS runs; indexers may name this worker until the lease expires")
		return
	}
	log.Info(event)
}
