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
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/server"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// serving holds the settings of indexer serve.
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
	rows := s.rows()
	rows.Add(f)
	s.nats = cli.NATSFlags(f, true)
	s.security = cli.HTTPSecurityFlags(f, "HTTP and gRPC")
	cli.Renamed(f, map[string]string{"max-parked": "max-pending", "park-for": "pending-for",
		"max-remembered": "max-tombstones", "remember-for": "tombstone-for"}) // the old names for one release
	cli.Exclusive(f, "data", "nats")
	s.l3Master = cli.MasterFlags(f)
	s.rule = cli.DialFlag(f, "networks in which the addresses of clients, leases and registrations are dialled")
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
		if err := s.check(rows); err != nil {
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

// check checks the flags, reads their files, and fills in the settings that several flags make up.
func (s *serving) check(rows cli.Flags) error {
	var wrong cli.Complaints
	rows.Check(&wrong)
	wrong.When(s.LogAge > 0 && s.LogAge < 2*s.SnapshotInterval,
		"--log-age %v is less than twice --snapshot-interval %v: messages would leave the log before two snapshots have them",
		s.LogAge, s.SnapshotInterval)
	listen := map[string]string{"--http-listen": s.HTTPListen, "--select-listen": s.SelectListen,
		"--slot-tracker-listen": s.SlotTrackerListen,
		"--conductor-listen":    s.ConductorListen,
		"--grpc-listen":         s.GRPCListen}
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
	var err error
	s.Engines.OnRefused, err = shim.ParseOnRefused(s.onRefused)
	wrong.About("--on-engine-refused", err)
	wrong.When(s.Engines.GoneAfter != 0 && s.Engines.GoneAfter < s.Engines.SilentAfter,
		"--engine-gone-after %v is less than --engine-silent-after %v", s.Engines.GoneAfter, s.Engines.SilentAfter)
	wrong = append(wrong, s.Guesses.Check())
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
	options, err := s.nats.Options(upkeep.IndexerConnection + s.ID)
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
	options.Waiting = func(err error) {
		if time.Since(told) >= 5*time.Second {
			what, todo := s.nats.Away(err)
			log.Warn(what, "nats", s.nats.Shown(), "for", s.natsWait, "error", err, "what_to_do", todo)
			told = time.Now()
		}
	}
	options.Disconnected = func(err error) {
		log.Warn("NATS connection lost", "error", err, "what_to_do",
			"see that the NATS server runs; it is dialled until it answers")
	}
	options.Reconnected = func(url string) { log.Info("NATS connection is back", "server", url) }
	options.AsyncError = func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice(err)) }
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

// quieter logs routine messages of the NATS server as debug messages.
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
