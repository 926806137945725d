//go:build judges

package envoy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

// part is a worker of a disaggregated fleet: a simulated engine behind a recorder.
type part struct {
	*harness.Recorder
	name, role string
}

// received is a request at an engine.
type received struct {
	prefiller string // header x-prefiller-host-port
	body      map[string]any
}

func (p *part) got(id string) (r received, ok bool) {
	q, ok := p.Got(id)
	r.prefiller = strings.Join(q.Header.Values("x-prefiller-host-port"), " and ")
	_ = json.Unmarshal(q.Body, &r.body) // an incomplete body has no fields
	return r, ok
}

// pools is a gateway before parts.
type pools struct {
	gateway
	parts []*part
}

// startPools starts two workers of each role, prefill workers with the flags.
func startPools(t *testing.T, settings string, prefill []string, edits ...string) *pools {
	t.Helper()
	file := t.TempDir() + "/routing.yaml"
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	g := &pools{gateway: gateway{t: t, indexer: harness.StartIndexer(t, t.TempDir(), "", "--grpc-listen", "127.0.0.1:0",
		"--guess-ttl", "1h", "--routing-config", file)}}
	for _, role := range []string{"decode", "prefill", "encode"} {
		for i := range 2 {
			p := &part{name: fmt.Sprintf("%s-%d", role, i), role: role}
			e, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: model, BlockSize: blockSize, Tokens: 4,
				Delay: 2 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.Kill)
			p.Recorder = harness.StartRecorder(t, e.Addr)
			g.parts = append(g.parts, p)
			args := []string{"workers", "register", p.name, "--model", model, "--block-size", fmt.Sprint(blockSize),
				"--endpoint", "http://" + p.Addr, "--role", role, "--nats", g.indexer.NATS}
			if role == "prefill" {
				args = append(args, prefill...)
			}
			if r := harness.Run(t, "indexer", args...); r.Code != 0 {
				t.Fatal(r)
			}
		}
	}
	var addresses []string // Envoy's cluster has all workers, as an InferencePool has
	for _, p := range g.parts {
		addresses = append(addresses, p.Addr)
	}
	g.url = harness.StartEnvoy(t, root, g.indexer.GRPC(), addresses, edits...).URL
	return g
}

// send sends a request with headers and fields of a client that names a worker of its own. patience bounds the answer;
// 0: none.
func (g *pools) send(id, path, body string, patience time.Duration) (int, error) {
	ctx, cancel := g.t.Context(), context.CancelFunc(func() {})
	if patience > 0 {
		ctx, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "POST", g.url+path, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(harness.TestID, id)
	r.Header.Add("X-Prefiller-Host-Port", "169.254.169.254:80")
	r.Header.Add("X-Prefiller-Host-Port", "127.0.0.1:1")
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	_, err = io.Copy(io.Discard, reply.Body)
	return reply.StatusCode, err
}

// mirror matches the commented lines for SGLang in deploy/envoy.
var mirror = regexp.MustCompile(`(?m)^( +)# (request_mirror_policies:.*|- name: prefill|  (?:type: ORIGINAL_DST|` +
	`connect_timeout: 1s|lb_policy: CLUSTER_PROVIDED|original_dst_lb_config:.*|circuit_breakers: \{thresholds.*))$`)

// withMirror returns the edits that enable the lines for SGLang.
func withMirror(t *testing.T, edits ...string) []string {
	t.Helper()
	text, err := os.ReadFile(root + "/deploy/envoy/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	lines := mirror.FindAllStringSubmatch(string(text), -1)
	if len(lines) != 7 {
		t.Fatalf("deploy/envoy has %d lines for prefill workers of SGLang", len(lines))
	}
	for _, line := range lines {
		edits = append(edits, line[0], line[1]+line[2])
	}
	return edits
}

// TestPrefillAndDecode sends mixed requests, streamed and not, of which clients cancel a part, to two workers of each
// role. Every request reaches one decode worker, with a prefill worker in the header of llm-d's sidecar. For SGLang the
// body has the bootstrap fields, and the prefill worker gets the same body from Envoy's mirror. No load remains.
func TestPrefillAndDecode(t *testing.T) {
	for name, edits := range bothModes {
		for _, sglang := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, SGLang %v", name, sglang), func(t *testing.T) {
				var flags []string
				if sglang {
					flags, edits = []string{"--bootstrap-port", "8998"}, withMirror(t, edits...)
				}
				g := startPools(t, "{}", flags, edits...)
				const requests, clients = 300, 8
				status := make([]int, requests)
				var all sync.WaitGroup
				for c := range clients {
					all.Go(func() {
						rng := rand.New(rand.NewPCG(7, uint64(c)))
						for n := c; n < requests; n += clients {
							path, body := "/v1/completions", map[string]any{"model": model, "stream": n%2 == 0,
								"prompt": harness.Tokens(rng.IntN(20)*10_000, 16+rng.IntN(400)), "bootstrap_host": "evil",
								"bootstrap_room": 1}
							if n%3 == 0 {
								delete(body, "prompt")
								path, body["messages"] = "/v1/chat/completions", []any{map[string]string{"role": "user",
									"content": strings.Repeat("word ", 1+rng.IntN(200))}}
							}
							text, _ := json.Marshal(body) // the value can be encoded
							patience := time.Duration(0)
							if n%5 == 4 {
								patience = time.Duration(rng.IntN(12_000)) * time.Microsecond
							}
							var err error
							if status[n], err = g.send(fmt.Sprint(n), path, string(text), patience); patience == 0 &&
								(err != nil || status[n] != 200) {
								t.Errorf("request %d: %d, %v", n, status[n], err)
							}
						}
					})
				}
				all.Wait()
				g.idle()
				used := map[string]int{}
				for n := range requests {
					g.check(fmt.Sprint(n), n%5 != 4, sglang, used)
				}
				for _, p := range g.parts[:4] {
					if used[p.name] < requests/5 {
						t.Errorf("%s has %d of %d requests", p.name, used[p.name], requests)
					}
				}
				if m := g.metric("kvatlas_route_disaggregated_total"); m < requests*4/5 {
					t.Errorf("%v choices of a pair are counted", m)
				}
			})
		}
	}
}

