package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Shim runs the shims of an engine's ranks. A copy with the settings of a rank runs the shim of the rank.
type Shim struct {
	*Shared
	Settings

	// Process is done when all shims of the process must stop. Only contexts with the cause ErrEngineGone need Process.
	Process context.Context

	Messages shim.Receiver // of an engine behind a shared socket; nil: the engine has a socket

	facts
}

// Shared is the common state of all ranks of a process.
type Shared struct {
	Tracer     *tracing.Tracer
	Reconnects Reconnects
	Figures    Figures
}

// facts are the facts about the engine of a rank beside the settings.
type facts struct {
	spec            *api.WorkerSpec // facts for routers, with the address of the engine
	l3              *hicache.Config
	l3Passed        hicache.Passed
	groups          []events.GroupSpec
	loopbackEngine  bool         // EngineHTTP is on loopback, and contains the serving address
	unnamedAdapters bool         // the engine serves adapters, and the events omit adapter names
	remote          bool         // the rank publishes its events on another host
	engineSize      uint32       // block size of the engine's events; 0: unknown
	proof           *sizeProof   // for a nominal BlockSize; nil: BlockSize is certain
	watch           *engineWatch // finds new settings of a returned engine; nil: settings are fixed
	poll            *enginePoll  // polls the running engine; nil: no polling
}

// ErrEngineGone is the cause of the end of a context if the engine is gone, for example with a deleted pod.
var ErrEngineGone = errors.New("the engine is gone")

// Run shims the engine until ctx ends, with the current settings of the engine. Run registers an engine on loopback
// with the address of this host.
func (s *Shim) Run(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	err := s.serveElsewhere(ctx, conn, log)
	if err == nil {
		err = s.RunOn(ctx, conn, log)
	}
	return IgnoreEnd(ctx, err)
}

// RunOn shims the engine until ctx ends, with the current settings of the engine.
func (s *Shim) RunOn(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	for {
		err := s.runOnce(ctx, conn, log)
		if other, is := errors.AsType[*sizeError](err); is {
			s.engineSize = other.size
			log.Warn("the engine's events have larger blocks than the engine reports over HTTP; the size in the "+
				"events is used", "model", s.Model, "block_size", other.size)
			continue
		}
		if errors.Is(err, errOtherSettings) {
			s.engineSize = 0
			log.Warn("the engine has restarted with new settings; the shim uses the new settings", "engine_http",
				s.EngineHTTP)
			continue
		}
		return err
	}
}

// runOnce shims the engine until ctx ends, or until the engine has new settings.
func (s *Shim) runOnce(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	ranks, said, err := s.ranksToServe(ctx, log)
	if err != nil {
		return IgnoreEnd(ctx, err)
	}
	ns, err := ranks[0].Join(ctx, conn, log)
	if err != nil {
		return IgnoreEnd(ctx, err)
	}
	if err := shareFacts(ranks); err != nil {
		return err
	}
	stop := ctx
	ctx, end := s.stopContext(stop, log)
	defer end()
	all, ctx := errgroup.WithContext(ctx)
	if s.EngineHTTP != "" {
		asker, err := s.asker()
		if err != nil {
			return err
		}
		watch, poll := newEngineWatch(), newEnginePoll(s, ranks[0].Model, said, asker, log)
		for _, one := range ranks {
			one.watch, one.poll = watch, poll
		}
		all.Go(func() error { return watch.run(ctx, asker, said) })
		if s.EngineLoad > 0 {
			all.Go(func() error {
				poll.runLoads(ctx, ns)
				return nil
			})
			for _, rank := range said.Ranks {
				if rank.Load != "" {
					all.Go(func() error {
						poll.runLoadSocket(ctx, ns, rank)
						return nil
					})
				}
			}
		}
		if s.EngineCheck > 0 {
			all.Go(func() error {
				poll.run(ctx)
				return nil
			})
		}
	}
	if proof := ranks[0].proof; proof != nil {
		all.Go(func() error { return proof.run(ctx, ranks[0], ns) })
	}
	remoteRanks(ctx, ranks, said, log)
	var serving sync.WaitGroup
	for _, one := range ranks {
		log := log.With("worker", one.Worker, "rank", one.Rank)
		serving.Add(1)
		all.Go(func() error {
			defer serving.Done()
			if one.remote {
				return one.serveRemote(ctx, stop, ns, log)
			}
			return one.serve(ctx, stop, ns, log)
		})
	}
	all.Go(func() error { // after a stop, the end of the last rank ends all goroutines
		select {
		case <-stop.Done():
			serving.Wait()
			end()
		case <-ctx.Done():
		}
		return nil
	})
	return all.Wait()
}

