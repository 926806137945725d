//go:build realvllm

package vllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// prefillHeader is the header with the address of the prefill worker.
const prefillHeader = "X-Prefiller-Host-Port"

// sidecar is a proxy before a decode engine. It processes a request in two steps as llm-d's routing sidecar does with
// --kv-connector=nixlv2 (llm-d/llm-d-router › pkg/sidecar/proxy/connector_nixlv2.go): the prefill worker of the header
// computes the prompt and a single token, and the decode engine receives the transfer parameters of its answer.
type sidecar struct {
	engine string // HOST:PORT
	client *http.Client
}

// prefill sends the first step. It returns the request of the second step.
func (s *sidecar) prefill(at, path string, body []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return nil, err
	}
	first := map[string]json.RawMessage{}
	for name, value := range fields {
		first[name] = value
	}
	first["kv_transfer_params"] = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,` +
		`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)
	first["max_tokens"], first["stream"] = json.RawMessage("1"), json.RawMessage("false")
	delete(first, "stream_options")
	text, err := json.Marshal(first)
	if err != nil {
		return nil, err
	}
	reply, err := s.client.Post("http://"+at+path, "application/json", bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	answer, err := io.ReadAll(reply.Body)
	if err != nil {
		return nil, err
	}
	if reply.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the prefill worker answers %d: %.300s", reply.StatusCode, answer)
	}
	var got struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &got); err != nil {
		return nil, err
	}
	if len(got.Params) > 0 {
		fields["kv_transfer_params"] = got.Params
	}
	return json.Marshal(fields)
}

func (s *sidecar) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if at := r.Header.Get(prefillHeader); at != "" && err == nil {
		body, err = s.prefill(at, r.URL.Path, body)
	}
	var reply *http.Response
	if err == nil {
		var q *http.Request
		if q, err = http.NewRequestWithContext(r.Context(), r.Method, "http://"+s.engine+r.URL.Path,
			bytes.NewReader(body)); err == nil {
			q.Header.Set("Content-Type", "application/json")
			reply, err = s.client.Do(q)
		}
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer reply.Body.Close()
	w.Header().Set("Content-Type", reply.Header.Get("Content-Type"))
	w.WriteHeader(reply.StatusCode)
	_, _ = io.Copy(w, reply.Body) // the client sees an incomplete answer
}

// pair is two engines that exchange KV over files in a folder, by vLLM's own ExampleConnector.
type pair struct {
	t               *testing.T
	client          *http.Client
	folder          string
	prefill, decode *stage
	before, behind  *harness.Recorder // before the sidecar, and before the prefill engine

	requests []clientRequest
	alone    []clientReply // of the decode engine alone
}

// startPair starts two engines. The connector stores the blocks of a prompt's first step only, so a step must have room
// for each prompt.
func startPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{t: t, client: &http.Client{Timeout: harness.Patience}, folder: t.TempDir()}
	config, err := json.Marshal(map[string]any{"kv_connector": "ExampleConnector", "kv_role": "kv_both",
		"kv_connector_extra_config": map[string]any{"shared_storage_path": p.folder}})
	if err != nil {
		t.Fatal(err)
	}
	begun, m := time.Now(), textModel(t)
	var waits []func()
	start := func() *stage {
		e := textEngine(t, m, "--kv-transfer-config", string(config))
		of, opened, _ := newListener(t, e.events, blockSize)
		waits = append(waits, opened)
		e.begin()
		return &stage{t: t, engine: e, twin: of, fences: newGenerator(1<<32, 1<<32, blockSize, false)}
	}
	p.prefill, p.decode = start(), start()
	p.prefill.engine.awaitHealth()
	p.decode.engine.awaitHealth()
	for _, wait := range waits {
		wait()
	}
	t.Logf("the start of both engines took %.0f s", time.Since(begun).Seconds())
	front := httptest.NewServer(&sidecar{p.decode.engine.http, p.client})
	t.Cleanup(front.Close)
	p.before = harness.StartRecorder(t, strings.TrimPrefix(front.URL, "http://"))
	p.behind = harness.StartRecorder(t, p.prefill.engine.http)
	return p
}

// answerAlone sends random requests to the decode engine.
func (p *pair) answerAlone() {
	p.t.Helper()
	a := &asker{rand.New(rand.NewPCG(*seed, 10)), harness.ReadSamples(p.t, root)}
	for len(p.requests) < *gatewayRequests {
		q := a.next()
		delete(q.body, "logprobs") // the sums of a prompt in two parts are rounded differently
		delete(q.body, "top_logprobs")
		delete(q.body, "n")
		want, err := q.send(p.client, "http://"+p.decode.engine.http, "")
		if err != nil {
			p.t.Fatal(err)
		}
		if _, several := q.body["prompt"].([]any); !several && want.status == http.StatusOK {
			p.requests, p.alone = append(p.requests, q), append(p.alone, want)
		}
	}
}

