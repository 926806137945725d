package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/internal/compat"
	"github.com/kvatlas/kvatlas/internal/metrics"
	"github.com/kvatlas/kvatlas/internal/node"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/internal/wire"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/rpc"
	"github.com/spf13/cobra"
)

// serving is what indexer serve was told.
type serving struct {
	data, natsListen, natsConfig, httpListen string
	namespace, id                            string
	partitions                               uint32
	replicas, replication                    int
	drain, natsWait                          time.Duration
	syncInterval                             time.Duration
	logBytes, snapshotBytes, storeBytes      int64
	logAge                                   time.Duration
	snapshotInterval                         time.Duration
	snapshotBlocks                           uint64
	index                                    radix.Config
	parkFor, rememberFor                     time.Duration
	security                                 httpSecurity
	queryWorkers, queryQueue                 int
	l3Config                                 string
	l3                                       node.L3Config
	nats                                     *cli.NATS
	debug                                    *cli.Debug
	onRefused                                string
	engines                                  compat.Engines // of shims in this process
}

func serveCommand() *cobra.Command {
	s := &serving{}
	cmd := &cobra.Command{
		Use:   "serve [--data DIR | --nats URL]",
		Short: "Run an indexer, with a NATS server of its own or on one that is there",
		Long: `Run an indexer. With --data (the default) it runs a NATS server with JetStream in this process, keeps everything in that folder, and
takes shims and clients on --nats-listen. With --nats it joins a NATS server that is there, and the other nodes on it, which
share the partitions of the namespace: each is kept by so many nodes as --replication says, and who gets one restores it before another lets it go.

It restores the last snapshot, applies the log that follows it, and then answers queries over NATS and HTTP. SIGINT and
SIGTERM end it in good order; after any other end it comes back with nothing lost.`,
		Example: `  indexer serve --data /var/lib/kvatlas
  indexer serve --nats nats://nats-1,nats://nats-2 --namespace prod`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	s.nats = cli.NATSFlags(f, true)
	f.StringVar(&s.data, "data", "kvatlas-data",
		"folder for the log and the snapshots of the NATS server in this process")
	f.StringVar(&s.natsListen, "nats-listen", "127.0.0.1:4222", "where that server listens; port 0 takes a free one")
	f.StringVar(&s.natsConfig, "nats-config", "",
		"nats-server configuration file for that server: users, TLS, leaf nodes")
	f.StringVar(&s.httpListen, "http-listen", "127.0.0.1:8090",
		"where HTTP is served; port 0 takes a free one, empty serves none")
	f.StringVar(&s.security.tokenFile, "http-token-file", "",
		"file with the bearer token that HTTP requests must bring; needed to listen on other than loopback")
	f.StringVar(&s.security.cert, "http-cert", "", "certificate file (PEM) with which HTTP is served over TLS")
	f.StringVar(&s.security.key, "http-key", "", "its key")
	f.StringVar(&s.namespace, "namespace", "default",
		"namespace: one deployment's world of subjects, streams and buckets")
	f.StringVar(&s.id, "node-id", "", "how this node calls itself (default: the host's name)")
	f.Uint32Var(&s.partitions, "partitions", 0,
		"shares of the log, fixed when the namespace is created (default: what is there, or 8)")
	f.IntVar(&s.replicas, "replicas", 1, "copies of streams and buckets on the NATS servers: 1, 3 or 5")
	f.IntVar(&s.replication, "replication", 0,
		"with --nats: how many nodes keep each partition; the greatest that any node says counts (default: all, or 2 if there are more than three)")
	f.DurationVar(&s.drain, "drain-timeout", 20*time.Second,
		"how long after SIGTERM this node may go on until others have taken what it has")
	f.DurationVar(&s.natsWait, "nats-wait", 30*time.Second,
		"with --nats: how long to wait at the start for a server that is not there yet")
	f.DurationVar(&s.syncInterval, "sync-interval", 0,
		"how long what was acknowledged may wait for the disk; 0 waits for it each time (server in this process)")
	f.Int64Var(&s.logBytes, "log-bytes", 0,
		"bytes that each partition's log may take; beyond, the oldest goes (default: 1 GiB, or less on a small disk)")
	f.DurationVar(&s.logAge, "log-age", 24*time.Hour, "age at which messages leave the log")
	f.Int64Var(&s.snapshotBytes, "snapshot-bytes", -1, "bytes that the snapshot bucket may take; -1 sets no bound")
	f.Int64Var(&s.storeBytes, "store-bytes", 0,
		"bytes that all logs and snapshots of the server in this process may take; beyond, writing waits (default: what the disk has)")
	f.DurationVar(&s.snapshotInterval, "snapshot-interval", time.Minute,
		"time between snapshots of a partition that changes; sooner if its log needs room")
	f.Uint64Var(&s.snapshotBlocks, "snapshot-blocks", 2_000_000,
		"blocks stored or removed after which a snapshot is due earlier")
	f.IntVar(&s.index.MaxParked, "max-parked", radix.DefaultMaxParked,
		"blocks of one rank that may wait for their parents")
	f.DurationVar(&s.parkFor, "park-for", time.Duration(radix.DefaultParkFor)*time.Millisecond,
		"how long a block waits for its parent")
	f.IntVar(&s.index.MaxRemembered, "max-remembered", radix.DefaultMaxRemembered,
		"removals of one rank whose place is remembered")
	f.DurationVar(&s.rememberFor, "remember-for", time.Duration(radix.DefaultRememberFor)*time.Millisecond,
		"how long it is remembered")
	f.StringVar(&s.onRefused, "on-engine-refused", "clear",
		"of shims in this process: what follows when an engine's connection has ended and its own ports refuse: clear or keep; see worker-shim run")
	f.DurationVar(&s.engines.SilentAfter, "engine-silent-after", 10*time.Second,
		"of shims in this process: after how long without a sign of life an engine counts as silent")
	f.DurationVar(&s.engines.GoneAfter, "engine-gone-after", 0,
		"of shims in this process: after how long a silence an engine counts as gone, and what it had in device and host memory is cleared; 0: never")
	f.IntVar(&s.queryWorkers, "query-workers", 0,
		"queries over NATS that are answered at once (default: 128, or one for each core if there are more)")
	f.IntVar(&s.queryQueue, "query-queue", 0,
		"queries over NATS that may wait for a worker, 64 MiB of them at most; more are refused as busy (default: 512 for each core)")
	cli.Exclusive(f, "data", "nats")
	f.StringVar(&s.l3Config, "l3-config", "",
		"JSON file that says for each model how its workers use a shared store, in place of what they register; see docs/l3.md")
	f.DurationVar(&s.l3.Timeout, "l3-timeout", 20*time.Millisecond,
		"how long an answer waits for the shared store at most")
	f.DurationVar(&s.l3.Cache.HitLife, "l3-hit-life", 2*time.Second,
		"how long a block that was in the shared store is taken to be there")
	f.DurationVar(&s.l3.Cache.MissLife, "l3-miss-life", 500*time.Millisecond,
		"how long one that was not is taken not to be")
	s.debug = cli.DebugFlag(f)
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("data") && s.nats.URL != "" {
			return cli.UsageErrorf("--data and --nats exclude each other: with --nats the data are on that server")
		}
		if s.nats.URL != "" {
			for _, name := range []string{"nats-listen", "nats-config", "sync-interval", "store-bytes"} {
				if cmd.Flags().Changed(name) {
					return cli.UsageErrorf("--%s is about a server in this process; it does not go with --nats", name)
				}
			}
		}
		if err := s.check(); err != nil {
			return err
		}
		err = s.run(cmd.Context(), log)
		if cmd.Context().Err() != nil && errors.Is(err, context.Canceled) {
			return nil // told to stop before it had begun to serve
		}
		return err
	}
	return cmd
}

