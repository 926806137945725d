package gateway

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// world is a router and a registry of the model m. Workers a, b, c are at 10.0.0.1 to 3, and d has no address. The
// router chooses b, or the first permitted worker, and never d.
type world struct {
	pool *registry.Pool
	log  []string // calls of the router
	ids  map[string]string
	fail error
}

func newWorld() *world {
	w := &world{pool: &registry.Pool{Model: "m"}, ids: map[string]string{}}
	add := func(name string, rank events.Rank, endpoint string) {
		record := &api.WorkerRecord{State: api.WorkerSchedulable}
		record.Endpoint, record.LoRAAdapters = endpoint, []string{"adapter"}
		w.pool.Ranks = append(w.pool.Ranks, registry.PoolRank{
			RankKey: events.RankKey{Instance: events.WorkerID(name), Rank: rank}, BlockSize: 16, Record: record})
	}
	add("a", 0, "http://10.0.0.1:8000/v1")
	add("b", 0, "10.0.0.2:8000")
	add("b", 1, "10.0.0.2:8000")
	add("c", 0, "http://10.0.0.3")
	add("d", 0, "http://some.name:8000")
	return w
}

func (w *world) config() Config {
	return Config{Select: w.Select, Bookings: w, Text: true,
		Pool: func(model string) *registry.Pool {
			if model == "m" {
				return w.pool
			}
			return &registry.Pool{Model: model}
		},
		All: func() (list []registry.ModelRank) {
			for _, r := range w.pool.Ranks {
				list = append(list, registry.ModelRank{Model: "m", PoolRank: r})
			}
			return list
		},
		Resolve: func(name string) (registry.Target, error) {
			switch name {
			case "adapter":
				return registry.Target{Model: "m", LoRA: name}, nil
			case "alias":
				return registry.Target{Model: "m"}, nil
			case "two models'":
				return registry.Target{}, api.Errorf(api.CodeConflict, "the name is ambiguous")
			}
			return registry.Target{Model: name}, nil
		},
		Bind: func(model, session string, rank events.RankKey, requestID string) {
			w.say("bind %s %s to %s %d of %s", model, session, rank.Instance, rank.Rank, w.id(requestID))
		},
		Metrics: w,
	}
}

func (w *world) Moved(model string)              { w.say("moved %s", model) }
func (w *world) ReportAnswer(_ string, n uint64) { w.say("answered %d", n) }

func (w *world) ReportReused(_ string, n uint64, alone bool) {
	if alone {
		w.say("reused %d without the prefill worker", n)
		return
	}
	w.say("reused %d", n)
}

func (w *world) Prefilled(_, outcome string, _ time.Duration) { w.say("prefill: %s", outcome) }

func (w *world) PromptCompared(model string, estimated, actual, completion uint64) {
	w.say("compared %s %d with %d and %d", model, estimated, actual, completion)
}

func (w *world) TokenizationAvoided(model string, tokens int, took time.Duration) {
	w.say("avoided %s %d %v", model, tokens, took)
}

func (w *world) Unsupported(api string, names []string) {
	if len(names) > 0 {
		w.say("unsupported %s %v", api, names)
	}
}