// forget empties both caches and the folder.
func (p *pair) forget() {
	p.t.Helper()
	p.prefill.emptyCache()
	p.decode.emptyCache()
	list, err := os.ReadDir(p.folder)
	for _, f := range list {
		if err == nil {
			err = os.RemoveAll(filepath.Join(p.folder, f.Name()))
		}
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// transferable returns the tokens that ExampleConnector transfers for a prompt: all whole blocks, but none with the
// last token. The connector does not find a prompt with a single token after the whole blocks.
func transferable(tokens int) int {
	if tokens%blockSize == 1 {
		return 0
	}
	return max(0, (tokens-2)/blockSize*blockSize)
}

// Metrics of an engine: prompt tokens from the other engine, and from the engine's own cache.
const (
	externalHits = "external_prefix_cache_hits_total"
	ownHits      = "prefix_cache_hits_total"
)

// metric returns the value of a metric of the engine.
func (e *engine) metric(name string) int {
	e.t.Helper()
	r, err := e.client.Get("http://" + e.http + "/metrics")
	if err != nil {
		e.t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^vllm:` + name + `\{.*\} (\S+)$`).FindSubmatch(text)
	if m == nil {
		e.t.Fatalf("the engine has no metric %s", name)
	}
	v, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		e.t.Fatal(err)
	}
	return int(v)
}

// TestGatewayPools sends random completions and chats through a real Envoy to two real vLLM engines, with the roles
// prefill and decode. The prefill worker computes every prompt, and the decode worker loads the KV. The answers must
// equal those of the decode engine alone, and the decode engine must report the transferred tokens. The first step of a
// request is sent by a sidecar in the form of llm-d, or by the gateway itself.
func TestGatewayPools(t *testing.T) {
	p := startPair(t)
	p.answerAlone()
	for _, form := range []string{"sidecar", "vllm"} {
		t.Run(form, func(t *testing.T) {
			p.forget()
			p.judge(t, form)
		})
	}
}

// judge sends all requests with a value of --gateway-prefill.
func (p *pair) judge(t *testing.T, form string) {
	t.Helper()
	decode, flags := p.before.Addr, []string{"--grpc-listen", "127.0.0.1:0"}
	if form == "vllm" {
		decode, flags = p.decode.engine.http, append(flags, "--gateway-prefill", form)
	}
	x := harness.StartIndexer(t, filepath.Join(t.TempDir(), "data"), "", flags...)
	for role, at := range map[string]string{"prefill": p.behind.Addr, "decode": decode} {
		e := p.prefill.engine
		if role == "decode" {
			e = p.decode.engine
		}
		startTextShim(t, x.NATS, role, e, at, "--role", role)
		harness.WaitLease(t, x, role, true)
	}
	url := harness.StartEnvoy(t, root, x.GRPC(), []string{decode}).URL
	begun, reused, prompts := time.Now(), 0, 0
	loaded, own := p.decode.engine.metric(externalHits), p.decode.engine.metric(ownHits)
	for i := range p.requests {
		q, want := &p.requests[i], p.alone[i]
		id := fmt.Sprint(form, i)
		got, err := q.send(p.client, url, id)
		if err != nil {
			t.Fatalf("%v: %v", q, err)
		}
		if !got.sameAs(&want) {
			t.Errorf("%v\nthe answer of one engine is %.2000s\nnot %.2000s", q, want.compared(), got.compared())
		}
		if got.cached < transferable(got.promptTokens) {
			t.Errorf("%v\nthe decode engine computes all but %d of %d tokens", q, got.cached, got.promptTokens)
		}
		if form == "sidecar" {
			r, _ := p.before.Got(id)
			if at := strings.Join(r.Header.Values(prefillHeader), " and "); at != p.behind.Addr {
				t.Errorf("%v: the header at the sidecar is %q", q, at)
			}
		}
		p.checkFirstStep(t, q)
		reused += got.cached
		prompts += got.promptTokens
	}
	loaded = p.decode.engine.metric(externalHits) - loaded
	t.Logf("%d requests with %d prompt tokens: the decode engine has loaded %d tokens and reused %d in all; the prefill "+
		"engine has loaded %d; %.0f s", len(p.requests), prompts, loaded, reused, p.prefill.engine.metric(externalHits),
		time.Since(begun).Seconds())
	if n := x.Metric(`kvatlas_route_disaggregated_total{model="` + gatewayModel + `",outcome="prefill"}`); int(n) !=
		len(p.requests) {
		t.Errorf("%v of %d choices have a prefill worker", n, len(p.requests))
	}
	if own = p.decode.engine.metric(ownHits) - own; loaded == 0 || loaded+own != reused {
		t.Errorf("the decode engine has loaded %d tokens, and had %d of the %d reused ones", loaded, own, reused)
	}
}

// checkFirstStep checks the last request at the prefill engine: the prompt of q, for a single token.
func (p *pair) checkFirstStep(t *testing.T, q *clientRequest) {
	t.Helper()
	var want, got map[string]any
	r, _ := p.behind.Got("")
	text, err := json.Marshal(q.body)
	if err = errors.Join(err, json.Unmarshal(text, &want), json.Unmarshal(r.Body, &got)); err != nil {
		t.Fatalf("%v: the prefill engine receives %q: %v", q, r.Body, err)
	}
	for _, name := range []string{"prompt", "messages"} {
		if !reflect.DeepEqual(got[name], want[name]) || got["max_tokens"] != 1. || got["stream"] != false {
			t.Errorf("%v\nthe prefill engine receives %.600s", q, r.Body)
			return
		}
	}
}
