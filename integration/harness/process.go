package harness

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Module is the path of this module with a trailing slash.
const Module = "github.com/kvatlas/kvatlas/"

// Patience is [testkit.Patience].
const Patience = testkit.Patience

// prebuilt is a folder with the programs, for a machine without Go; empty: the programs are built.
var prebuilt = os.Getenv("KVATLAS_TEST_PROGRAMS")

var programs struct {
	sync.Once
	dir string
	err error
}

// Main runs the tests of a package that starts programs, eight at a time, and removes the built programs. TestMain
// calls Main.
func Main(m *testing.M) { MainOf(m, 8) }

// MainOf is [Main] with another number of concurrent tests, if the flag -parallel is not given. Tests mostly wait for
// programs.
func MainOf(m *testing.M, atATime int) {
	if err := flag.Set("test.parallel", strconv.Itoa(atATime)); err != nil {
		panic(err)
	}
	status := m.Run()
	if programs.dir != "" && programs.dir != prebuilt {
		os.RemoveAll(programs.dir)
	}
	os.Exit(status)
}

// Program returns the path of a program of this module, or of nats-server, built from this module. A path is returned
// unchanged.
func Program(t testing.TB, name string) string {
	t.Helper()
	programs.Do(func() {
		if programs.dir = prebuilt; prebuilt != "" {
			return
		}
		if programs.err = dependOnSources(); programs.err != nil {
			return
		}
		if programs.dir, programs.err = os.MkdirTemp("", "kvatlas-programs-"); programs.err != nil {
			return
		}
		programs.err = buildPrograms(programs.dir)
	})
	if programs.err != nil {
		t.Fatal(programs.err)
	}
	if filepath.IsAbs(name) {
		return name
	}
	if name == "nats-server" {
		name = "v2"
		if _, err := os.Stat(filepath.Join(programs.dir, name)); err != nil {
			name = "nats-server"
		}
	}
	return filepath.Join(programs.dir, name)
}

// buildPrograms builds the programs into a folder in the cache of the user, and makes hard links in dir. The test
// packages of a work tree share the folder, so the linker runs once: go build keeps a program that is up to date. A
// later build replaces the files of the folder, and does not change those of dir.
func buildPrograms(dir string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	shared, unlock, err := lockPrograms(fmt.Sprintf("%x", sha256.Sum256([]byte(root)))[:16])
	if err != nil {
		return err
	}
	defer unlock()
	bin := filepath.Join(shared, "bin")
	if err := command("go", "build", "-ldflags=-s -w", "-o", bin+"/", Module+"cmd/indexer", Module+"cmd/worker-shim",
		"github.com/nats-io/nats-server/v2"); err != nil {
		return err
	}
	return linkFiles(bin, dir)
}

// lockPrograms makes a folder for programs in the cache of the user, and locks the folder until unlock is called.
func lockPrograms(name string) (dir string, unlock func(), err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(cache, "kvatlas", "programs", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	path := filepath.Join(dir, "lock")
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		lock.Close()
		return "", nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return dir, func() { lock.Close() }, nil // Close releases the lock, and so does the end of the process
}

// linkFiles makes hard links to all files of a folder, or copies on another file system.
func linkFiles(from, to string) error {
	files, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, file := range files {
		source, target := filepath.Join(from, file.Name()), filepath.Join(to, file.Name())
		if os.Link(source, target) == nil {
			continue
		}
		data, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		if err := os.WriteFile(target, data, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// moduleRoot returns the folder of go.mod.
func moduleRoot() (string, error) {
	gomod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(gomod))), nil
}

// beforeCommit is the last commit of the previous version.
const beforeCommit = "e4129fe05f109d424218a9ed7796b09c8eb03659"

var before struct {
	sync.Once
	dir string
	err error
}

// Before returns the path of a program of the previous version, built from the repository's history.
func Before(t testing.TB, name string) string {
	t.Helper()
	Program(t, "indexer") // makes the folder
	before.Do(func() {
		before.dir = filepath.Join(programs.dir, "before")
		before.err = buildBefore(before.dir)
	})
	if before.err != nil {
		t.Fatal(before.err)
	}
	return filepath.Join(before.dir, name)
}

// buildBefore builds the programs of the previous version like [buildPrograms]. Their sources stay in the cache of the
// user, so the linker runs once.
func buildBefore(dir string) error {
	shared, unlock, err := lockPrograms("before-" + beforeCommit[:16])
	if err != nil {
		return err
	}
	defer unlock()
	source, bin := filepath.Join(shared, "source"), filepath.Join(shared, "bin")
	if _, err := os.Stat(source); err != nil {
		if err := unpackBefore(source); err != nil {
			return err
		}
	}
	if err := command("go", "build", "-C", source, "-trimpath", "-o", bin+"/", "./cmd/indexer",
		"./cmd/worker-shim"); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return linkFiles(bin, dir)
}

// unpackBefore writes the sources of the previous version into a new folder. The folder gets its name at the end, so a
// folder with this name is complete.
func unpackBefore(folder string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	if err := command("git", "-C", root, "cat-file", "-e", beforeCommit+"^{commit}"); err != nil {
		return fmt.Errorf(
			"this clone lacks the commit of the previous version, %s; fetch the whole history with git fetch --unshallow: %w",
			beforeCommit, err)
	}
	part, archive := folder+".part", folder+".tar"
	if err := os.RemoveAll(part); err != nil {
		return err
	}
	if err := os.Mkdir(part, 0o700); err != nil {
		return err
	}
	if err := command("git", "-C", root, "archive", "-o", archive, beforeCommit); err != nil {
		return err
	}
	if err := command("tar", "-x", "-f", archive, "-C", part); err != nil {
		return err
	}
	if err := os.Remove(archive); err != nil {
		return err
	}
	return os.Rename(part, folder)
}

// command runs a program to its end.
func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// dependOnSources reads all source folders of the programs. go test caches a result while the files opened by the test
// are unchanged, but does not see the build of the programs.
func dependOnSources() error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	for _, dir := range []string{"cmd", "internal", "pkg"} {
		if err := filepath.WalkDir(filepath.Join(root, dir),
			func(_ string, _ fs.DirEntry, err error) error { return err }); err != nil {
			return err
		}
	}
	for _, file := range []string{"go.mod", "go.sum"} {
		if _, err := os.Stat(filepath.Join(root, file)); err != nil {
			return err
		}
	}
	return nil
}

// Process is a running program with its standard error.
type Process struct {
	t    testing.TB
	Cmd  *exec.Cmd
	Done chan struct{} // closed at the end

	mu     sync.Mutex
	said   bytes.Buffer
	change chan struct{} // closed at further output
}

// Start runs a program until the test ends.
func Start(t testing.TB, name string, args ...string) *Process {
	t.Helper()
	if name == "nats-server" {
		args = withRoom(t, args)
	}
	p := &Process{t: t, Cmd: exec.Command(Program(t, name), args...), Done: make(chan struct{}),
		change: make(chan struct{})}
	p.Cmd.Stderr = p
	p.Cmd.Env = Environment(args)
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.Cmd.Wait()
		close(p.Done)
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("output of %s %s:\n%s", name, strings.Join(args, " "), p.Said())
		}
	})
	return p
}