// check refuses what makes no sense, all of it at once.
func (s *serving) check() error {
	var errs []error
	if err := jetstream.CheckNamespace(s.namespace); err != nil {
		errs = append(errs, fmt.Errorf("--namespace: %w", err))
	}
	if s.replicas != 1 && s.replicas != 3 && s.replicas != 5 {
		errs = append(errs, fmt.Errorf("--replicas %d is none of 1, 3, 5", s.replicas))
	}
	for name, d := range map[string]time.Duration{"--snapshot-interval": s.snapshotInterval, "--log-age": s.logAge} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s %v is not positive", name, d))
		}
	}
	if s.logBytes != 0 && s.logBytes < 1<<20 {
		errs = append(errs, fmt.Errorf("--log-bytes %d is less than 1 MiB", s.logBytes))
	}
	if s.logAge > 0 && s.logAge < 2*s.snapshotInterval {
		errs = append(errs,
			fmt.Errorf(
				"--log-age %v is less than twice --snapshot-interval %v: messages would leave the log before two snapshots have them", s.logAge, s.snapshotInterval))
	}
	if s.replication < 0 {
		errs = append(errs, fmt.Errorf("--replication %d is negative", s.replication))
	}
	if s.drain <= 0 {
		errs = append(errs, fmt.Errorf("--drain-timeout %v is not positive", s.drain))
	}
	if s.natsWait < 0 {
		errs = append(errs, fmt.Errorf("--nats-wait %v is negative", s.natsWait))
	}
	if s.storeBytes < 0 {
		errs = append(errs, fmt.Errorf("--store-bytes %d is negative", s.storeBytes))
	}
	if s.syncInterval < 0 {
		errs = append(errs, fmt.Errorf("--sync-interval %v is negative", s.syncInterval))
	}
	for name, addr := range map[string]string{"--nats-listen": s.natsListen, "--http-listen": s.httpListen} {
		if _, _, err := net.SplitHostPort(addr); err != nil && addr != "" {
			errs = append(errs, fmt.Errorf("%s %q is not HOST:PORT", name, addr))
		}
	}
	if err := s.debug.Check(); err != nil {
		errs = append(errs, err)
	}
	if err := (&jetstream.ServerOptions{ConfigFile: s.natsConfig}).CheckFile(); err != nil {
		errs = append(errs, fmt.Errorf("--nats-config: %w", err))
	}
	if err := s.security.check(s.httpListen); err != nil {
		errs = append(errs, err)
	}
	var err error
	if s.engines.OnRefused, err = shim.ParseOnRefused(s.onRefused); err != nil {
		errs = append(errs, fmt.Errorf("--on-engine-refused: %w", err))
	}
	if s.engines.SilentAfter < time.Second {
		errs = append(errs, fmt.Errorf("--engine-silent-after %v is less than 1s", s.engines.SilentAfter))
	}
	if s.engines.GoneAfter != 0 && s.engines.GoneAfter < s.engines.SilentAfter {
		errs = append(errs, fmt.Errorf("--engine-gone-after %v is less than --engine-silent-after %v",
			s.engines.GoneAfter, s.engines.SilentAfter))
	}
	if s.queryWorkers < 0 {
		errs = append(errs, fmt.Errorf("--query-workers %d is negative", s.queryWorkers))
	}
	if s.queryQueue < 0 {
		errs = append(errs, fmt.Errorf("--query-queue %d is negative", s.queryQueue))
	}
	if s.l3.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--l3-timeout %v is not positive", s.l3.Timeout))
	}
	for name, life := range map[string]time.Duration{"--l3-hit-life": s.l3.Cache.HitLife,
		"--l3-miss-life": s.l3.Cache.MissLife} {
		if life <= 0 {
			errs = append(errs, fmt.Errorf("%s %v is not positive", name, life))
		}
	}
	if s.l3Config != "" {
		var err error
		if s.l3.Models, err = readL3Config(s.l3Config); err != nil {
			errs = append(errs, fmt.Errorf("--l3-config: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	s.index.ParkFor, s.index.RememberFor = events.Millis(s.parkFor.Milliseconds()),
		events.Millis(s.rememberFor.Milliseconds())
	if s.id == "" {
		if s.id, _ = os.Hostname(); s.id == "" {
			s.id = "indexer"
		}
	}
	return nil
}

// run serves until ctx ends.
func (s *serving) run(ctx context.Context, log *slog.Logger) error {
	debugStop, err := s.debug.Serve(log)
	if err != nil {
		return err
	}
	defer debugStop()
	began := time.Now() // of the server in this process
	conn, server, err := s.connect(ctx, log)
	if err != nil {
		return err
	}
	if server != nil {
		defer server.Stop()
	} else {
		began = time.Time{}
	}
	defer conn.Close()
	var ns *jetstream.Namespace
	var bucket *jetstream.Bucket
	var logConfig jetstream.LogConfig
	err = whileAway(ctx, log, func(ctx context.Context) (err error) {
		ns, err = jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: s.namespace,
			Partitions: s.partitions, Replicas: s.replicas})
		if err != nil {
			return err
		}
		logConfig = jetstream.LogConfig{
			MaxBytes: s.logBytes, Usual: usualLog(server, ns.Partitions()), MaxAge: s.logAge, Replicas: s.replicas,
		}
		if err := ns.EnsureStreams(ctx, logConfig); err != nil {
			return err
		}
		bucket, err = ns.EnsureSnapshots(ctx, jetstream.BucketConfig{MaxBytes: s.snapshotBytes, Replicas: s.replicas})
		return err
	})
	if err != nil {
		return err
	}
	ensureWorkers := func(ctx context.Context) (*jetstream.Bucket, error) {
		return ns.EnsureWorkers(ctx, jetstream.BucketConfig{Replicas: s.replicas})
	}
	workers, err := ensureWorkers(ctx)
	if err != nil {
		return err
	}
	mendWorkers := func(ctx context.Context) error {
		_, err := ensureWorkers(ctx)
		return err
	}
	var member *cluster.Member
	mine := func(p events.Partition) bool { return member.View().Writes(p) }
	known := newRegistry(ns, workers, mendWorkers, mine, began, log)
	s.l3.Registered = known.Sharing
	s.l3.Listen = func(ctx context.Context, store string, heard func([]byte)) {
		listenStore(ctx, ns, store, heard,
			log)
	}
	isReady := make(chan struct{})
	outcomes := &api.Outcomes{}
	cfg := node.Config{
		ID: s.id, Version: cli.Version(), Namespace: ns, Snapshots: bucket, Index: s.index, L3: s.l3,
		SnapshotInterval: s.snapshotInterval, SnapshotBlocks: s.snapshotBlocks,
		Recreate: func(ctx context.Context) error {
			select { // as with a bucket (jetstream.Bucket.Gone): not while the server still removes what was there
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			return ns.EnsureStreams(ctx, logConfig)
		},
		Shared: true, View: func() *cluster.View { return member.View() },
		Outcomes: outcomes, Hooks: logHooks(log, func() { close(isReady) }),
	}
	if server != nil {
		cfg.StoreLimit, cfg.Health = server.Limit, server.Health
	}
	n := node.New(cfg)
	if member, err = s.join(ctx, ns, n, server != nil, log); err != nil {
		return err
	}
	scrape, queries := metrics.New(registry.Leased{Indexer: n, Registry: known})
	own := api.Handler{
		Indexer: n, Unknown: api.IgnoreUnknown, // nodes ask there, of newer versions too
		Observe: func(op, outcome string, took time.Duration) { queries.Observe("own_"+op, outcome, took) },
	}
	pool, err := rpc.NewPool(conn.NATS())
	if err != nil {
		return err
	}
	defer pool.Close()
	others := &wire.Nodes{Pool: pool, Namespace: ns.Name()}
	scattered := scatterOver(ns, s.id, server != nil, n, member, known, queries, others)
	whole := everywhere(ns, s.id, scattered, n, member, others)
	handler := api.Handler{Indexer: registry.Leased{Indexer: whole, Registry: known}, Observe: queries.Observe}
	queryWorkers, queryQueue := s.roomForQueries()
	service := wire.NewService(conn, s.namespace, handler, wire.ServiceConfig{Version: cli.Version(),
		Workers: queryWorkers, Queue: queryQueue, Ended: outcomes.Count})
	overHTTP := func(op, outcome string) { outcomes.Count(api.OverHTTP, op, outcome) }
	shims := newShims(ns, workers, s.id, s.engines, log)
	ours := api.NewHTTP(api.HTTPConfig{
		Handler: handler, Ready: n.Ready, Notes: func() []string { return append(n.Notes(), known.Notes()...) },
		Metrics: scrape, Ended: overHTTP,
	})
	front := withCompat(ours, handler.Indexer, shims, ns, overHTTP)
	httpStop, err := s.serveHTTP(s.security.guard(front, overHTTP), log)
	if err != nil {
		return err
	}
	defer httpStop()
	if err := errors.Join(service.Tell(), service.Own(s.id, own)); err != nil {
		return err
	}
	recallStop, err := shim.ServeRecall(ns)
	if err != nil {
		return err
	}
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	if server != nil {
		go server.Tend(running, tendHooks(log))
	}
	var parts sync.WaitGroup
	parts.Go(func() { n.Run(running) })
	parts.Go(func() { known.Run(running) })
	parts.Go(func() { shims.Run(running) })
	parts.Go(func() { logRefusals(running, outcomes, log) })
	// told when this node has left the cluster: after ctx has ended, or because it cannot stay
	left := make(chan error, 1)
	go func() { left <- member.Run(ctx) }()
	select {
	case <-isReady:
		// else others, and whoever asks for the status, know it a beat later
		announcing, cancel := context.WithTimeout(ctx, memberBeat)
		member.Announce(announcing)
		cancel()
		if err = service.Answer(); err == nil {
			log.Info("ready", "namespace", s.namespace, "partitions", ns.Partitions())
			err = s.untilLeft(ctx, left, service, log)
		}
	case <-ctx.Done():
		err = s.untilLeft(ctx, left, service, log)
	case err = <-left:
	}
	log.Info("stopping")
	stopping, cancel := context.WithTimeout(running, 5*time.Second)
	service.Stop(stopping)
	recallStop(stopping)
	cancel()
	end()
	parts.Wait()
	return err
}

// openPatience is how long JetStream may take to open a namespace before it is said that it is waited for.
const openPatience = 10 * time.Second

// whileAway does something that may be done twice, again and again while JetStream is unavailable, and says so.
func whileAway(ctx context.Context, log *slog.Logger, do func(context.Context) error) error {
	for {
		trying, cancel := context.WithTimeout(ctx, openPatience)
		err := do(trying)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable) {
			return err
		}
		what, todo := cli.NoJetStream()
		log.Warn(what, "error", err, "what_to_do", todo)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// untilLeft serves until ctx ends, and then what is asked of this node by its name until others have what it had. It
// returns early with an error if another process took this node's name.
func (s *serving) untilLeft(ctx context.Context, left <-chan error, service *wire.Service, log *slog.Logger) error {
	select {
	case err := <-left:
		return err
	case <-ctx.Done():
	}
	log.Info("draining", "timeout", s.drain)
	leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.drain/4)
	service.Leave(leaving)
	cancel()
	return <-left
}

// usualLog is how many bytes each partition's log may take if nothing was said. The server reserves them: half of what
// it has is for the log. It holds for streams that are made now; a fuller disk at a later start does not take messages
// from those that are there.
func usualLog(server *jetstream.Server, partitions uint32) int64 {
	const usual = 1 << 30
	if server == nil {
		return usual
	}
	return max(1<<20, min(usual, server.MaxStore()/2/int64(partitions)))
}

// tendHooks make log lines of what happens to the NATS server in this process.
func tendHooks(log *slog.Logger) jetstream.TendHooks {
	return jetstream.TendHooks{
		Ill: func(why error, room bool) {
			if room {
				log.Error("the NATS server in this process is ill; it is started anew", "error", why, "what_to_do",
					"see the error; if it comes again, look at the disk of --data")
			} else {
				log.Error("the NATS server in this process is ill; it is started anew when its disk has room", "error",
					why, "what_to_do",
					"make room on the disk of --data, or give --store-bytes more")
			}
		},
		Mended: func() { log.Info("the NATS server in this process is well again") },
		Failed: func(err error) {
			log.Error("the NATS server could not be started anew; it is tried again", "error", err, "what_to_do",
				"see the error; look at the disk of --data and at --nats-listen's port")
		},
		Grown: func(bytes int64) {
			log.Info("the disk has more room; the NATS server may take more of it", "bytes", bytes)
		},
	}
}

// connect connects to NATS: to a server that it starts in this process, or to the one that --nats names; then server is
// nil.
func (s *serving) connect(ctx context.Context, log *slog.Logger) (conn *jetstream.Conn, server *jetstream.Server,
	err error) {
	options, err := s.nats.Options("kvatlas indexer " + s.id)
	if err != nil {
		return nil, nil, err
	}
	connecting := ctx
	if options.Wait = s.nats.URL != "" && s.natsWait > 0; options.Wait {
		var cancel func()
		connecting, cancel = context.WithTimeout(ctx, s.natsWait)
		defer cancel()
	}
	var told time.Time
	options.Hooks = jetstream.ConnHooks{
		Waiting: func(err error) {
			if time.Since(told) >= 5*time.Second {
				what, todo := s.nats.Away(err)
				log.Warn(what, "nats", s.nats.Shown(), "for", s.natsWait, "error", err, "what_to_do", todo)
				told = time.Now()
			}
		},
		Disconnected: func(err error) {
			log.Warn("NATS connection lost", "error", err, "what_to_do",
				"see that the NATS server runs; it is dialled until it answers")
		},
		Reconnected: func(url string) { log.Info("NATS connection is back", "server", url) },
		AsyncError:  func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice) },
	}
	if s.nats.URL == "" {
		dir, err := filepath.Abs(s.data)
		if err != nil {
			return nil, nil, err
		}
		server, err = jetstream.StartServer(ctx, jetstream.ServerOptions{
			Dir: dir, Listen: s.natsListen, ConfigFile: s.natsConfig, SyncInterval: s.syncInterval,
			MaxStore: s.storeBytes,
			Logger:   slog.New(quieter{log.With("from", "nats-server").Handler()}),
		})
		if err != nil {
			return nil, nil, err
		}
		options.Server = server
		log.Info("NATS server runs in this process", "listen", server.Addr(), "data", dir)
	}
	if conn, err = jetstream.Connect(connecting, options); err != nil {
		if server != nil {
			server.Stop()
		}
		return nil, nil, err
	}
	if s.nats.URL != "" {
		log.Info("connected to NATS", "server", conn.Server().URL)
	}
	return conn, server, nil
}

