//go:build kube

package kube

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// yamlBlock finds the YAML blocks of a page.
var yamlBlock = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

var resident = regexp.MustCompile(`VmRSS:\s+[0-9]+ kB`)

// blocks returns the YAML blocks of a page in docs.
func blocks(t *testing.T, name string) (list []string) {
	t.Helper()
	page, err := os.ReadFile(root + "/docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range yamlBlock.FindAllSubmatch(page, -1) {
		list = append(list, string(m[1]))
	}
	if n := bytes.Count(page, []byte("```yaml")); n != len(list) {
		t.Fatalf("%s has %d lines with ```yaml, and %d YAML blocks", name, n, len(list))
	}
	return list
}

// complete posts a completion of token ids to an engine's pod.
func (w *world) complete(from *network, p *pod, first int) error {
	tokens := make([]string, 64)
	for i := range tokens {
		tokens[i] = fmt.Sprint(first + i)
	}
	return w.http(from, net.JoinHostPort(p.Status.PodIP, "8000"), "POST", "/v1/completions",
		fmt.Sprintf(`{"model":"qwen3","prompt":[%s]}`, strings.Join(tokens, ",")), nil)
}

// TestPage applies every YAML block of docs/kubernetes.md in order, after the commands before the block. The pods of
// "after" are registered with their addresses, and the index has their blocks.
func TestPage(t *testing.T) {
	list := blocks(t, "kubernetes.md")
	if len(list) != 7 {
		t.Fatalf("the page has %d YAML blocks: add the expected effect of the new blocks", len(list))
	}
	disks(t)
	gpus(t)
	w := newWorld(t, "inference", "baseline", "--model", "qwen3", "--pool", "qwen3")
	helm(t, "-n", w.namespace, "install", "kvatlas", file(t, chart), "--wait", "--timeout", "5m")
	asking := w.client("asking", `kvatlas.io/http-client: "true"`)
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")

	before, after, closed, sglang := list[0], list[1], list[2], list[3]
	stateful, podShims, plain := list[4], list[5], list[6]
	apply(t, w.namespace, before)
	w.rolledOut("deployment/vllm")
	apply(t, w.namespace, after)
	t.Logf("the Deployment is new %v after the second block", w.rolledOut("deployment/vllm"))
	w.registered(t, asking, indexer, "app=vllm", 2, 1)
	for _, p := range w.pods("-l", "app=vllm") {
		if p.Metadata.DeletionTimestamp != nil {
			continue // a pod of the first block
		}
		for _, pid := range p.processes(t, "worker-shim") {
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			t.Logf("the shim of %s has %s resident", p.Metadata.Name, resident.Find(status))
		}
		eventually(t, time.Minute, "the metrics of the shim of "+p.Metadata.Name, func() (bool, string) {
			text, err := w.get(asking, net.JoinHostPort(p.Status.PodIP, "9091"), "/metrics")
			return err == nil && strings.Contains(text, "kvatlas_shim_events_total"), fmt.Sprintf("%v\n%.500s", err, text)
		})
	}

	apply(t, w.namespace, closed)
	for port, open := range map[string]bool{"8000": true, "5557": false, "5657": false, "9091": false} {
		running := w.pods("-l", "app=vllm", "--field-selector", "status.phase=Running")
		address := net.JoinHostPort(running[0].Status.PodIP, port)
		eventually(t, time.Minute, fmt.Sprintf("port %s of an engine is open to other pods: %v", port, open),
			func() (bool, string) {
				is := asking.open(address)
				return is == open, fmt.Sprint(is)
			})
	}
	helm(t, "-n", w.namespace, "upgrade", "kvatlas", file(t, chart), "--reuse-values", "--set",
		"tokenizers.models.qwen3.engines=tokenize", "--wait", "--timeout", "5m")
	eventually(t, time.Minute, "a chat is tokenized by the engines", func() (bool, string) {
		text, err := w.request(asking, indexer, "POST", "/v1/find",
			`{"model":"qwen3","messages":[{"role":"user","content":"hello"}]}`)
		return strings.Contains(text, `"tokenized":true`), fmt.Sprintf("%s, %v", text, err)
	})

	apply(t, w.namespace, sglang)
	w.rolledOut("deployment/sglang")
	w.registered(t, asking, indexer, "app=sglang", 1, 1)
	kubectl(t, "-n", w.namespace, "delete", "deployment/sglang", "--timeout=60s")

	apply(t, w.namespace, stateful)
	w.rolledOut("statefulset/vllm-dp")
	w.registered(t, asking, indexer, "app=vllm-dp", 2, 2)

	kubectl(t, "-n", w.namespace, "delete", "deployment/vllm", "statefulset/vllm-dp", "--timeout=60s")
	values := filepath.Join(t.TempDir(), "pod-shims.yaml")
	if err := os.WriteFile(values, []byte(podShims), 0o644); err != nil {
		t.Fatal(err)
	}
	helm(t, "-n", w.namespace, "upgrade", "kvatlas", file(t, chart), "--reuse-values", "--values", values, "--wait",
		"--timeout", "5m")
	apply(t, w.namespace, plain)
	w.rolledOut("deployment/vllm-plain")
	w.registered(t, asking, indexer, "app=vllm-plain", 2, 1)
	w.sharedPods(t, asking, indexer)
}

// registered waits until the workers of the index are exactly the ranks of the pods with a label, with the addresses of
// the pods, and hold computed blocks.
func (w *world) registered(t *testing.T, from *network, indexer, label string, replicas, ranks int) {
	t.Helper()
	eventually(t, 4*time.Minute, "the pods with "+label+" are registered and hold blocks", func() (bool, string) {
		want := map[string]bool{}
		for _, p := range w.pods("-l", label) {
			if p.Metadata.DeletionTimestamp != nil {
				continue
			}
			for rank := range ranks { // the ranks compute in turns
				if err := w.complete(from, &p, 1000*rank); err != nil {
					return false, err.Error()
				}
				want[fmt.Sprintf("%s/%d http://%s:8000", p.Metadata.Name, rank, p.Status.PodIP)] = true
			}
		}
		var list api.WorkerList
		if err := w.http(from, indexer, "GET", "/v1/workers", "", &list); err != nil {
			return false, err.Error()
		}
		found := 0
		for _, r := range list.Workers {
			if r.Record != nil && r.Blocks.Device > 0 &&
				want[fmt.Sprintf("%s/%d %s", r.Instance, r.Rank, r.Record.Endpoint)] {
				found++
			}
		}
		return len(want) == replicas*ranks && found == len(want), fmt.Sprintf("%v of %+v", want, list.Workers)
	})
}
