package integration

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/kubesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

var manyPods = flag.Int("pods", 30, "pods of TestManyPods; docs/measurements/2026-11-scale.md has the figures of 1,000")

// podWorld is an API server with pods, an engine for every pod, and an indexer.
type podWorld struct {
	t            *testing.T
	x            *harness.Indexer
	kube         *kubesim.Server
	engines      []*enginesim.Engine
	port, replay string
	served       []int // number of served requests of every engine
}

// ip returns the address of a pod.
func (w *podWorld) ip(i int) string { return fmt.Sprintf("127.77.%d.%d", i/200, 1+i%200) }

func (w *podWorld) name(i int) string { return fmt.Sprintf("vllm-%04d", i) }

func (w *podWorld) put(i int) { w.kube.Put(podsPath, runningPod(w.name(i), "vllm", w.ip(i))) }

// replica starts a worker-shim that shares the pods.
func (w *podWorld) replica(name string) *harness.Process {
	return harness.Start(w.t, "worker-shim", "pods", "--selector", "app=vllm", "--engine", "tcp://POD_IP:"+w.port,
		"--replay", "tcp://POD_IP:"+w.replay, "--model", "sim", "--block-size", "16", "--nats", w.x.NATS, "--share-as", "shims",
		"--replica", name, "--kube-api", w.kube.URL)
}

// promptBlocks is the number of stored blocks of a request.
const promptBlocks = 8

// serve sends a request to every engine from first on.
func (w *podWorld) serve(first, n int) {
	w.t.Helper()
	for i := first; i < first+n; i++ {
		harness.ServePrompt(w.t, w.engines[i], harness.Tokens((i*1000+w.served[i])*promptBlocks*16, promptBlocks*16))
		w.served[i]++
	}
}

// waitFor waits until the first pods' workers have leases and all their blocks are in the index, and the other workers
// have no lease. It returns the duration.
func (w *podWorld) waitFor(what string, there int) time.Duration {
	w.t.Helper()
	begun := time.Now()
	harness.Eventually(w.t, what, func() (bool, string) {
		var list api.WorkerList
		if err := harness.HTTPDo(w.x.HTTP, "GET", "/v1/workers", nil, &list); err != nil {
			return false, err.Error()
		}
		leased, complete := 0, 0
		for _, one := range list.Workers {
			i, err := strconv.Atoi(strings.TrimPrefix(string(one.Instance), "vllm-"))
			if err != nil {
				return false, fmt.Sprint(one)
			}
			if one.Lease == nil {
				continue
			}
			leased++
			if i < there && int(one.Blocks.Device) == w.served[i]*promptBlocks {
				complete++
			}
		}
		return leased == there && complete == there, fmt.Sprintf("%d leases, %d complete, want %d", leased, complete, there)
	})
	return time.Since(begun)
}

var statusLine = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// cost returns the resident memory and the processor time of a process.
func cost(p *harness.Process) (megabytes float64, cpu time.Duration) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
	if m := statusLine.FindSubmatch(status); m != nil {
		kb, _ := strconv.Atoi(string(m[1]))
		megabytes = float64(kb) / 1000
	}
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Cmd.Process.Pid))
	if words := strings.Fields(string(stat)); len(words) > 14 {
		user, _ := strconv.Atoi(words[13])
		system, _ := strconv.Atoi(words[14])
		cpu = time.Duration(user+system) * 10 * time.Millisecond
	}
	return megabytes, cpu
}

// TestManyPods runs the shims of all pods' engines in a single process. A third of the pods vanish at once and return.
// A second process gets a share, and all pods after a kill of the first. Every time the index must have all blocks of
// all pods.
func TestManyPods(t *testing.T) {
	t.Parallel()
	n := *manyPods
	w := &podWorld{t: t, x: harness.StartIndexer(t, t.TempDir(), loopback.Reserve(t)), kube: kubesim.Start(),
		served: make([]int, n)}
	t.Cleanup(w.kube.Close)
	_, w.port, _ = strings.Cut(loopback.Reserve(t), ":")
	_, w.replay, _ = strings.Cut(loopback.Reserve(t), ":")
	for i := range n {
		e, err := enginesim.Start(t.Context(), enginesim.Config{Endpoint: "tcp://" + w.ip(i) + ":" + w.port,
			Replay: "tcp://" + w.ip(i) + ":" + w.replay, Seed: uint64(i), Buffer: 1000})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		w.engines = append(w.engines, e)
		w.put(i)
	}
	w.serve(0, n)
	a := w.replica("a")
	report := func(what string, took time.Duration, p *harness.Process) {
		mb, cpu := cost(p)
		t.Logf("%-42s %8v; %.1f MB, %v of processor time so far", what, took.Round(time.Millisecond), mb, cpu)
	}
	report("all pods are served", w.waitFor("all pods are served", n), a)

	begun, rounds := time.Now(), 5
	_, before := cost(a)
	for range rounds {
		w.serve(0, n)
		w.waitFor("all blocks are in the index", n)
	}
	_, after := cost(a)
	report(fmt.Sprintf("%d rounds of %d requests", rounds, n), time.Since(begun), a)
	t.Logf("%.0f blocks a second at %.1f %% of a core", float64(rounds*n*promptBlocks)/time.Since(begun).Seconds(),
		100*(after-before).Seconds()/time.Since(begun).Seconds())

	left := n - n*3/10
	for i := left; i < n; i++ {
		w.kube.Delete(podsPath, w.name(i))
	}
	report(fmt.Sprintf("%d pods vanish", n-left), w.waitFor("the vanished pods have no lease", left), a)
	for i := left; i < n; i++ {
		w.put(i)
	}
	report(fmt.Sprintf("%d pods come back", n-left), w.waitFor("the returned pods are served", n), a)

	begun = time.Now()
	b := w.replica("b")
	harness.Eventually(t, "the second replica serves a third of the pods", func() (bool, string) {
		share := strings.Count(b.Said(), "msg=registered") // the log has at most 100 such lines in a minute
		return share >= min(n/3, 100), fmt.Sprint(share)
	})
	w.serve(0, n)
	w.waitFor("all pods are served by two", n)
	report("a second replica serves a share", time.Since(begun), b)
	a.Kill()
	w.serve(0, n)
	report("the second replica serves all pods", w.waitFor("all pods are served by the second", n), b)
}
