package integration

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// externalMetrics has the path of the waiting tokens for an autoscaler.
const externalMetrics = "/apis/external.metrics.k8s.io/v1beta1/namespaces/inference/kvatlas-waiting-uncached-tokens"

// TestExternalMetrics reads the waiting tokens as an API server of Kubernetes, before, during and after a booking.
// Other clients have no access to the port, and the port has no other paths.
func TestExternalMetrics(t *testing.T) {
	t.Parallel()
	serving, proxy, other := harness.NewAuthority(t), harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := serving.Issue("indexer", x509.ExtKeyUsageServerAuth)
	x := harness.StartIndexer(t, t.TempDir(), "", "--http-cert", cert, "--http-key", key, "--external-metrics-listen",
		"127.0.0.1:0", "--external-metrics-client-ca", proxy.File, "--external-metrics-client",
		"front-proxy-client,aggregator")
	port := x.WaitFor(`external metrics API of Kubernetes is served" listen=(\S+)`)[1]

	client := func(by *harness.Authority, name string, usage x509.ExtKeyUsage) *http.Client {
		config := &tls.Config{RootCAs: x509.NewCertPool()}
		config.RootCAs.AppendCertsFromPEM([]byte(readFile(t, serving.File)))
		if by != nil {
			pair, err := tls.LoadX509KeyPair(by.Issue(name, usage))
			if err != nil {
				t.Fatal(err)
			}
			// for any request of the server
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		transport := &http.Transport{TLSClientConfig: config}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport, Timeout: harness.Patience}
	}
	send := func(c *http.Client, method, url, user string, body, into any) (int, error) {
		t.Helper()
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.NewRequest(method, url, strings.NewReader(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		if user != "" {
			r.Header.Set("X-Remote-User", user)
		}
		reply, err := c.Do(r)
		if err != nil {
			return 0, err
		}
		defer reply.Body.Close()
		if text, err = io.ReadAll(reply.Body); err != nil || into == nil {
			return reply.StatusCode, err
		}
		if err := json.Unmarshal(text, into); err != nil {
			return reply.StatusCode, fmt.Errorf("%w: %s", err, text)
		}
		return reply.StatusCode, nil
	}
	router := client(nil, "", 0)
	post := func(path string, body, into any) {
		t.Helper()
		if status, err := send(router, "POST", "https://"+x.HTTP+path, "", body, into); err != nil || status != 200 {
			t.Fatal(path, status, err, into)
		}
	}
	post("/v1/workers", json.RawMessage(`{"instance":"w","model":"meta-llama/Llama3","block_size":16,"events":"none"}`),
		nil)

	apiServer := client(proxy, "aggregator", x509.ExtKeyUsageClientAuth)
	const hpa = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
	waiting := func() (tokens string) {
		t.Helper()
		var list struct {
			Kind  string
			Items []struct {
				MetricLabels map[string]string
				Value        string
			}
		}
		status, err := send(apiServer, "GET", "https://"+port+externalMetrics+"?labelSelector=model%3Dmeta-llama_Llama3", hpa,
			nil, &list)
		if err != nil || status != 200 || list.Kind != "ExternalMetricValueList" || len(list.Items) != 1 {
			t.Fatalf("%d %+v, %v", status, list, err)
		}
		return list.Items[0].Value
	}
	if is := waiting(); is != "0" {
		t.Errorf("before the booking %s tokens wait", is)
	}
	q := api.Query{Model: "meta-llama/Llama3", Tokens: harness.Tokens(1, 4000)}
	var chosen api.Selection
	post("/v1/select", api.SelectRequest{Query: q, RequestID: "r", Book: true}, &chosen)
	if is := waiting(); is != "4k" || chosen.EffectivePrefillTokens != 4000 {
		t.Errorf("with %d booked tokens %s wait", chosen.EffectivePrefillTokens, is)
	}
	post("/v1/prefill_complete", api.RequestRef{Model: q.Model, RequestID: "r"}, nil)
	if is := waiting(); is != "0" {
		t.Errorf("after the first token %s tokens wait", is)
	}

	for name, c := range map[string]*http.Client{
		"no certificate":          router,
		"another authority":       client(other, "aggregator", x509.ExtKeyUsageClientAuth),
		"another name":            client(proxy, "kubelet", x509.ExtKeyUsageClientAuth),
		"a server's certificate":  client(proxy, "front-proxy-client", x509.ExtKeyUsageServerAuth),
		"the serving certificate": client(serving, "front-proxy-client", x509.ExtKeyUsageServerAuth),
	} {
		if status, err := send(c, "GET", "https://"+port+externalMetrics, hpa, nil, nil); err == nil {
			t.Errorf("%s: status %d", name, status)
		}
	}
	if status, err := send(apiServer, "GET", "https://"+port+externalMetrics, "", nil, nil); status != 401 || err != nil {
		t.Errorf("without the name of a client: %d, %v", status, err)
	}
	if status, err := send(apiServer, "GET", "https://"+port+"/v1/status", hpa, nil, nil); status != 404 || err != nil {
		t.Errorf("the port of the API server has other paths: %d, %v", status, err)
	}
	harness.Eventually(t, "the requests are counted", func() (bool, string) {
		reply, err := router.Get("https://" + x.HTTP + "/metrics")
		if err != nil {
			return false, err.Error()
		}
		defer reply.Body.Close()
		text, err := io.ReadAll(reply.Body)
		return err == nil && strings.Contains(string(text), `operation="external_metrics",outcome="ok"`), fmt.Sprint(err)
	})
}

// TestExternalMetricsFlags checks that settings with which no API server could read the metrics are refused with the
// name of the flag.
func TestExternalMetricsFlags(t *testing.T) {
	t.Parallel()
	ca := harness.NewAuthority(t)
	cert, key := ca.Issue("indexer", x509.ExtKeyUsageServerAuth)
	listen, secure := []string{"--external-metrics-listen", "0.0.0.0:0"}, []string{"--http-cert", cert, "--http-key", key}
	for _, c := range []struct {
		args [][]string
		said string
	}{
		{[][]string{{"--external-metrics-client-ca", ca.File}}, "no effect without --external-metrics-listen"},
		{[][]string{{"--external-metrics-client", "x"}}, "no effect without --external-metrics-listen"},
		{[][]string{listen, {"--external-metrics-client-ca", ca.File}}, "--http-cert and --http-key"},
		{[][]string{listen, secure}, "needs --external-metrics-client-ca"},
		{[][]string{listen, secure, {"--external-metrics-client-ca", key}}, "has no certificate in PEM"},
		{[][]string{listen, secure, {"--external-metrics-client-ca", ca.File, "--external-metrics-client", ""}},
			"--external-metrics-client is empty"},
		{[][]string{{"--external-metrics-listen", "6443"}}, "is not HOST:PORT"},
	} {
		args := []string{"serve", "--data", t.TempDir()}
		for _, more := range c.args {
			args = append(args, more...)
		}
		if r := harness.Run(t, "indexer", args...); r.Code != 2 || !strings.Contains(r.Stderr, c.said) {
			t.Errorf("%v: %d %s; want %s", c.args, r.Code, r.Stderr, c.said)
		}
	}
}