// shareFacts gives all ranks the block size and the facts for routers of the first rank. The first rank has joined the
// namespace.
func shareFacts(ranks []*Shim) error {
	first := ranks[0]
	for _, one := range ranks {
		one.BlockSize, one.proof = first.BlockSize, first.proof
		if err := one.readGroups(); err != nil {
			return err
		}
	}
	if len(ranks) > 1 {
		spec := *first.spec
		spec.RankStart, spec.RankSize = first.Rank, uint32(len(ranks))
		for _, one := range ranks {
			one.spec = &spec
		}
	}
	return nil
}

// stopContext returns a context with an end --stop-wait after stop, which leaves time to record the end of the engine.
// The context ends at once if stop ends with ErrEngineGone, or when end is called.
func (s *Shim) stopContext(stop context.Context, log *slog.Logger) (ctx context.Context, end context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stop))
	forget := context.AfterFunc(stop, func() {
		if errors.Is(context.Cause(stop), ErrEngineGone) {
			cancel()
			return
		}
		if s.StopWait > 0 {
			log.Info("stopping; waiting for the engine's end", "at_most", s.StopWait)
		}
		loop.Wait(ctx, s.StopWait)
		cancel()
	})
	return ctx, func() {
		forget()
		cancel()
	}
}

// LogPassed logs the unknown fields of --l3-config.
func (s *Shim) LogPassed(log *slog.Logger) {
	if len(s.l3Passed) > 0 {
		log.Warn("unknown fields of --l3-config are ignored", "l3_config", s.L3Config, "fields", s.l3Passed,
			"what_to_do", s.l3Passed.Remedy())
	}
}

// Join waits for the namespace and registers the model.
func (s *Shim) Join(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) (*jetstream.Namespace, error) {
	waiting := Limiter{Every: s.LogRepeat}
	for {
		ns, err := s.open(ctx, conn)
		if errors.Is(err, jetstream.ErrMismatch) {
			return nil, otherSize(err, s.Model)
		}
		if err == nil || ctx.Err() != nil || !(errors.Is(err, jetstream.ErrNoNamespace) ||
			errors.Is(err, jetstream.ErrBadRecord) || errors.Is(err, jetstream.ErrUnavailable)) {
			return ns, err
		}
		waiting.Do(func(n uint64) {
			event, todo := "waiting for an indexer to create the namespace",
				"start `indexer serve` on the same NATS server, with --namespace "+s.Namespace
			switch {
			case errors.Is(err, jetstream.ErrBadRecord):
				event, todo = "waiting: the namespace's record is unreadable",
					"start `indexer serve` with --restore-namespace on the same NATS server"
			case errors.Is(err, jetstream.ErrUnavailable):
				event, todo = natsauth.NoJetStream()
			}
			log.Warn(event, "namespace", s.Namespace, "error", err, "what_to_do", todo, "times", n)
		})
		loop.Wait(ctx, time.Second)
	}
}

// openPatience bounds one attempt to reach JetStream. A later attempt logs the wait.
const openPatience = 5 * time.Second

// open tries once to open the namespace and to register the model.
func (s *Shim) open(ctx context.Context, conn *jetstream.Conn) (*jetstream.Namespace, error) {
	ctx, cancel := context.WithTimeout(ctx, openPatience)
	defer cancel()
	ns, err := jetstream.OpenNamespace(ctx, conn, s.Namespace)
	if err != nil {
		return nil, err
	}
	if s.proof != nil {
		undecided, err := s.nominalSize(ctx, ns)
		if err != nil || undecided {
			return ns, err
		}
		s.proof = nil
	}
	if s.Model == "" || s.BlockSize == 0 {
		return ns, nil // topics contain the models, and events the sizes
	}
	return ns, ns.RegisterModel(ctx, jetstream.Model{Name: s.Model, BlockSize: s.BlockSize})
}

// servingAt returns a serving address with the scheme of --engine-http.
func servingAt(engineHTTP, host, port string) string {
	scheme, _, _ := strings.Cut(engineHTTP, "://")
	return scheme + "://" + net.JoinHostPort(host, port)
}

// serveElsewhere registers an engine on loopback with the address of this host in the connection to the NATS server. A
// host name may have no record in DNS, for example the name of a pod.
func (s *Shim) serveElsewhere(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	if !s.loopbackEngine {
		return nil
	}
	asker, err := s.asker()
	if err != nil {
		return err
	}
	for {
		if server := conn.NATS().ConnectedAddr(); server != "" { // empty between two connections
			host, err := dial.LocalAddress(server)
			if err != nil {
				return fmt.Errorf("find this host's address for clients of the engine (set --serving-endpoint to name "+
					"it): %w", err)
			}
			s.spec.Endpoint = servingAt(s.EngineHTTP, host, asker.Port())
			log.Info("the engine listens on loopback; the registration has the address of this host", "endpoint",
				s.spec.Endpoint)
			return nil
		}
		if !loop.Wait(ctx, askEvery) {
			return ctx.Err()
		}
	}
}
