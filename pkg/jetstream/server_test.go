package jetstream

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// helperEnv makes the test binary a process that holds a data folder until its input ends or it is killed.
const helperEnv = "KVATLAS_TEST_SERVER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		os.Exit(serveForTest(dir, os.Getenv(helperEnv+"_LISTEN")))
	}
	if settings := os.Getenv(clusterEnv); settings != "" {
		os.Exit(serveInCluster(settings))
	}
	testkit.Main(m)
}

func serveForTest(dir, listen string) int {
	s, err := natsserver.Start(context.Background(), natsserver.Options{Dir: dir, Listen: listen})
	if err != nil {
		fmt.Println("failed", err)
		return 1
	}
	fmt.Println("ready", s.Addr())
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Println("done", obey(s, lines.Text()))
	}
	s.Stop()
	return 0
}

// obey executes a test's command in the process.
func obey(s *natsserver.Server, command string) error {
	switch command {
	case "fill the disk": // in the view of this process: no file may exceed 1 MB
		signal.Ignore(unix.SIGXFSZ)
		return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1_000_000, Max: unix.RLIM_INFINITY})
	case "make room":
		return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	case "health":
		return s.Health()
	case "restart":
		return s.Restart(context.Background())
	}
	return errors.New("what?")
}

// process is the test binary, run as a server.
type process struct {
	cmd  *exec.Cmd
	in   io.Writer
	out  *bufio.Reader
	addr string
}

// tell sends a command to the process and returns the answer.
func (p *process) tell(t testing.TB, command string) string {
	t.Helper()
	if _, err := io.WriteString(p.in, command+"\n"); err != nil {
		t.Fatal(err)
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(strings.TrimPrefix(line, "done"))
}

func startProcess(t testing.TB, dir, listen string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), helperEnv+"="+dir, helperEnv+"_LISTEN="+listen)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(p.kill)
	line, err := p.out.ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if err != nil || !ok {
		t.Fatalf("the server process answered %q, %v", line, err)
	}
	p.addr = addr
	return p
}

// kill ends the process like a power button.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func TestServerSaysWhereItIs(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	host, port, err := net.SplitHostPort(s.Addr())
	if err != nil || host != "127.0.0.1" || port == "0" || s.URL() != "nats://"+s.Addr() {
		t.Fatalf("address %q, URL %q", s.Addr(), s.URL())
	}
	c := connect(t, ConnOptions{URLs: []string{s.URL()}})
	if got := c.NATS(); got.ConnectedServerName() != "kvatlas" || got.MaxPayload() != 1<<20 || c.level < 2 {
		t.Fatalf("server %q, messages of %d bytes", got.ConnectedServerName(), got.MaxPayload())
	}
	s.Stop()
	s.Stop()
}

func TestServerWithoutListener(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "")
	if s.Addr() != "" || s.URL() != "" {
		t.Fatalf("listens on %q", s.Addr())
	}
	c := connect(t, ConnOptions{Server: s})
	if _, err := JoinNamespace(ctxFor(t), c, NamespaceConfig{Name: "a"}); err != nil {
		t.Fatal(err)
	}
}

func TestServerLoopbackByDefault(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), ":0")
	if !strings.HasPrefix(s.Addr(), "127.0.0.1:") {
		t.Fatalf("listens on %s", s.Addr())
	}
}

func TestServerRefusals(t *testing.T) {
	t.Parallel()
	ctx := ctxFor(t)
	held := startServer(t, t.TempDir(), "127.0.0.1:0")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		o    natsserver.Options
		is   error
		says string
	}{
		{"no folder", natsserver.Options{}, nil, "data folder"},
		{"a file", natsserver.Options{Dir: file}, nil, file},
		{"port taken", natsserver.Options{Dir: t.TempDir(), Listen: held.Addr()}, natsserver.ErrInUse, held.Addr()},
		{"no port", natsserver.Options{Dir: t.TempDir(), Listen: "localhost"}, nil, "HOST:PORT"},
		{"no number", natsserver.Options{Dir: t.TempDir(), Listen: "localhost:x"}, nil, `"x"`},
		{"no such configuration", natsserver.Options{Dir: t.TempDir(), ConfigFile: "/nonexistent/nats.conf"}, nil,
			"nats.conf"},
	} {
		s, err := natsserver.Start(ctx, c.o)
		if err == nil {
			s.Stop()
			t.Errorf("%s: started", c.name)
			continue
		}
		if c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// A refused start has released its folder.
	dir := t.TempDir()
	_, err := natsserver.Start(ctx, natsserver.Options{Dir: dir, Listen: held.Addr()})
	if !errors.Is(err, natsserver.ErrInUse) {
		t.Fatal(err)
	}
	startServer(t, dir, "127.0.0.1:0")
}

func TestServerFolderInUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := startProcess(t, dir, "127.0.0.1:0")
	_, err := natsserver.Start(ctxFor(t), natsserver.Options{Dir: dir})
	if !errors.Is(err, natsserver.ErrInUse) || !strings.Contains(err.Error(), dir) ||
		!strings.Contains(err.Error(), fmt.Sprint(p.cmd.Process.Pid)) {
		t.Fatalf("second server: %v", err)
	}
	p.kill() // the lock ends with the process
	startServer(t, dir, "")
}

// TestServerDiskFull: Health reports a full disk, and with room again, a restart inside the process repairs it.
// Acknowledged messages survive, and the shim and the reader continue as after a lost connection.
func TestServerDiskFull(t *testing.T) {
	t.Parallel()
	w := &world{t: t, ctx: ctxFor(t)}
	p := startProcess(t, t.TempDir(), "127.0.0.1:0")
	// messages that cannot be stored get no answer
	w.c = connect(t, ConnOptions{URLs: []string{"nats://" + p.addr}, AttemptTimeout: 300 * time.Millisecond})
	w.join()
	pub := w.publisher(w1)
	rd := startReader(t, w.ns, Position{})
	rd.notice(CaughtUp{0})
	if got := p.tell(t, "health"); got != "<nil>" {
		t.Fatal(got)
	}
	if err := w.ns.Writable(w.ctx, 0); err != nil {
		t.Fatal(err)
	}
	if got := p.tell(t, "fill the disk"); got != "<nil>" {
		t.Fatal(got)
	}
	text := func(i int) []byte { return fmt.Appendf(nil, "%0100000d", i) }
	next := 1
	filling, full := context.WithCancel(w.ctx)
	defer full()
	filled := make(chan error, 1)
	go func() {
		for filling.Err() == nil {
			_, err := pub.Publish(filling, [][]byte{text(next)})
			switch {
			case err == nil:
				next++
			case !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrFull):
				filled <- err
				return
			}
		}
		filled <- nil
	}()
	health := "<nil>"
	for health == "<nil>" && w.ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond)
		health = p.tell(t, "health")
	}
	full()
	if err := <-filled; err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(health, "write error") || !strings.Contains(health, Names("test").Stream(0)) {
		t.Fatal(health)
	}
	if next < 5 {
		t.Fatalf("%d were acknowledged", next-1)
	}
	if err := w.ns.Writable(w.ctx, 0); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "file too large") {
		t.Fatalf("the stream can be written: %v", err)
	}
	if got := p.tell(t, "make room"); got != "<nil>" {
		t.Fatal(got)
	}
	if got := p.tell(t, "restart"); got != "<nil>" {
		t.Fatal(got)
	}
	if got := p.tell(t, "health"); got != "<nil>" {
		t.Fatal(got)
	}
	if err := w.ns.Writable(w.ctx, 0); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if _, err := pub.Publish(w.ctx, [][]byte{text(next)}); err != nil {
			t.Fatal(err)
		}
		next++
	}
	for i := 1; i < next; {
		for _, m := range rd.next().Messages {
			switch string(m.Data) {
			case string(text(i)):
				i++
			case string(text(i - 1)): // the cancelled message, which was stored
			default:
				t.Fatalf("message %d is %.20q…", i, bytes.TrimLeft(m.Data, "0"))
			}
		}
	}
}

func TestServerRestart(t *testing.T) {
	t.Parallel()
	addr := loopback.Reserve(t)
	s := startServer(t, t.TempDir(), addr)
	inside := connect(t, ConnOptions{Server: s})
	outside := connect(t, ConnOptions{URLs: []string{s.URL()}})
	for i, c := range []*Conn{inside, outside, inside} {
		if _, err := JoinNamespace(ctxFor(t), c, NamespaceConfig{Name: fmt.Sprint("n", i)}); err != nil {
			t.Fatal(err)
		}
		freed(t, func() error { return s.Restart(ctxFor(t)) })
		if s.Addr() != addr || s.Health() != nil {
			t.Fatal(s.Addr(), s.Health())
		}
		if _, err := OpenNamespace(ctxFor(t), c, fmt.Sprint("n", i)); err != nil {
			t.Fatal(err)
		}
	}
	if s.MaxStore() < 1<<20 {
		t.Errorf("room for %d bytes", s.MaxStore())
	}
	s.Stop()
	if err := s.Restart(ctxFor(t)); err == nil {
		t.Error("a stopped server was started")
	}
}

