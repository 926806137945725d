//go:build kube

package kube

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

const chart = root + "/deploy/helm/kvatlas"

// file returns the absolute path of a file of the repository.
func file(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// disks gives every node two empty volumes for claims, and removes the volumes of an earlier test.
func disks(t *testing.T) {
	t.Helper()
	kubectl(t, "delete", "persistentvolume", "--all", "--timeout=60s")
	text := `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
`
	for n := 1; n <= nodes; n++ {
		for i := range 2 {
			disks := filepath.Join(cluster.dir, "disks")
			empty, err := os.MkdirTemp(fmt.Sprintf("/proc/%d/root%s", cluster.init, disks), "")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(empty, 0o755); err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join(disks, filepath.Base(empty))
			text += fmt.Sprintf(`---
apiVersion: v1
kind: PersistentVolume
metadata: {name: node%[1]d-%[2]d}
spec:
  capacity: {storage: 20Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local
  local: {path: %[3]s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [
    {key: kubernetes.io/hostname, operator: In, values: [node%[1]d]}]}]}}
`, n, i, dir)
		}
	}
	apply(t, "default", text)
}

// TestChartCluster installs the chart with values-cluster.yaml and an engine, and performs an operator's tasks.
func TestChartCluster(t *testing.T) {
	disks(t)
	w := newWorld(t, "chart", "restricted", "--model", "sim", "--shim", "engine-example-0", "--shim", "engine-example-1")
	before := w.objects()
	begun := time.Now()
	helm(t, "-n", w.namespace, "install", "kvatlas", file(t, chart), "--values", file(t, chart+"/values-cluster.yaml"),
		"--set", "engineExample.enabled=true", "--wait", "--timeout", "5m")
	t.Logf("helm install: ready after %v", time.Since(begun).Round(100*time.Millisecond))
	asking := w.client("asking", `kvatlas.io/http-client: "true", kvatlas.io/client: "true"`)
	stranger := w.client("stranger", "app: stranger")
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")

	t.Run("Index", func(t *testing.T) { w.knows(t, asking, indexer, "engine-example-0", "engine-example-1") })
	t.Run("Privileges", w.privileges)
	t.Run("Policies", func(t *testing.T) { w.policies(t, asking, stranger) })
	t.Run("Upgrade", func(t *testing.T) { w.upgrade(t, asking, indexer) })
	t.Run("RolloutOfNATS", func(t *testing.T) { w.rolloutOfNATS(t, asking, indexer) })
	t.Run("RolloutOfIndexers", func(t *testing.T) {
		h := w.watch(asking, indexer, "/readyz")
		w.kubectl("rollout", "restart", "statefulset/kvatlas-indexer")
		t.Logf("the indexers are new after %v", w.rolledOut("statefulset/kvatlas-indexer"))
		h.end(t, "rollout of the indexers")
	})
	t.Run("Stopped", func(t *testing.T) { w.stopped(t, asking, indexer) })
	t.Run("Drain", func(t *testing.T) { w.drained(t, asking, indexer) })
	t.Run("Uninstall", func(t *testing.T) { w.uninstall(t, before) })
}

// knows waits until a node's answer has blocks of the given workers.
func (w *world) knows(t *testing.T, from *network, address string, workers ...string) {
	t.Helper()
	took := eventually(t, time.Minute, fmt.Sprintf("%q are registered, and hold blocks", workers), func() (bool, string) {
		var list api.WorkerList
		if err := w.http(from, address, "GET", "/v1/workers", "", &list); err != nil {
			return false, err.Error()
		}
		found := map[string]bool{}
		for _, r := range list.Workers {
			if r.Blocks.Device > 0 {
				found[string(r.Instance)] = true
			}
		}
		for _, name := range workers {
			if !found[name] {
				return false, fmt.Sprintf("%+v", list.Workers)
			}
		}
		return true, ""
	})
	t.Logf("the index has blocks of all workers after %v", took.Round(100*time.Millisecond))
}

// privileges: no pod has a token of the API server, and the account of the pods may do nothing.
func (w *world) privileges(t *testing.T) {
	for _, p := range w.pods() {
		for _, v := range p.Spec.Volumes {
			if v["projected"] != nil {
				t.Errorf("%s has the volume %v", p.Metadata.Name, v)
			}
		}
	}
	account := "system:serviceaccount:" + w.namespace + ":default"
	for _, what := range []string{"get pods", "list secrets", "create pods", "get configmaps", "list nodes"} {
		verb, kind, _ := strings.Cut(what, " ")
		out, err := inCluster("", "kube", "kubectl", "-n", w.namespace, "auth", "can-i", verb, kind, "--as", account)
		if err == nil {
			t.Errorf("%s may %s: %s", account, what, out)
		}
	}
	for _, o := range w.objects() {
		if strings.HasPrefix(o, "role") {
			t.Errorf("the chart makes %s by default", o)
		}
	}
}

// policies checks that the network allows exactly the connections in the policies.
func (w *world) policies(t *testing.T, asking, stranger *network) {
	at := func(pod, port string) string {
		p := w.pod(pod)
		return net.JoinHostPort(p.Status.PodIP, port)
	}
	for _, c := range []struct {
		from    *network
		who, to string
		port    string
		open    bool
	}{
		{asking, "a client", "kvatlas-indexer-0", "8090", true}, {stranger, "a stranger", "kvatlas-indexer-0", "8090", false},
		{asking, "a client", "kvatlas-indexer-2", "8090", true}, {stranger, "a stranger", "kvatlas-indexer-2", "8090", false},
		{asking, "a client", "kvatlas-nats-0", "4222", true}, {stranger, "a stranger", "kvatlas-nats-0", "4222", false},
		{asking, "a client", "kvatlas-nats-1", "4222", true}, {stranger, "a stranger", "kvatlas-nats-2", "4222", false},
		{asking, "a client", "kvatlas-nats-0", "8222", false}, {asking, "a client", "kvatlas-nats-0", "6222", false},
		{asking, "a client", "engine-example-0", "5557", false},
	} {
		address := at(c.to, c.port)
		eventually(t, time.Minute, fmt.Sprintf("%s reaches port %s of %s: %v", c.who, c.port, c.to, c.open),
			func() (bool, string) {
				is := c.from.open(address)
				return is == c.open, fmt.Sprint(is)
			})
	}
}

// upgrade changes a value and restores the value. The NATS servers must not restart.
func (w *world) upgrade(t *testing.T, asking *network, indexer string) {
	servers := func() (list string) {
		for _, p := range w.pods("-l", "app.kubernetes.io/name=kvatlas-nats") {
			list += p.Metadata.UID + " "
		}
		return list
	}
	was := servers()
	// The default values have no such servers: an upgrade to the default would lose the log.
	out, err := inCluster("", "helm", "-n", w.namespace, "upgrade", "kvatlas", file(t, chart), "--reset-values")
	if err == nil || !strings.Contains(out, "values-cluster.yaml") {
		t.Errorf("helm upgrade to the default: %v\n%s", err, out)
	}
	h := w.watch(asking, indexer, "/readyz")
	begun := time.Now()
	helm(t, "-n", w.namespace, "upgrade", "kvatlas", file(t, chart), "--reuse-values", "--set", "grpc.enabled=true",
		"--wait", "--timeout", "5m")
	t.Logf("helm upgrade: ready after %v", time.Since(begun).Round(100*time.Millisecond))
	if out := w.kubectl("get", "service", "kvatlas-indexer", "-o", "jsonpath={.spec.ports[*].port}"); out != "8090 9002" {
		t.Errorf("after the upgrade the service has the ports %s", out)
	}
	begun = time.Now()
	helm(t, "-n", w.namespace, "rollback", "kvatlas", "1", "--wait", "--timeout", "5m")
	t.Logf("helm rollback: ready after %v", time.Since(begun).Round(100*time.Millisecond))
	h.end(t, "upgrade and rollback")
	if out := w.kubectl("get", "service", "kvatlas-indexer", "-o", "jsonpath={.spec.ports[*].port}"); out != "8090" {
		t.Errorf("after the rollback the service has the ports %s", out)
	}
	if is := servers(); is != was {
		t.Errorf("the NATS servers have changed: %s, before %s", is, was)
	}
}

// rolloutOfNATS replaces the NATS servers in sequence. Every server hands over, and indexers answer all requests.
func (w *world) rolloutOfNATS(t *testing.T, asking *network, indexer string) {
	servers := w.follow("kvatlas-nats-0", "kvatlas-nats-1", "kvatlas-nats-2")
	indexers := w.follow("kvatlas-indexer-0", "kvatlas-indexer-1", "kvatlas-indexer-2")
	h := w.watch(asking, indexer, "/readyz")
	w.kubectl("rollout", "restart", "statefulset/kvatlas-nats")
	t.Logf("the NATS servers are new after %v", w.rolledOut("statefulset/kvatlas-nats"))
	h.end(t, "rollout of the NATS servers")
	if n := strings.Count(servers.String(), "Entering lame duck mode"); n != 3 {
		t.Errorf("%d of 3 NATS servers entered lame duck mode; they logged\n%s", n, servers)
	}
	for pod, times := range timesOf(t, indexers.String(), "meta leader") {
		without := longestRun(times)
		t.Logf("%s logged %d times in %v that JetStream has no meta leader", pod, len(times), without)
		if without > electionAtMost {
			t.Errorf("%s was without a meta leader for %v, more than %v; the indexers logged\n%s", pod, without,
				electionAtMost, indexers)
		}
	}
}

// electionAtMost is the longest time without a meta leader of JetStream during the replacement of a NATS server.
// nats-server elects a leader within 9 s if the former leader has not named a successor.
const electionAtMost = 10 * time.Second

// longestRun returns the length of the longest run of times with at most five seconds between two of them: the
// replacement of each server may have an election.
func longestRun(times []time.Time) (longest time.Duration) {
	begun := times[0]
	for i, at := range times {
		if i > 0 && at.Sub(times[i-1]) > 5*time.Second {
			begun = at
		}
		longest = max(longest, at.Sub(begun))
	}
	return longest
}

// timesOf returns, by pod, the times of the log lines with a text.
func timesOf(t *testing.T, log, text string) map[string][]time.Time {
	t.Helper()
	times := map[string][]time.Time{}
	for _, line := range strings.Split(log, "\n") {
		pod, entry, ok := strings.Cut(line, " ")
		if !ok || !strings.Contains(entry, text) {
			continue
		}
		var e struct{ Time time.Time }
		if err := json.Unmarshal([]byte(entry), &e); err != nil {
			t.Fatalf("%v\n%s", err, line)
		}
		times[pod] = append(times[pod], e.Time)
	}
	return times
}

// stopped stops an indexer's process with SIGSTOP. The Service removes the indexer, and Kubernetes restarts the
// container.
func (w *world) stopped(t *testing.T, asking *network, indexer string) {
	p := w.pod("kvatlas-indexer-1")
	ids := p.processes(t, "indexer")
	if len(ids) != 1 {
		t.Fatalf("kvatlas-indexer-1 has the processes %v", ids)
	}
	begun := time.Now()
	if err := syscall.Kill(ids[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the stopped indexer is not ready", func() (bool, string) {
		p := w.pod("kvatlas-indexer-1")
		return !p.ready(), ""
	})
	// The proxies of the nodes follow the state of the pod a moment later.
	eventually(t, time.Minute, "the Service has removed the stopped indexer", func() (bool, string) {
		for range 30 {
			if err := w.http(asking, indexer, "GET", "/readyz", "", nil); err != nil {
				return false, err.Error()
			}
		}
		return true, ""
	})
	t.Logf("the Service has removed the stopped indexer after %v", time.Since(begun).Round(100*time.Millisecond))
	h := w.watch(asking, indexer, "/readyz")
	eventually(t, 4*time.Minute, "the stopped indexer is ready again", func() (bool, string) {
		p := w.pod("kvatlas-indexer-1")
		return p.ready() && p.Status.ContainerStatuses[0].RestartCount > 0, fmt.Sprintf("%+v", p.Status)
	})
	took := time.Since(begun)
	t.Logf("the stopped indexer is ready again after %v", took.Round(100*time.Millisecond))
	if took > 119*time.Second {
		t.Errorf("the stopped indexer was ready again only after %v", took)
	}
	h.end(t, "a stopped indexer")
}

// drained drains a node as `kubectl drain` does, and uncordons the node. All requests are answered.
func (w *world) drained(t *testing.T, asking *network, indexer string) {
	node := "node1"
	for _, p := range w.pods("-l", "app=stranger") {
		node = p.Spec.NodeName
	}
	for _, p := range w.pods() {
		if p.Metadata.Name == "asking" && p.Spec.NodeName == node { // the pod of the test must not be evicted
			for n := 1; n <= nodes; n++ {
				if name := fmt.Sprintf("node%d", n); name != p.Spec.NodeName {
					node = name
				}
			}
		}
	}
	h := w.watch(asking, indexer, "/readyz")
	begun := time.Now()
	kubectl(t, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s",
		"--pod-selector=app.kubernetes.io/part-of=kvatlas")
	t.Logf("%s is drained after %v", node, time.Since(begun).Round(100*time.Millisecond))
	begun = time.Now()
	kubectl(t, "uncordon", node)
	for _, object := range []string{"kvatlas-nats", "kvatlas-indexer", "engine-example"} {
		w.rolledOut("statefulset/" + object)
	}
	t.Logf("all pods are ready %v after uncordon", time.Since(begun).Round(100*time.Millisecond))
	h.end(t, "drain of a node")
	w.knows(t, asking, indexer, "engine-example-0", "engine-example-1")
}

// uninstall removes the release. Indexers hand over while NATS servers still run. Only claims and the test's own
// objects remain.
func (w *world) uninstall(t *testing.T, before []string) {
	indexers := w.follow("kvatlas-indexer-0", "kvatlas-indexer-1", "kvatlas-indexer-2")
	servers := w.follow("kvatlas-nats-0", "kvatlas-nats-1", "kvatlas-nats-2")
	w.kubectl("delete", "pod", "asking", "stranger", "--wait=false")
	begun := time.Now()
	helm(t, "-n", w.namespace, "uninstall", "kvatlas", "--timeout", "2m")
	eventually(t, 4*time.Minute, "no pod is left", func() (bool, string) {
		list := w.pods()
		return len(list) == 0, fmt.Sprintf("%d pods", len(list))
	})
	t.Logf("the last pod is gone %v after helm uninstall", time.Since(begun).Round(100*time.Millisecond))
	said := indexers.String()
	if n := strings.Count(said, `"msg":"draining"`); n != 3 || strings.Contains(said, "without handing over") ||
		strings.Contains(said, `"level":"ERROR"`) {
		t.Errorf("%d of 3 indexers drained; they logged\n%s\nthe NATS servers logged\n%s", n, said, servers)
	}
	w.nothingLeft(t, before)
}

// nothingLeft checks that the namespace has only the earlier objects and claims.
func (w *world) nothingLeft(t *testing.T, before []string) {
	t.Helper()
	had := map[string]bool{}
	for _, o := range before {
		had[o] = true
	}
	eventually(t, time.Minute, "nothing is left but claims", func() (bool, string) {
		var left []string
		for _, o := range w.objects() {
			if !had[o] && !strings.HasPrefix(o, "persistentvolumeclaim/data-kvatlas-") {
				left = append(left, o)
			}
		}
		return len(left) == 0, fmt.Sprint(left)
	})
}

// TestChart installs the chart with its defaults: the only indexer contains the NATS server. After a replacement of the
// pod, the index has the same blocks.
func TestChart(t *testing.T) {
	disks(t)
	w := newWorld(t, "embedded", "restricted", "--model", "sim", "--shim", "engine-example-0", "--shim",
		"engine-example-1")
	before := w.objects()
	begun := time.Now()
	helm(t, "-n", w.namespace, "install", "kvatlas", file(t, chart), "--set", "engineExample.enabled=true", "--wait",
		"--timeout", "5m")
	t.Logf("helm install: ready after %v", time.Since(begun).Round(100*time.Millisecond))
	asking := w.client("asking", `kvatlas.io/http-client: "true", kvatlas.io/client: "true"`)
	stranger := w.client("stranger", "app: stranger")
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")
	w.knows(t, asking, indexer, "engine-example-0", "engine-example-1")
	t.Run("Privileges", w.privileges)
	p := w.pod("kvatlas-indexer-0")
	for _, port := range []string{"8090", "4222"} {
		address := net.JoinHostPort(p.Status.PodIP, port)
		eventually(t, time.Minute, "only a client reaches port "+port, func() (bool, string) {
			a, b := asking.open(address), stranger.open(address)
			return a && !b, fmt.Sprint(a, b)
		})
	}
	begun = time.Now()
	w.kubectl("delete", "pod", "kvatlas-indexer-0")
	w.rolledOut("statefulset/kvatlas-indexer")
	t.Logf("a deleted pod is ready again after %v", time.Since(begun).Round(100*time.Millisecond))
	w.knows(t, asking, indexer, "engine-example-0", "engine-example-1")
	helm(t, "-n", w.namespace, "uninstall", "kvatlas", "--wait", "--timeout", "2m")
	w.kubectl("delete", "pod", "asking", "stranger")
	w.nothingLeft(t, before)
}

// TestManifests applies deploy/kubernetes as described in README.md, and the files of a gateway.
func TestManifests(t *testing.T) {
	disks(t)
	w := newWorld(t, "manifests", "restricted", "--model", "sim", "--shim", "engine-example-0", "--shim",
		"engine-example-1")
	before := w.objects()
	const folder = root + "/deploy/kubernetes/"
	read := func(names ...string) (text string) {
		for _, name := range names {
			one, err := os.ReadFile(folder + name)
			if err != nil {
				t.Fatal(err)
			}
			text += "---\n" + string(one)
		}
		return text
	}
	begun := time.Now()
	apply(t, w.namespace, read("nats.yaml", "indexer.yaml"))
	w.rolledOut("statefulset/kvatlas-indexer")
	t.Logf("the indexers are ready %v after apply", time.Since(begun).Round(100*time.Millisecond))
	apply(t, w.namespace, read("engine-example.yaml"))
	w.rolledOut("statefulset/engine-example")
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")
	stranger := w.client("stranger", "app: stranger")
	w.knows(t, stranger, indexer, "engine-example-0", "engine-example-1")

	// A gateway's files alone close nothing.
	kubectl(t, "apply", "-f", pyenv.InferencePool(t))
	kubectl(t, "wait", "--for=condition=Established", "crd/inferencepools.inference.networking.k8s.io", "--timeout=30s")
	apply(t, w.namespace, read("gateway/inferencepool.yaml"))
	for range 10 {
		if err := w.http(stranger, indexer, "GET", "/readyz", "", nil); err != nil {
			t.Errorf("with gateway/inferencepool.yaml alone: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	apply(t, w.namespace, read("network.yaml", "gateway/network.yaml"))
	asking := w.client("asking", `kvatlas.io/http-client: "true"`)
	p := w.pod("kvatlas-indexer-0")
	address := net.JoinHostPort(p.Status.PodIP, "8090")
	eventually(t, time.Minute, "with the policies only a client reaches port 8090", func() (bool, string) {
		a, b := asking.open(address), stranger.open(address)
		return a && !b, fmt.Sprint(a, b)
	})
	kubectl(t, "exec", "-n", w.namespace, "kvatlas-indexer-0", "--", "/indexer", "cluster", "--nats",
		"nats://kvatlas-nats:4222", "--nats-nkey", "/etc/kvatlas/keys/node.nk", "--nats-inbox-prefix", "_INBOX_node")
	for _, name := range []string{"gateway/network.yaml", "gateway/inferencepool.yaml", "engine-example.yaml",
		"network.yaml", "indexer.yaml", "nats.yaml"} {
		w.kubectl("delete", "-f", file(t, folder+name), "--wait=false")
	}
	w.kubectl("delete", "pod", "asking", "stranger")
	eventually(t, 4*time.Minute, "no pod is left", func() (bool, string) {
		list := w.pods()
		return len(list) == 0, fmt.Sprintf("%d pods", len(list))
	})
	w.nothingLeft(t, before)
}
