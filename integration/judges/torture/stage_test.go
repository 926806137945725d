//go:build judges

package torture

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// stage is the environment of a torture test: engines with shims, NATS servers, indexers, and the connections between
// them.
type stage struct {
	t       testing.TB
	dir     string
	servers []*daemon // of NATS
	nodes   []*daemon // the running indexers
	engines []*tortured
	shims   []*daemon
	proxies []*proxy
	names   []string // of the proxies
	ways    map[*tortured][2]*proxy

	marks    uint64
	counters map[string]int
}

func newStage(t testing.TB, counters map[string]int) *stage {
	s := &stage{t: t, counters: counters}
	var err error
	if s.dir, err = os.MkdirTemp("", "kvatlas-torture-"); err != nil {
		t.Fatal(err)
	}
	return s
}

// engine adds an engine with a stopped shim. nats returns the shim's NATS addresses.
func (s *stage) engine(i int, rng *rand.Rand, programs func(string) string, nats func(who string) string) {
	e := &tortured{
		name: fmt.Sprintf("w%d-%d", i+1, rng.IntN(1000)), rng: rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64())),
		truth: harness.NewTruth(),
	}
	var err error
	if e.hasher, err = events.NewHasher(harness.BlockSize, events.Space{}); err != nil {
		s.t.Fatal(err)
	}
	form := []string{"map", "array"}[rng.IntN(2)]
	e.pub = pyenv.StartPublisher(s.t, pyenv.PublisherOptions{Form: form, BlockSize: harness.BlockSize, Buffer: 1 << 20,
		HighWater: 100})
	host := func(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }
	engine, replay := s.proxy(e.name+"→engine", host(e.pub.Endpoint)), s.proxy(e.name+"→replay", host(e.pub.Replay))
	if s.ways == nil {
		s.ways = map[*tortured][2]*proxy{}
	}
	s.ways[e] = [2]*proxy{engine, replay}
	shim := s.daemon("shim of "+e.name, programs("worker-shim"), func(code int, last string) bool {
		// The writes of the life before arrived after the new shim's check: a supervisor restarts the shim.
		return code == 1 && strings.Contains(last, "another shim publishes for this worker and rank")
	}, "run", "--engine", "tcp://"+engine.addr(), "--replay", "tcp://"+replay.addr(), "--worker", e.name, "--model",
		"m", "--block-size", fmt.Sprint(harness.BlockSize),
		"--nats", nats(e.name), "--log-repeat", "0", "--idle-check", "700ms", "--replay-timeout", "2s")
	s.engines, s.shims = append(s.engines, e), append(s.shims, shim)
}

