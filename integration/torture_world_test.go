package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	ours "github.com/kvatlas/kvatlas/pkg/jetstream"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// daemon is a program that is to run for ever: killed in between, and started again. All that it ever said is in one file.
type daemon struct {
	t       testing.TB
	name    string
	program string
	args    []string
	said    string // the file
	running *running
	begun   atomic.Int64                     // where in the file the words of its last life begin
	excused func(code int, last string) bool // an end of its own accord that is no fault of it
}

// running is one life of a daemon.
type running struct {
	cmd  *exec.Cmd
	done chan struct{}
	from int64 // where in the file its words begin
}

func (d *daemon) start() {
	d.t.Helper()
	f, err := os.OpenFile(d.said, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	r := &running{cmd: exec.Command(d.program, d.args...), done: make(chan struct{})}
	r.from, _ = f.Seek(0, io.SeekEnd)
	d.begun.Store(r.from)
	r.cmd.Stdout, r.cmd.Stderr, r.cmd.Env = f, f, cleanEnvironment()
	if err := r.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	go func() {
		r.cmd.Wait()
		close(r.done)
	}()
	d.running = r
}

// alive reports whether it runs. If it has ended by itself without an excuse the test fails.
func (d *daemon) alive() bool {
	if d.running == nil {
		return false
	}
	select {
	case <-d.running.done:
	default:
		return true
	}
	code := d.running.cmd.ProcessState.ExitCode()
	last := strings.TrimSpace(d.words(d.running.from))
	last = last[strings.LastIndexByte(last, '\n')+1:]
	d.running = nil
	if d.excused == nil || !d.excused(code, last) {
		d.t.Fatalf("%s ended by itself with %d: %s", d.name, code, last)
	}
	return false
}

func (d *daemon) signal(s syscall.Signal) {
	if d.running != nil {
		d.running.cmd.Process.Signal(s)
	}
}

func (d *daemon) kill() {
	if d.alive() {
		d.signal(syscall.SIGKILL)
		<-d.running.done
		d.running = nil
	}
}

// stop ends it in good order.
func (d *daemon) stop() {
	d.t.Helper()
	if !d.alive() {
		return
	}
	d.signal(syscall.SIGTERM)
	d.signal(syscall.SIGCONT) // it may be held
	select {
	case <-d.running.done:
	case <-time.After(patience):
		d.signal(syscall.SIGQUIT) // its goroutines, in its file
		<-d.running.done
		d.t.Fatalf("%s does not stop", d.name)
	}
	said := d.words(d.running.from)
	code := d.running.cmd.ProcessState.ExitCode()
	unprepared := code == -1 && said == "" // it had not come so far as to ask for signals
	if code != 0 && !unprepared && (d.excused == nil || !d.excused(code, said)) {
		d.t.Fatalf("%s was told to stop and ended with %d", d.name, code)
	}
	d.running = nil
}

// words is what it has said from a place in its file on.
func (d *daemon) words(from int64) string {
	b, err := os.ReadFile(d.said)
	if err != nil || int64(len(b)) < from {
		return ""
	}
	return string(b[from:])
}

func (d *daemon) spoken() int64 {
	info, err := os.Stat(d.said)
	if err != nil {
		return 0
	}
	return info.Size()
}

// tail is the end of what it has said.
func (d *daemon) tail(lines int) string {
	all := strings.Split(strings.TrimSpace(d.words(0)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

var badWords = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE).*|goroutine \d+ \[running\]`)

// world is one deployment and all its history: a NATS server and its files, an indexer, and engines with their shims.
type world struct {
	t        testing.TB
	dir      string
	natsAddr string
	nats     *daemon
	indexer  *daemon
	engines  []*tortured
	shims    []*daemon
	proxies  []*proxy
	names    []string // of the proxies
	http     http.Client

	mu     sync.Mutex
	addr   string // of the indexer's HTTP port, in the life whose words begin at addrOf
	addrOf int64

	marks    uint64
	backup   string
	admin    *nats.Conn
	counters map[string]int
}

// tortureServer is the server's configuration. What the account may store is little, so that somebody can fill it.
const tortureServer = `
listen: %q
jetstream { store_dir: %q, max_file_store: 4GB, max_memory_store: 256MB }
accounts { KV { jetstream { max_file: 96MB, max_mem: 64MB }, users: [ { user: torture, password: torture } ] } }
no_auth_user: torture
`

const (
	logBytes    = 1 << 20 // of each partition: the least that is allowed
	partitionsT = 2
)

func startWorld(t testing.TB, rng *rand.Rand, programs func(string) string, counters map[string]int) *world {
	w := &world{t: t, natsAddr: lastingAddr(t, rng), counters: counters}
	w.http.Timeout = 5 * time.Second
	var err error
	if w.dir, err = os.MkdirTemp("", "kvatlas-torture-"); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(w.dir, "nats.conf")
	text := fmt.Sprintf(tortureServer, w.natsAddr, filepath.Join(w.dir, "store"))
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	w.nats = w.daemon("nats-server", program(t, "nats-server"), nil, "-c", config)
	toNATS := func(who string) string { return "nats://" + w.proxy(who+"→nats", w.natsAddr).addr() }
	interval := []string{"200ms", "1s", "3s"}[rng.IntN(3)]
	w.indexer = w.daemon("indexer", programs("indexer"), func(code int, last string) bool {
		return code == 1 && strings.Contains(last, "not available")
	}, "serve", "--nats", toNATS("indexer"), "--http-listen", "127.0.0.1:0", "--partitions", fmt.Sprint(partitionsT),
		"--snapshot-interval", interval, "--log-bytes", fmt.Sprint(logBytes), "--park-for", "24h", "--remember-for", "24h", "--log-level", "debug")
	forms := []string{"map", "array"}
	for i := range 2 {
		e := &tortured{
			name: fmt.Sprintf("w%d-%d", i+1, rng.IntN(1000)), rng: rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())), truth: newTruth(),
		}
		if e.hasher, err = events.NewHasher(blockSize, events.Space{}); err != nil {
			t.Fatal(err)
		}
		e.pub = pyenv.StartPublisher(t, pyenv.PublisherOptions{Form: forms[rng.IntN(2)], BlockSize: blockSize, Buffer: 1 << 20, HighWater: 100})
		host := func(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }
		engine, replay := w.proxy(e.name+"→engine", host(e.pub.Endpoint)), w.proxy(e.name+"→replay", host(e.pub.Replay))
		shim := w.daemon("shim of "+e.name, programs("worker-shim"), func(code int, last string) bool {
			// What the life before had on its way arrived after this one had looked: a supervisor starts it again.
			return code == 1 && strings.Contains(last, "another shim publishes for this worker and rank")
		}, "run", "--engine", "tcp://"+engine.addr(), "--replay", "tcp://"+replay.addr(), "--instance", e.name, "--model", "m", "--block-size", fmt.Sprint(blockSize),
			"--nats", toNATS(e.name), "--log-repeat", "0", "--idle-check", "700ms", "--replay-timeout", "2s")
		w.engines, w.shims = append(w.engines, e), append(w.shims, shim)
	}
	if w.admin, err = nats.Connect("nats://"+w.natsAddr, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.RetryOnFailedConnect(true)); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) daemon(name, program string, excused func(int, string) bool, args ...string) *daemon {
	d := &daemon{t: w.t, name: name, program: program, args: args, said: filepath.Join(w.dir, strings.ReplaceAll(name, " ", "-")+".log")}
	if excused != nil {
		d.excused = func(code int, last string) bool {
			if excused(code, last) {
				w.counters[name[:4]+" ended with an excuse"]++
				return true
			}
			return false
		}
	}
	return d
}

func (w *world) proxy(name, target string) *proxy {
	p := startProxy(w.t, target)
	w.proxies, w.names = append(w.proxies, p), append(w.names, name)
	return p
}

func (w *world) daemons() []*daemon { return append([]*daemon{w.nats, w.indexer}, w.shims...) }

// end stops everything, each in good order if the test stands well.
func (w *world) end() {
	for _, d := range append(append([]*daemon{}, w.shims...), w.indexer, w.nats) {
		if d.running != nil && !w.t.Failed() {
			d.stop()
		} else if d.running != nil {
			d.signal(syscall.SIGKILL)
			<-d.running.done
		}
	}
	w.admin.Close()
	for _, p := range w.proxies {
		p.stop()
	}
	for _, e := range w.engines {
		e.pub.Kill()
	}
	if !w.t.Failed() {
		os.RemoveAll(w.dir)
	}
}

// mend undoes every fault and starts what does not run.
func (w *world) mend() {
	for _, p := range w.proxies {
		p.set(false, false)
	}
	w.revive()
}

func (w *world) revive() {
	for _, d := range w.daemons() {
		if !d.alive() {
			d.start()
		}
	}
}

// lastingAddr is a loopback address that nobody has now, and that the system gives to nobody while its owner is dead: one below the ports
// that it chooses from.
func lastingAddr(t testing.TB, rng *rand.Rand) string {
	for range 1000 {
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rng.IntN(20000))); err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

// served finds out where the indexer's last life serves HTTP. Any goroutine may call it.
func (w *world) served() (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if begun := w.indexer.begun.Load(); w.addr == "" || w.addrOf != begun {
		found := servedAt.FindStringSubmatch(w.indexer.words(begun))
		if found == nil {
			return "", errors.New("the indexer serves no HTTP yet")
		}
		w.addr, w.addrOf = found[1], begun
	}
	return w.addr, nil
}

var servedAt = regexp.MustCompile(`HTTP is served" listen=(\S+)`)

// ask asks the HTTP port of the indexer's present life.
func (w *world) ask(method, path string, body any, into any) error {
	addr, err := w.served()
	if err != nil {
		return err
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequest(method, "http://"+addr+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := w.http.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != 200 {
		return fmt.Errorf("%d %s", answer.StatusCode, b)
	}
	return json.Unmarshal(b, into)
}

// depths asks who holds how much of a prompt.
func (w *world) depths(locals []events.LocalHash) (map[events.WorkerID][events.NumTiers]uint32, error) {
	q := api.Query{Model: "m"}
	for _, l := range locals {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	var a api.Answer
	if err := w.ask("POST", "/v1/find", q, &a); err != nil {
		return nil, err
	}
	if !a.Complete {
		return nil, fmt.Errorf("the answer is incomplete")
	}
	out := map[events.WorkerID][events.NumTiers]uint32{}
	for _, o := range a.Workers {
		out[o.Instance] = [events.NumTiers]uint32{o.Device, o.Host, o.Disk, o.External}
	}
	return out, nil
}

// until asks again and again, restarting what has ended with an excuse, until check returns nil.
func (w *world) until(what string, check func() error) {
	w.t.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(15 * time.Millisecond) {
		w.revive()
		if err = check(); err == nil {
			return
		}
	}
	for _, d := range w.daemons() {
		if d.alive() && d != w.nats {
			d.signal(syscall.SIGQUIT) // its goroutines, in its file
			<-d.running.done
			d.running = nil
		}
	}
	w.t.Fatalf("it does not come about that %s: %v", what, err)
}

// streams looks at the partitions' streams, past everything of ours.
func (w *world) stream(ctx context.Context, p events.Partition) (jetstream.Stream, error) {
	js, err := jetstream.New(w.admin)
	if err != nil {
		return nil, err
	}
	return js.Stream(ctx, ours.StreamName("default", p))
}
