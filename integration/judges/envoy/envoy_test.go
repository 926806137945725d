//go:build judges

package envoy

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

const (
	model     = "sim"
	blockSize = 16
	root      = "../../.."
)

// gateway is an Envoy before engines, with an indexer for the choice.
type gateway struct {
	t       *testing.T
	indexer *harness.Indexer
	engines []*openaisim.Engine
	url     string
	admin   string // HOST:PORT of Envoy's administration
}

// start starts all parts, with three engines and registered workers.
func start(t *testing.T, edits ...string) *gateway {
	t.Helper()
	return startWith(t, nil, edits...)
}

// startWith is start with further flags of the indexer.
func startWith(t *testing.T, flags []string, edits ...string) *gateway {
	t.Helper()
	return startFleet(t, openaisim.Options{Delay: 2 * time.Millisecond}, flags, edits...)
}

// startFleet is startWith with other engines. o has the options of the engines without the model.
func startFleet(t *testing.T, o openaisim.Options, flags []string, edits ...string) *gateway {
	t.Helper()
	o.Model, o.BlockSize, o.Tokens = model, blockSize, 4
	g := &gateway{t: t, indexer: harness.StartIndexer(t, t.TempDir(), "", append([]string{"--grpc-listen", "127.0.0.1:0",
		"--guess-ttl", "1h"}, flags...)...)}
	var addresses []string
	for i := range 3 {
		e, err := openaisim.Start("127.0.0.1:0", o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Kill)
		g.engines = append(g.engines, e)
		addresses = append(addresses, e.Addr)
		r := harness.Run(t, "indexer", "workers", "register", fmt.Sprintf("worker-%d", i), "--model", model, "--block-size",
			fmt.Sprint(blockSize), "--endpoint", "http://"+e.Addr, "--nats", g.indexer.NATS)
		if r.Code != 0 {
			t.Fatal(r)
		}
	}
	e := harness.StartEnvoy(t, root, g.indexer.GRPC(), addresses, edits...)
	g.url, g.admin = e.URL, strings.TrimPrefix(e.Admin, "http://")
	return g
}

// answer is the reply of a client.
type answer struct {
	status int
	engine string
	body   string
	err    error
}

func (g *gateway) do(method, path, body string) answer { return g.doAs("", method, path, body) }