func (s *stage) daemon(name, program string, excused func(int, string) bool, args ...string) *daemon {
	d := &daemon{t: s.t, name: name, program: program, args: args,
		said: filepath.Join(s.dir, strings.ReplaceAll(name, " ", "-")+".log")}
	if excused != nil {
		d.excused = func(code int, last string) bool {
			if excused(code, last) {
				s.counters[strings.Fields(name)[0]+" ended with an excuse"]++
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

// daemons returns all running daemons in the order of their starts.
func (s *stage) daemons() (all []*daemon) {
	return append(append(append(all, s.servers...), s.nodes...), s.shims...)
}

// end stops all daemons, gracefully unless the test has failed.
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

// mend ends all faults and starts the stopped processes.
func (s *stage) mend() {
	for _, p := range s.proxies {
		p.set(false, false)
		if err := p.open(); err != nil {
			s.t.Fatal(err)
		}
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

// ask sends a request to the HTTP port of a node's present life. It is safe for concurrent use.
func (s *stage) ask(d *daemon, method, path string, body any, into any) error {
	addr, err := d.served()
	if err != nil {
		return err
	}
	return harness.HTTPOnce(addr, method, path, body, into)
}

// depths queries a node for the workers' prefixes of a prompt.
func (s *stage) depths(d *daemon, locals []events.LocalHash) (map[events.WorkerID][events.NumTiers]uint32, error) {
	var a api.Answer
	if err := s.ask(d, "POST", "/v1/find", harness.LocalsQuery(locals), &a); err != nil {
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

// until polls check until the error is nil, and starts stopped processes.
func (s *stage) until(what string, check func() error) {
	s.t.Helper()
	s.await(what, func() error {
		s.revive()
		return check()
	})
}

// await polls check until the error is nil.
func (s *stage) await(what string, check func() error) {
	s.t.Helper()
	var err error
	for left := harness.Patience; left > 0; {
		begun := time.Now()
		if err = check(); err == nil {
			return
		}
		time.Sleep(15 * time.Millisecond)
		left -= min(time.Since(begun), 2*harness.HTTPTimeout) // the whole machine may have stood still
	}
	for _, d := range s.daemons() {
		if d.alive() && !slices.Contains(s.servers, d) {
			d.signal(syscall.SIGQUIT) // writes the goroutines to the output
			<-d.running.done
			d.running = nil
		}
	}
	s.t.Fatalf("timeout: %s: %v", what, err)
}

// inOrder returns an error unless a node is ready without problems and has applied all messages of every log, except
// for a permitted lag.
func (s *stage) inOrder(d *daemon, lag uint64) (*api.Status, error) {
	var status api.Status
	if err := s.ask(d, "GET", "/v1/status", nil, &status); err != nil {
		return nil, err
	}
	// a warning
	status.Problems = slices.DeleteFunc(status.Problems, func(p string) bool { return strings.Contains(p, "% full") })
	if !status.Ready || len(status.Problems) > 0 {
		return nil, fmt.Errorf("ready: %v, problems: %q", status.Ready, status.Problems)
	}
	for _, p := range status.Partitions {
		if p.Lag > lag || p.State != api.PartitionServing {
			return nil, fmt.Errorf("partition %d is %s with a lag of %d", p.Partition, p.State, p.Lag)
		}
	}
	for _, name := range []string{"poison", "malformed_events"} {
		if status.Events[name] > 0 {
			s.t.Fatalf("%s: %d events counted as %s", d.name, status.Events[name], name)
		}
	}
	return &status, nil
}

// awaitMarks announces a new block of every engine, and waits until every node has the block and so all earlier events.
// It returns the blocks.
func (s *stage) awaitMarks() (marks []events.LocalHash) {
	for _, e := range s.engines {
		s.marks++
		marks = append(marks, e.mark(s.marks))
	}
	for i, e := range s.engines {
		for _, d := range s.nodes {
			s.until(fmt.Sprintf("%s has all events of %s, up to message %d", d.name, e.name, e.next-1),
				func() error {
					got, err := s.depths(d, marks[i:i+1])
					if err == nil && got[events.WorkerID(e.name)][0] != 1 {
						err = fmt.Errorf("the last message is not there; the answer is %v", got)
					}
					return err
				})
		}
	}
	return marks
}

// judge queries a node for every prompt and for the workers, and compares the answers with the truth. It returns the
// number of answers.
func (s *stage) judge(d *daemon, prompts []path) (judged int) {
	for _, p := range prompts {
		locals := s.engines[0].hasher.Hash(nil, p.tokens(0, p.blocks()))
		var got map[events.WorkerID][events.NumTiers]uint32
		s.await(d.name+" answers", func() (err error) {
			got, err = s.depths(d, locals)
			return err
		})
		for _, e := range s.engines {
			if wrong := e.judge(locals, got[events.WorkerID(e.name)]); wrong != "" {
				s.t.Fatalf("%s: the prompt %q: %s", d.name, p, wrong)
			}
			judged++
		}
	}
	var list api.WorkerList
	s.await(d.name+" lists all workers", func() error {
		list = api.WorkerList{}
		if err := s.ask(d, "GET", "/v1/workers", nil, &list); err != nil {
			return err
		}
		if !list.Complete {
			return fmt.Errorf("partitions %v are missing", list.Missing)
		}
		return nil
	})
	if len(list.Workers) != len(s.engines) {
		s.t.Fatalf("%s: workers: %+v", d.name, list)
	}
	for _, e := range s.engines {
		i := slices.IndexFunc(list.Workers, func(k api.WorkerInfo) bool { return string(k.Instance) == e.name })
		if i < 0 {
			s.t.Fatalf("%s: %s is not among %+v", d.name, e.name, list.Workers)
		}
		b := list.Workers[i].Blocks
		if held := b.Device + b.Host + b.Disk + b.External; held > uint64(e.truth.Holdings()) ||
			e.exact() && held < uint64(e.truth.Holdings()) {
			s.t.Fatalf("%s: %s holds %d blocks, the list of workers has %d", d.name, e.name, e.truth.Holdings(), held)
		}
	}
	return judged
}
