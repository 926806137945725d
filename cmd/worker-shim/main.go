// Command worker-shim carries one inference engine's KV-cache events into kvatlas.
package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/simulate"
)

func main() { os.Exit(cli.Main(rootCommand())) }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "worker-shim",
		Short: "Carry an inference engine's KV-cache events into kvatlas",
	}
	return cli.Group(root, runCommand(), podsCommand(), simulate.Command())
}

// running is a run of one rank, of the ranks of one engine, or of a fleet. It is copied for each rank.
type running struct {
	*shared
	settings // of the flags, or of the engine where flags leave them open
	engineFacts

	whole context.Context // of pods: it is done when all shims are to stop
}

// shared is what all ranks of the process share.
type shared struct {
	http       *httpPort
	traces     *cli.Traces
	debug      *cli.Debug
	tracer     *tracing.Tracer
	reconnects *host.Reconnects
	figures    *fleetFigures
}

// engineFacts is what is known of a rank's engine beside the settings.
type engineFacts struct {
	rule            *dial.Rule // of addresses of Dynamo's discovery
	l3              *hicache.Config
	l3Passed        hicache.Passed
	spec            *api.WorkerSpec // what worker says
	groups          []events.GroupSpec
	loopbackEngine  bool          // --engine-http is on loopback, and names the serving address
	unnamedAdapters bool          // the engine serves adapters and does not announce which
	remote          bool          // the rank publishes its events on another host
	engineSize      uint32        // of blocks, as the engine's events have shown; 0: they have not
	proof           *sizeProof    // of blockSize, which is nominal; nil: it is not
	watch           *engineWatch  // nil: nobody asks whether the engine has other settings
	poll            *enginePoll   // nil: nobody asks whether the engine sleeps
	messages        shim.Receiver // of one engine that dials in; nil: the engine has a socket of its own
}

// What --on-unreadable may be.
const (
	unreadablePass  = "pass"
	unreadableClear = "clear"
)

func runCommand() *cobra.Command {
	r := &running{shared: &shared{reconnects: &host.Reconnects{}, figures: &fleetFigures{}}}
	cmd := &cobra.Command{
		Use:   "run --engine tcp://HOST:PORT --worker ID --model M --block-size N | --engine-http http://HOST:PORT",
		Short: "Publish one engine rank's events until stopped",
		Long: `Hear one engine rank's KV-cache events on its ZeroMQ socket and publish them to the log, each
acknowledged. It keeps no file: when it starts again it goes on where its own last message in the log says. With
--replay, the engine's replay endpoint, nothing is lost while it is away, as long as the engine's replay buffer
reaches back; without it a gap clears what the rank was known to hold.

One process shims as many data-parallel ranks as --ranks says: rank N has --engine's port + N and --replay's + N, which
is how vLLM and SGLang number them. vLLM publishes with
  --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",` +
			`"replay_endpoint":"tcp://*:5657"}'

With --engine-http alone all of that is asked of the engine: SGLang says it, and vLLM from 0.32 on. What flags say
counts more. The worker is called HOST:PORT then, with this host's name in place of a loopback address. If the engine
comes back with other settings they are taken.

With --listen and without --worker any number of engines dial this shim. The topic of an engine's messages,
kv@IP:PORT@MODEL, kv@IP@MODEL or kv@POD@MODEL, names its worker and model.

With --source mooncake it is no engine's shim but a shared store's: it passes on what a Mooncake master says of its
objects, for indexers to know without asking. It needs --engine and --master alone.`,
		Example: `  worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --worker w1 ` +
			`--model llama --block-size 16
  worker-shim run --engine-http http://127.0.0.1:8000
  worker-shim run --listen --engine tcp://0.0.0.0:5557 --block-size 16
  worker-shim run --source mooncake --engine tcp://mooncake:5557 --master mooncake:9003`,
		Args: cobra.NoArgs,
	}
	logger := r.addFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if r.source == sourceMooncake {
			return r.underWatch(log, func() error { return r.runStore(cmd, log) })
		}
		if err := r.check(); err != nil {
			return err
		}
		return r.process(cmd.Context(), log, func() error { return r.run(cmd.Context(), log) })
	}
	return cmd
}

