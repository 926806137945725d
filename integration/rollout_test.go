package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

var rolloutWithin = flag.Bool("rollout.within", false,
	"TestRollout fails if a dead address is chosen later than 1s after the end of its engine, or 2s after kill -9")

// pod is an engine with a shim, as separate processes.
type pod struct {
	name, address string
	engine, shim  *harness.Process
}

// The orders of the processes' ends in a pod.
const (
	bothAtOnce  = "both at once"
	shimFirst   = "shim first"
	engineFirst = "engine first"
	killed      = "kill -9"
)

// rollout is a model with pods, and requests to the pods.
type rollout struct {
	*testing.T
	nats  string
	nodes []string // HTTP addresses

	mu      sync.Mutex
	dead    map[string]time.Time // by serving address: when the end of the engine began
	late    time.Duration        // from the end of an engine to the last refused request
	refused int                  // requests to dead addresses
	served  int
}

func (r *rollout) start(name, address string) *pod {
	p := &pod{name: name, address: address}
	p.engine = harness.Start(r, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--serve", address, "--model", "m", "--rate", "0", "--block-size", "16")
	at := p.engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	p.shim = harness.Start(r, "worker-shim", "run", "--nats", r.nats, "--engine", at[1], "--replay", at[2], "--worker",
		name, "--model", "m", "--block-size", "16", "--serving-endpoint", "http://"+address, "--stop-wait", "15m")
	p.shim.WaitFor("msg=registered")
	return p
}

// end ends a pod, and waits for the end of its processes.
func (r *rollout) end(p *pod, order string) {
	signal := func(to *harness.Process, s syscall.Signal) {
		if to == p.engine {
			r.mu.Lock()
			r.dead[p.address] = time.Now()
			r.mu.Unlock()
		}
		if err := to.Cmd.Process.Signal(s); err != nil {
			r.Error(err)
		}
	}
	switch order {
	case bothAtOnce:
		signal(p.engine, syscall.SIGTERM)
		signal(p.shim, syscall.SIGTERM)
	case shimFirst:
		signal(p.shim, syscall.SIGTERM)
		p.shim.WaitFor("waiting for the engine's end")
		signal(p.engine, syscall.SIGTERM)
	case engineFirst:
		signal(p.engine, syscall.SIGTERM)
		<-p.engine.Done
		signal(p.shim, syscall.SIGTERM)
	case killed:
		signal(p.engine, syscall.SIGKILL)
		signal(p.shim, syscall.SIGKILL)
	}
	<-p.engine.Done
	select {
	case <-p.shim.Done:
	case <-time.After(harness.Patience):
		r.Errorf("the shim of %s does not end", p.name)
		return
	}
	if code := p.shim.Cmd.ProcessState.ExitCode(); order != killed && code != 0 {
		r.Errorf("%s: the shim of %s ended with %d:\n%s", order, p.name, code, p.shim.Said())
	}
}

// request chooses a worker for a prompt, and sends the prompt there.
func (r *rollout) request(ctx context.Context, node string, prompt []uint32) error {
	var chosen api.Selection
	body := api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}}
	if err := harness.HTTPDo(node, http.MethodPost, "/v1/select", body, &chosen); err != nil {
		return err
	}
	at := time.Now()
	text := fmt.Sprintf(`{"model":"m","prompt":%s}`, harness.JSONList(prompt))
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, chosen.Endpoint+"/v1/completions", strings.NewReader(text))
	if err != nil {
		return err
	}
	q.Close = true // a connection for every request
	address := strings.TrimPrefix(chosen.Endpoint, "http://")
	r.mu.Lock()
	end, dead := r.dead[address] // a successor may serve at the address before the answer
	r.mu.Unlock()
	answer, err := http.DefaultClient.Do(q)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		answer.Body.Close()
		r.served++
		return nil
	}
	if !dead {
		end, dead = r.dead[address]
	}
	switch {
	case ctx.Err() != nil:
	case !dead:
		return fmt.Errorf("%s lives: %w", chosen.Worker, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		r.refused++
		r.late = max(r.late, at.Sub(end))
	}
	return nil
}

