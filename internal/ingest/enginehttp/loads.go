package enginehttp

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
)

// Load is the present load of a rank, as the engine reports it.
type Load struct {
	Rank             uint32
	Running, Waiting uint64 // requests

	// WaitingTokens counts the tokens that the engine must compute for waiting requests; nil: not reported.
	WaitingTokens *uint64

	// UsedBlocks counts the blocks of running requests in device memory, and TotalBlocks all blocks. 0: unknown, if
	// TotalBlocks is 0.
	UsedBlocks, TotalBlocks uint64

	Source string // the reporting interface; empty: the kind of the engine
}

// Loads reads the loads of the ranks of an engine of this kind, ascending by rank. blockSize is the size of a block in
// tokens, for engines that count tokens. The list is nil if the engine does not report its load, and empty without a
// new load. The error wraps ErrNotReady or ErrUnknown.
//
//	vLLM     /metrics    vllm:num_requests_running, vllm:num_requests_waiting, and vllm:kv_cache_usage_perc
//	                     (vllm:gpu_cache_usage_perc in old releases), each with the rank in the label engine
//	SGLang   /v1/loads   num_running_reqs, num_waiting_reqs, num_waiting_uncached_tokens, num_used_tokens,
//	                     max_total_num_tokens, for each dp_rank; /get_load in old releases. Rank.Load has the
//	                     address of the load socket; see [LoadStat]
//	TensorRT-LLM         /prometheus/metrics: trtllm_num_requests_running, trtllm_num_requests_waiting,
//	                     trtllm_kv_cache_used_blocks and trtllm_kv_cache_max_blocks; without these, the last iteration
//	                     of /metrics. Its kind is VLLM
func (a *Asker) Loads(ctx context.Context, kind string, blockSize uint32) ([]Load, error) {
	if kind == SGLang {
		return a.sglangLoads(ctx, uint64(blockSize))
	}
	if a.tensorrt.Load() {
		return a.tensorrtLoads(ctx)
	}
	body, err := a.loads(ctx, "/metrics")
	if err == nil && isIterations(body) {
		a.tensorrt.Store(true)
		return a.tensorrtLoads(ctx)
	}
	return vllmLoads(string(body)), err
}

// loads requests a path with loads. The body is empty if the engine does not have the path.
func (a *Asker) loads(ctx context.Context, path string) ([]byte, error) {
	body, status, err := a.get(ctx, path)
	switch {
	case err != nil:
		return nil, err
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return nil, fmt.Errorf("%w: %s: %s", ErrUnknown, path, refusal(status))
	case status != http.StatusOK:
		return nil, nil
	}
	return body, nil
}

// loadGauge matches a gauge of vLLM's load. engineLabel matches the rank in its labels.
var (
	loadGauge = regexp.MustCompile(`(?m)^vllm:(num_requests_running|num_requests_waiting|` +
		`kv_cache_usage_perc|gpu_cache_usage_perc)\{(.*)\}\s+(\S+)`)
	engineLabel = regexp.MustCompile(`(?:^|,)engine="(\d{1,9})"`)
)

// vllmLoads reads vLLM's metrics. A rank without the number of running requests is left out.
func vllmLoads(metrics string) (list []Load) {
	type gauges map[string]float64
	ranks := map[uint32]gauges{}
	for _, m := range loadGauge.FindAllStringSubmatch(metrics, -1) {
		rank := uint64(0)
		if label := engineLabel.FindStringSubmatch(m[2]); label != nil {
			rank, _ = strconv.ParseUint(label[1], 10, 32) // the pattern has at most 9 digits
		}
		value, err := strconv.ParseFloat(m[3], 64)
		if err != nil || !(value >= 0 && value <= math.MaxUint32) {
			continue
		}
		if ranks[uint32(rank)] == nil {
			ranks[uint32(rank)] = gauges{}
		}
		ranks[uint32(rank)][m[1]] = value
	}
	_, _, total := cacheConfig(metrics)
	for rank, g := range ranks {
		running, some := g["num_requests_running"]
		if !some {
			continue
		}
		l := Load{Rank: rank, Running: uint64(running), Waiting: uint64(g["num_requests_waiting"])}
		usage, some := g["kv_cache_usage_perc"]
		if !some {
			usage, some = g["gpu_cache_usage_perc"]
		}
		if some && total > 0 {
			l.UsedBlocks, l.TotalBlocks = uint64(math.Round(min(usage, 1)*float64(total))), total
		}
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b Load) int { return int(a.Rank) - int(b.Rank) })
	return list
}

// sglangLoad contains the decoded fields of /v1/loads (LoadSnapshot in sgl-project/sglang ›
// python/sglang/srt/managers/load_snapshot.py), and of /get_load in releases without it.
type sglangLoad struct {
	Rank    *uint32 `json:"dp_rank"`
	Running *uint64 `json:"num_running_reqs"`
	Waiting uint64  `json:"num_waiting_reqs"`

	WaitingTokens *uint64 `json:"num_waiting_uncached_tokens"`
	Used          *uint64 `json:"num_used_tokens"`
	Most          uint64  `json:"max_total_num_tokens"`

	All *uint64 `json:"num_reqs"` // of /get_load: running and waiting
}

func (a *Asker) sglangLoads(ctx context.Context, blockSize uint64) (list []Load, err error) {
	var loads []sglangLoad
	body, err := a.loads(ctx, "/v1/loads?include=core")
	if err == nil && len(body) > 0 {
		var answer struct {
			Loads []sglangLoad `json:"loads"`
		}
		err = decode("/v1/loads", body, &answer)
		loads = answer.Loads
	} else if err == nil {
		if body, err = a.loads(ctx, "/get_load"); err == nil && len(body) > 0 {
			err = decode("/get_load", body, &loads)
		}
	}
	for i := range loads {
		l := &loads[i]
		if l.Running == nil && l.All != nil {
			running := *l.All - min(l.Waiting, *l.All)
			l.Running = &running
		}
		if l.Running == nil {
			continue
		}
		load := Load{Rank: valueOf(l.Rank), Running: *l.Running, Waiting: l.Waiting, WaitingTokens: l.WaitingTokens}
		if l.Used != nil {
			load.setTokens(*l.Used, l.Most, blockSize)
		}
		list = append(list, load)
	}
	slices.SortFunc(list, func(a, b Load) int { return int(a.Rank) - int(b.Rank) })
	return list, err
}
