package enginehttp

import (
	"net/http"
	"net/http/httptest"
	"reflect"
	"sync"
	"testing"
)

// TestTensorRTLoads reads the loads of trtllm-serve with and without Prometheus gauges. Once recognised, a server with
// gauges gets no further request to /metrics, which would remove iterations from other readers. A vLLM at the same
// address is recognised again.
func TestTensorRTLoads(t *testing.T) {
	var mu sync.Mutex
	paths, asked := map[string]string{}, map[string]int{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked[r.URL.Path]++
		body, has := paths[r.URL.Path]
		if !has {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(body))
	}))
	defer server.Close()
	asker, err := New(server.URL, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	const iterations = ` [{"iter":1,"numActiveRequests":9,"numQueuedRequests":9,"kvCacheStats":null},
		{"iter":2,"iterLatencyMS":7.0,"numActiveRequests":2,"numQueuedRequests":3,"kvCacheStats":{"cacheHitRate":0.5,
		"freeNumBlocks":97,"maxNumBlocks":100,"tokensPerBlock":32,"usedNumBlocks":3},"inflightBatchingStats":null}]`
	const gauges = `# HELP trtllm_num_requests_running Number of active requests
trtllm_num_requests_running{engine_type="trtllm",model_name="m}"} 4.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m}"} 5.0
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m}"} 6.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m}"} 1e+02
trtllm_num_requests_completed_total{engine_type="trtllm"} 99.0
`
	for _, c := range []struct {
		what, metrics, prometheus string
		want                      []Load
		reads                     int // of /metrics
	}{
		{"no iteration yet", "[]", "", []Load{}, 2},
		{"iterations", iterations, "", []Load{{Running: 2, Waiting: 3, UsedBlocks: 3, TotalBlocks: 100,
			Source: TensorRTSource}}, 1},
		{"nothing new", "[]", "", []Load{}, 1},
		{"an iteration without requests", `[{"iter":3}]`, "", []Load{}, 1},
		{"gauges", iterations, gauges, []Load{{Running: 4, Waiting: 5, UsedBlocks: 6, TotalBlocks: 100,
			Source: TensorRTSource}}, 0},
		{"gauges of an old release", "[]", "trtllm_kv_cache_utilization 0.5\n", []Load{}, 1},
		{"a vLLM", `vllm:num_requests_running{engine="0"} 1.0` + "\n", "", []Load{{Running: 1}}, 1},
		{"the vLLM again", `vllm:num_requests_running{engine="0"} 2.0` + "\n", "", []Load{{Running: 2}}, 1},
	} {
		mu.Lock()
		clear(paths)
		clear(asked)
		paths["/metrics"] = c.metrics
		if c.prometheus != "" {
			paths["/prometheus/metrics"] = c.prometheus
		}
		mu.Unlock()
		got, err := asker.Loads(t.Context(), VLLM, 32)
		if err != nil || !reflect.DeepEqual(got, c.want) || asked["/metrics"] != c.reads {
			t.Errorf("%s: %+v, %v, %d reads of /metrics; want %+v, %d", c.what, got, err, asked["/metrics"], c.want, c.reads)
		}
	}
}
