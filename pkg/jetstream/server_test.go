package jetstream

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// helperEnv makes the test binary a process that holds a data folder until its input ends or it is killed.
const helperEnv = "KVATLAS_TEST_SERVER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		os.Exit(serveForTest(dir, os.Getenv(helperEnv+"_LISTEN")))
	}
	os.Exit(m.Run())
}

func serveForTest(dir, listen string) int {
	s, err := StartServer(context.Background(), ServerOptions{Dir: dir, Listen: listen})
	if err != nil {
		fmt.Println("failed", err)
		return 1
	}
	fmt.Println("ready", s.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Stop()
	return 0
}

// process is the test binary run again as a server.
type process struct {
	cmd  *exec.Cmd
	in   io.Closer
	addr string
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
	p := &process{cmd: cmd, in: in}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if err != nil || !ok {
		t.Fatalf("the server process said %q, %v", line, err)
	}
	p.addr = addr
	return p
}

// kill ends the process as a power button would.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func TestServerSaysWhereItIs(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	host, port, err := net.SplitHostPort(s.Addr())
	if err != nil || host != "127.0.0.1" || port == "0" || s.URL() != "nats://"+s.Addr() {
		t.Fatalf("address %q, URL %q", s.Addr(), s.URL())
	}
	c := connect(t, ConnOptions{URLs: []string{s.URL()}})
	if got := c.Server(); got.Name != "kvatlas" || got.MaxPayload != 1<<20 || got.APILevel < 2 {
		t.Fatalf("server %+v", got)
	}
	s.Stop()
	s.Stop()
}

func TestServerWithoutListener(t *testing.T) {
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
	s := startServer(t, t.TempDir(), ":0")
	if !strings.HasPrefix(s.Addr(), "127.0.0.1:") {
		t.Fatalf("listens on %s", s.Addr())
	}
}

func TestServerRefusals(t *testing.T) {
	ctx := ctxFor(t)
	held := startServer(t, t.TempDir(), "127.0.0.1:0")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		o    ServerOptions
		is   error
		says string
	}{
		{"no folder", ServerOptions{}, nil, "data folder"},
		{"a file", ServerOptions{Dir: file}, nil, file},
		{"port taken", ServerOptions{Dir: t.TempDir(), Listen: held.Addr()}, ErrInUse, held.Addr()},
		{"no port", ServerOptions{Dir: t.TempDir(), Listen: "localhost"}, nil, "HOST:PORT"},
		{"no number", ServerOptions{Dir: t.TempDir(), Listen: "localhost:x"}, nil, `"x"`},
		{"no such configuration", ServerOptions{Dir: t.TempDir(), ConfigFile: "/nonexistent/nats.conf"}, nil, "nats.conf"},
	} {
		s, err := StartServer(ctx, c.o)
		if err == nil {
			s.Stop()
			t.Errorf("%s: started", c.name)
			continue
		}
		if c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// What was refused has let go of its folder.
	dir := t.TempDir()
	if _, err := StartServer(ctx, ServerOptions{Dir: dir, Listen: held.Addr()}); !errors.Is(err, ErrInUse) {
		t.Fatal(err)
	}
	startServer(t, dir, "127.0.0.1:0")
}

func TestServerFolderInUse(t *testing.T) {
	dir := t.TempDir()
	p := startProcess(t, dir, "127.0.0.1:0")
	_, err := StartServer(ctxFor(t), ServerOptions{Dir: dir})
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), fmt.Sprint(p.cmd.Process.Pid)) {
		t.Fatalf("second server: %v", err)
	}
	p.kill() // the lock goes with the process, however it ends
	startServer(t, dir, "")
}

func TestServerConfigFile(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "nats.conf")
	text := "max_payload: 262144\nauthorization { user: u, password: p }\n"
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	s, err := StartServer(ctxFor(t), ServerOptions{
		Dir: t.TempDir(), ConfigFile: conf, Listen: "127.0.0.1:0",
		Logger: slog.New(slog.NewTextHandler(&lines, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t, ConnOptions{URLs: []string{s.URL()}, User: "u", Password: "p"})
	if got := c.Server().MaxPayload; got != 262144 {
		t.Errorf("max payload %d", got)
	}
	// Credentials that are refused are refused at once, however patient the caller.
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Nanosecond)
	defer cancel()
	dir := t.TempDir()
	if s, err := StartServer(ctx, ServerOptions{Dir: dir}); err == nil {
		s.Stop() // it may be that fast
	} else if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	startServer(t, dir, "")
}