// doAs sends a request with an id that the engine stores.
func (g *gateway) doAs(id, method, path, body string) (a answer) {
	r, err := http.NewRequestWithContext(g.t.Context(), method, g.url+path, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(harness.TestID, id)
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	return answer{reply.StatusCode, reply.Header.Get("X-Engine"), string(text), err}
}

// whole reports whether an answer is complete.
func (a *answer) whole(stream bool) bool {
	return a.err == nil && a.status == 200 && strings.Contains(a.body, `"cached_tokens"`) &&
		(!stream || strings.HasSuffix(a.body, "data: [DONE]\n\n"))
}

var cached = regexp.MustCompile(`"cached_tokens":(\d+)`)

func (a *answer) cached() (n int) {
	if m := cached.FindStringSubmatch(a.body); m != nil {
		fmt.Sscan(m[1], &n)
	}
	return n
}

func completion(stream bool, tokens []uint32) string {
	text, _ := json.Marshal(map[string]any{"model": model, "stream": stream, "prompt": tokens}) // the value can be encoded
	return string(text)
}

// idle waits until no request is under way.
func (g *gateway) idle() {
	g.t.Helper()
	harness.Eventually(g.t, "all loads are zero", func() (bool, string) {
		var list api.LoadList
		_, reply, err := harness.Request(g.indexer.HTTP, "GET", "/v1/loads", "")
		if err == nil {
			err = json.Unmarshal([]byte(reply), &list)
		}
		if err != nil {
			return false, err.Error()
		}
		for _, m := range list.Models {
			if m.Requests > 0 {
				return false, reply
			}
			for _, r := range m.Ranks {
				if r.ActiveBlocks+r.ActivePrefillTokens+r.ActiveRequests > 0 {
					return false, reply
				}
			}
		}
		return true, reply
	})
}

// metric is a counter of the indexer.
func (g *gateway) metric(name string) float64 {
	g.t.Helper()
	return g.indexer.Metric(name)
}

// compared checks that the estimated prompt tokens of each request are within a tenth of the engine's number.
func (g *gateway) compared(requests int) {
	g.t.Helper()
	of := g.metric(`kvatlas_prompt_estimates_total{model="` + model + `",outcome="close"}`)
	estimated, actual := g.metric("kvatlas_prompt_tokens_estimated_total"), g.metric("kvatlas_prompt_tokens_actual_total")
	g.t.Logf("%v prompt tokens are estimated for %v requests, and the engines count %v", estimated, of, actual)
	if int(of) != requests || actual == 0 || max(estimated, actual)-min(estimated, actual) > actual/10 {
		g.t.Errorf("the estimates of %v of %d requests are within a tenth", of, requests)
	}
}

var bothModes = map[string][]string{"as deployed": nil, "full duplex": harness.EnvoyDuplex}

// TestWarmWorker sends chats of several turns as token ids, in both modes, streamed and not. Every turn must go to the
// worker of the turn before. The same holds for a prompt of many chunks.
func TestWarmWorker(t *testing.T) {
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := start(t, edits...)
			reused := 0
			for chat := range 20 {
				prompt := harness.Tokens(chat*100_000, 40*blockSize)
				if chat == 0 {
					prompt = harness.Tokens(7_000_000, 30_000) // some 200 KB
				}
				first := g.do("POST", "/v1/completions", completion(chat%2 == 0, prompt))
				if !first.whole(chat%2 == 0) {
					t.Fatal(first)
				}
				for turn := range 3 {
					prompt = append(prompt, harness.Tokens(chat*100_000+50_000+turn*1000, 3*blockSize)...)
					a := g.do("POST", "/v1/completions", completion(turn%2 == 0, prompt))
					if !a.whole(turn%2 == 0) || a.engine != first.engine || a.cached() < len(prompt)-4*blockSize {
						t.Fatalf("chat %d, turn %d: %.300v; the first turn was at %s", chat, turn, a, first.engine)
					}
					reused += a.cached()
				}
			}
			g.idle()
			if n := g.metric("kvatlas_route_reused_tokens_total"); int(n) != reused {
				t.Errorf("%v reused tokens are counted, want %d", n, reused)
			}
			g.compared(20 * 4)
			// Text is routed by load. So is an unknown model name beside a single model: the engine refuses it.
			a := g.do("POST", "/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"hello"}]}`)
			if !a.whole(false) {
				t.Error(a)
			}
			for body, status := range map[string]int{`{"model":"other","prompt":[1]}`: 400, `{"model":`: 400} {
				if a := g.do("POST", "/v1/completions", body); a.status != status || !strings.Contains(a.body, `"error"`) {
					t.Errorf("%s: %v", body, a)
				}
			}
			g.idle()
			// no worker may be chosen
			for i := range g.engines {
				drain := `{"drain":true}`
				if status, reply, err := harness.Request(g.indexer.HTTP, "PATCH", fmt.Sprintf("/v1/workers/worker-%d", i),
					drain); status != 200 {
					t.Fatal(status, reply, err)
				}
			}
			if a := g.do("POST", "/v1/completions", completion(false, harness.Tokens(1, 64))); a.status != 503 ||
				!strings.Contains(a.body, "no_workers") {
				t.Error(a)
			}
		})
	}
}

// TestEngineDies sends a thousand requests, half of them streamed, and kills an engine under load. Only started answers
// may end early, and no load remains at the end.
func TestEngineDies(t *testing.T) {
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := start(t, edits...)
			const requests, clients = 1000, 16
			var mu sync.Mutex
			next, cut := 0, 0
			var all sync.WaitGroup
			for range clients {
				all.Go(func() {
					for {
						mu.Lock()
						n := next
						next++
						mu.Unlock()
						if n >= requests {
							return
						}
						if n == requests/3 {
							g.engines[1].Kill()
						}
						rng := rand.New(rand.NewPCG(1, uint64(n)))
						stream := n%2 == 0
						id := fmt.Sprint(n)
						a := g.doAs(id, "POST", "/v1/completions",
							completion(stream, harness.Tokens(rng.IntN(50)*10_000, 64+rng.IntN(512))))
						if a.whole(stream) {
							continue
						}
						begun := g.engines[1].Begun(id) // Envoy already has the start of the answer
						mu.Lock()
						if cut++; !begun || cut > clients {
							t.Errorf("request %d, stream %v: %+v", n, stream, a)
						}
						mu.Unlock()
					}
				})
			}
			all.Wait()
			g.idle()
			t.Logf("%d answers were cut, %v requests answered by another worker than chosen", cut,
				g.metric("kvatlas_route_moved_total"))
			if g.metric("kvatlas_route_moved_total") == 0 {
				t.Error("no request was saved by a retry")
			}
		})
	}
}

