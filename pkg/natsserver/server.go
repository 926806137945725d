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

// ErrInUse means that another process holds the data folder or the port. [Start] and [Server.Restart] return it.
var ErrInUse = errors.New("in use")

// Options configures a [Server]. Only Dir is required.
type Options struct {
	Dir string // the data folder, its own and kept between runs. One process at a time may use it.

	// Listen is HOST:PORT for other processes; port 0 takes a free one ([Server.URL] has it). Empty: the server
	// does not listen, and only this process can connect to it: see [Server.InProcessConn]. There is no password:
	// leave it on loopback, or use ConfigFile.
	Listen string

	// ConfigFile is a nats-server configuration for all that has no field here (users, TLS, cluster, leaf
	// nodes). Set fields win over it, and the data folder and JetStream are always ours.
	ConfigFile string

	Name string // of the server, stable over restarts; default "kvatlas"

	// SyncInterval is how long what was acknowledged may wait to be forced to the disk. Zero forces it before each
	// acknowledgement: a power failure then loses nothing that was acknowledged.
	SyncInterval time.Duration

	// MaxStore bounds all streams and buckets together, in bytes; their own limits are reserved from it when
	// they are created. Default: what is in the folder at the start plus nine tenths of what is free on its
	// disk; [Server.Supervise] raises that if the disk gets more room. Beyond it the server refuses writes until there is
	// room; a disk that is really full is worse, see [Server.Health].
	MaxStore  int64
	MaxMemory int64 // bytes for streams and consumers in memory; default 256 MiB

	Logger *slog.Logger // takes what the server says; nil takes nothing.
}

// Server is an embedded nats-server with JetStream. Its methods may be called from any goroutine.
type Server struct {
	lock  *os.File
	bound bool // nobody has set MaxStore

	turns sync.Mutex // one Restart or Stop at a time; taken before mu

	mu      sync.Mutex
	o       Options // defaults filled, the port chosen
	opts    *server.Options
	srv     *server.Server
	stopped bool
}

const (
	lockFile    = "kvatlas.lock"
	storeFolder = server.JetStreamStoreDir // where nats-server keeps streams
)

// Start starts a server and returns when it is ready, or says why it cannot be. An error that wraps
// [ErrInUse] names the folder or the port that somebody else has.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("start server: a data folder is needed")
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

// roomIn is what a folder has and nine tenths of what its disk has free.
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

// openBatches is how many atomic batches may be open on a stream of the embedded server; nats-server's default is 50.
// Each costs a few files. Fifty shims of a partition that publish at the same moment, or one client that leaves batches
// open, would have the server refuse the batches of all others.
const openBatches = 256

// natsOptions says it in nats-server's words.
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
	if limits := &opts.JetStreamLimits; limits.MaxBatchInflightPerStream == 0 { // the configuration file leaves it open
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

// CheckFile returns an error if nats-server would refuse the configuration file.
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

// lockDir makes the folder and takes its lock.
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
	// For people: who holds it. The lock itself is the system's.
	if err = f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// run starts a server and waits until it is ready. It returns the options with which it runs, too.
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
	for {
		if srv.ReadyForConnections(20 * time.Millisecond) {
			if health := srv.Healthz(&server.HealthzOptions{}); health.StatusCode == 200 {
				return srv, opts, nil
			}
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
		case <-time.After(5 * time.Millisecond):
			continue
		}
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, nil, why
	}
}

// URL is where clients in other processes connect to; empty if the server does not listen.
func (s *Server) URL() string {
	if addr := s.Addr(); addr != "" {
		return "nats://" + addr
	}
	return ""
}

// Addr is the HOST:PORT on which the server listens; empty if it does not.
func (s *Server) Addr() string {
	if addr := s.current().Addr(); addr != nil {
		return addr.String()
	}
	return ""
}