// gone waits until no node lists or credits a worker.
func (r *rollout) gone(name string) {
	for _, node := range r.nodes {
		harness.Eventually(r, name+" is gone at "+node, func() (bool, string) {
			var list api.WorkerList
			if err := harness.HTTPDo(node, http.MethodGet, "/v1/workers", nil, &list); err != nil {
				return false, err.Error()
			}
			i := slices.IndexFunc(list.Workers, func(w api.WorkerInfo) bool { return string(w.Instance) == name })
			if i < 0 {
				return true, ""
			}
			w := list.Workers[i]
			return w.Lease == nil && w.Blocks.Device == 0, fmt.Sprintf("%+v", w)
		})
	}
}

// TestRollout replaces four pods, four times, during requests to three nodes. The processes of a pod end in four
// orders. No lease may expire meanwhile. The pods of the last order get successors at the same addresses.
func TestRollout(t *testing.T) {
	t.Parallel()
	const pods, ends = 4, 2 // ends is the number of simultaneous ends
	r := &rollout{T: t, nats: harness.StartNATS(t), dead: map[string]time.Time{}}
	var nodes []*harness.Process
	for i := range 3 {
		nodes = append(nodes, harness.Start(t, "indexer", "serve", "--nats", r.nats, "--node-id", fmt.Sprint("n", i),
			"--partition-replicas", "2", "--partitions", "4", "--http-listen", "127.0.0.1:0"))
	}
	for _, p := range nodes {
		r.nodes = append(r.nodes, p.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		p.WaitFor(`msg=ready`)
	}
	var running []*pod
	for i := range pods {
		running = append(running, r.start(fmt.Sprint("first-", i), loopback.Reserve(t)))
	}
	for _, node := range r.nodes {
		harness.Eventually(t, node+" knows all pods", func() (bool, string) {
			n, seen := schedulable(node)
			return n == pods, seen
		})
	}

	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	defer load.Wait()
	defer cancel()
	for i := range 4 {
		load.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			harness.Load(ctx, func(int) {
				prompt := harness.Tokens(random.IntN(40)*1000, 16*(2+random.IntN(6)))
				if err := r.request(ctx, r.nodes[random.IntN(len(r.nodes))], prompt); err != nil && ctx.Err() == nil {
					t.Error(err)
					cancel()
				}
			})
		})
	}

	for _, order := range []string{bothAtOnce, shimFirst, engineFirst, killed} {
		r.mu.Lock()
		r.late, r.refused, r.served = 0, 0, 0
		r.mu.Unlock()
		for from := 0; from < pods; from += ends {
			old := slices.Clone(running[from : from+ends])
			for i := from; i < from+ends && order != killed; i++ {
				running[i] = r.start(fmt.Sprint(strings.ReplaceAll(order, " ", "-"), "-", i), loopback.Reserve(t))
			}
			var some sync.WaitGroup
			for _, p := range old {
				some.Go(func() { r.end(p, order) })
			}
			some.Wait()
			for _, p := range old {
				r.gone(p.name)
			}
			if order == killed {
				for i := from; i < from+ends; i++ {
					r.mu.Lock()
					delete(r.dead, running[i].address)
					r.mu.Unlock()
					running[i] = r.start(fmt.Sprint("last-", i), running[i].address)
				}
			}
		}
		for _, node := range r.nodes {
			harness.Eventually(t, "all pods of the rollout may be chosen", func() (bool, string) {
				n, seen := schedulable(node)
				return n == pods, seen
			})
		}
		r.mu.Lock()
		late, refused, served := r.late, r.refused, r.served
		r.mu.Unlock()
		t.Logf("%s: %d requests were served and %d sent to dead addresses, the last %.2f s after the end", order, served,
			refused, late.Seconds())
		bound := time.Second
		if order == killed {
			bound = 2 * time.Second
		}
		if *rolloutWithin && late > bound {
			t.Errorf("%s: a dead address was chosen %v after the end of its engine", order, late)
		}
	}
}

// schedulable counts the ranks that a node may choose.
func schedulable(node string) (n int, seen string) {
	var list api.WorkerList
	if err := harness.HTTPDo(node, http.MethodGet, "/v1/workers", nil, &list); err != nil {
		return 0, err.Error()
	}
	for _, w := range list.Workers {
		if w.Record != nil && w.Record.State == api.WorkerSchedulable {
			n++
		}
	}
	return n, fmt.Sprintf("%+v", list.Workers)
}
