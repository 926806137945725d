package enginehttp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/loopback"
)

// engineOf serves an engine's answers. Other paths are not found.
func engineOf(t *testing.T, answers map[string]string) *Asker {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body, ok := answers[r.URL.Path]; ok {
			fmt.Fprint(w, body)
			return
		}
		http.NotFound(w, r)
	}))
	t.Cleanup(s.Close)
	a, err := New(s.URL, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func read(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestVLLM reads the settings that vLLM 0.32.0's own code reports.
func TestVLLM(t *testing.T) {
	var goldens struct {
		Cases map[string]map[string]string `json:"cases"`
	}
	read(t, "vllm-0.32.0.json", &goldens)
	chosen := func(name, field string) string { // a port from the system
		m := regexp.MustCompile(`"` + field +
			`":"([^"]*)"`).FindStringSubmatch(goldens.Cases[name]["/kv_event_sources"])
		if m == nil {
			t.Fatalf("%s: no %s", name, field)
		}
		return m[1]
	}
	const ports = "ports that the system chose"
	names := Names{Model: "llama"}
	serves := Engine{Kind: VLLM, Version: "0.32.0", Model: "llama", Names: names}
	more := serves
	more.Names = Names{Model: "llama", Aliases: []string{"llama-alias"}, Adapters: []string{"adapter"}}
	with := func(e Engine, size uint32, ranks ...Rank) Engine {
		e.BlockSize, e.Ranks, e.Nominal = size, ranks, size == 16 // a stopped engine does not report the effective size
		return e
	}
	for name, want := range map[string]Engine{
		"two ranks, replay, a topic": with(more, 32,
			Rank{Endpoint: "tcp://127.0.0.1:25557", Replay: "tcp://127.0.0.1:25657", Topic: "kv"},
			Rank{Rank: 1, Endpoint: "tcp://127.0.0.1:25558", Replay: "tcp://127.0.0.1:25658", Topic: "kv"}),
		ports: with(serves, 16, Rank{Endpoint: chosen(ports, "endpoint"),
			Replay: chosen(ports, "replay_endpoint"), Unclear: true}),
		"dials out": with(serves, 16, Rank{Endpoint: "tcp://127.0.0.1:25758", Unclear: true}),
		"ipc":       with(serves, 16, Rank{Endpoint: "ipc:///tmp/vllm-golden.sock"}),
	} {
		got, err := engineOf(t, goldens.Cases[name]).Ask(t.Context())
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v\nwant %+v", name, got, err, want)
		}
	}
	// A running server reports the sum of all ranks' blocks. Its development mode has the other values.
	runs := map[string]string{"/server_info": `{"vllm_config":{"scheduler_config":{"max_num_batched_tokens":8192}}}`}
	for path, body := range goldens.Cases["two ranks, replay, a topic"] {
		runs[path] = strings.ReplaceAll(body, `num_gpu_blocks="None"`, `num_gpu_blocks="2001"`)
	}
	if got, err := engineOf(t, runs).Ask(t.Context()); err != nil || got.TotalKVBlocks != 1000 ||
		got.MaxBatchedTokens != 8192 || got.BlockSize != 32 {
		t.Errorf("a running engine: %+v, %v", got, err)
	}
	if got, err := engineOf(t, goldens.Cases["no events"]).Ask(t.Context()); !errors.Is(err, ErrNoEvents) {
		t.Errorf("without events: %+v, %v", got, err)
	}

	// An older vLLM reports everything except the endpoints. Without metrics the block size is missing too.
	old := map[string]string{"/version": `{"version":"0.31.0"}`, "/v1/models": goldens.Cases["ipc"]["/v1/models"]}
	want := Engine{Kind: VLLM, Version: "0.31.0", Model: "llama", Names: names}
	if got, err := engineOf(t, old).Ask(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("0.31.0 without metrics: %+v, %v", got, err)
	}
	old["/metrics"] = strings.ReplaceAll(goldens.Cases["ipc"]["/metrics"], `effective_attention_block_size="None",`, "")
	want.BlockSize, want.Nominal = 16, true
	if got, err := engineOf(t, old).Ask(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("0.31.0: %+v, %v", got, err)
	}
}

// TestSGLang reads the settings that releases of SGLang report.
func TestSGLang(t *testing.T) {
	var releases map[string]map[string]json.RawMessage
	read(t, "sglang.json", &releases)
	eight := Engine{BlockSize: 64}
	for i := range uint32(8) {
		eight.Ranks = append(eight.Ranks, Rank{
			Rank: i, Endpoint: fmt.Sprint("tcp://127.0.0.1:", 5557+i), Replay: fmt.Sprint("tcp://127.0.0.1:",
				5657+i), Unclear: true,
		})
	}
	one := func(r Rank) Engine { return Engine{BlockSize: 16, Ranks: []Rank{r}} }
	for version, cases := range releases {
		for name, want := range map[string]Engine{
			"plain": one(Rank{Endpoint: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5657",
				Topic: "kv-events"}),
			"eight ranks":      eight,
			"context parallel": one(Rank{Endpoint: "tcp://127.0.0.1:5557"}),
			"no name":          one(Rank{Endpoint: "tcp://127.0.0.1:5557"}),
			"dials out":        one(Rank{Endpoint: "tcp://10.0.0.9:5557", Listen: true}),
			"ipc":              one(Rank{Endpoint: "ipc:///tmp/events"}),
			"adapters":         one(Rank{Endpoint: "tcp://127.0.0.1:5557"}),
			"adapters, dynamo": one(Rank{Endpoint: "tcp://127.0.0.1:5557"}),
		} {
			want.Kind, want.Version, want.Model = SGLang, version, "llama"
			want.UnnamedAdapters = name == "adapters" && version != "0.5.23" ||
				name == "adapters, dynamo" && version < "0.5.22"
			switch {
			case name == "no name":
				want.Model = "/models/llama"
			case name == "context parallel" && version != "0.5.12": // 0.5.12 has no context parallelism
				want.BlockSize = 32
			}
			for _, path := range []string{"/server_info", "/get_server_info"} {
				got, err := engineOf(t, map[string]string{path: string(cases[name])}).Ask(t.Context())
				if err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%s, %s, %s: %+v, %v\nwant %+v", version, name, path, got, err, want)
				}
			}
		}
		runs := strings.Replace(string(cases["plain"]), "{", `{"max_total_num_tokens":1610,"max_prefill_tokens":4096,`, 1)
		if got, err := engineOf(t, map[string]string{"/server_info": runs}).Ask(
			t.Context()); err != nil || got.TotalKVBlocks != 100 || got.MaxBatchedTokens != 4096 {
			t.Errorf("%s, a running engine: %+v, %v", version, got, err)
		}
		for mode, role := range map[string]string{"null": "", "prefill": "prefill", "decode": "decode", "encode": "encode"} {
			port := uint32(0)
			if role == "prefill" {
				port = 8998
			}
			runs := strings.Replace(string(cases["plain"]), "{", `{"disaggregation_mode":"`+mode+
				`","disaggregation_bootstrap_port":8998,`, 1)
			if got, err := engineOf(t, map[string]string{"/server_info": runs}).Ask(
				t.Context()); err != nil || got.Role != role || got.BootstrapPort != port {
				t.Errorf("%s, mode %s: %+v, %v", version, mode, got, err)
			}
		}
		for _, name := range []string{"null", "no events"} {
			if got, err := engineOf(t, map[string]string{"/server_info": string(cases[name])}).Ask(
				t.Context()); !errors.Is(err, ErrNoEvents) {
				t.Errorf("%s, %s: %+v, %v", version, name, got, err)
			}
		}
	}
}