// Authenticates reports whether clients must say who they are: as a user, with a token, or by a certificate.
func (s *Server) Authenticates() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.opts
	return len(o.Users)+len(o.Nkeys)+len(o.TrustedKeys)+len(o.TrustedOperators) > 0 || o.Username != "" ||
		o.Authorization != "" || o.AuthCallout != nil || o.TLSVerify
}

// MaxStore is the bound on all streams and buckets together.
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

// InProcessConn gives nats.go a connection inside the process.
func (s *Server) InProcessConn() (net.Conn, error) { return s.current().InProcessConn() }

// Health is nil while the server can do its work. Otherwise it says what is wrong; above all that a stream
// could not be written (the disk is full or broken). nats-server then answers nothing that would write to that
// stream, not even a purge, until it is started anew, whatever room there is meanwhile: see [Server.Restart], and
// [Server.Supervise], which does it when it helps.
func (s *Server) Health() error {
	health := s.current().Healthz(&server.HealthzOptions{})
	if health.StatusCode == 200 {
		return nil
	}
	return fmt.Errorf("the NATS server is unhealthy: %s", health.Error)
}

// Restart stops the server and starts it again on the same folder and port. Connections come back by
// themselves; it takes some tenths of a second for small logs. If it cannot be started again the error says
// why, and Restart may be called again.
func (s *Server) Restart(ctx context.Context) error {
	s.turns.Lock()
	defer s.turns.Unlock()
	s.mu.Lock()
	o, srv, stopped := s.o, s.srv, s.stopped
	s.mu.Unlock()
	if stopped {
		return errors.New("restart server: it was stopped")
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

// Reload reads the configuration file again and applies its users and accounts, without interrupting the connections
// of users that stay as they are. The error says why the server keeps its configuration.
func (s *Server) Reload() error {
	s.turns.Lock()
	defer s.turns.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.New("reload server: it was stopped")
	}
	// nats-server 2.15 starts the service imports of an account that a reload adds with the next reload (server.go,
	// configureAccounts: only accounts that exist have theirs processed).
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

// Stop ends the server, waits until all is written and releases the data folder. Clients should have drained
// before. Calling it again does nothing.
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
	_ = s.lock.Close() // releases the lock too; there is nothing else in the file to lose
}

// serverLog hands the server's lines to slog, with an explanation where one is needed, and keeps the reason for which
// it gave up.
type serverLog struct {
	to    *slog.Logger
	fatal chan string
}

func (l *serverLog) say(level slog.Level, format string, v []any) {
	if l.to != nil && l.to.Enabled(context.Background(), level) {
		line := fmt.Sprintf(format, v...)
		l.to.Log(context.Background(), level, line, explain(line)...)
	}
}

func (l *serverLog) Noticef(format string, v ...any) { l.say(slog.LevelInfo, format, v) }
func (l *serverLog) Warnf(format string, v ...any)   { l.say(slog.LevelWarn, format, v) }
func (l *serverLog) Errorf(format string, v ...any)  { l.say(slog.LevelError, format, v) }
func (l *serverLog) Debugf(format string, v ...any)  { l.say(slog.LevelDebug, format, v) }
func (l *serverLog) Tracef(format string, v ...any)  { l.say(slog.LevelDebug, format, v) }

func (l *serverLog) Fatalf(format string, v ...any) {
	l.say(slog.LevelError, format, v)
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default:
	}
}

// recoveries are parts of lines that look worse than they are (nats-server server/filestore.go, recoverFullState and
// who calls it).
var recoveries = []string{
	"Stream state outdated",
	"Stream state detected prior state",
	"Recovering stream state from index errored: prior state file",
	"state is outdated; attempting to recover",
}

// explain returns attributes for a line of the NATS server's log that has an explanation; none for another.
func explain(line string) []any {
	if !slices.ContainsFunc(recoveries, func(says string) bool { return strings.Contains(line, says) }) {
		return nil
	}
	return []any{"means", "the server ended before it could write down what it knew of this stream, as after kill -9 or a " +
		"power failure; it reads the stream's own files instead, which takes a moment and loses nothing",
		"what_to_do", "nothing"}
}