// check compares a request at the workers with the contract.
func (g *pools) check(id string, complete, sglang bool, used map[string]int) {
	g.t.Helper()
	var decodes []received
	for _, p := range g.parts {
		r, ok := p.got(id)
		switch {
		case ok && p.role == "decode":
			decodes = append(decodes, r)
			used[p.name]++
		case ok && (p.role != "prefill" || !sglang):
			g.t.Errorf("request %s reaches %s", id, p.name)
		}
	}
	if len(decodes) != 1 {
		if complete || len(decodes) > 1 {
			g.t.Errorf("request %s reaches %d decode workers", id, len(decodes))
		}
		return
	}
	at := slices.IndexFunc(g.parts, func(p *part) bool { return p.Addr == decodes[0].prefiller })
	if at < 0 || g.parts[at].role != "prefill" {
		g.t.Errorf("request %s has the header x-prefiller-host-port: %s", id, decodes[0].prefiller)
		return
	}
	used[g.parts[at].name]++
	room, _ := decodes[0].body["bootstrap_room"].(float64)
	switch {
	case !sglang:
		return
	case decodes[0].body["bootstrap_host"] != "127.0.0.1" || decodes[0].body["bootstrap_port"] != 8998. || room <= 1:
		g.t.Errorf("request %s has the body %v", id, decodes[0].body)
	}
	if !complete {
		return // the mirror of a cancelled request may be cancelled too
	}
	harness.Eventually(g.t, "the prefill worker gets request "+id, func() (bool, string) {
		r, ok := g.parts[at].got(id)
		return ok && fmt.Sprint(r.body) == fmt.Sprint(decodes[0].body), fmt.Sprintf("%v\nat decode %v", r, decodes[0])
	})
}

// TestWithoutPrefillWorkers: short uncached prompts stay on the decode worker. Without a schedulable prefill worker,
// decode workers answer alone. Both are counted. Without a decode worker, requests fail instead of going to prefill
// workers.
func TestWithoutPrefillWorkers(t *testing.T) {
	g := startPools(t, "disaggregation: {bypass: isl_bounding, isl_tokens: 100, isl_ratio: 2}", nil)
	counted := func(outcome string) float64 {
		return g.metric(`kvatlas_route_disaggregated_total{model="sim",outcome="` + outcome + `"}`)
	}
	header := func(id string, tokens int) string {
		t.Helper()
		if status, err := g.send(id, "/v1/completions", completion(false, harness.Tokens(1000, tokens)), 0); err != nil ||
			status != 200 {
			t.Fatalf("request %s: %d, %v", id, status, err)
		}
		for _, p := range g.parts {
			if r, ok := p.got(id); ok && p.role == "decode" {
				return r.prefiller
			} else if ok {
				t.Errorf("request %s reaches %s", id, p.name)
			}
		}
		t.Errorf("request %s reaches no worker", id)
		return ""
	}
	if h := header("short", 99); h != "" {
		t.Errorf("a short prompt has the prefill worker %s", h)
	}
	if h := header("long", 400); h == "" {
		t.Error("a long prompt has no prefill worker")
	}
	for _, p := range g.parts[2:4] {
		if r := harness.Run(t, "indexer", "workers", "drain", p.name, "--nats", g.indexer.NATS); r.Code != 0 {
			t.Fatal(r)
		}
	}
	harness.Eventually(t, "no prefill worker is chosen", func() (bool, string) {
		n := counted("no_prefill_worker")
		return header(fmt.Sprint("alone", n, counted("prefill")), 300) == "", ""
	})
	if counted("short_prompt") != 1 || counted("no_prefill_worker") < 1 || counted("prefill") < 1 {
		t.Errorf("short %v, alone %v, with prefill %v", counted("short_prompt"), counted("no_prefill_worker"),
			counted("prefill"))
	}
	for _, p := range g.parts[:2] {
		if r := harness.Run(t, "indexer", "workers", "remove", p.name, "--nats", g.indexer.NATS); r.Code != 0 {
			t.Fatal(r)
		}
	}
	harness.Eventually(t, "requests without decode workers fail", func() (bool, string) {
		status, err := g.send("refused", "/v1/completions", completion(false, harness.Tokens(1, 400)), 0)
		return status == 503, fmt.Sprint(status, err)
	})
	for _, p := range g.parts[2:] {
		if _, ok := p.got("refused"); ok {
			t.Errorf("a refused request reaches %s", p.name)
		}
	}
	g.idle()
}
