// Command worker-shim carries one inference engine's KV-cache events into kvatlas.
package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/internal/dial"
	"github.com/kvatlas/kvatlas/internal/loop"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/internal/tracing"
	"github.com/kvatlas/kvatlas/internal/zmtp"
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
	return cli.Group(root, runCommand(), simulate.Command())
}

// running is what worker-shim run was told.
type running struct {
	nats                                *cli.NATS
	namespace                           string
	engine, replay, source, topic       string
	master                              string
	engineSnapshot                      string
	engineNATS                          *cli.NATS
	etcd                                *etcdFlags
	makeRule                            func() (*dial.Rule, error)
	rule                                *dial.Rule // of addresses of Dynamo's discovery
	listen                              bool
	instance, model                     string
	rank, ranks, blockSize              uint32
	unnamedAdapters                     bool // learned: the engine serves adapters and does not announce which
	queueBytes                          int
	replayTimeout, idleCheck, logWindow time.Duration
	lease                               time.Duration
	l3Config                            string
	l3                                  *hicache.Config
	l3Passed                            hicache.Passed
	l3Master                            func() (hicache.Master, error)
	worker                              *cli.WorkerFlags
	spec                                *api.WorkerSpec // what worker says
	loopbackEngine                      bool            // --engine-http is on loopback, and names the serving address
	kvGroups                            string
	groups                              []events.GroupSpec
	claimWait, silence                  time.Duration
	onUnreadable                        string
	onRefused                           string
	silentAfter, goneAfter              time.Duration
	debug                               *cli.Debug
	traces                              *cli.Traces
	tracer                              *tracing.Tracer
	reconnects                          *reconnects
	http                                *httpPort
	figures                             *fleetFigures
	engineHTTP, engineHTTPToken         string
	engineCheck                         time.Duration
	remote                              bool          // the rank publishes its events on another host
	engineSize                          uint32        // of blocks, as the engine's events have shown; 0: they have not
	proof                               *sizeProof    // of blockSize, which is nominal; nil: it is not
	watch                               *engineWatch  // nil: nobody asks whether the engine has other settings
	poll                                *enginePoll   // nil: nobody asks whether the engine sleeps
	maxEngines                          uint32        // of engines that dial in, where topics name the workers
	messages                            shim.Receiver // of one such engine; nil: the engine has a socket of its own
}

// What --on-unreadable may be.
const (
	unreadablePass  = "pass"
	unreadableClear = "clear"
)

