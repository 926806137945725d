package natsserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/datafolder"
)

// ErrInUse means that another process uses the data folder or the port. [Start] and [Server.Restart] return it.
var ErrInUse = errors.New("in use")

// Options configure a [Server]. Only Dir is required.
type Options struct {
	Dir string // the data folder, kept between runs. One process at a time may use it.

	// Listen is HOST:PORT for clients in other processes. Port 0 selects a free port, which [Server.URL] returns. If
	// Listen is empty, only this process can connect: see [Server.InProcessConn]. Without ConfigFile the server has no
	// password: use a loopback address.
	Listen string

	// ConfigFile is a nats-server configuration for settings without a field here (users, TLS, cluster, leaf nodes).
	// Fields override the file. The file cannot change the data folder and JetStream.
	ConfigFile string

	Name string // name of the server, stable over restarts; default "kvatlas"

	// SyncInterval is the longest time until an acknowledged message is forced to the disk. Zero forces it before the
	// acknowledgement, so a power failure loses no acknowledged message.
	SyncInterval time.Duration

	// MaxStore limits the size of all streams and buckets together, in bytes. Streams and buckets reserve their own
	// limits from it at creation. The default is the size of the folder at the start plus nine tenths of the free
	// space; [Server.Supervise] raises it if the disk gets more room. At the limit, the server rejects writes until it
	// has room. A full disk is worse: see [Server.Health].
	MaxStore  int64
	MaxMemory int64 // bytes for streams and consumers in memory; default 256 MiB

	Logger *slog.Logger // receives the log lines of the server; nil discards them
}

// Server is an embedded nats-server with JetStream. It is safe for concurrent use.
type Server struct {
	lock  *os.File
	bound bool // MaxStore has the default

	turns sync.Mutex // serializes Restart, Reload and Stop; locked before mu

	mu      sync.Mutex
	o       Options // with defaults and the selected port
	opts    *server.Options
	srv     *server.Server
	stopped bool
}

const (
	lockFile    = "kvatlas.lock"
	storeFolder = server.JetStreamStoreDir // the folder of nats-server's streams
)

// Start starts a server and returns when the server is ready. An error that wraps [ErrInUse] names the folder or the
// port that another process uses.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("start server: a data folder is required")
	}
	o.Name = cmp.Or(o.Name, "kvatlas")
	o.MaxMemory = cmp.Or(max(o.MaxMemory, 0), 256<<20)
	lock, err := lockDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	s := &Server{o: o, lock: lock, bound: o.MaxStore <= 0}
	if s.bound {
		s.o.MaxStore, err = roomIn(o.Dir)
	}
	if err == nil {
		s.srv, s.opts, err = s.o.run(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start server: %w", err), unlock(lock), lock.Close())
	}
	if o.Listen != "" {
		s.o.Listen = s.Addr()
	}
	return s, nil
}

// roomIn returns the size of a folder plus nine tenths of the free space on the disk.
func roomIn(dir string) (int64, error) {
	free, err := freeBytes(dir)
	if err != nil {
		return 0, fmt.Errorf("disk of %s: %w", dir, err)
	}
	room := free / 10 * 9
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			room += info.Size()
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("data folder: %w", err)
	}
	return room, nil
}

// openBatches is the maximum number of open atomic batches on a stream of the embedded server. The default of
// nats-server is 50. A batch costs a few files. With the default, 50 shims that publish to a partition at once, or a
// client with open batches, would block the batches of all others.
const openBatches = 256

// natsOptions converts the options to nats-server's.
func (o *Options) natsOptions() (*server.Options, error) {
	opts := &server.Options{}
	if o.ConfigFile != "" {
		var err error
		if opts, err = server.ProcessConfigFile(o.ConfigFile); err != nil {
			return nil, fmt.Errorf("configuration %s: %w", o.ConfigFile, err)
		}
	}
	opts.ServerName = o.Name
	opts.NoSigs = true
	opts.JetStream = true
	opts.StoreDir = o.Dir
	opts.JetStreamMaxStore = o.MaxStore
	opts.JetStreamMaxMemory = o.MaxMemory
	if limits := &opts.JetStreamLimits; limits.MaxBatchInflightPerStream == 0 { // unset in the file
		limits.MaxBatchInflightPerStream = openBatches
	}
	opts.SyncAlways = o.SyncInterval <= 0
	if o.SyncInterval > 0 {
		opts.SyncInterval = o.SyncInterval
	}
	opts.DisableJetStreamBanner = true
	switch {
	case o.Listen != "":
		host, port, err := splitListen(o.Listen)
		if err != nil {
			return nil, err
		}
		opts.Host, opts.Port = host, port
	case o.ConfigFile == "":
		opts.DontListen = true
	}
	return opts, nil
}