// process runs a shim with its traces and its HTTP port.
func (r *running) process(ctx context.Context, log *slog.Logger, run func() error) error {
	if err := r.http.check(); err != nil {
		return err
	}
	if err := r.traces.Check(); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	tracer, tracesEnd, err := r.traces.Open(ctx, "kvatlas-worker-shim", r.instance, log)
	if err != nil {
		return err
	}
	defer tracesEnd()
	r.tracer, r.figures.tracer = tracer, tracer
	r.figures.queueMost = r.ownQueue()
	httpStop, err := r.http.serve(r.figures, log)
	if err != nil {
		return err
	}
	defer httpStop()
	return r.underWatch(log, run)
}

// processors bounds the processors of a shim. One carries a million blocks a second.
const processors = 4

// underWatch runs with --debug-listen, in as little memory as possible.
func (r *running) underWatch(log *slog.Logger, run func() error) error {
	if err := r.debug.Check(); err != nil {
		return err
	}
	debugStop, err := r.debug.Serve(log)
	if err != nil {
		return err
	}
	defer debugStop()
	cli.LimitProcessors(processors)
	cli.SaveMemory(cli.ShimRoom)
	return run()
}

func (r *running) check() error {
	var wrong cli.Complaints
	for _, s := range []struct{ name, value string }{{"--engine", r.engine}, {"--worker", r.instance},
		{"--model", r.model}} {
		optional := r.fleet() && s.name == "--worker" || r.engineHTTP != "" || r.byTopic() && s.name != "--engine"
		wrong.When(s.value == "" && !optional, "%s is missing", s.name)
		if s.name != "--engine" && !(s.value == "" && optional) {
			_, err := jetstream.EscapeToken(s.value)
			wrong.About(s.name, err)
		}
	}
	wrong.When(r.blockSize == 0 && r.engineHTTP == "" && !r.byTopic() || r.blockSize > events.MaxBlockSize,
		"--block-size %d is not from 1 to %d", r.blockSize, events.MaxBlockSize)
	if r.fleet() {
		r.checkFleet(&wrong)
	} else {
		_, err := events.EngineOf(r.source)
		wrong.When(err != nil, "--source %q is none of auto, vllm, sglang, ndjson, dynamo-nats, dynamo-zmq, mooncake",
			r.source)
	}
	r.checkTopics(&wrong)
	wrong.When(r.master != "", "--master is for --source %s", sourceMooncake)
	wrong.When(r.engineNATS.Said() && (r.source != sourceDynamo || r.engineNATS.URL == ""),
		"--engine-nats and what begins so are for --source %s, and say nothing without --engine-nats itself",
		sourceDynamo)
	r.etcd.check(&wrong, r.source, r.engine)
	var err error
	r.rule, err = r.makeRule()
	wrong.About("--dial-allow", err)
	_, err = r.engineNATS.Options("") // which is connected to much later
	wrong = append(wrong, err)
	wrong.About("--namespace", jetstream.CheckNamespace(r.namespace))
	for _, s := range []struct{ name, value string }{{"--engine", r.engine}, {"--replay", r.replay},
		{"--engine-snapshot", r.engineSnapshot}} {
		if s.value != "" && !r.fleet() {
			wrong.About(s.name, zmtp.CheckEndpoint(s.value))
		}
	}
	if r.ranks == 0 || r.ranks > maxRanks {
		wrong.When(true, "--ranks %d is not from 1 to %d", r.ranks, maxRanks)
	} else if last := uint64(r.rank) + uint64(r.ranks) - 1; last >= events.MaxRanks {
		wrong.When(true, "rank %d (--rank, --ranks) is not from 0 to %d", last, events.MaxRanks-1)
	} else if errors.Join(wrong...) == nil && !r.fleet() && r.engine != "" {
		wrong = append(wrong, r.checkPorts())
	}
	wrong = append(wrong, r.checkLearning())
	wrong.When(r.lease < registry.MinLease || r.lease > registry.MaxLease, "--lease %v is not from %v to %v", r.lease,
		registry.MinLease, registry.MaxLease)
	master, err := r.l3Master()
	wrong = append(wrong, err)
	if r.l3Config != "" {
		wrong.About("--l3-config", r.readL3Config(master))
	} else {
		wrong.When(master.Address != "", "--l3-master says nothing without --l3-config")
	}
	wrong = append(wrong, r.readGroups(), r.readWorker())
	wrong.When(r.onUnreadable != unreadablePass && r.onUnreadable != unreadableClear,
		"--on-unreadable %q is neither %s nor %s", r.onUnreadable, unreadablePass, unreadableClear)
	_, err = shim.ParseOnRefused(r.onRefused)
	wrong.About("--on-engine-refused", err)
	wrong.When(r.engineCheck != 0 && r.engineCheck < 100*time.Millisecond,
		"--engine-http-check %v is neither 0 nor at least 100ms", r.engineCheck)
	wrong.When(r.silentAfter < time.Second, "--engine-silent-after %v is less than 1s", r.silentAfter)
	wrong.When(r.goneAfter != 0 && r.goneAfter < r.silentAfter && !r.byTopic(),
		"--engine-gone-after %v is less than --engine-silent-after %v", r.goneAfter, r.silentAfter)
	wrong.When(r.stopWait < 0, "--stop-wait %v is negative", r.stopWait)
	wrong.When(r.queueBytes < 1<<20, "--queue-bytes %d is less than 1 MiB", r.queueBytes)
	return wrong.Usage()
}

