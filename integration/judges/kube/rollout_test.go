//go:build kube

package kube

import (
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// fleet requests choices, and checks whether the chosen addresses accept connections.
type fleet struct {
	w       *world
	from    *network
	indexer string
	began   time.Time
	stop    chan struct{}
	done    sync.WaitGroup

	mu       sync.Mutex
	accepted map[string]time.Time // by address: the last accepted connection
	chosen   int
	refused  int           // choices of an address that no longer accepts connections
	early    int           // choices of an address before the first accepted connection
	never    []string      // early choices without a connection within earlyAtMost
	latest   time.Duration // the longest time from an address's last connection to a choice
	errors   []string
}

// earlyAtMost is the longest wait for the first connection to a chosen address. An engine may open the event port
// before the HTTP port, and kvatlas may choose the engine from then on. The engine of the test needs a second between
// the ports, and more on a busy machine.
const earlyAtMost = time.Minute

// load requests a choice every 20 ms until end.
func (w *world) load(from *network, indexer string) *fleet {
	f := &fleet{w: w, from: from, indexer: indexer, began: time.Now(), stop: make(chan struct{}),
		accepted: map[string]time.Time{}}
	every := func(pause time.Duration, do func(i int)) {
		f.done.Go(func() {
			tick := time.NewTicker(pause)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-f.stop:
					return
				case <-tick.C:
					do(i)
				}
			}
		})
	}
	every(20*time.Millisecond, f.choose)
	every(50*time.Millisecond, func(int) { // when does an address end?
		f.mu.Lock()
		var list []string
		for address := range f.accepted {
			list = append(list, address)
		}
		f.mu.Unlock()
		var all sync.WaitGroup
		for _, address := range list {
			all.Go(func() {
				if now := time.Now(); f.from.open(address) {
					f.mu.Lock()
					f.accepted[address] = now
					f.mu.Unlock()
				}
			})
		}
		all.Wait()
	})
	return f
}

func (f *fleet) choose(i int) {
	var tokens [64]string
	for j := range tokens {
		tokens[j] = fmt.Sprint(1000*(i%16) + j)
	}
	var s api.Selection
	asked := time.Now() // the choice comes later, at an unknown time
	err := f.w.http(f.from, f.indexer, "POST", "/v1/select",
		fmt.Sprintf(`{"model":"qwen3","tokens":[%s],"advisory":true}`, strings.Join(tokens[:], ",")), &s)
	now := time.Now()
	var address string
	if u, bad := url.Parse(s.Endpoint); bad == nil {
		address = u.Host
	}
	open := err == nil && f.from.open(address)
	f.mu.Lock()
	defer f.mu.Unlock()
	last, was := f.accepted[address]
	switch {
	case err != nil:
		f.errors = append(f.errors, err.Error())
	case open:
		f.chosen++
		f.accepted[address] = now
	case !was && now.Sub(f.began) < time.Second:
		f.refused++ // an ended pod of the rollout before, within the allowed second
	case !was:
		f.early++
		f.done.Go(func() {
			for until := now.Add(earlyAtMost); !f.from.open(address); time.Sleep(50 * time.Millisecond) {
				if time.Now().After(until) {
					f.mu.Lock()
					f.never = append(f.never, address)
					f.mu.Unlock()
					return
				}
			}
		})
	default:
		f.refused++
		f.latest = max(f.latest, asked.Sub(last))
	}
}

// end stops the load after at least a hundred choices, and checks the choices.
func (f *fleet) end(t *testing.T, order string, within time.Duration) {
	t.Helper()
	eventually(t, 4*time.Minute, order+": a hundred choices", func() (bool, string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.chosen >= 100, fmt.Sprintf("%d choices, and the errors %q", f.chosen, f.errors)
	})
	close(f.stop)
	f.done.Wait()
	t.Logf("%s: %d choices of pods that serve, %d of pods that have ended, the last %v after the end, %d of pods that do "+
		"not serve yet, %d errors", order, f.chosen, f.refused, f.latest.Round(time.Millisecond), f.early, len(f.errors))
	if f.latest > within {
		t.Errorf("%s: a pod was chosen %v after its end, more than %v", order, f.latest, within)
	}
	if len(f.never) > 0 {
		t.Errorf("%s: %q were chosen, and took no connection %v later", order, f.never, earlyAtMost)
	}
	if len(f.errors) > 0 {
		t.Errorf("%s: the errors %q", order, f.errors[:min(5, len(f.errors))])
	}
}