func runCommand() *cobra.Command {
	r := &running{reconnects: &reconnects{}, figures: &fleetFigures{}}
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
	f := cmd.Flags()
	r.nats = cli.NATSFlags(f, false)
	f.StringVar(&r.namespace, "namespace", "default", "namespace of the indexer")
	f.StringVar(&r.engine, "engine", "",
		"the engine's event endpoint, tcp://HOST:PORT or ipc://PATH (required); of ndjson - for standard input or "+
			"ipc://PATH to listen at; of dynamo-nats a subject; of dynamo-zmq where Dynamo's discovery is: "+
			"http://HOST:PORT of etcd, ETCD_ENDPOINTS, or the folder of files, DYN_FILE_KV")
	r.engineNATS = cli.OtherNATSFlags(f, "engine-nats",
		"of dynamo-nats: the NATS server of the Dynamo fleet, if it is another than --nats")
	r.etcd = addEtcdFlags(f)
	r.makeRule = cli.DialFlag(f, "of dynamo-zmq: networks in which the addresses of Dynamo's discovery are dialled")
	f.BoolVar(&r.listen, "listen", false,
		"listen on --engine; the engine dials in. Without --worker any number of engines may: each topic kv@POD@MODEL is "+
			"a worker, and POD its name")
	f.Uint32Var(&r.maxEngines, "max-engines", defaultEngines,
		"of --listen without --worker: how many ranks are served; the messages of further ones are skipped and counted")
	f.StringVar(&r.replay, "replay", "", "the engine's replay endpoint")
	f.StringVar(&r.engineSnapshot, "engine-snapshot", "",
		"where the engine can be asked for all that it holds, as proposed for vLLM: its snapshot_endpoint, "+
			"or --replay's endpoint again")
	f.StringVar(&r.source, "source", "auto",
		"how the engine speaks: vllm, sglang, auto (one of the two, told from what it says), or, for many ranks at once, "+
			"ndjson, dynamo-nats or dynamo-zmq; mooncake is no engine but a shared store's master, with --master; "+
			"see docs/l3.md")
	f.StringVar(&r.master, "master", "", "of mooncake: HOST:PORT of the master's HTTP, as workers register it")
	f.StringVar(&r.topic, "topic", "", "hear only messages whose topic begins with this; of dynamo-zmq only publishers "+
		"whose NAMESPACE.COMPONENT.ENDPOINT does")
	f.StringVar(&r.instance, "worker", "", "the worker's name: what routers address (required)")
	cli.Renamed(f, map[string]string{"instance": "worker"})
	f.Uint32Var(&r.rank, "rank", 0, "data-parallel rank, the first one if there are several")
	f.Uint32Var(&r.ranks, "ranks", 1,
		"how many data-parallel ranks to shim: each has the ports after those of the one before, as engines number them")
	f.StringVar(&r.model, "model", "", "model that the engine serves (required)")
	f.Uint32Var(&r.blockSize, "block-size", 0, "tokens in one of the engine's blocks (required)")
	f.IntVar(&r.queueBytes, "queue-bytes", 64<<20,
		"bytes of memory that may wait for NATS before the engine is no longer read")
	f.DurationVar(&r.replayTimeout, "replay-timeout", 2*time.Second, "how long the replay endpoint may say nothing")
	f.DurationVar(&r.idleCheck, "idle-check", 30*time.Second,
		"after how long a silence the replay endpoint is asked whether anything was missed")
	f.DurationVar(&r.claimWait, "claim-wait", 45*time.Second,
		"how long to wait for another shim of the same rank to end, before this one gives up: longer than a predecessor "+
			"may take to stop")
	f.DurationVar(&r.silence, "silence", 30*time.Second,
		"how long a source may publish no first event, or not be reached, before the log, indexer status and doctor report it")
	f.DurationVar(&r.lease, "lease", registry.DefaultLease,
		"after how long without a sign of this shim the worker counts as gone, and what it held is cleared")
	f.StringVar(&r.l3Config, "l3-config", "",
		"JSON file that says how this worker uses a shared store; it is registered with the lease; see docs/l3.md")
	r.l3Master = cli.MasterFlags(f)
	r.worker = cli.AddWorkerFlags(f, "serving-endpoint")
	f.StringVar(&r.kvGroups, "kv-groups", "",
		"of a hybrid model: what the engine's KV-cache groups serve, by number, where its events leave that open: full, "+
			"mla, swa:TOKENS, chunked:TOKENS or mamba, with :eagle behind it if a draft model has the last block of a hit "+
			"computed anew; as in full,chunked:8192. The default is what --l3-config says")
	f.StringVar(&r.onUnreadable, "on-unreadable", unreadablePass,
		"what an engine's message that cannot be read costs: pass (itself alone) or clear (all that the rank was known to "+
			"hold, since it may have told of removals)")
	f.StringVar(&r.engineHTTP, "engine-http", "",
		"http://HOST:PORT of the engine's API, from which is learned what other flags do not say: endpoints, ranks, model, "+
			"block size, room in blocks (SGLang; vLLM from 0.32 on)")
	f.StringVar(&r.engineHTTPToken, "engine-http-token-file", "", "file with the API key that the engine wants")
	f.DurationVar(&r.engineCheck, "engine-http-check", 2*time.Second,
		"how often --engine-http is asked whether the engine sleeps, and, at every fifth time, which names and LoRA "+
			"adapters it serves; 0: never")
	f.StringVar(&r.onRefused, "on-engine-refused", "clear",
		"what follows when the engine's connection has ended and its own ports refuse: clear (its process is gone, and "+
			"what it had in device and host memory is cleared) or keep (a proxy may refuse)")
	f.DurationVar(&r.silentAfter, "engine-silent-after", 10*time.Second,
		"after how long without a sign of life the engine counts as silent, which is said and clears nothing")
	f.DurationVar(&r.goneAfter, "engine-gone-after", 0,
		"after how long a silence the engine counts as gone, and what it had in device and host memory is cleared; 0: "+
			"never. Of --listen without --worker: how long after its connection has ended; 0: 2s")
	f.DurationVar(&r.logWindow, "log-repeat", 10*time.Second, "least time between two log lines about the same trouble")
	r.http = httpFlags(f)
	r.traces = cli.TraceFlags(f)
	r.debug = cli.DebugFlag(f)
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if err := r.debug.Check(); err != nil {
			return err
		}
		run := func() error { return r.runStore(cmd, log) }
		if r.source != sourceMooncake {
			if err := r.check(); err != nil {
				return err
			}
			run = func() error { return r.run(cmd.Context(), log) }
			if err := r.http.check(); err != nil {
				return err
			}
			if err := r.traces.Check(); err != nil {
				return cli.UsageErrorf("%w", err)
			}
			tracer, tracesEnd, err := r.traces.Open(cmd.Context(), "kvatlas-worker-shim", r.instance, log)
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
		}
		debugStop, err := r.debug.Serve(log)
		if err != nil {
			return err
		}
		defer debugStop()
		return run()
	}
	return cmd
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
			r.reconnects.tell()
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
		if err == nil {
			log.Info("stopped")
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
	for _, one := range ranks {
		log := log.With("worker", one.instance, "rank", one.rank)
		all.Go(func() error {
			if one.remote {
				return one.serveRemote(ctx, ns, log)
			}
			return one.serve(ctx, ns, log)
		})
	}
	return all.Wait()
}

