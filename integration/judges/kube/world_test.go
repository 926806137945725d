//go:build kube

package kube

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// engineImages maps the images of docs/kubernetes.md to the program of the container.
var engineImages = map[string]string{
	"vllm/vllm-openai:v0.32.0": "/bin/vllm",
	"lmsysorg/sglang:v0.5.23":  "/bin/python3",
}

// world is a namespace of Kubernetes for an installation of kvatlas.
type world struct {
	t         *testing.T
	namespace string
	token     string // of HTTP

	tls *tls.Config // of HTTP; nil: plain text
}

// newWorld makes a namespace with the strictest Pod Security and the secrets of the chart's README.md. The end of the
// test deletes the namespace.
func newWorld(t *testing.T, namespace, security string, auth ...string) *world {
	t.Helper()
	w := &world{t: t, namespace: namespace, token: "a-token-of-the-judge"}
	apply(t, "default", fmt.Sprintf(`{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {
  pod-security.kubernetes.io/enforce: %s, pod-security.kubernetes.io/warn: %s}}}`, namespace, security, security))
	t.Cleanup(func() {
		if t.Failed() {
			w.describe()
		}
		inCluster("", "kube", "kubectl", "delete", "namespace", namespace, "--timeout=120s")
	})
	keys := t.TempDir()
	cmd := exec.Command(filepath.Join(cluster.dir, "bin", "indexer"),
		append([]string{"auth", "create", "--keys", keys}, auth...)...)
	accounts, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	w.secret("kvatlas-accounts", map[string]string{"accounts.conf": string(accounts)})
	w.secret("kvatlas-http", map[string]string{"token": w.token})
	w.secret("kvatlas-shim-metrics", map[string]string{"token": w.token})
	node, err := os.ReadFile(filepath.Join(keys, "default-node.nk"))
	if err != nil {
		t.Fatal(err)
	}
	w.secret("kvatlas-node", map[string]string{"node.nk": string(node)})
	files, err := filepath.Glob(filepath.Join(keys, "default-*.nk"))
	if err != nil {
		t.Fatal(err)
	}
	shims := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(filepath.Base(file), "default-")
		for _, kind := range []string{"shim-", "pool-"} {
			if after, is := strings.CutPrefix(name, kind); is {
				shims[after] = string(text)
			}
		}
	}
	w.secret("kvatlas-shims", shims)
	pools, err := filepath.Glob(filepath.Join(keys, "default-pool-*.nk"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range pools {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		w.secret("kvatlas-pod-shims", map[string]string{"shims.nk": string(text)})
	}
	return w
}

// secret makes a secret with files.
func (w *world) secret(name string, files map[string]string) {
	w.t.Helper()
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Secret", "stringData": files,
		"metadata": map[string]any{"name": name}})
	if err != nil {
		w.t.Fatal(err)
	}
	apply(w.t, w.namespace, string(text))
}

// describe writes the state for an analysis of a failure to a file, because the failure must be the last output.
func (w *world) describe() {
	file, err := os.CreateTemp("", "kvatlas-kube-"+w.namespace+"-*.log")
	if err != nil {
		w.t.Log(err)
		return
	}
	defer file.Close()
	show := func(args ...string) string {
		out, _ := inCluster("", "kube", append([]string{"kubectl", "-n", w.namespace}, args...)...)
		fmt.Fprintf(file, "kubectl %s\n%s\n", strings.Join(args, " "), out)
		return out
	}
	show("get", "pods", "-o", "wide")
	show("get", "events", "--sort-by=.lastTimestamp")
	show("describe", "pods")
	for _, name := range strings.Fields(show("get", "pods", "-o", "name")) {
		show("logs", "--all-containers", "--tail=200", name)
	}
	w.t.Logf("the pods, their events and logs are in %s", file.Name())
}

func (w *world) kubectl(args ...string) string {
	w.t.Helper()
	return kubectl(w.t, append([]string{"-n", w.namespace}, args...)...)
}

func (w *world) pods(args ...string) []pod { w.t.Helper(); return pods(w.t, w.namespace, args...) }

func (w *world) pod(name string) pod { w.t.Helper(); return podNamed(w.t, w.namespace, name) }