// TestServerKilled: kill -9 while a shim publishes. Acknowledged messages are there afterwards, once, and in order.
func TestServerKilled(t *testing.T) {
	t.Parallel()
	w := &world{t: t, ctx: ctxFor(t), dir: t.TempDir(), addr: loopback.Reserve(t)}
	p := startProcess(t, w.dir, w.addr)
	w.c = connect(t, ConnOptions{URLs: []string{"nats://" + w.addr}})
	w.join()
	pub := w.publisher(w1)
	rounds := 5
	if testing.Short() {
		rounds = 2
	}
	next := 1
	for range rounds {
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			time.Sleep(30 * time.Millisecond)
			p.kill()
		}()
		for dead := false; !dead; {
			select {
			case <-killed:
				dead = true
				p = startProcess(t, w.dir, w.addr)
			default:
			}
			for _, n := range []int{1, 20} {
				ctx, cancel := w.ctx, context.CancelFunc(func() {})
				if !dead {
					ctx, cancel = context.WithTimeout(w.ctx, 50*time.Millisecond)
				}
				_, err := pub.Publish(ctx, numbered(next, n))
				cancel()
				if err == nil {
					next += n
				} else if !errors.Is(err, ErrUnavailable) {
					t.Fatal(err)
				}
			}
		}
	}
	if last, _ := w.dedupe(); last < next-1 {
		t.Fatalf("%d were acknowledged, the log has %d", next-1, last)
	}
	t.Logf("%d messages, %d kills", next-1, rounds)
}

// TestAuthenticates starts servers with and without required authentication.
func TestAuthenticates(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"max_payload: 2097152":                                                         false,
		"authorization { user: u, password: p }":                                       true,
		"authorization { token: t }":                                                   true,
		"accounts { A { jetstream: true, users [{ user: u, password: p }] } }":         true,
		"authorization { users [{ user: u, password: p }, { user: v, password: p }] }": true,
	} {
		conf := filepath.Join(t.TempDir(), "nats.conf")
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := natsserver.Start(ctxFor(t), natsserver.Options{Dir: t.TempDir(), ConfigFile: conf, Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Authenticates(); got != want {
			t.Errorf("%s: %v", text, got)
		}
		s.Stop()
	}
}

func TestServerConfigFile(t *testing.T) {
	t.Parallel()
	conf := filepath.Join(t.TempDir(), "nats.conf")
	text := "max_payload: 262144\nauthorization { user: u, password: p }\n"
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	s, err := natsserver.Start(ctxFor(t), natsserver.Options{
		Dir: t.TempDir(), ConfigFile: conf, Listen: "127.0.0.1:0",
		Logger: slog.New(slog.NewTextHandler(&lines, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t, ConnOptions{URLs: []string{s.URL()}, User: "u", Password: "p"})
	if got := c.NATS().MaxPayload(); got != 262144 {
		t.Errorf("max payload %d", got)
	}
	// An indexer reports the fault of such a server at its start instead of at its first snapshot.
	_, err = JoinNamespace(ctxFor(t), c, NamespaceConfig{Name: "n", Partitions: 1})
	if want := "kvatlas accepts messages of at most 262144 bytes, an indexer needs 900512: set max_payload: 900512"; !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), want) {
		t.Errorf("a namespace on a server of small messages: %v", err)
	}
	// Refused credentials are an error at once, even for a patient caller.
	_, err = Connect(ctxFor(t), ConnOptions{URLs: []string{s.URL()}, User: "u", Password: "wrong", Wait: true})
	if !errors.Is(err, ErrDenied) {
		t.Errorf("wrong password: %v", err)
	}
	s.Stop()
	if !strings.Contains(lines.String(), "Server is ready") {
		t.Errorf("the server's lines did not arrive: %q", lines.String())
	}
}

func TestServerGivesUpInTime(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), time.Nanosecond)
	defer cancel()
	dir := t.TempDir()
	if s, err := natsserver.Start(ctx, natsserver.Options{Dir: dir}); err == nil {
		s.Stop() // it may be that fast
	} else if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	startServer(t, dir, "")
}
