package enginehttp

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// source contains the decoded fields of vLLM's KVEventsConfig (vllm-project/vllm › vllm/config/kv_events.py). Its
// endpoints already include the rank.
type source struct {
	Enabled   bool    `json:"enable_kv_cache_events"`
	Publisher string  `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
	Topic     string  `json:"topic"`
}

// vllm reads vLLM's settings, beginning with its event sources.
func (a *Asker) vllm(ctx context.Context, body []byte) (Engine, error) {
	sources := map[uint32]source{}
	if err := decode("/kv_event_sources", body, &sources); err != nil {
		return Engine{}, err
	}
	e := Engine{Kind: VLLM}
	for rank, s := range sources {
		if !s.Enabled || s.Publisher != "zmq" {
			continue
		}
		r, err := a.vllmRank(rank, s)
		if err != nil {
			return Engine{}, err
		}
		e.Ranks = append(e.Ranks, r)
	}
	slices.SortFunc(e.Ranks, func(a, b Rank) int { return int(a.Rank) - int(b.Rank) })
	if len(e.Ranks) == 0 {
		return Engine{},
			fmt.Errorf(
				`%w: start vLLM with "enable_kv_cache_events":true in --kv-events-config and with prefix caching`,
				ErrNoEvents)
	}
	return e, a.vllmServes(ctx, &e)
}

func (a *Asker) vllmRank(rank uint32, s source) (Rank, error) {
	r := Rank{Rank: rank, Topic: s.Topic}
	var err error
	if r.Endpoint, err = a.reachable(s.Endpoint); err != nil {
		return r, err
	}
	if s.Replay != nil && *s.Replay != "" {
		if r.Replay, err = a.reachable(*s.Replay); err != nil {
			return r, err
		}
	}
	// vLLM binds an endpoint with a wildcard, and dials an endpoint with a host (ZmqEventPublisher._is_bind_endpoint).
	// But for a wildcard with port 0 the report contains the bound address, which has a host too.
	r.Unclear = strings.HasPrefix(s.Endpoint, "tcp://") && !strings.Contains(s.Endpoint, "*") &&
		!strings.Contains(s.Endpoint, "::")
	return r, nil
}

// oldVLLM reads the settings of a vLLM without /kv_event_sources.
func (a *Asker) oldVLLM(ctx context.Context) (Engine, error) {
	e := Engine{Kind: VLLM}
	if err := a.vllmServes(ctx, &e); err != nil {
		return Engine{}, err
	}
	if e.Version == "" {
		return Engine{}, fmt.Errorf("%w: the server has neither /kv_event_sources nor /server_info nor /version", ErrUnknown)
	}
	return e, nil
}

// vllmServes reads vLLM's version, the name of its model, and the size and number of its blocks.
func (a *Asker) vllmServes(ctx context.Context, e *Engine) error {
	var version struct {
		Version string `json:"version"`
	}
	if body, status, err := a.get(ctx, "/version"); err != nil {
		return err
	} else if status == http.StatusOK && decode("/version", body, &version) == nil {
		e.Version = version.Version
	}
	names, err := a.Names(ctx)
	if err != nil {
		return err
	}
	e.Model, e.Names = names.Model, names
	body, status, err := a.get(ctx, "/metrics")
	if err != nil {
		return err
	}
	if status == http.StatusOK {
		e.BlockSize, e.Nominal, e.TotalKVBlocks = cacheConfig(string(body))
	}
	var info struct {
		Config struct {
			Scheduler struct {
				MaxBatchedTokens uint64 `json:"max_num_batched_tokens"`
			} `json:"scheduler_config"`
		} `json:"vllm_config"`
	}
	body, status, err = a.get(ctx, "/server_info?config_format=json")
	if err != nil && status == 0 {
		return err
	}
	if status == http.StatusOK && strictjson.Unmarshal(body, &info) == nil { // other modes have no such fields
		e.MaxBatchedTokens = info.Config.Scheduler.MaxBatchedTokens
	}
	return nil
}

// cacheInfo matches the metric with vLLM's cache configuration. Its labels contain the block size, and since 0.32 the
// effective size of full attention. A server has a line for each rank, with the sum of all ranks' blocks
// (vllm/v1/engine/core_client.py).
var (
	cacheInfo     = regexp.MustCompile(`(?m)^vllm:cache_config_info\{(.*)\}`)
	effectiveSize = regexp.MustCompile(`(?:^|,)effective_attention_block_size="(\d+)"`)
	plainSize     = regexp.MustCompile(`(?:^|,)block_size="(\d+)"`)
	blocks        = regexp.MustCompile(`(?:^|,)num_gpu_blocks="(\d+)"`)
)

// cacheConfig returns the block size in tokens, whether the blocks of events may be a multiple of it, and the capacity
// of each rank in blocks. 0 means unknown. Before 0.32 vLLM ignores the ranks of decode context parallelism: a block in
// events is larger by the number of these ranks.
func cacheConfig(metrics string) (size uint32, nominal bool, total uint64) {
	ranks := cacheInfo.FindAllStringSubmatch(metrics, -1)
	if ranks == nil {
		return 0, false, 0
	}
	label := func(bits int, names ...*regexp.Regexp) uint64 {
		for _, name := range names {
			if m := name.FindStringSubmatch(ranks[0][1]); m != nil {
				if n, err := strconv.ParseUint(m[1], 10, bits); err == nil && n > 0 {
					return n
				}
			}
		}
		return 0
	}
	size = uint32(label(32, effectiveSize, plainSize))
	return size, size > 0 && label(32, effectiveSize) == 0, label(64, blocks) / uint64(len(ranks))
}