// rolledOut waits until all pods of an object are new and ready.
func (w *world) rolledOut(object string) (took time.Duration) {
	w.t.Helper()
	begun := time.Now()
	w.kubectl("rollout", "status", object, "--timeout=180s")
	return time.Since(begun).Round(100 * time.Millisecond)
}

// client starts an idle pod with labels. Tests connect from the pod's network.
func (w *world) client(name, labels string) *network {
	w.t.Helper()
	apply(w.t, w.namespace, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {%s}}
spec:
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
    - name: client
      image: localhost/pause:1
      resources: {requests: {cpu: 1m, memory: 8Mi}, limits: {memory: 64Mi}}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
        seccompProfile: {type: RuntimeDefault}
`, name, labels))
	w.kubectl("wait", "--for=condition=Ready", "pod/"+name, "--timeout=60s")
	p := w.pod(name)
	return p.network(w.t)
}

// serviceIP returns the address of a service.
func (w *world) serviceIP(name string) string {
	w.t.Helper()
	return strings.TrimSpace(w.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}"))
}

// http requests a path with the token, and decodes the reply with status 200. A nil into accepts any reply.
func (w *world) http(from *network, address, method, path, body string, into any) error {
	text, err := w.request(from, address, method, path, body)
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// get returns the text at a path.
func (w *world) get(from *network, address, path string) (string, error) {
	return w.request(from, address, "GET", path, "")
}

func (w *world) request(from *network, address, method, path, body string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	client, scheme := from.client(), "http://"
	if w.tls != nil {
		client.Transport.(*http.Transport).TLSClientConfig, scheme = w.tls, "https://"
	}
	req, err := http.NewRequestWithContext(ctx, method, scheme+address+path, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+w.token)
	req.Header.Set("Content-Type", "application/json")
	reply, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err == nil && reply.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, reply.Status, text)
	}
	return string(text), err
}

// watch counts the replies of a path, requested through a service every 20 ms, until stopped.
type watch struct {
	stop     chan struct{}
	done     sync.WaitGroup
	good     int
	failures []string
}

func (w *world) watch(from *network, address, path string) *watch {
	h := &watch{stop: make(chan struct{})}
	h.done.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-h.stop:
				return
			case <-tick.C:
			}
			if err := w.http(from, address, "GET", path, "", nil); err != nil {
				h.failures = append(h.failures, fmt.Sprintf("%s %v", time.Now().Format("15:04:05.000"), err))
			} else {
				h.good++
			}
		}
	})
	return h
}

// end stops the watch. All answers must have been good.
func (h *watch) end(t *testing.T, what string) {
	t.Helper()
	close(h.stop)
	h.done.Wait()
	t.Logf("%s: %d requests were answered, %d failed", what, h.good, len(h.failures))
	if len(h.failures) > 0 || h.good < 10 {
		t.Errorf("%s: %d requests were answered, %d failed: %q", what, h.good, len(h.failures),
			h.failures[:min(len(h.failures), 5)])
	}
}

// logs collects the logs of containers, including pods that end.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
	cmds []*exec.Cmd
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// follow collects the logs of the pods' containers from now on.
func (w *world) follow(names ...string) *logs {
	w.t.Helper()
	l, now := &logs{}, time.Now().UTC().Format(time.RFC3339) // a connection may need seconds
	for _, name := range names {
		cmd := clusterCommand("kube", "kubectl", "-n", w.namespace, "logs", "-f", "--since-time="+now, "--all-containers",
			"--prefix", name)
		cmd.Stdout, cmd.Stderr = l, l
		if err := cmd.Start(); err != nil {
			w.t.Fatal(err)
		}
		l.cmds = append(l.cmds, cmd)
	}
	w.t.Cleanup(func() {
		for _, cmd := range l.cmds {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	return l
}

// objects lists all objects of the namespace except events and Kubernetes' own objects.
func (w *world) objects() (names []string) {
	w.t.Helper()
	kinds := strings.Fields(kubectl(w.t, "api-resources", "--namespaced", "--verbs=list", "-o", "name"))
	kinds = slices.DeleteFunc(kinds, func(k string) bool { return strings.HasPrefix(k, "events") })
	text := w.kubectl("get", strings.Join(kinds, ","), "-o", "name", "--ignore-not-found")
	for _, name := range strings.Fields(text) {
		if name != "configmap/kube-root-ca.crt" && name != "serviceaccount/default" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