// TestErrorsOfOtherServers covers other servers, and engines that are not ready or refuse the request.
func TestErrorsOfOtherServers(t *testing.T) {
	status := func(code int) *Asker {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer secret" {
				w.WriteHeader(code)
				return
			}
			http.NotFound(w, r)
		}))
		t.Cleanup(s.Close)
		a, err := New(s.URL, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	nobody, err := New("http://"+loopback.Reserve(t), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		asker *Asker
		want  error
		said  string
	}{
		"nobody":     {nobody, ErrNotReady, "refused"},
		"loading":    {status(503), ErrNotReady, "503"},
		"a key":      {status(401), ErrUnknown, "--engine-http-token-file"},
		"a web site": {engineOf(t, map[string]string{"/": "hello"}), ErrUnknown, "neither"},
		"no JSON":    {engineOf(t, map[string]string{"/kv_event_sources": "<html>"}), ErrUnknown, "/kv_event_sources"},
		"inproc": {engineOf(t,
			map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"inproc://x"}}`}), ErrNoEvents, "inproc://x"},
		"no port": {engineOf(t,
			map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*"}}`}), ErrUnknown, "tcp://*"},
		"many ranks": {engineOf(t,
			map[string]string{"/server_info": `{"page_size":16,"dp_size":4000000000,"kv_events_config":"{\"publisher\":\"zmq\"}"}`}), ErrUnknown, "dp_size"},
		"beyond 65k": {engineOf(t,
			map[string]string{"/server_info": `{"page_size":16,"dp_size":2,"kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:65535\"}"}`}), ErrUnknown, "rank 1"},
		"bad config": {engineOf(t,
			map[string]string{"/server_info": `{"page_size":16,"kv_events_config":"publisher"}`}), ErrUnknown,
			"kv_events_config"},
		"vLLM's info": {engineOf(t, map[string]string{"/server_info": `{"vllm_config":"x"}`}), ErrUnknown, "neither"},
	} {
		if _, err := c.asker.Ask(t.Context()); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.said) {
			t.Errorf("%s: %v, want %v and %q", name, err, c.want, c.said)
		}
	}
	allowed := status(401)
	allowed.token = "secret"
	if _, err := allowed.Ask(t.Context()); !errors.Is(err, ErrUnknown) || strings.Contains(err.Error(), "key") {
		t.Errorf("with the key: %v", err)
	}
	for _, bad := range []string{"", "host:8000", "ftp://host", "http://", "http://u:p@host", "http://host/?x=1",
		"http://[::1"} {
		if a, err := New(bad, "", nil); err == nil {
			t.Errorf("%q: %+v", bad, a)
		}
	}
	for text, want := range map[string]string{"http://host:8000": "host 8000", "https://host/prefix/": "host 443",
		"http://[::1]": "::1 80"} {
		if a, err := New(text, "", nil); err != nil || a.Host()+" "+a.Port() != want {
			t.Errorf("%s: %v, %v", text, a, err)
		}
	}
}