// TestRollouts replaces eight pods of the page's Deployment during choices, in four orders of ends. An ended pod is not
// chosen later than a second after the end, or two seconds after a kill.
func TestRollouts(t *testing.T) {
	disks(t)
	gpus(t)
	w := newWorld(t, "rollouts", "baseline", "--model", "qwen3", "--pool", "qwen3")
	helm(t, "-n", w.namespace, "install", "kvatlas", file(t, chart), "--wait", "--timeout", "5m")
	asking := w.client("asking", `kvatlas.io/http-client: "true"`)
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")
	after := strings.Replace(blocks(t, "kubernetes.md")[1], "replicas: 2", "replicas: 8", 1)
	const restart, containers = "          restartPolicy: Always", "      containers:\n"
	if !strings.Contains(after, restart) || !strings.Contains(after, containers) {
		t.Fatal("the page's block has no native sidecar")
	}
	// Two containers without a sidecar: both get SIGTERM at the same time.
	var beside []string
	for _, line := range strings.Split(after, "\n") {
		if !strings.HasPrefix(line, restart) && line != "      containers:" {
			beside = append(beside, strings.Replace(line, "initContainers:", "containers:", 1))
		}
	}
	together := strings.Join(beside, "\n")
	shimFirst := strings.Replace(together, "        - name: vllm\n", "        - name: vllm\n"+
		"          lifecycle: {preStop: {sleep: {seconds: 3}}}\n", 1)

	for _, order := range []struct {
		name, manifest string
	}{{"engine first", after}, {"both at once", together}, {"shim first", shimFirst}} {
		apply(t, w.namespace, order.manifest)
		w.rolledOut("deployment/vllm")
		w.registered(t, asking, indexer, "app=vllm", 8, 1)
		f := w.load(asking, indexer)
		w.kubectl("rollout", "restart", "deployment/vllm")
		took := w.rolledOut("deployment/vllm")
		eventually(t, 4*time.Minute, "the old pods are gone", func() (bool, string) {
			list := w.pods("-l", "app=vllm")
			return len(list) == 8, fmt.Sprint(len(list))
		})
		time.Sleep(2 * time.Second) // choices after the last end
		f.end(t, fmt.Sprintf("%s (rollout of %v)", order.name, took), time.Second)
	}
	f := w.load(asking, indexer)
	time.Sleep(time.Second) // choices of the ending pods
	killed := w.killed(t, "app=vllm", "node1")
	w.rolledOut("deployment/vllm")
	w.registered(t, asking, indexer, "app=vllm", 8, 1)
	f.end(t, fmt.Sprintf("kill -9 of %d pods", killed), 2*time.Second)
}

// killed sends SIGKILL to all processes of a node's pods with a label, as at the end of memory. Kubernetes restarts the
// pods with other addresses.
func (w *world) killed(t *testing.T, label, node string) (n int) {
	t.Helper()
	var all []int
	for _, p := range w.pods("-l", label, "--field-selector=spec.nodeName="+node) {
		n++
		for _, name := range []string{"pause", "vllm", "worker-shim"} {
			ids := p.processes(t, name)
			if len(ids) != 1 {
				t.Fatalf("%s has the processes %v of %s", p.Metadata.Name, ids, name)
			}
			all = append(all, ids...)
		}
	}
	if n == 0 {
		t.Fatalf("no pod with %s is on %s", label, node)
	}
	for _, pid := range all {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// gpus gives every node four GPUs, as a device plugin does.
func gpus(t *testing.T) {
	t.Helper()
	for n := 1; n <= nodes; n++ {
		kubectl(t, "patch", "node", fmt.Sprintf("node%d", n), "--subresource=status", "--type=json", "-p",
			`[{"op":"add","path":"/status/capacity/nvidia.com~1gpu","value":"4"},
			{"op":"add","path":"/status/allocatable/nvidia.com~1gpu","value":"4"}]`)
	}
}
