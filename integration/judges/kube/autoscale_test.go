//go:build kube

package kube

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

const (
	apiService   = "v1beta1.external.metrics.k8s.io"
	waitingPath  = "/apis/external.metrics.k8s.io/v1beta1/namespaces/autoscale/kvatlas-waiting-uncached-tokens"
	waitingLlama = waitingPath + "?labelSelector=model%3Dllama"
	scaled       = "deployment/llama-vllm"
)

// TestAutoscale follows docs/scaling.md: the API server reads the waiting tokens from the indexers, and the
// HorizontalPodAutoscaler of the page scales a Deployment up under booked load, and down after it.
func TestAutoscale(t *testing.T) {
	list := blocks(t, "scaling.md")
	if len(list) != 1 {
		t.Fatalf("docs/scaling.md has %d YAML blocks: add the expected effect of the new blocks", len(list))
	}
	disks(t)
	w := newWorld(t, "autoscale", "restricted", "--model", "llama")
	w.serveTLS("kvatlas-tls")
	authority := kubectl(t, "-n", "kube-system", "get", "configmap", "extension-apiserver-authentication", "-o",
		"jsonpath={.data.requestheader-client-ca-file}")
	w.secret("kvatlas-front-proxy", map[string]string{"ca.crt": authority})
	serving := get[struct{ Data map[string]string }](t, "-n", w.namespace, "secret", "kvatlas-tls").Data["tls.crt"]
	t.Cleanup(func() { inCluster("", "helm", "-n", w.namespace, "uninstall", "kvatlas", "--timeout", "1m") })
	helm(t, "-n", w.namespace, "install", "kvatlas", file(t, chart), "--set", "http.tlsSecret=kvatlas-tls",
		"--set", "externalMetrics.enabled=true", "--set", "externalMetrics.caBundle="+serving, "--wait", "--timeout", "5m")
	kubectl(t, "wait", "--for=condition=Available", "apiservice/"+apiService, "--timeout=60s")
	asking := w.client("asking", `kvatlas.io/http-client: "true"`)
	indexer := net.JoinHostPort(w.serviceIP("kvatlas-indexer"), "8090")
	w.rightsOfMetrics(t, asking)

	if err := w.http(asking, indexer, "POST", "/v1/workers",
		`{"instance":"w","model":"llama","block_size":16,"events":"none"}`, nil); err != nil {
		t.Fatal(err)
	}
	apply(t, w.namespace, sleepers)
	apply(t, w.namespace, list[0])
	w.kubectl("patch", "hpa/llama", "--patch", `{"spec":{"behavior":{"scaleDown":{"stabilizationWindowSeconds":0}}}}`)
	replicas := func(want string) time.Duration {
		t.Helper()
		return eventually(t, 2*time.Minute, "the Deployment has "+want+" replicas", func() (bool, string) {
			is := w.kubectl("get", scaled, "-o", "jsonpath={.spec.replicas}")
			return is == want, is + "\n" + w.kubectl("describe", "hpa/llama")
		})
	}
	eventually(t, time.Minute, "the autoscaler reads the metric", func() (bool, string) {
		active := w.kubectl("get", "hpa/llama", "-o", `jsonpath={.status.conditions[?(@.type=="ScalingActive")].status}`)
		return active == "True", w.kubectl("describe", "hpa/llama")
	})
	replicas("2")
	const requests, tokens = 5, 30_000 // a worker for each request
	for i := range requests {
		prompt := make([]uint32, tokens)
		for j := range prompt {
			prompt[j] = uint32(i*tokens + j)
		}
		body, err := json.Marshal(api.SelectRequest{Query: api.Query{Model: "llama", Tokens: prompt},
			RequestID: fmt.Sprint("r", i), Book: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.http(asking, indexer, "POST", "/v1/select", string(body), nil); err != nil {
			t.Fatal(err)
		}
	}
	if out := kubectl(t, "get", "--raw", waitingLlama); !strings.Contains(out, `"value":"150k"`) {
		t.Errorf("150,000 tokens wait, and the API server answers %s", out)
	}
	t.Logf("%d replicas %v after the bookings", requests, replicas(fmt.Sprint(requests)).Round(100*time.Millisecond))
	for i := range requests {
		if err := w.http(asking, indexer, "POST", "/v1/prefill_complete", fmt.Sprintf(`{"model":"llama","request_id":"r%d"}`,
			i), nil); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("2 replicas %v after the first tokens", replicas("2").Round(100*time.Millisecond))
}

// sleepers is the Deployment that the autoscaler of the page scales. Its pods do nothing.
const sleepers = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama-vllm}
spec:
  replicas: 2
  selector: {matchLabels: {app: llama-vllm}}
  template:
    metadata: {labels: {app: llama-vllm}}
    spec:
      terminationGracePeriodSeconds: 1
      automountServiceAccountToken: false
      containers:
        - name: sleeper
          image: localhost/pause:1
          resources: {requests: {cpu: 1m, memory: 8Mi}, limits: {memory: 64Mi}}
          securityContext:
            runAsNonRoot: true
            runAsUser: 65532
            allowPrivilegeEscalation: false
            capabilities: {drop: [ALL]}
            seccompProfile: {type: RuntimeDefault}
`

// serveTLS makes a secret with a certificate for the service of the indexers. The later requests of the test trust the
// certificate.
func (w *world) serveTLS(name string) {
	w.t.Helper()
	dir, host := w.t.TempDir(), "kvatlas-indexer."+w.namespace+".svc"
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	cmd := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
		"-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=indexer", "-addext", "subjectAltName=DNS:"+host)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
	w.kubectl("create", "secret", "tls", name, "--cert", cert, "--key", key)
	text, err := os.ReadFile(cert)
	if err != nil {
		w.t.Fatal(err)
	}
	w.tls = &tls.Config{RootCAs: x509.NewCertPool(), ServerName: host}
	w.tls.RootCAs.AppendCertsFromPEM(text)
}

// rightsOfMetrics checks that the API server serves the metrics to the autoscaler and to no other account. The port of
// the indexers must refuse other clients than the API server.
func (w *world) rightsOfMetrics(t *testing.T, asking *network) {
	const autoscaler = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
	if out := kubectl(t, "get", "--raw", waitingPath, "--as", autoscaler); !strings.Contains(out,
		`"kind":"ExternalMetricValueList"`) {
		t.Errorf("the autoscaler gets %s", out)
	}
	account := "system:serviceaccount:" + w.namespace + ":default"
	if out, err := inCluster("", "kube", "kubectl", "get", "--raw", waitingPath, "--as", account); err == nil ||
		!strings.Contains(out, "forbidden") {
		t.Errorf("%s gets %s, %v", account, out, err)
	}
	if out := kubectl(t, "api-resources", "--api-group=external.metrics.k8s.io", "-o", "name"); !strings.Contains(out,
		"kvatlas-waiting-uncached-tokens.external.metrics.k8s.io") {
		t.Errorf("the API server lists the resources %s", out)
	}
	p := w.pod("kvatlas-indexer-0")
	address := net.JoinHostPort(p.Status.PodIP, "6443")
	if !asking.open(address) {
		t.Fatalf("%s is closed", address)
	}
	if out, err := w.get(asking, address, waitingPath); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client without a certificate gets %s, %v", out, err)
	}
}
