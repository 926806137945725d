package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/kubesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

const podsPath = "/api/v1/namespaces/default/pods"

// runningPod returns a pod with running containers and an address.
func runningPod(name, app, ip string) kubesim.Object {
	return kubesim.Object{"metadata": kubesim.Object{"name": name, "namespace": "default",
		"labels": kubesim.Object{"app": app}}, "status": kubesim.Object{"phase": "Running", "podIP": ip}}
}

// TestPodsAreShimmed runs two replicas of worker-shim pods that share the pods of a selector. A terminating pod loses
// its registration, and a pod recreated under the same name gets the registration again. After a stop of a replica and
// a kill of the other, a new replica serves all pods. The API server is simulated.
func TestPodsAreShimmed(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), loopback.Reserve(t))
	kube := kubesim.Start()
	defer kube.Close()
	addr := loopback.Reserve(t)
	ip, port, _ := strings.Cut(addr, ":")
	_, replayPort, _ := strings.Cut(loopback.Reserve(t), ":")
	base := ip[:strings.LastIndex(ip, ".")]
	const pods = 4
	engines := map[string]*enginesim.Engine{}
	pod := func(i int) (name, ip string) { return fmt.Sprintf("vllm-%d", i), fmt.Sprintf("%s.%d", base, 200+i) }
	for i := range pods {
		name, ip := pod(i)
		e, err := enginesim.Start(t.Context(), enginesim.Config{Endpoint: "tcp://" + ip + ":" + port,
			Replay: "tcp://" + ip + ":" + replayPort, Seed: uint64(i)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		engines[name] = e
		kube.Put(podsPath, runningPod(name, "vllm", ip))
	}
	kube.Put(podsPath, runningPod("web", "web", base+".250"))
	replica := func(name string) *harness.Process {
		return harness.Start(t, "worker-shim", "pods", "--selector", "app=vllm", "--engine", "tcp://POD_IP:"+port,
			"--replay", "tcp://POD_IP:"+replayPort, "--model", "sim", "--block-size", "16", "--nats", x.NATS, "--share-as", "shims", "--replica", name,
			"--kube-api", kube.URL, "--serving-endpoint", "http://POD_IP:8000")
	}
	a, b := replica("a"), replica("b")
	credited := func(name string, first int) {
		t.Helper()
		prompt := harness.Tokens(first, 64)
		harness.ServePrompt(t, engines[name], prompt)
		x.WaitDepth(t, "sim", prompt, name, 4)
	}
	for i := range pods {
		name, ip := pod(i)
		if w := harness.WaitLease(t, x, name, true); w.Record == nil || w.Record.Endpoint != "http://"+ip+":8000" {
			t.Errorf("%s is registered as %+v", name, w.Record)
		}
	}
	credited("vllm-0", 0)

	terminating := runningPod("vllm-0", "vllm", base+".200")
	terminating["metadata"].(kubesim.Object)["deletionTimestamp"] = time.Now().Format(time.RFC3339)
	kube.Put(podsPath, terminating)
	harness.WaitLease(t, x, "vllm-0", false)
	kube.Delete(podsPath, "vllm-0")
	kube.Put(podsPath, runningPod("vllm-0", "vllm", base+".200"))
	harness.WaitLease(t, x, "vllm-0", true)
	credited("vllm-0", 100_000)

	a.Stop() // deletes the replica's Lease
	if said := a.Said(); strings.Contains(said, "waiting for the engine's end") {
		t.Errorf("a stopping replica waits for engines in other pods:\n%s", said)
	}
	c := replica("c")
	b.Kill()
	for i := range pods {
		name, _ := pod(i)
		credited(name, 300_000+1000*i)
	}

	// A hanging replica loses its pods, and gets a share back after the hang.
	d := replica("d")
	d.WaitFor("msg=registered")
	c.Cmd.Process.Signal(syscall.SIGSTOP)
	for i := range pods {
		name, _ := pod(i)
		credited(name, 400_000+1000*i)
	}
	c.Cmd.Process.Signal(syscall.SIGCONT)
	for i := range pods {
		name, _ := pod(i)
		credited(name, 500_000+1000*i)
	}
	if said := c.Said(); strings.Contains(said, "it is tried again") {
		t.Errorf("a resumed replica abandoned a pod for half a minute:\n%s", said)
	}
	if said := c.Said(); strings.Contains(said, "worker=web") {
		t.Errorf("a pod without the label is served:\n%s", said)
	}
}

// TestPodVanishesWithoutNATS removes a pod while the NATS server hangs for longer than the clients' timeout. The lease
// of the pod ends after the hang.
func TestPodVanishesWithoutNATS(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), loopback.Reserve(t))
	kube := kubesim.Start()
	defer kube.Close()
	e := harness.StartSimEngine(t)
	_, port, _ := strings.Cut(strings.TrimPrefix(e.Endpoint(), "tcp://"), ":")
	kube.Put(podsPath, runningPod("vllm-0", "vllm", "127.0.0.1"))
	shims := harness.Start(t, "worker-shim", "pods", "--selector", "app=vllm", "--engine", "tcp://POD_IP:"+port, "--model",
		"sim", "--block-size", "16", "--nats", x.NATS, "--kube-api", kube.URL)
	harness.WaitLease(t, x, "vllm-0", true)
	if err := x.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	kube.Delete(podsPath, "vllm-0")
	shims.WaitFor("NATS connection lost")
	if err := x.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	harness.WaitLease(t, x, "vllm-0", false)
}