// serve shims one rank.
func (r *running) serve(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
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
	watch.Examiner = watch.examiner(decoder)
	key := events.RankKey{Instance: events.WorkerID(r.instance), Rank: events.Rank(r.rank)}
	server, err := r.claim(ctx, ns, key, log)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	if server != nil {
		defer server.Close()
	}
	if watch.report, err = r.register(ns, key, server, log); err != nil {
		return err
	}
	defer r.figures.end(watch)
	var sleep <-chan shim.SleepReport
	if r.poll != nil {
		var end func()
		sleep, end = r.poll.serve(watch.report)
		defer end()
	}
	log.Info("starting", "engine", r.engine, "replay", r.replay, "model", r.model, "block_size", r.blockSize, "nats",
		ns.Conn().ServerURL())
	err = shim.Run(ctx, shim.Config{
		Engine: r.engine, Listen: r.listen, Topics: []string{r.topic}, Messages: r.messages,
		Replay: r.replay, Snapshot: r.engineSnapshot,
		Identity: shim.Identity{Model: r.model, BlockSize: r.blockSize},
		Limits:   shim.Limits{QueueBytes: r.queueBytes}, Decoder: watch,
		ClearUnreadable: r.onUnreadable == unreadableClear,
		Log:             shim.NewStreamLog(ns, key, watch.logFailed).OnCrowded(watch.logCrowded),
		Control:         server,
		Keep:            r.keep(watch.report, log),
		ReplayTimeout:   r.replayTimeout, IdleCheck: r.idleCheck, Hooks: watch.hooks(), QuietAfter: r.silence,
		OnRefused: onRefused, SilentAfter: r.silentAfter, GoneAfter: r.goneAfter,
		Tracer: r.tracer, Sleep: sleep,
	})
	if err == nil && ctx.Err() == nil { // the engine is gone, and nobody waits for it
		log.Info("the engine is gone; its lease is ended")
		if err := watch.report.End(ctx); err != nil {
			log.Warn("the lease cannot be ended; it expires by itself", "error", err, "what_to_do",
				"see whether NATS runs; until then indexers name this worker")
		}
	}
	return err
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
