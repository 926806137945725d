package launch

import (
	"context"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// connect connects to the NATS servers of --nats, or starts a server in this process and connects to it. embedded is
// nil with --nats.
func (p *Process) connect(ctx context.Context, log *slog.Logger) (conn *jetstream.Conn, embedded *natsserver.Server,
	err error) {
	options, err := p.options(log)
	if err != nil {
		return nil, nil, err
	}
	connecting := ctx
	if options.Wait = p.NATS.URL != "" && p.NATSWait > 0; options.Wait {
		var cancel func()
		connecting, cancel = context.WithTimeout(ctx, p.NATSWait)
		defer cancel()
	}
	if p.NATS.URL == "" {
		if embedded, err = p.startServer(ctx, log); err != nil {
			return nil, nil, err
		}
		options.Server = embedded
	}
	if conn, err = jetstream.Connect(connecting, options); err != nil {
		if embedded != nil {
			embedded.Stop()
		}
		return nil, nil, err
	}
	if p.NATS.URL != "" {
		log.Info("connected to NATS", "server", conn.ServerURL())
	}
	return conn, embedded, nil
}

// options returns the options of the connection to NATS, which logs changes of the connection.
func (p *Process) options(log *slog.Logger) (jetstream.ConnOptions, error) {
	options, err := p.NATS.Options(upkeep.IndexerConnection + p.ID)
	if err != nil {
		return options, err
	}
	var logged time.Time
	options.Waiting = func(err error) {
		if time.Since(logged) >= 5*time.Second {
			event, todo := p.NATS.Away(err)
			log.Warn(event, "nats", p.NATS.Shown(), "for", p.NATSWait, "error", err, "what_to_do", todo)
			logged = time.Now()
		}
	}
	options.Disconnected = func(err error) {
		log.Warn("NATS connection lost", "error", err, "what_to_do",
			"check that the NATS server runs; the program dials until the server answers")
	}
	options.Reconnected = func(url string) { log.Info("NATS connection is back", "server", url) }
	options.AsyncError = func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice(err)) }
	return options, nil
}

// startServer starts a NATS server in this process, and warns about a server that other hosts can use without a user.
func (p *Process) startServer(ctx context.Context, log *slog.Logger) (*natsserver.Server, error) {
	dir, err := filepath.Abs(p.Data)
	if err != nil {
		return nil, err
	}
	embedded, err := natsserver.Start(ctx, natsserver.Options{
		Dir: dir, Listen: p.NATSListen, ConfigFile: p.NATSConfig, SyncInterval: p.SyncInterval, MaxStore: p.StoreBytes,
		Logger: slog.New(quieter{log.With("from", "nats-server").Handler()}),
	})
	if err != nil {
		return nil, err
	}
	log.Info("NATS server runs in this process", "listen", embedded.Addr(), "data", dir)
	if openToOthers(embedded.Addr()) && !embedded.Authenticates() {
		log.Warn("all clients with access to the NATS server's port may read and write everything", "listen", embedded.Addr(),
			"what_to_do", "define users with --nats-config (docs/security.md), or leave --nats-listen on loopback")
	}
	return embedded, nil
}

// reloadOnHangup reloads the NATS server's configuration at each SIGHUP, until stop is called.
func reloadOnHangup(srv *natsserver.Server, log *slog.Logger) (stop func()) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range hangups {
			if err := srv.Reload(); err != nil {
				log.Error("the NATS server keeps the earlier configuration", "error", err, "what_to_do",
					"correct the file of --nats-config and send SIGHUP again")
				continue
			}
			log.Info("the NATS server has read the configuration again")
		}
	}()
	return func() {
		signal.Stop(hangups)
		close(hangups)
		<-ended
	}
}

// openToOthers reports whether other hosts can reach an address. Other hosts cannot reach the empty address.
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
