package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// stage is what every torture plays on: engines and their shims, NATS servers and indexers, the connections between them, and how each is reached.
type stage struct {
	t       testing.TB
	dir     string
	servers []*daemon // of NATS
	nodes   []*daemon // the indexers that are to run
	engines []*tortured
	shims   []*daemon
	proxies []*proxy
	names   []string // of the proxies
	http    http.Client

	marks    uint64
	counters map[string]int
}

func newStage(t testing.TB, counters map[string]int) *stage {
	s := &stage{t: t, counters: counters}
	s.http.Timeout = 5 * time.Second
	var err error
	if s.dir, err = os.MkdirTemp("", "kvatlas-torture-"); err != nil {
		t.Fatal(err)
	}
	return s
}

// engine adds an engine and the shim that reads it, not started. nats is what the shim is told of NATS.
func (s *stage) engine(i int, rng *rand.Rand, programs func(string) string, nats func(who string) string) {
	e := &tortured{
		name: fmt.Sprintf("w%d-%d", i+1, rng.IntN(1000)), rng: rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())), truth: newTruth(),
	}
	var err error
	if e.hasher, err = events.NewHasher(blockSize, events.Space{}); err != nil {
		s.t.Fatal(err)
	}
	form := []string{"map", "array"}[rng.IntN(2)]
	e.pub = pyenv.StartPublisher(s.t, pyenv.PublisherOptions{Form: form, BlockSize: blockSize, Buffer: 1 << 20, HighWater: 100})
	host := func(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }
	engine, replay := s.proxy(e.name+"→engine", host(e.pub.Endpoint)), s.proxy(e.name+"→replay", host(e.pub.Replay))
	shim := s.daemon("shim of "+e.name, programs("worker-shim"), func(code int, last string) bool {
		// What the life before had on its way arrived after this one had looked: a supervisor starts it again.
		return code == 1 && strings.Contains(last, "another shim publishes for this worker and rank")
	}, "run", "--engine", "tcp://"+engine.addr(), "--replay", "tcp://"+replay.addr(), "--instance", e.name, "--model", "m", "--block-size", fmt.Sprint(blockSize),
		"--nats", nats(e.name), "--log-repeat", "0", "--idle-check", "700ms", "--replay-timeout", "2s")
	s.engines, s.shims = append(s.engines, e), append(s.shims, shim)
}

func (s *stage) daemon(name, program string, excused func(int, string) bool, args ...string) *daemon {
	d := &daemon{t: s.t, name: name, program: program, args: args, said: filepath.Join(s.dir, strings.ReplaceAll(name, " ", "-")+".log")}
	if excused != nil {
		d.excused = func(code int, last string) bool {
			if excused(code, last) {
				s.counters[name[:4]+" ended with an excuse"]++
				return true
			}
			return false
		}
	}
	return d
}

func (s *stage) proxy(name, target string) *proxy {
	p := startProxy(s.t, target)
	s.proxies, s.names = append(s.proxies, p), append(s.names, name)
	return p
}

// daemons are all that are to run, in the order in which they are started.
func (s *stage) daemons() (all []*daemon) {
	return append(append(append(all, s.servers...), s.nodes...), s.shims...)
}

// end stops everything, each in good order if the test stands well.
func (s *stage) end() {
	for _, d := range slices.Backward(s.daemons()) {
		if d.running != nil && !s.t.Failed() {
			d.stop()
		} else if d.running != nil {
			d.signal(syscall.SIGKILL)
			<-d.running.done
		}
	}
	for _, p := range s.proxies {
		p.stop()
	}
	for _, e := range s.engines {
		e.pub.Kill()
	}
	if !s.t.Failed() {
		os.RemoveAll(s.dir)
	}
}

// mend undoes every fault and starts what does not run.
func (s *stage) mend() {
	for _, p := range s.proxies {
		p.set(false, false)
	}
	s.revive()
}

func (s *stage) revive() {
	for _, d := range s.daemons() {
		if !d.alive() {
			d.start()
		}
	}
}

// ask asks the HTTP port of a node's present life. Any goroutine may call it.
func (s *stage) ask(d *daemon, method, path string, body any, into any) error {
	addr, err := d.served()
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
	answer, err := s.http.Do(r)
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

// depths asks a node who holds how much of a prompt.
func (s *stage) depths(d *daemon, locals []events.LocalHash) (map[events.WorkerID][events.NumTiers]uint32, error) {
	q := api.Query{Model: "m"}
	for _, l := range locals {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	var a api.Answer
	if err := s.ask(d, "POST", "/v1/find", q, &a); err != nil {
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

// until asks again and again, starting what does not run, until check returns nil.
func (s *stage) until(what string, check func() error) {
	s.t.Helper()
	s.await(what, func() error {
		s.revive()
		return check()
	})
}

// await asks again and again until check returns nil.
func (s *stage) await(what string, check func() error) {
	s.t.Helper()
	var err error
	for left := patience; left > 0; {
		begun := time.Now()
		if err = check(); err == nil {
			return
		}
		time.Sleep(15 * time.Millisecond)
		left -= min(time.Since(begun), 2*s.http.Timeout) // the whole machine may have stood still
	}
	for _, d := range s.daemons() {
		if d.alive() && !slices.Contains(s.servers, d) {
			d.signal(syscall.SIGQUIT) // its goroutines, in its file
			<-d.running.done
			d.running = nil
		}
	}
	s.t.Fatalf("it does not come about that %s: %v", what, err)
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
