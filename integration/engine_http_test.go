package integration

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// engineAPI is the HTTP API of an engine: replies by path. No replies means that the engine is loading.
// internal/ingest/enginehttp has the replies of the engines' own code.
type engineAPI struct {
	*httptest.Server
	mu      sync.Mutex
	answers map[string]string
	asked   map[string]int // requests by path
}

func startEngineAPI(t *testing.T) *engineAPI {
	a := &engineAPI{asked: map[string]int{}}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		defer a.mu.Unlock()
		body, ok := a.answers[r.URL.Path]
		a.asked[r.URL.Path]++
		switch {
		case a.answers == nil:
			w.WriteHeader(http.StatusServiceUnavailable)
		case ok:
			fmt.Fprint(w, body)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(a.Close)
	return a
}

func (a *engineAPI) says(answers map[string]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers = maps.Clone(answers)
}

// adds adds a path.
func (a *engineAPI) adds(path, answer string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers[path] = answer
}

// vllm replies as vLLM 0.32 does. The engines are the ranks.
func (a *engineAPI) vllm(model string, blockSize int, ranks ...*enginesim.Engine) {
	var sources []string
	for i, e := range ranks {
		sources = append(sources, fmt.Sprintf(
			`"%d":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":""}`,
			i, strings.Replace(e.Endpoint(), "127.0.0.1", "*", 1), strings.Replace(e.Replay(), "127.0.0.1", "*", 1)))
	}
	a.says(map[string]string{
		"/kv_event_sources": "{" + strings.Join(sources, ",") + "}", "/version": `{"version":"0.32.0"}`,
		"/v1/models": fmt.Sprintf(`{"object":"list","data":[{"id":%q,"parent":null}]}`, model),
		"/metrics": fmt.Sprintf(
			"vllm:cache_config_info{block_size=\"%d\",effective_attention_block_size=\"None\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n",
			blockSize),
		"/server_info": `{"vllm_config":{"scheduler_config":{"max_num_batched_tokens":2048}}}`,
	})
}

func startRank(t *testing.T, rank events.Rank, blockSize int) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(t.Context(), enginesim.Config{
		BlockSize: blockSize, Capacity: 100, Rank: rank, Endpoint: "tcp://" + loopback.Reserve(t), Replay: "tcp://" +
			loopback.Reserve(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

// TestShimLearnsFromTheEngine runs a shim with only the address of an engine's API. The shim waits for the engine,
// reads model, block size, endpoints and ranks, and uses the address as the worker's name. It follows an engine that
// returns with other settings at another place.
func TestShimLearnsFromTheEngine(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front := startEngineAPI(t)
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL)
	shim.WaitFor("waiting for the engine's settings over HTTP.*503")
	first, second := startRank(t, 0, 16), startRank(t, 1, 16)
	harness.ServePrompt(t, first, harness.Tokens(1, 4*16))
	harness.ServePrompt(t, second, harness.Tokens(1, 2*16))
	front.vllm("llama", 16, first, second)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	worker := host + front.URL[strings.LastIndexByte(front.URL, ':'):]
	holds := func(model string, want map[events.Rank]uint32) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("%s's ranks hold %v blocks", worker, want), func() (bool, string) {
			var a api.Answer
			err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: model, Tokens: harness.Tokens(1, 4*16)},
				&a)
			got := map[events.Rank]uint32{}
			for _, o := range a.Workers {
				if string(o.Instance) == worker {
					got[o.Rank] = o.Device
				}
			}
			return err == nil && fmt.Sprint(got) == fmt.Sprint(want), fmt.Sprint(got, err)
		})
	}
	holds("llama", map[events.Rank]uint32{0: 4, 1: 2})
	ask := []string{"query", "--nats", x.NATS, "--model", "llama", "--json", "--tokens",
		strings.Trim(fmt.Sprint(harness.Tokens(1, 4*16)), "[]")}
	if r := harness.Run(t, "indexer", append(ask, "--rank", worker+"/1")...); r.Code != 0 ||
		!strings.Contains(r.Stdout, `"device": 2`) || strings.Contains(r.Stdout, `"device": 4`) {
		t.Errorf("rank 1: %d, %s%s", r.Code, r.Stdout, r.Stderr)
	}
	for flag, want := range map[string]string{"w": "is not WORKER/RANK", "w/x": `the rank is "x"`} {
		if r := harness.Run(t, "indexer", append(ask, "--rank", flag)...); r.Code != 2 ||
			!strings.Contains(r.Stderr, want) {
			t.Errorf("--rank %s: %d, %s; want %q", flag, r.Code, r.Stderr, want)
		}
	}
	serving := "http://127.0.0.1" + front.URL[strings.LastIndexByte(front.URL, ':'):]
	harness.Eventually(t, "the worker is registered with an IP address and not with a host name", func() (bool, string) {
		var list api.WorkerList
		err := harness.HTTPDo(x.HTTP, "GET", "/v1/workers", nil, &list)
		all := list.Workers
		return err == nil && len(all) == 2 && all[1].Record != nil && all[1].Record.Endpoint == serving,
			fmt.Sprintf("%+v, %v", all, err)
	})
	harness.Eventually(t, "the worker's record has the capacity", func() (bool, string) {
		var list api.WorkerList
		err := harness.HTTPDo(x.HTTP, "GET", "/v1/workers", nil, &list)
		all := list.Workers
		return err == nil && len(all) == 2 && all[1].Record != nil && all[1].Record.TotalKVBlocks == 100 &&
			all[1].Record.MaxBatchedTokens == 2048, fmt.Sprintf("%+v, %v", list, err)
	})

	first.Stop()
	second.Stop()
	other := startRank(t, 0, 32)
	harness.ServePrompt(t, other, harness.Tokens(1, 4*16))
	front.vllm("qwen", 32, other)
	shim.WaitFor("the engine has restarted with new settings")
	holds("qwen", map[events.Rank]uint32{0: 2})
}