// withRoom adds a limit of storage to the arguments of a NATS server with JetStream and without a configuration.
// Otherwise the limit is three quarters of the free disk space. Streams reserve their largest size, which tests never
// reach, so the limit is large.
func withRoom(t testing.TB, args []string) []string {
	t.Helper()
	if !slices.Contains(args, "-js") || slices.Contains(args, "-c") || slices.Contains(args, "--config") {
		return args
	}
	file := filepath.Join(t.TempDir(), "room.conf")
	if err := os.WriteFile(file, []byte("jetstream { max_file_store: 1TB }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return slices.Concat([]string{"-c", file}, args)
}

// unhurried are default settings of all programs: no lease or wait expires because a process, or the whole machine, was
// paused for some minutes.
var unhurried = []string{
	"KVATLAS_LEASE=15m", "KVATLAS_CLAIM_WAIT=15m", "KVATLAS_ENGINE_SILENT_AFTER=15m", "KVATLAS_STOP_WAIT=0s", // of shims
	"KVATLAS_PENDING_FOR=24h", "KVATLAS_TOMBSTONE_FOR=24h", "KVATLAS_L3_TIMEOUT=4m", "KVATLAS_NATS_WAIT=4m", // of indexers
	"KVATLAS_PARK_FOR=24h", "KVATLAS_REMEMBER_FOR=24h", // of indexers of v0.4
	"KVATLAS_TIMEOUT=4m",                                                  // of clients
	"OTEL_EXPORTER_OTLP_TIMEOUT=240000", "OTEL_BSP_EXPORT_TIMEOUT=240000", // of traces
	"OTEL_BSP_SCHEDULE_DELAY=100",
}

// Environment returns the environment of a program: no settings of kvatlas except unhurried.
func Environment(args []string) (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "NATS_") && !strings.HasPrefix(v, "KVATLAS_") &&
			!strings.HasPrefix(v, "OTEL_") {
			env = append(env, v)
		}
	}
	if slices.Contains(args, "mooncake") { // a store's shim has no settings of a worker
		return env
	}
	return append(env, unhurried...)
}

// Write receives standard error of the program.
func (p *Process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said.Write(b)
	close(p.change)
	p.change = make(chan struct{})
	return len(b), nil
}

func (p *Process) Said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// WaitFor waits until a complete line of output matches, and returns the match.
func (p *Process) WaitFor(pattern string) []string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	deadline := time.After(Patience)
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
		case <-p.Done:
			if found := re.FindStringSubmatch(p.Said()); found != nil {
				return found
			}
			p.t.Fatalf("%s has ended without the output %q:\n%s", p.Cmd, pattern, p.Said())
		case <-deadline:
			p.t.Fatalf("%s does not print %q:\n%s", p.Cmd, pattern, p.Said())
		}
	}
}

// Kill ends the program as a crash would.
func (p *Process) Kill() {
	p.Cmd.Process.Kill()
	<-p.Done
}

