package enginehttp

import (
	"bytes"
	"context"
	"math"
	"regexp"
	"strconv"
)

// TensorRTSource is the source of TensorRT-LLM's loads. The settings of trtllm-serve are read like those of an old
// vLLM.
const TensorRTSource = "tensorrt-llm"

// iteration contains the decoded fields of an iteration's statistics (NVIDIA/TensorRT-LLM ›
// tensorrt_llm/serve/openai_server.py, get_iteration_stats).
type iteration struct {
	Active *uint64 `json:"numActiveRequests"` // running and waiting requests that the scheduler has accepted
	Queued uint64  `json:"numQueuedRequests"`
	Cache  *struct {
		Used uint64 `json:"usedNumBlocks"`
		Most uint64 `json:"maxNumBlocks"`
	} `json:"kvCacheStats"`
}

// isIterations reports whether /metrics is the list of iterations of trtllm-serve.
func isIterations(body []byte) bool { return bytes.HasPrefix(bytes.TrimSpace(body), []byte("[")) }

// tensorrtLoads reads the gauges of /prometheus/metrics, or, without gauges, the last iteration of /metrics. An answer
// of /metrics has the iterations since the last answer to any client. Therefore an empty list without an error means
// that nothing is new.
func (a *Asker) tensorrtLoads(ctx context.Context) ([]Load, error) {
	body, err := a.loads(ctx, "/prometheus/metrics")
	if err != nil {
		return nil, err
	}
	if list := tensorrtGauges(string(body)); list != nil {
		return list, nil
	}
	if body, err = a.loads(ctx, "/metrics"); err != nil {
		return nil, err
	}
	if !isIterations(body) {
		a.tensorrt.Store(false) // another engine has the address
		return vllmLoads(string(body)), nil
	}
	return iterationLoads(body)
}

// iterationLoads reads the last iteration of a list.
func iterationLoads(body []byte) ([]Load, error) {
	var all []iteration
	if err := decode("/metrics", body, &all); err != nil {
		return nil, err
	}
	list := []Load{}
	if n := len(all); n > 0 && all[n-1].Active != nil {
		last := &all[n-1]
		l := Load{Running: *last.Active, Waiting: last.Queued, Source: TensorRTSource}
		if last.Cache != nil {
			l.UsedBlocks, l.TotalBlocks = last.Cache.Used, last.Cache.Most
		}
		list = append(list, l)
	}
	return list, nil
}

// tensorrtGauge matches a gauge of TensorRT-LLM's load (tensorrt_llm/metrics/collector.py).
var tensorrtGauge = regexp.MustCompile(`(?m)^trtllm_(num_requests_running|num_requests_waiting|kv_cache_used_blocks|` +
	`kv_cache_max_blocks)(?:\{.*\})?\s+(\S+)`)

// tensorrtGauges returns nil without the number of running requests.
func tensorrtGauges(metrics string) []Load {
	gauges := map[string]uint64{}
	for _, m := range tensorrtGauge.FindAllStringSubmatch(metrics, -1) {
		if v, err := strconv.ParseFloat(m[2], 64); err == nil && v >= 0 && v <= math.MaxUint32 {
			gauges[m[1]] = uint64(v)
		}
	}
	running, some := gauges["num_requests_running"]
	if !some {
		return nil
	}
	return []Load{{Running: running, Waiting: gauges["num_requests_waiting"],
		UsedBlocks: gauges["kv_cache_used_blocks"], TotalBlocks: gauges["kv_cache_max_blocks"], Source: TensorRTSource}}
}