// TestShimLearnsFromSGLang is the same for SGLang with a given model. The ranks have consecutive ports.
func TestShimLearnsFromSGLang(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front, engine := startEngineAPI(t), startRank(t, 0, 16)
	harness.ServePrompt(t, engine, harness.Tokens(1, 4*16))
	config := fmt.Sprintf(`{\"publisher\":\"zmq\",\"endpoint\":\"%s\",\"bind\":true,\"replay_endpoint\":\"%s\"}`,
		engine.Endpoint(), engine.Replay())
	front.says(
		map[string]string{"/server_info": `{"version":"0.5.23","served_model_name":"llama","page_size":16,"dp_size":1,"kv_events_config":"` + config + `"}`})
	harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL, "--model", "mine",
		"--worker", "w").WaitFor("connected to the engine")
	x.WaitDepth(t, "mine", harness.Tokens(1, 4*16), "w", 4)
}

// TestShimCannotLearn checks that the error names the missing setting with the flag, and that an older vLLM works with
// the flag.
func TestShimCannotLearn(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front, engine := startEngineAPI(t), startRank(t, 0, 16)
	old := map[string]string{"/version": `{"version":"0.23.0"}`,
		"/v1/models": `{"data":[{"id":"llama","parent":null}]}`}
	args := []string{"run", "--nats", x.NATS, "--engine-http", front.URL}
	for _, c := range []struct {
		answers map[string]string
		args    []string
		code    int
		said    string
	}{
		{old, nil, 2, "vllm 0.23.0 does not report the endpoint of events over HTTP"},
		{old, []string{"--engine", engine.Endpoint()}, 2, "give --block-size"},
		{map[string]string{"/version": `{"version":"0.23.0"}`}, []string{"--engine", engine.Endpoint()}, 2,
			"give --model"},
		{map[string]string{"/kv_event_sources": "{}"}, nil, 1, `"enable_kv_cache_events":true`},
		{map[string]string{}, nil, 1, "no vLLM and no SGLang answers there"},
		{old, []string{"--replay", engine.Replay()}, 2, "go with --engine"},
		{old, []string{"--source", "ndjson", "--engine", "-"}, 2, "--engine-http is not for --source ndjson"},
	} {
		front.says(c.answers)
		if r := harness.Run(t, "worker-shim", append(args, c.args...)...); r.Code != c.code ||
			!strings.Contains(r.Stderr, c.said) {
			t.Errorf("with %v the shim ended with %d and %q; want %d and %q", c.args, r.Code, r.Stderr, c.code, c.said)
		}
	}
	old["/metrics"] = "vllm:cache_config_info{block_size=\"16\"} 1.0\n"
	front.says(old)
	harness.Start(t, "worker-shim", append(args, "--engine", engine.Endpoint(), "--replay", engine.Replay(),
		"--worker", "w")...)
	harness.ServePrompt(t, engine, harness.Tokens(1, 4*16))
	x.WaitDepth(t, "llama", harness.Tokens(1, 4*16), "w", 4)
}

// TestShimOfUnnamedAdapters runs SGLang 0.5.22 with adapters and the default format. An adapter's blocks look like
// blocks of the base model, so the index has none of them. In the format dynamo, every block has the adapter's name.
func TestShimOfUnnamedAdapters(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	front := startEngineAPI(t)
	const size = 4
	base, adapter := harness.Tokens(1, 2*size), harness.Tokens(101, 2*size)
	depth := func(model string, tokens []uint32, lora string) (depth uint32, text string) {
		var a api.Answer
		err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: model, Tokens: tokens, LoRA: lora}, &a)
		if err == nil && a.Complete && len(a.Workers) == 1 {
			depth = a.Workers[0].Device
		}
		return depth, fmt.Sprint(a, err)
	}
	for format, want := range map[string]uint32{"default": 0, "dynamo": 2} {
		engine := startCaseEngine(t)
		front.says(map[string]string{"/server_info": fmt.Sprintf(`{"version":"0.5.22","served_model_name":%q,"page_size":4,`+
			`"dp_size":1,"enable_lora":true,"lora_paths":["sql=/models/sql"],"kv_events_config":%q}`, format,
			fmt.Sprintf(`{"publisher":"zmq","format":%q,"endpoint":%q,"bind":true,"replay_endpoint":%q}`, format,
				engine.endpoint, engine.replay))})
		shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine-http", front.URL, "--worker", format)
		if want == 0 {
			shim.WaitFor(`events do not name adapters.*\\"format\\":\\"dynamo\\"`)
		}
		if err := engine.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		stored := func(names []int64, tokens []uint32, lora any) map[string]any {
			e := map[string]any{"type": "BlockStored", "block_hashes": names, "parent_block_hash": nil, "token_ids": tokens,
				"block_size": size, "lora_id": nil, "medium": "GPU"}
			if lora != nil {
				e["lora_name"] = lora
			}
			return e
		}
		// The second event shows that the first event was applied.
		engine.publish(t, []any{stored([]int64{-11, 12}, base, nil), stored([]int64{-13, 14}, adapter, "sql")})
		harness.Eventually(t, "the named blocks are found", func() (bool, string) {
			n, text := depth(format, adapter, "sql")
			return n == 2, text
		})
		if got, text := depth(format, base, ""); got != want {
			t.Errorf("format %s: %s; want %d blocks", format, text, want)
		}
		if got, text := depth(format, adapter, ""); got != 0 {
			t.Errorf("format %s: the adapter's blocks for the base model: %s", format, text)
		}
	}
}
