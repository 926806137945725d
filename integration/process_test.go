package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
)

// patience is how long a test waits for anything; a machine may be slow.
const patience = 4 * time.Minute

var programs struct {
	sync.Once
	dir string
	err error
}

func TestMain(m *testing.M) {
	status := m.Run()
	if programs.dir != "" {
		os.RemoveAll(programs.dir)
	}
	os.Exit(status)
}

// program returns the path of one of our programs, or of nats-server, built from this module.
func program(t testing.TB, name string) string {
	t.Helper()
	programs.Do(func() {
		if programs.dir, programs.err = os.MkdirTemp("", "kvatlas-programs-"); programs.err != nil {
			return
		}
		for _, pkg := range []string{module + "cmd/indexer", module + "cmd/worker-shim", "github.com/nats-io/nats-server/v2"} {
			out, err := exec.Command("go", "build", "-o", programs.dir+"/", pkg).CombinedOutput()
			if err != nil {
				programs.err = fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
				return
			}
		}
	})
	if programs.err != nil {
		t.Fatal(programs.err)
	}
	if name == "nats-server" {
		name = "v2"
		if _, err := os.Stat(filepath.Join(programs.dir, name)); err != nil {
			name = "nats-server"
		}
	}
	return filepath.Join(programs.dir, name)
}

// process is a program that runs, and what it has said on standard error.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	done chan struct{} // closed at its end

	mu     sync.Mutex
	said   bytes.Buffer
	change chan struct{} // closed when it says more
}

// start runs a program until the test ends.
func start(t testing.TB, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(program(t, name), args...), done: make(chan struct{}), change: make(chan struct{})}
	p.cmd.Stderr = p
	p.cmd.Env = environment(args)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s %s said:\n%s", name, strings.Join(args, " "), p.saying())
		}
	})
	return p
}

// unhurried are settings of all programs, unless a test has others: nothing expires, is given up or taken for gone because a process, or the whole
// machine, stood still for some minutes.
var unhurried = []string{
	"KVATLAS_LEASE=15m", "KVATLAS_CLAIM_WAIT=15m", // of shims
	"KVATLAS_PARK_FOR=24h", "KVATLAS_REMEMBER_FOR=24h", "KVATLAS_L3_TIMEOUT=4m", "KVATLAS_NATS_WAIT=4m", // of indexers
	"KVATLAS_TIMEOUT=4m", // of who asks them
}

// environment is that of a program: nothing of ours is in it but what is unhurried.
func environment(args []string) (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "NATS_") && !strings.HasPrefix(v, "KVATLAS_") {
			env = append(env, v)
		}
	}
	if slices.Contains(args, "mooncake") { // a store's shim takes no settings of a worker's
		return env
	}
	return append(env, unhurried...)
}

// Write takes what the program says.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said.Write(b)
	close(p.change)
	p.change = make(chan struct{})
	return len(b), nil
}

func (p *process) saying() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// waitFor waits until the program has said something that matches, and returns the match. A line counts when it is whole.
func (p *process) waitFor(pattern string) []string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	deadline := time.After(patience)
	for {
		p.mu.Lock()
		whole := p.said.String()
		found, change := re.FindStringSubmatch(whole[:strings.LastIndexByte(whole, '\n')+1]), p.change
		p.mu.Unlock()
		if found != nil {
			return found
		}
		select {
		case <-change:
		case <-p.done:
			if found := re.FindStringSubmatch(p.saying()); found != nil {
				return found
			}
			p.t.Fatalf("%s has ended without saying %q:\n%s", p.cmd, pattern, p.saying())
		case <-deadline:
			p.t.Fatalf("%s does not say %q:\n%s", p.cmd, pattern, p.saying())
		}
	}
}

// kill ends the program as a crash would.
func (p *process) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// stop ends the program in good order.
func (p *process) stop() {
	p.t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("%s does not stop:\n%s", p.cmd, p.saying())
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Fatalf("%s ended with %d:\n%s", p.cmd, code, p.saying())
	}
}

// indexerProcess is indexer serve on a server of its own.
type indexerProcess struct {
	*process
	data, nats, http string
}

// startIndexer runs an indexer on a data folder, and waits until it is ready. An empty addr takes a free port.
func startIndexer(t testing.TB, data, addr string, args ...string) *indexerProcess {
	t.Helper()
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	x := &indexerProcess{data: data}
	x.process = start(t, "indexer", append([]string{"serve", "--data", data, "--nats-listen", addr, "--http-listen", "127.0.0.1:0", "--partitions", "4"}, args...)...)
	x.nats = x.waitFor(`in this process" listen=(\S+)`)[1]
	x.http = x.waitFor(`HTTP is served" listen=(\S+)`)[1]
	x.waitFor(`msg=ready`)
	return x
}

// ran is how a program that is not meant to stay ended.
type ran struct {
	code           int
	stdout, stderr string
}

// run runs a program to its end.
func run(t testing.TB, name string, args ...string) ran {
	t.Helper()
	return runWith(t, nil, name, args...)
}

// runWith is run with more in the environment. A program to which a NATS server did not answer in time, since one of the two stood still, is run again.
func runWith(t testing.TB, env []string, name string, args ...string) (r ran) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		r = runOnce(t, env, name, args...)
		if r.code != 1 || !noAnswerInTime.MatchString(r.stderr) || time.Now().After(deadline) {
			return r
		}
	}
}

var noAnswerInTime = regexp.MustCompile(`no NATS server answers.*timeout`)

func runOnce(t testing.TB, env []string, name string, args ...string) ran {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience) // twice what a program may wait for
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program(t, name), args...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &stdout, &stderr, append(environment(args), env...)
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %v: %v", name, args, err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%s %v does not end; it said:\n%s%s", name, args, &stdout, &stderr)
	}
	return ran{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// query asks as a user would.
func (x *indexerProcess) query(t testing.TB, args ...string) (a api.Answer, failure *api.Error) {
	t.Helper()
	r := run(t, "indexer", append([]string{"query", "--nats", x.nats, "--json"}, args...)...)
	var out struct {
		api.Answer
		Error *api.Error `json:"error"`
	}
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil {
		t.Fatalf("query %v ended with %d and printed %q, %q: %v", args, r.code, r.stdout, r.stderr, err)
	}
	if (out.Error != nil) != (r.code != 0) {
		t.Fatalf("query %v ended with %d and printed %q", args, r.code, r.stdout)
	}
	return out.Answer, out.Error
}

// waitDepth waits until a worker holds so many of a prompt's blocks on its device.
func (x *indexerProcess) waitDepth(t testing.TB, model string, tokens []uint32, worker string, want uint32) api.Answer {
	t.Helper()
	words := strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]")
	var a api.Answer
	var failure *api.Error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		a, failure = x.query(t, "--model", model, "--tokens", words)
		got := uint32(0)
		for _, o := range a.Workers {
			if string(o.Instance) == worker {
				got = o.Device
			}
		}
		if failure == nil && got == want {
			return a
		}
	}
	t.Fatalf("%s should hold %d blocks; the last answer was %+v, %v", worker, want, a, failure)
	return a
}

// tokens makes a prompt of n tokens that no other first gives.
func tokens(first, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(first + i)
	}
	return out
}