// Stop ends the program in good order.
func (p *Process) Stop() {
	p.t.Helper()
	p.Cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.Done:
	case <-time.After(Patience):
		p.t.Fatalf("%s does not stop:\n%s", p.Cmd, p.Said())
	}
	if code := p.Cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Fatalf("%s ended with %d:\n%s", p.Cmd, code, p.Said())
	}
}

// Indexer is indexer serve with an embedded server.
type Indexer struct {
	*Process
	Data, NATS, HTTP string
}

// StartIndexer runs an indexer on a data folder, and waits for readiness. An empty addr selects a free port.
func StartIndexer(t testing.TB, data, addr string, args ...string) *Indexer {
	t.Helper()
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	x := &Indexer{Data: data}
	x.Process = Start(t, "indexer", append([]string{"serve", "--data", data, "--nats-listen", addr, "--http-listen",
		"127.0.0.1:0", "--partitions", "4"}, args...)...)
	x.NATS = x.WaitFor(`in this process" listen=(\S+)`)[1]
	x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	x.WaitFor(`msg=ready`)
	return x
}

// Result is the result of a program that ends.
type Result struct {
	Code           int
	Stdout, Stderr string
}

// Run runs a program to its end.
func Run(t testing.TB, name string, args ...string) Result {
	t.Helper()
	return runWith(t, nil, name, args...)
}

// runWith is Run with additional environment variables. It repeats the run after a timeout of a NATS server, because a
// process may have been paused.
func runWith(t testing.TB, env []string, name string, args ...string) (r Result) {
	t.Helper()
	for deadline := time.Now().Add(Patience); ; {
		r = runOnce(t, env, name, args...)
		if r.Code != 1 || !noAnswerInTime.MatchString(r.Stderr) || time.Now().After(deadline) {
			return r
		}
	}
}

var noAnswerInTime = regexp.MustCompile(`no NATS server answers.*timeout`)

func runOnce(t testing.TB, env []string, name string, args ...string) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience) // double the timeout of a program
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, Program(t, name), args...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &stdout, &stderr, append(Environment(args), env...)
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %v: %v", name, args, err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%s %v does not end; output:\n%s%s", name, args, &stdout, &stderr)
	}
	return Result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// IndexerJSON runs indexer with words and --json, and decodes the output.
func IndexerJSON[T any](t testing.TB, nats, words string) (out T) {
	t.Helper()
	r := Run(t, "indexer", append(strings.Fields(words), "--nats", nats, "--json")...)
	if err := json.Unmarshal([]byte(r.Stdout), &out); err != nil || r.Code != 0 {
		t.Fatalf("%s: %+v: %v", words, r, err)
	}
	return out
}

// Decode reads the JSON output of a program. Other output gives the zero value.
func Decode[T any](r Result) (out T) {
	if json.Unmarshal([]byte(r.Stdout), &out) != nil {
		return *new(T)
	}
	return out
}

// Status returns the status of the only node, or of the first node by name, with problems or without.
func Status(t testing.TB, nats string, args ...string) (s api.Status) {
	t.Helper()
	r := Run(t, "indexer", append([]string{"status", "--nats", nats, "--json"}, args...)...)
	var out struct {
		Nodes []struct{ Status *api.Status }
	}
	if err := json.Unmarshal([]byte(r.Stdout), &out); err != nil || len(out.Nodes) == 0 || out.Nodes[0].Status == nil {
		t.Fatalf("status: %+v: %v", r, err)
	}
	return *out.Nodes[0].Status
}

// Query runs a query as a user would.
func (x *Indexer) Query(t testing.TB, args ...string) (a api.Answer, failure *api.Error) {
	t.Helper()
	r := Run(t, "indexer", append([]string{"query", "--nats", x.NATS, "--json"}, args...)...)
	var out struct {
		api.Answer
		Error *api.Error `json:"error"`
	}
	if err := json.Unmarshal([]byte(r.Stdout), &out); err != nil {
		t.Fatalf("query %v ended with %d and printed %q, %q: %v", args, r.Code, r.Stdout, r.Stderr, err)
	}
	if (out.Error != nil) != (r.Code != 0) {
		t.Fatalf("query %v ended with %d and printed %q", args, r.Code, r.Stdout)
	}
	return out.Answer, out.Error
}

// WaitDepth waits until a worker holds the given number of a prompt's blocks on its device.
func (x *Indexer) WaitDepth(t testing.TB, model string, tokens []uint32, worker string, want uint32) api.Answer {
	t.Helper()
	words := strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]")
	var a api.Answer
	var failure *api.Error
	Eventually(t, fmt.Sprintf("%s holds %d blocks", worker, want), func() (bool, string) {
		a, failure = x.Query(t, "--model", model, "--tokens", words)
		got := uint32(0)
		for _, o := range a.Workers {
			if string(o.Instance) == worker {
				got = o.Device
			}
		}
		return failure == nil && got == want, fmt.Sprintf("%+v, %v", a, failure)
	})
	return a
}

// Tokens makes a prompt of n tokens. A different first gives different tokens.
func Tokens(first, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(first + i)
	}
	return out
}
