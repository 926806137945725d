package enginehttp

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"
)

// TestLoads reads loads in the forms of old and new releases of both engines. A server without loads has none.
func TestLoads(t *testing.T) {
	n := func(v uint64) *uint64 { return &v }
	const two = `# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m}\"x"} 3.0
vllm:num_requests_running{engine="1",model_name="m}\"x"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m}\"x"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m}\"x"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="2000"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-01
`
	for name, test := range map[string]struct {
		kind  string
		paths map[string]string
		want  []Load
	}{
		"vLLM with two ranks": {VLLM, map[string]string{"/metrics": two}, []Load{
			{Rank: 0, Running: 3, Waiting: 2, UsedBlocks: 250, TotalBlocks: 1000},
			{Rank: 1, Waiting: 1, UsedBlocks: 100, TotalBlocks: 1000}}},
		"an old vLLM": {VLLM, map[string]string{"/metrics": `vllm:num_requests_running{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} NaN
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0
`}, []Load{{Running: 1, UsedBlocks: 5, TotalBlocks: 10}}},
		"vLLM without its capacity": {VLLM, map[string]string{"/metrics": `vllm:num_requests_running{engine="7"} 1.0
vllm:kv_cache_usage_perc{engine="7"} 0.5
`}, []Load{{Rank: 7, Running: 1}}},
		"other metrics": {VLLM, map[string]string{"/metrics": "vllm:num_requests_waiting{} 1\nup 1\n"}, nil},
		"no metrics":    {VLLM, nil, nil},
		"SGLang": {SGLang, map[string]string{"/v1/loads": `{"timestamp":"2026","version":"0.5.23","loads":[
			{"dp_rank":1,"num_running_reqs":2,"num_waiting_reqs":3,"num_waiting_uncached_tokens":77,"num_used_tokens":33,
			 "max_total_num_tokens":320,"token_usage":0.1,"decode_moments":null},
			{"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":0,"num_used_tokens":0,"max_total_num_tokens":320}]}`},
			[]Load{{TotalBlocks: 20}, {Rank: 1, Running: 2, Waiting: 3, WaitingTokens: n(77), UsedBlocks: 3, TotalBlocks: 20}}},
		"an old SGLang": {SGLang, map[string]string{
			"/get_load": `[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":9}]`}, []Load{{Running: 3, Waiting: 2}}},
		"no loads": {SGLang, nil, nil},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, has := test.paths[r.URL.Path]
			if !has {
				http.NotFound(w, r)
				return
			}
			_, _ = w.Write([]byte(body))
		}))
		asker, err := New(server.URL, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := asker.Loads(t.Context(), test.kind, 16); err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, test.want)
		}
		server.Close()
	}
}

// TestLoadsRefused: errors tell a server that is away from one that wants a key or answers nonsense.
func TestLoadsRefused(t *testing.T) {
	for status, want := range map[int]error{401: ErrUnknown, 503: ErrNotReady, 200: ErrUnknown} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(`{"loads":[{"dp_rank":-1}]}`))
		}))
		asker, err := New(server.URL, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := asker.Loads(t.Context(), SGLang, 16); !errors.Is(err, want) || got != nil {
			t.Errorf("%d: %+v, %v", status, got, err)
		}
		server.Close()
	}
}