// quieter passes on what the NATS server says of its daily life as debug messages.
type quieter struct{ slog.Handler }

func (q quieter) level(l slog.Level) slog.Level {
	if l < slog.LevelWarn {
		return slog.LevelDebug
	}
	return l
}

func (q quieter) Enabled(ctx context.Context, l slog.Level) bool {
	return q.Handler.Enabled(ctx, q.level(l))
}

func (q quieter) Handle(ctx context.Context, r slog.Record) error {
	r.Level = q.level(r.Level)
	return q.Handler.Handle(ctx, r)
}

// serveHTTP listens and serves until the returned function is called.
func (s *serving) serveHTTP(front http.Handler, log *slog.Logger) (stop func(), err error) {
	if s.httpListen == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", s.httpListen)
	if err != nil {
		return nil, fmt.Errorf("HTTP: %w; choose another with --http-listen", err)
	}
	if s.security.tls != nil {
		l = tls.NewListener(l, s.security.tls)
	}
	server := &http.Server{Handler: front, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute}
	go server.Serve(l)
	log.Info("HTTP is served", "listen", l.Addr().String())
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		server.Shutdown(ctx)
	}, nil
}

// logHooks makes log lines of what happens to a node.
func logHooks(log *slog.Logger, ready func()) node.Hooks {
	unread := newOutages(log)
	return node.Hooks{
		Restored: func(p events.Partition, r node.Restored) {
			switch {
			case r.Lost != "":
				log.Warn("resync needed", "partition", p, "why", r.Lost, "from", r.Seq+1)
			case r.Ranks > 0:
				log.Info("restored", "partition", p, "seq", r.Seq, "ranks", r.Ranks, "holdings", r.Holdings, "took",
					r.Took)
			}
		},
		Rejected: func(p events.Partition, why string, err error) {
			log.Warn("snapshot passed over", "partition", p, "reason", why, "error", err)
		},
		CaughtUp: func(p events.Partition, seq events.StreamSeq) { log.Debug("caught up", "partition", p, "seq", seq) },
		Ready:    ready,
		Unfit: func(p events.Partition, notice jetstream.Notice) {
			log.Warn("the log is not the one that was applied; beginning again", "partition", p, "found",
				notice.String())
		},
		Trouble:   unread.note,
		Recovered: func(p events.Partition) { unread.note(p, nil) },
		Saved: func(s api.SnapshotInfo, took time.Duration) {
			log.Debug("snapshot written", "partition", s.Partition, "generation", s.Generation, "seq", s.Seq, "bytes",
				s.Bytes, "written", s.Written, "took", took)
		},
		SaveError: func(p events.Partition, err error) {
			log.Warn("snapshot not written", "partition", p, "error", err, "what_to_do",
				"see why NATS refuses (no room, no quorum); the log keeps what no snapshot has, and it is tried again")
		},
		Purged: func(p events.Partition, from events.StreamSeq) {
			log.Debug("log trimmed", "partition", p, "keeps", from)
		},
		ResyncAsked: func(p events.Partition, why string, answered int, err error) {
			if err != nil {
				log.Warn("the shims cannot be asked", "partition", p, "error", err, "what_to_do",
					"see that NATS answers, and that this user may publish on control subjects")
				return
			}
			log.Info("shims asked to say again what their engines hold", "partition", p, "why", why, "answered",
				answered)
		},
		Reread: func(p events.Partition, from events.StreamSeq) {
			log.Error("messages were lost between the log and the index; the log is read again", "partition", p, "from",
				from,
				"what_to_do", "nothing; report it if it happens again: the log itself was whole")
		},
		Recreated: func(p events.Partition, err error) {
			if err != nil {
				log.Error("the log's stream is missing and cannot be made", "partition", p, "error", err, "what_to_do",
					"see that NATS has room and quorum, and that this user may make streams")
				return
			}
			log.Warn("the log's stream was missing; it was made anew", "partition", p)
		},
		Resynced: func(p events.Partition) { log.Info("resync is over", "partition", p) },
		Filling: func(what string, used, limit int64) {
			log.Warn("filling up: "+what, "bytes", used, "limit", limit, "what_to_do",
				"give it more room (--log-bytes, --snapshot-bytes, --store-bytes, the disk), or write snapshots sooner")
		},
		Unwritable: func(what string, err error) {
			if err != nil {
				log.Error(what+" takes nothing more", "error", err, "what_to_do",
					"make room (the disk, --store-bytes, --snapshot-bytes); events wait in the shims meanwhile")
				return
			}
			log.Info(what + " can be written again")
		},
	}
}