// CheckFile returns an error if nats-server would reject the configuration file.
func (o *Options) CheckFile() error {
	if o.ConfigFile == "" {
		return nil
	}
	_, err := o.natsOptions()
	return err
}

func splitListen(listen string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(listen)
	if err != nil {
		return "", 0, fmt.Errorf("listen address %q: want HOST:PORT", listen)
	}
	port, err = strconv.Atoi(text)
	if err != nil || port < -1 || port > 65535 {
		return "", 0, fmt.Errorf("listen address %q: %q is not a port", listen, text)
	}
	return cmp.Or(host, "127.0.0.1"), cmp.Or(port, server.RANDOM_PORT), nil
}

// lockDir creates and locks the folder.
func lockDir(dir string) (*os.File, error) {
	if err := datafolder.Make(dir, storeFolder); err != nil {
		return nil, err
	}
	f, err := datafolder.Open(dir, lockFile)
	if err != nil {
		return nil, err
	}
	path := f.Name()
	ok, err := tryLock(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	if !ok {
		holder, _ := io.ReadAll(f)
		return nil, errors.Join(fmt.Errorf("data folder %s: %w by process %s", dir, ErrInUse,
			strings.TrimSpace(string(holder))), f.Close())
	}
	// For operators: the process id of the owner. The lock itself belongs to the system.
	if err = f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// warnAfter is the longest silent wait for a server.
const warnAfter = 3 * time.Second

// run starts a server and waits until the server is ready. It also returns the options of the server.
func (o *Options) run(ctx context.Context) (*server.Server, *server.Options, error) {
	opts, err := o.natsOptions()
	if err != nil {
		return nil, nil, err
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return nil, nil, err
	}
	log := &serverLog{to: o.Logger, fatal: make(chan string, 1)}
	debug := o.Logger != nil && o.Logger.Enabled(ctx, slog.LevelDebug)
	srv.SetLogger(log, debug, false)
	go srv.Start()
	unhealthy, warn := "", time.After(warnAfter)
	for {
		if srv.ReadyForConnections(20 * time.Millisecond) {
			health := healthz(srv.Healthz)
			if health.StatusCode == http.StatusOK {
				return srv, opts, nil
			}
			unhealthy = health.Error
		}
		var why error
		select {
		case text := <-log.fatal:
			why = errors.New(text)
			if strings.Contains(text, "address already in use") {
				why = fmt.Errorf("port of %s: %w", net.JoinHostPort(opts.Host, strconv.Itoa(opts.Port)), ErrInUse)
			}
		case <-ctx.Done():
			why = fmt.Errorf("not ready in time: %w", ctx.Err())
			if unhealthy != "" {
				why = fmt.Errorf("%w: %s", why, unhealthy)
			}
		case <-warn:
			if o.Logger != nil {
				o.Logger.Warn("the NATS server in this process is not ready yet", "error", unhealthy, "what_to_do",
					"wait while it reads its data; if an account is missing, give --nats-config as before, or another --data")
			}
			continue
		case <-time.After(5 * time.Millisecond):
			continue
		}
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, nil, why
	}
}

// URL returns the address for clients in other processes, or "" if the server does not listen.
func (s *Server) URL() string {
	if addr := s.Addr(); addr != "" {
		return "nats://" + addr
	}
	return ""
}

// Addr returns the HOST:PORT of the listener, or "" if the server does not listen.
func (s *Server) Addr() string {
	if addr := s.current().Addr(); addr != nil {
		return addr.String()
	}
	return ""
}

// Authenticates reports whether clients must authenticate: as a user, with a token, or with a certificate.
func (s *Server) Authenticates() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.opts
	return len(o.Users)+len(o.Nkeys)+len(o.TrustedKeys)+len(o.TrustedOperators) > 0 || o.Username != "" ||
		o.Authorization != "" || o.AuthCallout != nil || o.TLSVerify
}

// MaxStore returns the limit of all streams and buckets together.
func (s *Server) MaxStore() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.o.MaxStore
}

func (s *Server) current() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.srv
}

// InProcessConn returns a connection to the server inside the process, for nats.go.
func (s *Server) InProcessConn() (net.Conn, error) { return s.current().InProcessConn() }

// Health returns nil if the server works. The most important error is a failed write to a stream (the disk is full or
// broken). nats-server then rejects all writes to the stream, even a purge, until a restart. More room on the disk does
// not help. See [Server.Restart], and [Server.Supervise], which restarts the server when a restart helps.
func (s *Server) Health() error {
	health := healthz(s.current().Healthz)
	if health.StatusCode == http.StatusOK {
		return nil
	}
	return fmt.Errorf("the NATS server is unhealthy: %s", health.Error)
}