func (w *world) say(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

// id returns a short name for a request's id.
func (w *world) id(long string) string {
	if w.ids[long] == "" {
		w.ids[long] = fmt.Sprint("r", len(w.ids)+1)
	}
	return w.ids[long]
}

func (w *world) Select(_ context.Context, r *api.SelectRequest) (*api.Selection, error) {
	text := ""
	if r.Text != nil {
		text = fmt.Sprintf(" text %q %s", r.Text.Prompt, r.Messages)
		if r.Text.Request != nil {
			text = fmt.Sprintf(" %s %s", r.API, r.Request)
		}
	}
	if r.SessionID != "" {
		text += " session " + r.SessionID
	}
	w.say("select %s %s tokens %v isl %d lora %q salt %q of %v%s", w.id(r.RequestID), r.Model, r.Tokens, r.ISLTokens,
		r.LoRA, r.CacheSalt, r.Endpoints, text)
	if w.fail != nil {
		return nil, w.fail
	}
	if r.Model != "m" {
		return nil, api.Errorf(api.CodeUnknownModel, "no %s", r.Model)
	}
	out := &api.Selection{Model: "m", ISLTokens: 7, Explanation: &routing.Explanation{}}
	for i, p := range w.pool.Ranks {
		if r.Endpoints != nil && !slices.Contains(r.Endpoints, p.Record.Endpoint) {
			continue
		}
		if out.Worker == "" || p.Instance == "b" {
			out.Worker, out.Rank, out.Endpoint = p.Instance, p.Rank, p.Record.Endpoint
		}
		out.Explanation.Candidates = append(out.Explanation.Candidates,
			routing.Considered{Worker: p.Instance, Rank: p.Rank, Cost: float64(10 - i)})
	}
	return out, nil
}

func (w *world) Book(_ context.Context, r *api.BookRequest) (*api.Booking, error) {
	w.say("book %s at %s/%d prefill %d of %d", w.id(r.RequestID), r.Worker, r.Rank, r.EffectivePrefillTokens, r.ISLTokens)
	return &api.Booking{}, nil
}

func (w *world) Progress(context.Context, *api.RequestRef) error { return nil }

func (w *world) PrefillComplete(_ context.Context, r *api.RequestRef) error {
	w.say("prefill complete %s", w.id(r.RequestID))
	return nil
}

func (w *world) Free(_ context.Context, r *api.RequestRef) error {
	if r.Result != "" {
		w.say("the result is %s", r.Result)
	}
	w.say("free %s", w.id(r.RequestID))
	return nil
}

func (w *world) EngineLoad(_ context.Context, l *api.EngineLoads) error {
	for _, r := range l.Results {
		w.say("%s: %s", r.Worker, r.Result)
	}
	return nil
}

// script is a stream that sends messages and then ends.
type script struct {
	grpc.ServerStream
	t    *testing.T
	w    *world
	send []string
}

func (s *script) Context() context.Context { return s.t.Context() }

func (s *script) Recv() (*extprocv3.ProcessingRequest, error) {
	if len(s.send) == 0 {
		return nil, io.EOF
	}
	line := s.send[0]
	s.send = s.send[1:]
	if pause, is := strings.CutPrefix(line, "pause "); is {
		d, err := time.ParseDuration(pause)
		if err != nil {
			s.t.Fatal(err)
		}
		time.Sleep(d)
		return s.Recv()
	}
	return message(s.t, strings.Fields(line)), nil
}

func (s *script) Send(r *extprocv3.ProcessingResponse) error {
	s.w.log = append(s.w.log, transcript(Effects{Replies: []*extprocv3.ProcessingResponse{r}})...)
	return nil
}

// TestChoices serves streams and compares the calls of the router and the replies to the proxy.
func TestChoices(t *testing.T) {
	const from = "headers buffered"
	const all = "[http://10.0.0.1:8000/v1 10.0.0.2:8000 http://10.0.0.3]" // the addresses that proxies can reach
	for name, c := range map[string]struct {
		send []string
		fail error
		want []string
	}{
		"tokens": {
			[]string{from, `body {"model":"m","prompt":[1,2,3],"cache_salt":"s"}`, "response 10.0.0.2:8000",
				"response-body x", `response-body "cached_tokens":2}`, "response-body end"}, nil,
			[]string{"<- headers", `select r1 m tokens [1 2 3] isl 0 lora "" salt "s" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"<- response", "prefill complete r1", "<- response-body", "reused 2", "<- response-body",
				"free r1", "<- response-body"},
		},
		"the tokens of an answer": {
			[]string{from, `body {"model":"m","prompt":[1,2,3]}`, "response 10.0.0.2:8000",
				`response-body {"usage":{"prompt_tokens":3,"completion_tokens":7}}`, "response-body end"}, nil,
			[]string{"<- headers", `select r1 m tokens [1 2 3] isl 0 lora "" salt "" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"<- response", "prefill complete r1", "<- response-body", "answered 7", "compared m 7 with 3 and 7", "free r1",
				"<- response-body"},
		},
		"a response": {
			[]string{from + " /v1/responses", `body {"model":"m","input":"hi","stream":true}`, "response 10.0.0.3:80",
				`response-body data: {"response":{"id":"resp_1"}}`, "response-body end"}, nil,
			[]string{"<- headers", `select r1 m tokens [] isl 0 lora "" salt "" of ` + all + ` responses {"input":"hi"}`,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"b: refused", "moved m", "free r1", "book r2 at c/0 prefill 7 of 7", "<- response", "prefill complete r2",
				"bind m resp_1 to c 0 of r2", "<- response-body", "free r2", "<- response-body"},
		},
		"a response that continues another": {
			[]string{from + " /v1/responses", `body {"model":"m","input":"hi","previous_response_id":"resp_1"}`}, nil,
			[]string{"<- headers", "unsupported responses [previous_response_id]",
				`select r1 m tokens [] isl 7 lora "" salt "" of ` + all + " session resp_1",
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"kvatlas-unsupported-fields=previous_response_id metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000", "free r1"},
		},
		"messages": {
			[]string{from + " /v1/messages", `body {"model":"m","system":"s","messages":[],"max_tokens":9}`}, nil,
			[]string{"<- headers", `select r1 m tokens [] isl 0 lora "" salt "" of ` + all +
				` messages {"system":"s","messages":[],"max_tokens":9}`,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000", "free r1"},
		},
		"an adapter, a subset, and no answer": {
			[]string{from + " 10.0.0.1:8000,10.9.9.9:1", `body {"model":"adapter","prompt":[[1],[2]]}`}, nil,
			[]string{"<- headers", `select r1 m tokens [1] isl 2 lora "adapter" salt "" of [http://10.0.0.1:8000/v1]`,
				"<- body gateway-destination-endpoint=10.0.0.1:8000 metadata=10.0.0.1:8000", "free r1"},
		},
		"an adapter by its number, as for TensorRT-LLM": {
			[]string{from + " 10.0.0.1:8000", `body {"model":"m","prompt":[1],"lora_request":{"lora_int_id":0,"lora_path":"x"}}`},
			nil,
			[]string{"<- headers", `select r1 m tokens [1] isl 0 lora "lora_id:0" salt "" of [http://10.0.0.1:8000/v1]`,
				"<- body gateway-destination-endpoint=10.0.0.1:8000 metadata=10.0.0.1:8000", "free r1"},
		},
		"a lora_request of another form": {
			[]string{from + " 10.0.0.1:8000", `body {"model":"m","prompt":[1],"lora_request":"sql"}`}, nil,
			[]string{"<- headers", "unsupported completions [lora_request]",
				`select r1 m tokens [] isl 2 lora "" salt "" of [http://10.0.0.1:8000/v1]`,
				"<- body gateway-destination-endpoint=10.0.0.1:8000 kvatlas-unsupported-fields=lora_request " +
					"metadata=10.0.0.1:8000", "free r1"},
		},
		"text, and another answers": {
			[]string{from, `body {"prompt":["hello","you"]}`, "response 10.0.0.3:80", "response-body x"}, nil,
			[]string{"<- headers", `select r1 m tokens [] isl 1 lora "" salt "" of ` + all + ` text "hello" `,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"b: refused", "moved m", "free r1", "book r2 at c/0 prefill 7 of 7", "<- response",
				"prefill complete r2", "<- response-body", "free r2"},
		},
		"the last fallback answers with an error": {
			[]string{from, `body {"prompt":[1]}`, "response 10.0.0.1:8000 status 500", "response-body x", "response-body end"},
			nil,
			[]string{"<- headers", `select r1 m tokens [1] isl 0 lora "" salt "" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"b: refused", "c: refused", "moved m", "free r1", "book r2 at a/0 prefill 7 of 7", "<- response",
				"<- response-body", "the result is status", "free r2", "<- response-body"},
		},
		"a stranger answers": {
			[]string{from, `body {"model":"m","messages":[{"role":"user"}]}`, "response 10.7.7.7:80", "response-body x end"},
			nil,
			[]string{"<- headers",
				`select r1 m tokens [] isl 0 lora "" salt "" of ` + all + ` text "" [{"role":"user"}]`,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000",
				"a: refused", "b: refused", "c: refused", "moved m", "free r1", "<- response", "<- response-body"},
		},
		"neither": {
			[]string{from, `body {"model":"m","input":"x"}`}, nil,
			[]string{"<- headers", `select r1 m tokens [] isl 1 lora "" salt "" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000", "free r1"},
		},
		"no such model": {
			[]string{from + " 10.0.0.1:8000", `body {"model":"x","prompt":[1]}`}, nil,
			[]string{"<- headers", "unsupported completions [model]",
				`select r1 m tokens [] isl 1 lora "" salt "" of [http://10.0.0.1:8000/v1]`,
				"<- body gateway-destination-endpoint=10.0.0.1:8000 kvatlas-unsupported-fields=model " +
					"metadata=10.0.0.1:8000", "free r1"},
		},
		"an adapter in the form of SGLang": {
			[]string{from + " 10.0.0.1:8000", `body {"model":"m: a","prompt":[1]}`}, nil,
			[]string{"<- headers", `select r1 m tokens [1] isl 0 lora "a" salt "" of [http://10.0.0.1:8000/v1]`,
				"<- body gateway-destination-endpoint=10.0.0.1:8000 metadata=10.0.0.1:8000", "free r1"},
		},
		"no JSON": {
			[]string{from, `body {"model"`}, nil,
			[]string{"<- headers", `<- status 400 {"error":{"code":"malformed","message":"the body is not the JSON of a ` +
				`request: unexpected end of JSON input","type":"kvatlas_error"}}`},
		},
		"an alias": {
			[]string{from, `body {"model":"alias","prompt":[1]}`}, nil,
			[]string{"<- headers", `select r1 m tokens [1] isl 0 lora "" salt "" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000", "free r1"},
		},
		"an adapter, by load": {
			[]string{from, `body {"model":"adapter","input":"x"}`}, nil,
			[]string{"<- headers", `select r1 m tokens [] isl 1 lora "adapter" salt "" of ` + all,
				"<- body gateway-destination-endpoint=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000 data-parallel-rank=1 " +
					"metadata=10.0.0.2:8000,10.0.0.3:80,10.0.0.1:8000", "free r1"},
		},
		"a name of two models": {
			[]string{from, `body {"model":"two models'","prompt":[1]}`}, nil,
			[]string{"<- headers",
				`<- status 409 {"error":{"code":"conflict","message":"the name is ambiguous","type":"kvatlas_error"}}`},
		},
		"shed": {
			[]string{from, `body {"model":"m","prompt":[1]}`}, api.Errorf(api.CodeOverloaded, "busy"),
			[]string{"<- headers", `select r1 m tokens [1] isl 0 lora "" salt "" of ` + all,
				`<- status 429 {"error":{"code":"overloaded","message":"busy","type":"kvatlas_error"}}`},
		},
		"no worker of the subset": {
			[]string{from + " 10.9.9.9:1", `body {"model":"m","prompt":[1]}`}, nil,
			[]string{"<- headers", `<- status 503 {"error":{"code":"no_workers","message":"no worker of \"m\" has an ` +
				`address of the proxy's subset: 10.9.9.9:1","type":"kvatlas_error"}}`},
		},
		"no body": {
			[]string{from + " 10.0.0.3:80 end", "response"}, nil,
			[]string{"<- headers gateway-destination-endpoint=10.0.0.3:80 metadata=10.0.0.3:80", "<- response"},
		},
		"no body, and no worker": {
			[]string{from + " 10.9.9.9:80 end"}, nil,
			[]string{`<- status 503 {"error":{"code":"no_workers","message":"no worker may be chosen: see ` +
				"`indexer workers`" + `","type":"kvatlas_error"}}`},
		},
	} {
		w := newWorld()
		w.fail = c.fail
		if err := New(w.config()).Process(&script{t: t, w: w, send: c.send}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got, want := strings.Join(w.log, "\n"), strings.Join(c.want, "\n"); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

// moving is a router. The chosen worker registers at another address during the choice.
type moving struct {
	*world
	to string
}

func (m moving) Select(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
	out, err := m.world.Select(ctx, r)
	out.Endpoint = m.to
	return out, err
}

// TestRanksAtOwnAddresses: each rank of a worker is chosen by its own address, even if a proxy cannot reach some of
// them. A server with a part of the ranks counts its own.
func TestRanksAtOwnAddresses(t *testing.T) {
	const first, second = "10.0.0.2:8000", "10.0.0.2:8001"
	for _, c := range []struct {
		ranks  []string
		subset string
		moved  *string // address of the chosen rank after the choice
		of, to string
	}{
		{[]string{first, second}, "", nil, "[]", "10.0.0.2:8001,10.0.0.2:8000"},
		{[]string{first, second, ""}, "", nil, "[10.0.0.2:8000 10.0.0.2:8001]",
			"10.0.0.2:8001,10.0.0.2:8000"},
		{[]string{"", second}, "", nil, "[10.0.0.2:8001]", "10.0.0.2:8001"},
		{[]string{first, second}, second, nil, "[10.0.0.2:8001]", "10.0.0.2:8001"},
		{[]string{first, second}, first, nil, "[10.0.0.2:8000]", "10.0.0.2:8000"},
		{[]string{first, first, second, second}, second, nil, "[10.0.0.2:8001]", "10.0.0.2:8001 data-parallel-rank=1"},
		{[]string{first, first, second, second}, first, nil, "[10.0.0.2:8000]", "10.0.0.2:8000 data-parallel-rank=1"},
		{[]string{"http://" + first, first}, first, nil, "[http://10.0.0.2:8000 10.0.0.2:8000]",
			"10.0.0.2:8000 data-parallel-rank=1"},
		{[]string{first, second}, "", new(""), "[]", ""},
		{[]string{first, second}, first, new(second), "[10.0.0.2:8000]", ""},
	} {
		w := newWorld()
		w.pool.Ranks = nil
		for i, at := range c.ranks {
			record := &api.WorkerRecord{State: api.WorkerSchedulable}
			record.Endpoint = at
			w.pool.Ranks = append(w.pool.Ranks, registry.PoolRank{
				RankKey: events.RankKey{Instance: "b", Rank: events.Rank(i)}, BlockSize: 16, Record: record})
		}
		cfg := w.config()
		if c.moved != nil {
			cfg.Select = moving{w, *c.moved}.Select
		}
		send := []string{"headers buffered " + c.subset, `body {"model":"m","prompt":[1]}`}
		if err := New(cfg).Process(&script{t: t, w: w, send: send}); err != nil {
			t.Fatal(err)
		}
		want := []string{"<- headers", `select r1 m tokens [1] isl 0 lora "" salt "" of ` + c.of}
		if addresses, _, _ := strings.Cut(c.to, " "); c.to != "" {
			want = append(want, "<- body gateway-destination-endpoint="+c.to+" metadata="+addresses, "free r1")
		} else {
			want = append(want, "free r1", `<- status 503 {"error":{"code":"no_workers","message":"the chosen worker of \"m\" `+
				`has left its permitted address","type":"kvatlas_error"}}`)
		}
		if !slices.Equal(w.log, want) {
			t.Errorf("ranks at %q, subset %q:\n%s\nwant\n%s", c.ranks, c.subset, strings.Join(w.log, "\n"),
				strings.Join(want, "\n"))
		}
	}
}

// TestKVSource: a request has the address of the KV source in the header of llm-d's sidecar, if the address has a
// single rank.
func TestKVSource(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"a", "10.0.0.1:8000"}, {"c", "10.0.0.3:80"}, {"b", ""}, {"d", ""}, {"", ""},
	} {
		w := newWorld()
		cfg := w.config()
		cfg.Select = func(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
			s, err := w.Select(ctx, r)
			for _, p := range w.pool.Ranks {
				if p.Instance == events.WorkerID(c.source) && err == nil {
					s.KVSource = &api.KVSource{Worker: p.Instance, Rank: p.Rank, Endpoint: p.Record.Endpoint}
				}
			}
			return s, err
		}
		for _, mode := range []string{"duplex", "buffered"} {
			for _, body := range []string{`{"prompt":[1]}`, ""} {
				if body == "" && c.source != "" {
					continue // any worker, without a source
				}
				w.log = nil
				stream := &script{t: t, w: w, send: []string{"headers " + mode, "body " + body + " end"}}
				if err := New(cfg).Process(stream); err != nil {
					t.Fatal(err)
				}
				log := strings.Join(w.log, "\n") + "\n"
				_, got, _ := strings.Cut(log, "kv-cache-source-host-port=")
				got = got[:max(0, strings.IndexAny(got, " \n"))]
				if got != c.want {
					t.Errorf("%+v in %s: %q: %s", c, mode, got, log)
				}
			}
		}
	}
}

// TestFallbacksStayInTheSubset: a worker that registers again during a choice is a fallback only inside the subset.
func TestFallbacksStayInTheSubset(t *testing.T) {
	s := New(newWorld().config())
	of := &api.Selection{Model: "m", Worker: "a", Endpoint: "10.0.0.1:8000", Explanation: &routing.Explanation{
		Candidates: []routing.Considered{{Worker: "a"}, {Worker: "b"}, {Worker: "c"}, {Worker: "d"}}}}
	c := s.choice(of, []string{"10.0.0.1:8000", "10.0.0.3:80"}, formAlone)
	if want := []string{"10.0.0.1:8000", "10.0.0.3:80"}; !slices.Equal(c.Addresses, want) {
		t.Errorf("%q, want %q", c.Addresses, want)
	}
}

// TestBodiesAreBounded: a request is refused if complete bodies fill the room. The room becomes free again.
func TestBodiesAreBounded(t *testing.T) {
	w := newWorld()
	cfg := w.config()
	cfg.MaxBodies = 100_000
	s := New(cfg)
	other := s.bodies.Begin(func() { t.Error("a complete body makes room") })
	if failure := other.Add(99_000); failure != nil || other.Complete() != nil {
		t.Fatal(failure)
	}
	send := []string{"headers duplex", "body bytes-" + strings.Repeat("x", 20_000), "body y end"}
	if err := s.Process(&script{t: t, w: w, send: send}); err != nil {
		t.Fatal(err)
	}
	if len(w.log) != 1 || !strings.HasPrefix(w.log[0], "<- status 429") || s.bodies.Held() != 99_000 {
		t.Errorf("%q, and %d bytes are counted", w.log, s.bodies.Held())
	}
	other.End()
	send = []string{"headers duplex", "body " + strings.Repeat("x", 300_000)}
	if err := s.Process(&script{t: t, w: w, send: send}); err != nil || s.bodies.Held() != 0 {
		t.Errorf("a body alone: %v, and %d bytes are counted", err, s.bodies.Held())
	}
}

// TestKeysAreExact: names of fields are case-sensitive and unique. Other spellings are unknown.
func TestKeysAreExact(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m","MODEL":"n","prompt":[1]}`:                       "[MODEL]\nselect r1 m tokens []",
		`{"MODEL":"n","model":"m","Prompt":[2],"prompt":[1]}`:          "[MODEL Prompt]\nselect r1 m tokens []",
		`{"\u006dodel":"m","prompt":[1]}`:                              "select r1 m tokens [1]",
		`{"model":"m","prompt":[1],"Cache_Salt":"s"}`:                  `salt "" of`,
		`{"model":"m","model":"m","prompt":[1]}`:                       "<- status 400",
		`{"model":"m","prompt":[1],"prompt":[2]}`:                      "<- status 400",
		`{"model":"m","prompt":[1],"temperature":1,"x":{"model":"n"}}`: "kvatlas-unsupported-fields=x ",
	} {
		w := newWorld()
		send := []string{"headers buffered ", "body " + body}
		if err := New(w.config()).Process(&script{t: t, w: w, send: send}); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(strings.Join(w.log, "\n"), want) {
			t.Errorf("%s: %q, want %s", body, w.log, want)
		}
	}
}

// TestAddress covers the addresses that proxies can reach.
func TestAddress(t *testing.T) {
	for endpoint, want := range map[string]string{
		"http://10.0.0.1:8000": "10.0.0.1:8000", "https://10.0.0.1": "10.0.0.1:443", "10.0.0.1:8000": "10.0.0.1:8000",
		"http://[::1]:8000/v1": "[::1]:8000", "[::1]:8000": "[::1]:8000", "http://[::1]": "[::1]:80", "10.0.0.1": "10.0.0.1:80",
		"http://name:8000": "", "name:8000": "", "": "", "http://%zz": "", "tcp://10.0.0.1:70000": "",
		"http://169.254.169.254": "", "169.254.169.254:80": "", "http://[::ffff:169.254.169.254]:80/latest": "",
		"[fd00:ec2::254]:80": "", "100.100.100.200": "", "http://0.0.0.0:80": "",
	} {
		if got := address(endpoint); got != want {
			t.Errorf("%q is %q, want %q", endpoint, got, want)
		}
	}
}

// TestTextsOfRequests: null is treated as absent. A request's own template is not rendered. Texts that engines refuse
// are not texts.
func TestTextsOfRequests(t *testing.T) {
	for body, text := range map[string]bool{
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":null,"chat_template_kwargs":null}`:     true,
		`{"model":"m","prompt":"hi","messages":null,"tools":null}`:                                               true,
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"chat_template":"{{ 1 }}"}`:                    false,
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"chat_template":"x"}}`: false,
		`{"model":"m","messages":"hi"}`:                                                      false,
		`{"model":"m","messages":{"role":"user","content":"hi"}}`:                            false,
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":{}}`:               false,
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":1}`: false,
	} {
		w := newWorld()
		send := []string{"headers buffered ", "body " + body}
		if err := New(w.config()).Process(&script{t: t, w: w, send: send}); err != nil {
			t.Fatal(err)
		}
		if asked := strings.Contains(strings.Join(w.log, "\n"), " text "); asked != text {
			t.Errorf("%s: as text: %v\n%q", body, asked, w.log)
		}
	}
	w := newWorld()
	config := w.config()
	config.Templates = true
	send := []string{"headers buffered ",
		`body {"model":"m","messages":[{"role":"user","content":"hi"}],"chat_template":"{{ 1 }}"}`}
	if err := New(config).Process(&script{t: t, w: w, send: send}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.Join(w.log, "\n"), " text ") {
		t.Errorf("a request with a template is chosen by load although templates are run: %q", w.log)
	}
}