// TestEngineFails: an engine answers with 500. Envoy sends each request to another worker, the indexer counts the
// failures and no longer chooses the worker first, and the worker is chosen again once it has recovered. Without an
// indexer, Envoy's outlier detection ejects the engine.
func TestEngineFails(t *testing.T) {
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := start(t, edits...)
			prompt := harness.Tokens(1, 40*blockSize)
			first := g.do("POST", "/v1/completions", completion(false, prompt))
			sick := slices.IndexFunc(g.engines, func(e *openaisim.Engine) bool { return e.Addr == first.engine })
			if sick < 0 {
				t.Fatal(first)
			}
			e := g.engines[sick]
			e.Fail(500)
			const requests = 60
			for i := range requests {
				a := g.do("POST", "/v1/completions", completion(i%2 == 0, append(prompt, harness.Tokens(i*1000, blockSize)...)))
				if !a.whole(i%2 == 0) || a.engine == e.Addr {
					t.Fatalf("request %d: %+v", i, a)
				}
			}
			if n := e.Failed(); n == 0 || n > requests/2 {
				t.Errorf("%d of %d requests were sent to the failing engine", n, requests)
			}
			if n := int(g.metric("kvatlas_request_failures_total")); n == 0 || n > e.Failed() {
				t.Errorf("%d failures are counted; the engine has failed %d times", n, e.Failed())
			}
			e.Fail(0)
			harness.Eventually(t, "the engine serves again", func() (bool, string) {
				a := g.do("POST", "/v1/completions", completion(false, harness.Tokens(rand.IntN(1<<20)*100_000, 40*blockSize)))
				return a.engine == e.Addr, fmt.Sprint(a)
			})
			g.idle()

			g.indexer.Kill()
			e.Fail(503)
			if name != "as deployed" {
				return // Envoy passes requests on without an indexer in the mode BUFFERED only
			}
			harness.Eventually(t, "Envoy ejects the engine", func() (bool, string) {
				if a := g.do("POST", "/v1/completions", completion(false, prompt)); !a.whole(false) || a.engine == e.Addr {
					t.Fatalf("%+v", a)
				}
				_, stats, err := harness.Request(g.admin, "GET", "/stats?filter=outlier_detection.ejections_enforced_total", "")
				return err == nil && !strings.HasSuffix(strings.TrimSpace(stats), ": 0"), stats
			})
		})
	}
}

// TestWithoutIndexer: once the indexer has gone, requests go round robin.
func TestWithoutIndexer(t *testing.T) {
	g := start(t)
	g.indexer.Kill()
	for i := range 10 {
		if a := g.do("POST", "/v1/completions", completion(i%2 == 0, harness.Tokens(1, 64))); !a.whole(i%2 == 0) {
			t.Fatal(a)
		}
	}
}

// TestDemonstration runs make demo-gateway. The output has times and reasons, the warm worker answers every second
// turn, and no file remains.
func TestDemonstration(t *testing.T) {
	tmp := t.TempDir()
	cmd := exec.Command("make", "demo-gateway")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "TMPDIR="+tmp)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	said := string(out)
	turns := regexp.MustCompile(`(?s)TURN (\d): POST (\S+)/v1.*?(\d+) tokens, \d+ whole blocks.*?`+
		`Envoy selected (\S+), with (\d+) of (\d+) tokens cached: `).FindAllStringSubmatch(said, -1)
	if len(turns) != 2 || turns[0][4] != turns[1][4] || turns[0][5] != "0" || turns[1][5] == "0" ||
		turns[0][3] != turns[0][6] || turns[1][3] != turns[1][6] {
		t.Fatalf("the turns are %q in\n%s", turns, said)
	}
	for _, pattern := range []string{`\$ indexer serve .*--grpc-listen`, `\$ worker-shim run .*--worker worker-2`,
		`\$ envoy -c `, `WORKER +RANK +COST +PROBABILITY`, `the events are in the index after`,
		`(?s)TURN 2.*\* +` + turns[1][4] + ` +0 +\S+ +1.000 +` + turns[1][5] + ` `,
		`the worker of the first turn answered 10 of 10 second turns`} {
		if !regexp.MustCompile(pattern).MatchString(said) {
			t.Errorf("%s is missing in\n%s", pattern, said)
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("the demonstration leaves %v, %v", left, err)
	}
	if _, err := http.Get(turns[0][2]); err == nil {
		t.Error("Envoy still listens")
	}
}