// healthz returns the result of a check of a server. nats-server reports an internal error if it finds no listener
// within a millisecond. A pause of the process has the same effect. healthz therefore repeats such a check, up to ten
// checks in all.
func healthz(check func(*server.HealthzOptions) *server.HealthStatus) (health *server.HealthStatus) {
	for range 10 {
		if health = check(&server.HealthzOptions{}); health.StatusCode != http.StatusInternalServerError {
			break
		}
	}
	return health
}

// Restart stops the server and starts it again with the same folder and port. Clients reconnect on their own. A restart
// with small logs needs some tenths of a second. After an error, Restart may be called again.
func (s *Server) Restart(ctx context.Context) error {
	s.turns.Lock()
	defer s.turns.Unlock()
	s.mu.Lock()
	o, srv, stopped := s.o, s.srv, s.stopped
	s.mu.Unlock()
	if stopped {
		return errors.New("restart server: the server is stopped")
	}
	srv.Shutdown()
	srv.WaitForShutdown()
	if s.bound {
		if room, err := roomIn(o.Dir); err == nil {
			o.MaxStore = max(o.MaxStore, room)
		}
	}
	srv, opts, err := o.run(ctx)
	if err != nil {
		return fmt.Errorf("restart server: %w", err)
	}
	s.mu.Lock()
	s.srv, s.opts, s.o.MaxStore = srv, opts, o.MaxStore
	s.mu.Unlock()
	return nil
}

// Reload reads the configuration file again and applies the users and accounts. Connections of unchanged users stay
// open. After an error, the server keeps the old configuration.
func (s *Server) Reload() error {
	s.turns.Lock()
	defer s.turns.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.New("reload server: the server is stopped")
	}
	// nats-server 2.15 starts the service imports of a new account only at the reload after its creation (server.go,
	// configureAccounts: the function processes only the imports of existing accounts).
	for range 2 {
		opts, err := s.o.natsOptions()
		if err == nil {
			err = s.srv.ReloadOptions(opts)
		}
		if err != nil {
			return fmt.Errorf("reload server: %w", err)
		}
		s.opts = opts
	}
	return nil
}

// Stop stops the server, waits for all writes and releases the data folder. Clients should drain before. A second call
// has no effect.
func (s *Server) Stop() {
	s.turns.Lock()
	defer s.turns.Unlock()
	s.mu.Lock()
	srv, stopped := s.srv, s.stopped
	s.stopped = true
	s.mu.Unlock()
	if stopped {
		return
	}
	srv.Shutdown()
	srv.WaitForShutdown()
	_ = unlock(s.lock)
	_ = s.lock.Close() // closing also releases the lock, and the file has no other content
}

// serverLog writes the log lines of the server to slog, with explanations of confusing lines. It keeps the reason of a
// fatal error.
type serverLog struct {
	to    *slog.Logger
	fatal chan string
}

func (l *serverLog) write(level slog.Level, format string, v []any) {
	if l.to != nil && l.to.Enabled(context.Background(), level) {
		line := fmt.Sprintf(format, v...)
		l.to.Log(context.Background(), level, line, explain(line)...)
	}
}

func (l *serverLog) Noticef(format string, v ...any) { l.write(slog.LevelInfo, format, v) }
func (l *serverLog) Warnf(format string, v ...any)   { l.write(slog.LevelWarn, format, v) }
func (l *serverLog) Errorf(format string, v ...any)  { l.write(slog.LevelError, format, v) }
func (l *serverLog) Debugf(format string, v ...any)  { l.write(slog.LevelDebug, format, v) }
func (l *serverLog) Tracef(format string, v ...any)  { l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Fatalf(format string, v ...any) {
	l.write(slog.LevelError, format, v)
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default:
	}
}

// recoveries are parts of log lines about harmless recoveries (nats-server server/filestore.go, recoverFullState and
// the callers).
var recoveries = []string{
	"Stream state outdated",
	"Stream state detected prior state",
	"Recovering stream state from index errored: prior state file",
	"state is outdated; attempting to recover",
}

// explain returns log attributes with the explanation of a line of the NATS server, or nil.
func explain(line string) []any {
	if !slices.ContainsFunc(recoveries, func(part string) bool { return strings.Contains(line, part) }) {
		return nil
	}
	return []any{"means", "the server ended before it saved the state of this stream, as after kill -9 or a " +
		"power failure; the server reads the stream's files instead, which takes a moment and loses nothing",
		"what_to_do", "nothing"}
}