// connect waits for a NATS server. what is the connection's name there; without is what happens while the server is
// away.
func (r *running) connect(ctx context.Context, log *slog.Logger, what, without string, core bool) (*jetstream.Conn,
	error) {
	options, err := r.nats.Options("kvatlas shim " + what)
	if err != nil {
		return nil, err
	}
	waiting := limiter{every: r.logWindow}
	options.Core, options.Wait = core, true // a shim may be started before everything else
	options.Hooks = jetstream.ConnHooks{
		Disconnected: func(err error) {
			log.Warn("NATS connection lost; "+without, "error", err, "what_to_do",
				"see that the NATS server runs; it is dialled until it answers")
		},
		Reconnected: func(url string) {
			log.Info("NATS connection is back", "server", url)
			r.reconnects.Reconnected()
		},
		AsyncError: func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice(err)) },
		Waiting: func(err error) {
			waiting.do(func(n uint64) {
				what, todo := r.nats.Away(err)
				log.Warn(what, "nats", r.nats.Shown(), "error", err, "what_to_do", todo, "times", n)
			})
		},
	}
	return jetstream.Connect(ctx, options)
}

func (r *running) run(ctx context.Context, log *slog.Logger) error {
	if len(r.l3Passed) > 0 {
		log.Warn("--l3-config has unknown fields, which are passed over", "l3_config", r.l3Config, "fields", r.l3Passed,
			"what_to_do", hicache.PassedRemedy)
	}
	conn, err := r.connect(ctx, log, cmp.Or(r.instance, r.engineHTTP), "the engine's events wait", false)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	defer conn.Close()
	if err := r.serveElsewhere(ctx, conn, log); err != nil {
		return ignoreEnd(ctx, err)
	}
	err = r.runOn(ctx, conn, log)
	if err == nil {
		log.Info("stopped")
	}
	return err
}

// runOn shims until ctx ends, with the settings that the engine has at each time.
func (r *running) runOn(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	for {
		err := r.runOnce(ctx, conn, log)
		if other, is := errors.AsType[*sizeError](err); is {
			r.engineSize = other.size
			log.Warn("the blocks of the engine's events are larger than it reports over HTTP; their size is used", "model",
				r.model, "block_size", other.size)
			continue
		}
		if errors.Is(err, errOtherSettings) {
			r.engineSize = 0
			log.Warn("the engine came back with other settings; they are taken", "engine_http", r.engineHTTP)
			continue
		}
		return err
	}
}

