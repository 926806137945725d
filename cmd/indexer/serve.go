package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/server"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/natsserver"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/spf13/cobra"
)

// serving is what indexer serve was told.
type serving struct {
	server.Settings

	natsListen, natsConfig   string
	natsWait, syncInterval   time.Duration
	storeBytes               int64
	pendingFor, tombstoneFor time.Duration
	security                 *cli.HTTPSecurity
	l3Config, onRefused      string
	l3Passed                 map[string]hicache.Passed // of --l3-config, by model
	l3Master                 func() (hicache.Master, error)
	routingConfig            string
	forwardQueries           bool
	tokenizers, grpcClientCA string
	rule                     func() (*dial.Rule, error)
	nats                     *cli.NATS
	debug                    *cli.Debug
	traces                   *cli.Traces
}

func serveCommand() *cobra.Command {
	s := &serving{}
	cmd := &cobra.Command{
		Use:   "serve [--data DIR | --nats URL]",
		Short: "Run an indexer, with a NATS server of its own or on one that is there",
		Long: `Run an indexer. With --data (the default) it runs a NATS server with JetStream in this process, keeps
everything in that folder, and takes shims and clients on --nats-listen. With --nats it joins a NATS server that is
there, and the other nodes on it, which share the partitions of the namespace: each is kept by so many nodes
as --replication says, and who gets one restores it before another lets it go.

It restores the last snapshot, applies the log that follows it, and then answers queries over NATS and HTTP. SIGINT
and SIGTERM end it in good order; after any other end it comes back with nothing lost.`,
		Example: `  indexer serve --data /var/lib/kvatlas
  indexer serve --nats nats://nats-1,nats://nats-2 --namespace prod`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	s.nats = cli.NATSFlags(f, true)
	f.StringVar(&s.Data, "data", "kvatlas-data",
		"folder for the log and the snapshots of the NATS server in this process")
	f.StringVar(&s.natsListen, "nats-listen", "127.0.0.1:4222", "where that server listens; port 0 takes a free one")
	f.StringVar(&s.natsConfig, "nats-config", "",
		"nats-server configuration file for that server: users, TLS, leaf nodes")
	f.StringVar(&s.HTTPListen, "http-listen", "127.0.0.1:8090",
		"where HTTP is served; port 0 takes a free one, empty serves none")
	f.IntVar(&s.MetricsWorkers, "metrics-workers", 0,
		"how many workers have load metrics of their own, the first by name; the rest are added up as other")
	f.StringVar(&s.SelectListen, "select-listen", "",
		"where requests are answered as by Dynamo's selection service, which listens on 8092; empty: nowhere")
	f.StringVar(&s.SlotTrackerListen, "slot-tracker-listen", "",
		"where requests are answered as by Dynamo's slot tracker, which listens on 8091; empty: nowhere")
	f.StringVar(&s.ConductorListen, "conductor-listen", "",
		"where requests are answered as by Mooncake's conductor, which listens on 13333; empty: nowhere")
	f.StringVar(&s.GRPCListen, "grpc-listen", "", "where gRPC is served, such as 127.0.0.1:9002; empty: nowhere")
	f.BoolVar(&s.GRPCInsecure, "grpc-insecure", false,
		"whoever reaches --grpc-listen may have workers chosen without a token: for gateways that cannot send one, such as "+
			"those of an InferencePool. A NetworkPolicy must let only these reach the port")
	f.StringVar(&s.grpcClientCA, "grpc-client-ca", "",
		"file with the authorities (PEM) of client certificates on --grpc-listen: a gateway with a certificate of theirs "+
			"needs no token (mutual TLS); needs --http-cert and --http-key")
	s.security = cli.HTTPSecurityFlags(f, "HTTP and gRPC")
	f.StringVar(&s.Namespace, "namespace", "default",
		"name of the deployment, which has subjects, streams and buckets of its own; several may share NATS servers")
	f.StringVar(&s.ID, "node-id", "", "how this node calls itself (default: the host's name)")
	f.StringVar(&s.Zone, "zone", "",
		"what this node fails together with, such as a rack or an availability zone: a partition's replicas are kept in "+
			"different zones (default: a zone of its own)")
	f.Uint32Var(&s.Partitions, "partitions", 0,
		"shares of the log, fixed when the namespace is created (default: what is there, or 8)")
	f.BoolVar(&s.RestoreNamespace, "restore-namespace", false,
		"if the namespace's record is missing or unreadable, write it again with the number of partitions that the log's "+
			"streams show; without it such a start is refused (a readable record is never changed)")
	f.IntVar(&s.IndexShards, "index-shards", 0,
		"indexes of this node among which its partitions are dealt out, each with a writer of its own, at most one for each "+
			"partition (default: one for two cores)")
	f.IntVar(&s.Replicas, "replicas", 1, "copies of streams and buckets on the NATS servers: 1, 3 or 5")
	f.IntVar(&s.Replication, "replication", 0,
		"with --nats: how many nodes keep each partition; the greatest that any node says counts "+
			"(default: all, or 2 if there are more than three)")
	f.DurationVar(&s.Drain, "drain-timeout", 20*time.Second,
		"how long after SIGTERM this node may go on until others have taken what it has")
	f.DurationVar(&s.natsWait, "nats-wait", 30*time.Second,
		"with --nats: how long to wait at the start for a server that is not there yet")
	f.DurationVar(&s.syncInterval, "sync-interval", 0,
		"how long what was acknowledged may wait for the disk; 0 waits for it each time (server in this process)")
	f.Int64Var(&s.LogBytes, "log-bytes", 0,
		"bytes that each partition's log may take; beyond, the oldest goes (default: 1 GiB, or less on a small disk)")
	f.DurationVar(&s.LogAge, "log-age", 24*time.Hour, "age at which messages leave the log")
	f.Int64Var(&s.SnapshotBytes, "snapshot-bytes", -1, "bytes that the snapshot bucket may take; -1 sets no bound")
	f.Int64Var(&s.storeBytes, "store-bytes", 0,
		"bytes that all logs and snapshots of the server in this process may take; beyond, writing waits "+
			"(default: what the disk has)")
	f.DurationVar(&s.SnapshotInterval, "snapshot-interval", time.Minute,
		"time between snapshots of a partition that changes; sooner if its log needs room")
	f.Uint64Var(&s.SnapshotBlocks, "snapshot-blocks", 2_000_000,
		"blocks stored or removed after which a snapshot is due earlier")
	f.IntVar(&s.Index.MaxPending, "max-pending", radix.DefaultMaxPending,
		"pending blocks of one rank: blocks that wait for their parents; beyond, the oldest are dropped")
	f.IntVar(&s.Index.MaxPendingBytes, "max-pending-bytes", radix.DefaultMaxPendingBytes,
		"memory of one rank's pending blocks, 128 bytes a block and 288 an event; beyond, the oldest are dropped")
	f.DurationVar(&s.pendingFor, "pending-for", 0,
		"age at which a pending block is dropped; 0: never, it waits until its parent is announced or it is removed")
	f.IntVar(&s.Index.MaxTombstones, "max-tombstones", radix.DefaultMaxTombstones,
		"tombstones of one rank: removals whose place is remembered beyond the message that has them")
	f.DurationVar(&s.tombstoneFor, "tombstone-for", time.Duration(radix.DefaultTombstoneFor)*time.Millisecond,
		"how long a tombstone is kept")
	cli.Renamed(f, map[string]string{"max-parked": "max-pending", "park-for": "pending-for",
		"max-remembered": "max-tombstones", "remember-for": "tombstone-for"}) // the old ones for one release
	f.StringVar(&s.onRefused, "on-engine-refused", "clear",
		"of shims in this process: what follows when an engine's connection has ended and its own ports refuse: "+
			"clear or keep; see worker-shim run")
	f.DurationVar(&s.Engines.SilentAfter, "engine-silent-after", 10*time.Second,
		"of shims in this process: after how long without a sign of life an engine counts as silent")
	f.DurationVar(&s.Engines.GoneAfter, "engine-gone-after", 0,
		"of shims in this process: after how long a silence an engine counts as gone, and what it had in device and host "+
			"memory is cleared; 0: never")
	f.IntVar(&s.QueryWorkers, "query-workers", 0,
		"queries over NATS that are answered at once (default: 128, or one for each core if there are more)")
	f.IntVar(&s.QueryQueue, "query-queue", 0,
		"queries over NATS that may wait for a worker, 64 MiB of them at most; more are refused as busy "+
			"(default: 512 for each core); over HTTP so many and --query-workers more may be under way")
	f.BoolVar(&s.forwardQueries, "forward-queries", true,
		"with several nodes: have a query over NATS finished, and its client answered, by a node that has what this one "+
			"lacks, which saves a message; both nodes must say so")
	cli.Exclusive(f, "data", "nats")
	f.StringVar(&s.l3Config, "l3-config", "",
		"JSON file that says for each model how its workers use a shared store, in place of what they register; "+
			"see docs/l3.md")
	s.l3Master = cli.MasterFlags(f)
	f.DurationVar(&s.L3.Timeout, "l3-timeout", 20*time.Millisecond,
		"how long an answer waits for the shared store at most")
	f.DurationVar(&s.L3.Cache.HitLife, "l3-hit-life", 2*time.Second,
		"how long a block that was in the shared store is taken to be there")
	f.DurationVar(&s.L3.Cache.MissLife, "l3-miss-life", 500*time.Millisecond,
		"how long one that was not is taken not to be")
	s.rule = cli.DialFlag(f, "networks in which the addresses of clients, leases and registrations are dialled")
	f.StringSliceVar(&s.Screen.Folders, "l3-folder", nil,
		"folder of a shared store that registrations may name; may be given again (default: none)")
	f.StringVar(&s.Policy, "policy", selection.DefaultPolicy,
		"how workers are chosen where a request does not say: "+strings.Join(routing.Policies(), ", "))
	f.StringVar(&s.routingConfig, "routing-config", "",
		"YAML file with constants of the choice, such as router_temperature: 0.5; see docs/routing-reference.md")
	f.StringVar(&s.tokenizers, "tokenizers", "",
		"YAML file that says for each model what makes tokens of prompts and messages; see docs/text.md")
	f.BoolVar(&s.RequestTemplates, "request-templates", false,
		"run the chat templates that requests bring (chat_template), in place of the model's own; by default such requests "+
			"are refused, as by vLLM without --trust-request-chat-template")
	f.DurationVar(&s.RequestExpiry, "request-expiry", 300*time.Second,
		"age at which a request that was booked and not freed is forgotten; the same on all nodes")
	f.IntVar(&s.MaxRequests, "max-requests", load.DefaultRequests,
		"booked requests of one model that may be under way on all nodes together, with 256 blocks each on average; more "+
			"are refused as busy. Each node keeps them all, some 600 bytes and 8 for each block; the same on all nodes")
	f.StringVar((*string)(&s.Guesses.Policy), "guess-policy", string(guess.TTL),
		"for how long workers registered without events are taken to hold what they were sent: "+
			"ttl, lru (by total_kv_blocks, as an engine evicts) or off")
	f.DurationVar(&s.Guesses.TTL, "guess-ttl", 120*time.Second,
		"with ttl: how long after the last request that was sent there with a block")
	f.DurationVar(&s.Guesses.PredictTTL, "predict-ttl", 0,
		"how long workers with events are taken to hold what they were sent, until their events say so; "+
			"such as 5s; 0: not at all")
	f.IntVar(&s.Guesses.MaxBlocks, "guess-max-blocks", 0,
		"blocks of guesses for each model, counted for each rank; beyond, the soonest to expire go "+
			"(default: 2^20, with lru 2^24)")
	f.IntVar(&s.FunnelBlocks, "funnel-blocks", 0,
		"blocks that indexer funnel remembers to name the causes of lost tokens; some 120 bytes each (default: four for "+
			"each block in the index, from 65,536 to 524,288)")
	f.Float64Var(&s.Guesses.PruneRatio, "guess-prune-ratio", 0.8, "share of --guess-max-blocks that is left then")
	s.traces = cli.TraceFlags(f)
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

// readAuthorities reads the certificates of authorities in a PEM file.
func readAuthorities(path string) (*x509.CertPool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM", path)
	}
	return pool, nil
}

// check refuses what makes no sense, all of it at once.
func (s *serving) check() error {
	var wrong cli.Complaints
	wrong.About("--namespace", jetstream.CheckNamespace(s.Namespace))
	wrong.When(s.Replicas != 1 && s.Replicas != 3 && s.Replicas != 5, "--replicas %d is none of 1, 3, 5", s.Replicas)
	for name, d := range map[string]time.Duration{
		"--snapshot-interval": s.SnapshotInterval, "--log-age": s.LogAge, "--drain-timeout": s.Drain,
		"--l3-timeout": s.L3.Timeout, "--l3-hit-life": s.L3.Cache.HitLife, "--l3-miss-life": s.L3.Cache.MissLife,
		"--request-expiry": s.RequestExpiry,
	} {
		wrong.When(d <= 0, "%s %v is not positive", name, d)
	}
	wrong.When(s.LogBytes != 0 && s.LogBytes < 1<<20, "--log-bytes %d is less than 1 MiB", s.LogBytes)
	wrong.When(s.LogAge > 0 && s.LogAge < 2*s.SnapshotInterval,
		"--log-age %v is less than twice --snapshot-interval %v: messages would leave the log before two snapshots have them",
		s.LogAge, s.SnapshotInterval)
	wrong.When(s.RequestExpiry > load.MaxExpiry, "--request-expiry %v is more than %v", s.RequestExpiry, load.MaxExpiry)
	wrong.About("--zone", cluster.CheckZone(s.Zone))
	wrong.When(s.Replication < 0, "--replication %d is negative", s.Replication)
	wrong.When(s.natsWait < 0, "--nats-wait %v is negative", s.natsWait)
	wrong.When(s.storeBytes < 0, "--store-bytes %d is negative", s.storeBytes)
	wrong.When(s.syncInterval < 0, "--sync-interval %v is negative", s.syncInterval)
	listen := map[string]string{"--nats-listen": s.natsListen, "--http-listen": s.HTTPListen,
		"--select-listen": s.SelectListen, "--slot-tracker-listen": s.SlotTrackerListen,
		"--conductor-listen": s.ConductorListen,
		"--grpc-listen":      s.GRPCListen}
	for name, addr := range listen {
		_, _, err := net.SplitHostPort(addr)
		wrong.When(err != nil && addr != "", "%s %q is not HOST:PORT", name, addr)
	}
	delete(listen, "--nats-listen")
	wrong.When(s.GRPCInsecure && s.GRPCListen == "", "--grpc-insecure says nothing without --grpc-listen")
	if s.grpcClientCA != "" {
		wrong.When(s.GRPCListen == "", "--grpc-client-ca says nothing without --grpc-listen")
		delete(listen, "--grpc-listen") // a certificate takes the place of a token
	}
	wrong = append(wrong, s.debug.Check(), s.security.Check(listen), s.traces.Check())
	if s.grpcClientCA != "" {
		var err error
		s.GRPCClientCAs, err = readAuthorities(s.grpcClientCA)
		wrong.About("--grpc-client-ca", err)
		wrong.When(s.security.TLS == nil, "--grpc-client-ca needs --http-cert and --http-key: certificates are part of TLS")
	}
	wrong.About("--nats-config", (&natsserver.Options{ConfigFile: s.natsConfig}).CheckFile())
	var err error
	s.Engines.OnRefused, err = shim.ParseOnRefused(s.onRefused)
	wrong.About("--on-engine-refused", err)
	wrong.When(s.Engines.SilentAfter < time.Second, "--engine-silent-after %v is less than 1s", s.Engines.SilentAfter)
	wrong.When(s.Engines.GoneAfter != 0 && s.Engines.GoneAfter < s.Engines.SilentAfter,
		"--engine-gone-after %v is less than --engine-silent-after %v", s.Engines.GoneAfter, s.Engines.SilentAfter)
	wrong.When(s.Index.MaxPendingBytes < 0, "--max-pending-bytes %d is negative", s.Index.MaxPendingBytes)
	wrong.When(s.pendingFor < 0, "--pending-for %v is negative", s.pendingFor)
	wrong.When(s.MetricsWorkers < 0, "--metrics-workers %d is negative", s.MetricsWorkers)
	wrong.When(s.QueryWorkers < 0, "--query-workers %d is negative", s.QueryWorkers)
	wrong.When(s.QueryQueue < 0, "--query-queue %d is negative", s.QueryQueue)
	wrong.When(!slices.Contains(routing.Policies(), s.Policy), "--policy %q is none of %s", s.Policy,
		strings.Join(routing.Policies(), ", "))
	wrong = append(wrong, s.Guesses.Check())
	wrong.When(s.IndexShards < 0, "--index-shards %d is negative", s.IndexShards)
	wrong.When(s.FunnelBlocks < 0, "--funnel-blocks %d is negative", s.FunnelBlocks)
	wrong.When(s.MaxRequests < 1 || s.MaxRequests > load.MaxRequests, "--max-requests %d is not from 1 to %d",
		s.MaxRequests, load.MaxRequests)
	wrong.When(s.Guesses.TTL == 0, "--guess-ttl 0s is not positive; --guess-policy off turns guesses off")
	s.NoForwarding = !s.forwardQueries
	s.Routing, err = readRouting(s.routingConfig)
	wrong.About("--routing-config", err)
	s.Screen.Rule, err = s.rule()
	wrong.About("--dial-allow", err)
	for i, folder := range s.Screen.Folders {
		wrong.When(!filepath.IsAbs(folder), "--l3-folder %q is not an absolute path", folder)
		s.Screen.Folders[i] = filepath.Clean(folder)
	}
	s.Tokenizers, err = readTokenizers(s.tokenizers)
	wrong.About("--tokenizers", err)
	s.L3.Master, err = s.l3Master()
	wrong = append(wrong, err)
	if s.l3Config != "" {
		s.L3.Models, s.l3Passed, err = readL3Config(s.l3Config)
		wrong.About("--l3-config", err)
		for model, c := range s.L3.Models {
			s.L3.Models[model] = c.WithMaster(s.L3.Master)
		}
	}
	if err := wrong.Usage(); err != nil {
		return err
	}
	s.Index.PendingFor, s.Index.TombstoneFor = events.Millis(s.pendingFor.Milliseconds()),
		events.Millis(s.tombstoneFor.Milliseconds())
	if s.ID == "" {
		if s.ID, _ = os.Hostname(); s.ID == "" {
			s.ID = "indexer"
		}
	}
	return nil
}

// run serves until ctx ends.
func (s *serving) run(ctx context.Context, log *slog.Logger) error {
	s.warnPassed(log)
	debugStop, err := s.debug.Serve(log)
	if err != nil {
		return err
	}
	defer debugStop()
	tracer, tracesEnd, err := s.traces.Open(ctx, "kvatlas-indexer", s.ID, log)
	if err != nil {
		return err
	}
	defer tracesEnd()
	s.Tracer = tracer
	cli.SaveMemory(cli.IndexerRoom)
	began := time.Now()
	if s.Conn, s.Embedded, err = s.connect(ctx, log); err != nil {
		return err
	}
	if s.Embedded != nil {
		s.Began = began
		defer s.Embedded.Stop()
		if s.natsConfig != "" {
			defer reloadOnHangup(s.Embedded, log)()
		}
	}
	defer s.Conn.Close()
	s.Version, s.HTTPTokens, s.HTTPTLS = cli.Version(), s.security.Tokens, s.security.TLS
	s.ClearText = s.security.ClearText()
	s.HTTPTokens.LogStart(log, s.ClearText)
	s.Ready = func() {
		if err := cli.NotifyReady(); err != nil {
			log.Warn("the service manager does not hear that this node is ready", "error", err, "what_to_do",
				"see that the unit has Type=notify, and that nothing else sets NOTIFY_SOCKET")
		}
	}
	node, err := server.New(ctx, s.Settings, log)
	if err != nil {
		return err
	}
	return node.Run(ctx)
}

// connect connects to NATS: to a server that it starts in this process, or to the one that --nats names; then
// embedded is nil.
func (s *serving) connect(ctx context.Context, log *slog.Logger) (conn *jetstream.Conn, embedded *natsserver.Server,
	err error) {
	options, err := s.nats.Options(indexerConnection + s.ID)
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
		AsyncError:  func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice(err)) },
	}
	if s.nats.URL == "" {
		dir, err := filepath.Abs(s.Data)
		if err != nil {
			return nil, nil, err
		}
		embedded, err = natsserver.Start(ctx, natsserver.Options{
			Dir: dir, Listen: s.natsListen, ConfigFile: s.natsConfig, SyncInterval: s.syncInterval,
			MaxStore: s.storeBytes,
			Logger:   slog.New(quieter{log.With("from", "nats-server").Handler()}),
		})
		if err != nil {
			return nil, nil, err
		}
		options.Server = embedded
		log.Info("NATS server runs in this process", "listen", embedded.Addr(), "data", dir)
		if openToOthers(embedded.Addr()) && !embedded.Authenticates() {
			log.Warn("whoever reaches the NATS server's port may read and write everything", "listen", embedded.Addr(),
				"what_to_do", "give it users by --nats-config (docs/security.md), or leave --nats-listen on loopback")
		}
	}
	if conn, err = jetstream.Connect(connecting, options); err != nil {
		if embedded != nil {
			embedded.Stop()
		}
		return nil, nil, err
	}
	if s.nats.URL != "" {
		log.Info("connected to NATS", "server", conn.ServerURL())
	}
	return conn, embedded, nil
}

// reloadOnHangup reads the NATS server's configuration again at each SIGHUP, until stop is called.
func reloadOnHangup(srv *natsserver.Server, log *slog.Logger) (stop func()) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range hangups {
			if err := srv.Reload(); err != nil {
				log.Error("the NATS server keeps its configuration", "error", err, "what_to_do",
					"correct the file of --nats-config and send SIGHUP again")
				continue
			}
			log.Info("the NATS server has read its configuration again")
		}
	}()
	return func() {
		signal.Stop(hangups)
		close(hangups)
		<-ended
	}
}

// openToOthers reports whether other hosts can reach an address, which is empty if nothing listens.
func openToOthers(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && !cli.OnLoopback(host)
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