// runOnce shims until ctx ends, or the engine has other settings.
func (r *running) runOnce(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	if r.fleet() || r.byTopic() {
		ns, err := r.join(ctx, conn, log)
		if err != nil {
			return ignoreEnd(ctx, err)
		}
		return r.runFleet(ctx, ns, log)
	}
	ranks, said, err := r.ranksToServe(ctx, log)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	ns, err := ranks[0].join(ctx, conn, log)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	proof := ranks[0].proof
	for _, one := range ranks {
		one.blockSize, one.proof = ranks[0].blockSize, proof
		if err := one.readGroups(); err != nil {
			return err
		}
	}
	if len(ranks) > 1 {
		spec := *ranks[0].spec
		spec.RankStart, spec.RankSize = ranks[0].rank, uint32(len(ranks))
		for _, one := range ranks {
			one.spec = &spec
		}
	}
	stop := ctx
	ctx, end := r.linger(stop, log)
	defer end()
	all, ctx := errgroup.WithContext(ctx)
	if r.engineHTTP != "" {
		asker, err := r.asker()
		if err != nil {
			return err
		}
		watch, poll := newEngineWatch(), newEnginePoll(r, ranks[0].model, said, asker, log)
		for _, one := range ranks {
			one.watch, one.poll = watch, poll
		}
		all.Go(func() error { return watch.run(ctx, asker, said) })
		if r.engineCheck > 0 {
			all.Go(func() error {
				poll.run(ctx)
				return nil
			})
		}
	}
	if proof != nil {
		all.Go(func() error { return proof.run(ctx, ranks[0], ns) })
	}
	remoteRanks(ctx, ranks, said, log)
	var serving sync.WaitGroup
	for _, one := range ranks {
		log := log.With("worker", one.instance, "rank", one.rank)
		serving.Add(1)
		all.Go(func() error {
			defer serving.Done()
			if one.remote {
				return one.serveRemote(ctx, stop, ns, log)
			}
			return one.serve(ctx, stop, ns, log)
		})
	}
	all.Go(func() error { // at a stop, the last rank ends what runs beside
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

// serve shims one rank until ctx ends, or until stop has ended and the engine is gone.
func (r *running) serve(ctx, stop context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	source, err := events.EngineOf(r.source)
	if err != nil {
		return err
	}
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: source, BlockSize: r.blockSize, Groups: r.groups,
		Store: r.l3 != nil && r.l3.VLLM != nil, UnnamedAdapters: r.unnamedAdapters})
	if err != nil {
		return err
	}
	onRefused, err := shim.ParseOnRefused(r.onRefused)
	if err != nil {
		return err
	}
	watch := &watcher{log: log, cfg: r}
	serving := ""
	if r.messages == nil { // the engines that share a shim would cost it too many connections
		serving, _ = dial.ServingAddress(r.spec.Endpoint)
	}
	var polled func()
	claimed := false
	env := r.env(stop, ns, watch)
	env.Watch.Prepared = func(report *shim.Report, cfg *shim.Config) {
		claimed, watch.report = true, report
		if r.poll != nil {
			cfg.Sleep, polled = r.poll.serve(report)
		}
		log.Info("starting", "engine", r.engine, "replay", r.replay, "model", r.model, "block_size", r.blockSize, "nats",
			ns.Conn().ServerURL())
	}
	env.Watch.Ended = func(err error) {
		if err == nil && (stop.Err() != nil || ctx.Err() == nil) {
			r.leave(ctx, stop, watch.report, log)
		}
		if polled != nil {
			polled()
		}
	}
	err = host.Run(ctx, host.Rank{Record: r.record(r.key(), log), Decoder: decoder, Config: shim.Config{
		Engine: r.engine, Listen: r.listen, Topics: []string{r.topic}, Messages: r.messages,
		Replay: r.replay, Snapshot: r.engineSnapshot, Limits: shim.Limits{QueueBytes: r.queueBytes},
		ClearUnreadable: r.onUnreadable == unreadableClear, ReplayTimeout: r.replayTimeout, IdleCheck: r.idleCheck,
		QuietAfter: r.silence, OnRefused: onRefused, SilentAfter: r.silentAfter, GoneAfter: r.goneAfter,
		Tracer: r.tracer, Stop: stop.Done(), Serving: serving,
	}}, env)
	if !claimed {
		return ignoreEnd(stop, err)
	}
	r.figures.end(watch)
	return err
}

// key names the rank.
func (r *running) key() events.RankKey {
	return events.RankKey{Instance: events.WorkerID(r.instance), Rank: events.Rank(r.rank)}
}

// env returns the surroundings of a rank's shim. The claim waits until stop ends.
func (r *running) env(stop context.Context, ns *jetstream.Namespace, w *watcher) host.Env {
	return host.Env{Namespace: ns, Lease: r.leaseHooks(w.log), Reconnects: r.reconnects, Watch: w.watch(),
		Claim: func(context.Context) (*shim.ControlServer, error) { return r.claim(stop, ns, r.key(), w.log) }}
}

// join waits for the namespace and registers the model in it.
func (r *running) join(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) (*jetstream.Namespace, error) {
	waiting := limiter{every: r.logWindow}
	for {
		ns, err := r.open(ctx, conn)
		if errors.Is(err, jetstream.ErrMismatch) {
			return nil, otherSize(err, r.model)
		}
		if err == nil || ctx.Err() != nil || !(errors.Is(err, jetstream.ErrNoNamespace) ||
			errors.Is(err, jetstream.ErrBadRecord) || errors.Is(err, jetstream.ErrUnavailable)) {
			return ns, err
		}
		waiting.do(func(n uint64) {
			what, todo := "waiting for an indexer to create the namespace",
				"start `indexer serve` on this NATS server, with --namespace "+r.namespace
			switch {
			case errors.Is(err, jetstream.ErrBadRecord):
				what, todo = "waiting for the namespace's record, which cannot be read",
					"start `indexer serve` with --restore-namespace on this NATS server"
			case errors.Is(err, jetstream.ErrUnavailable):
				what, todo = cli.NoJetStream()
			}
			log.Warn(what, "namespace", r.namespace, "error", err, "what_to_do", todo, "times", n)
		})
		loop.Wait(ctx, time.Second)
	}
}

// openPatience is how long JetStream may take before it is said that it is waited for.
const openPatience = 5 * time.Second

// open tries once to open the namespace and to register the model in it.
func (r *running) open(ctx context.Context, conn *jetstream.Conn) (*jetstream.Namespace, error) {
	ctx, cancel := context.WithTimeout(ctx, openPatience)
	defer cancel()
	ns, err := jetstream.OpenNamespace(ctx, conn, r.namespace)
	if err != nil {
		return nil, err
	}
	if r.proof != nil {
		undecided, err := r.nominalSize(ctx, ns)
		if err != nil || undecided {
			return ns, err
		}
		r.proof = nil
	}
	if r.model == "" || r.blockSize == 0 {
		return ns, nil // topics name the models, and events the sizes
	}
	return ns, ns.RegisterModel(ctx, jetstream.Model{Name: r.model, BlockSize: r.blockSize})
}

// claim makes sure that no other shim serves the rank, for which it waits a while: a predecessor may be draining. It
// returns nil where the NATS server does not let us ask and be asked: then the log alone tells two shims apart, and
// nobody can have the engine's events said again.
func (r *running) claim(ctx context.Context, ns *jetstream.Namespace, key events.RankKey,
	log *slog.Logger) (*shim.ControlServer, error) {
	waiting := limiter{every: r.logWindow}
	giveUp := time.Now().Add(r.claimWait)
	for {
		server, err := shim.Claim(ctx, ns, key, r.replay != "" || r.engineSnapshot != "")
		switch {
		case errors.Is(err, jetstream.ErrDenied):
			log.Warn("the NATS server does not permit control subjects", "error", err, "what_to_do",
				"grant it to this user: indexer auth example prints what each user needs")
			return nil, nil
		case errors.Is(err, shim.ErrFenced) && time.Now().Before(giveUp):
			waiting.warn(log, "waiting for the shim that has this rank to end", "error", err, "at_most", r.claimWait,
				"what_to_do", "stop that shim, or let it drain; or give this one another --worker or --rank")
		case err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable):
			return server, err
		default:
			waiting.warn(log, "waiting for NATS", "error", err, "what_to_do",
				"see that the NATS server runs and that more than half of those with JetStream are up")
		}
		loop.Wait(ctx, time.Second)
	}
}

// ignoreEnd is nil for an error that only says that we were stopped.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// limiter bounds the rate of log lines about one thing.
type limiter struct {
	every time.Duration
	last  atomic.Int64 // nanoseconds
	count atomic.Uint64
}

// do calls say, with how often it happened since it was said last, unless that was only just now.
func (l *limiter) do(say func(times uint64)) {
	n := l.count.Add(1)
	now, last := time.Now().UnixNano(), l.last.Load()
	if now-last >= int64(l.every) && l.last.CompareAndSwap(last, now) {
		l.count.Add(-n)
		say(n)
	}
}

// warn logs a warning, with how often it would have been since it was said last.
func (l *limiter) warn(log *slog.Logger, what string, args ...any) {
	l.do(func(times uint64) { log.Warn(what, append(args, "times", times)...) })
}
