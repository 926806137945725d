package enginehttp

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// serverInfo contains the decoded fields of SGLang's /server_info (sgl-project/sglang ›
// python/sglang/srt/entrypoints/http_server.py): its settings, and since 0.5.18 a descriptor of its publishers.
type serverInfo struct {
	Version   string  `json:"version"`
	Model     *string `json:"served_model_name"`
	ModelPath *string `json:"model_path"`
	PageSize  *uint32 `json:"page_size"`
	DCPSize   *uint32 `json:"dcp_size"` // decode context parallelism: ranks that share a page of the radix tree
	DPSize    *uint32 `json:"dp_size"`
	MaxTokens *uint64 `json:"max_total_num_tokens"` // capacity of one rank's pool
	Prefill   *uint64 `json:"max_prefill_tokens"`   // bound on a batch
	Nodes     *uint32 `json:"nnodes"`

	Config *string `json:"kv_events_config"` // JSON, as on the command line

	Disaggregation *string `json:"disaggregation_mode"` // null, prefill, decode or encode
	BootstrapPort  *uint32 `json:"disaggregation_bootstrap_port"`

	EnableLoRA *bool           `json:"enable_lora"`
	LoRAPaths  json.RawMessage `json:"lora_paths"`

	hicacheInfo

	Events *struct {
		BlockSize uint32 `json:"block_size"`
		DPSize    uint32 `json:"dp_size"`

		LoadPort  uint32 `json:"load_endpoint_port_base"` // with --load-publish-endpoint; each rank adds its number
		LoadTopic string `json:"load_topic"`
	} `json:"kv_events"`
}

// publisher is SGLang's KVEventsConfig (python/sglang/srt/disaggregation/kv_events.py), with its defaults.
type publisher struct {
	Publisher string  `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Bind      *bool   `json:"bind"`
	Replay    *string `json:"replay_endpoint"`
	Topic     string  `json:"topic"`
	Format    string  `json:"format"` // from 0.5.22 on: default, dynamo
}

// isSGLang reports whether a /server_info is SGLang's. vLLM also has the path, in its development mode.
func isSGLang(body []byte) bool {
	var fields map[string]json.RawMessage
	if strictjson.Unmarshal(body, &fields) != nil {
		return false
	}
	_, page := fields["page_size"]
	_, config := fields["kv_events_config"]
	return page && config
}

const maxRanks = 1 << 16

func (a *Asker) sglang(ctx context.Context, body []byte) (Engine, error) {
	var info serverInfo
	if err := decode("/server_info", body, &info); err != nil {
		return Engine{}, err
	}
	e := Engine{Kind: SGLang, Version: info.Version, Nodes: valueOf(info.Nodes)}
	for _, name := range []*string{info.ModelPath, info.Model} {
		if name != nil && *name != "" {
			e.Model = *name
		}
	}
	if info.PageSize != nil {
		e.BlockSize = *info.PageSize * max(1, valueOf(info.DCPSize))
	}
	ranks := max(1, valueOf(info.DPSize))
	if info.Events != nil {
		e.BlockSize, ranks = info.Events.BlockSize, max(1, info.Events.DPSize)
	}
	if e.BlockSize > 0 && valueOf(info.DCPSize) <= 1 {
		// With context parallelism, the count in the report is ambiguous.
		e.TotalKVBlocks = valueOf(info.MaxTokens) / uint64(e.BlockSize)
	}
	e.MaxBatchedTokens = valueOf(info.Prefill)
	switch mode := valueOf(info.Disaggregation); mode {
	case "prefill":
		e.Role, e.BootstrapPort = mode, valueOf(info.BootstrapPort)
	case "decode", "encode":
		e.Role = mode
	}
	p := publisher{Publisher: "null", Endpoint: "tcp://*:5557"}
	if text := valueOf(info.Config); text != "" {
		if err := decode("/server_info: kv_events_config", []byte(text), &p); err != nil {
			return Engine{}, err
		}
	}
	if p.Publisher != "zmq" {
		return Engine{},
			fmt.Errorf(
				`%w: start SGLang with --kv-events-config '{"publisher":"zmq",...}' and without --disable-radix-cache`,
				ErrNoEvents)
	}
	e.UnnamedAdapters = info.unnamesAdapters(p.Format)
	if ranks > maxRanks {
		return Engine{}, fmt.Errorf("%w: /server_info contains dp_size %d", ErrUnknown, ranks)
	}
	var err error
	if e.Store, err = a.store(ctx, &info); err != nil {
		return Engine{}, err
	}
	for i := range ranks {
		r, err := a.sglangRank(i, p)
		if err != nil {
			return Engine{}, err
		}
		if info.Events != nil && info.Events.LoadPort > 0 {
			r.Load, r.LoadTopic = "tcp://"+net.JoinHostPort(a.Host(), fmt.Sprint(info.Events.LoadPort+i)), info.Events.LoadTopic
		}
		e.Ranks = append(e.Ranks, r)
	}
	return e, nil
}

func (a *Asker) sglangRank(rank uint32, p publisher) (Rank, error) {
	binds, sure := p.binds()
	r := Rank{Rank: rank, Topic: p.Topic, Listen: !binds, Unclear: !sure}
	endpoint, err := offset(p.Endpoint, rank)
	if err != nil {
		return r, err
	}
	if r.Endpoint, err = a.reachable(endpoint); err != nil {
		return r, err
	}
	if text := valueOf(p.Replay); text != "" {
		if text, err = offset(text, rank); err == nil {
			r.Replay, err = a.reachable(text)
		}
	}
	return r, err
}

// binds reports whether SGLang binds its endpoint instead of dialling it (ZmqEventPublisher._socket_setup). sure is
// false for 0.0.0.0, because releases differ there.
func (p *publisher) binds() (binds, sure bool) {
	switch {
	case p.Bind != nil:
		return *p.Bind, true
	case strings.Contains(p.Endpoint, "*"), strings.Contains(p.Endpoint, "::"), strings.HasPrefix(p.Endpoint, "ipc://"):
		return true, true
	case strings.Contains(p.Endpoint, "0.0.0.0"):
		return true, false
	}
	return false, true
}

// offset adds a rank to the port of an endpoint, as offset_endpoint_port of both engines does.
func offset(endpoint string, rank uint32) (string, error) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok || rank == 0 {
		return endpoint, nil
	}
	host, text, err := splitHostPort(rest)
	if err != nil {
		return "", fmt.Errorf("%w: endpoint %s: %w", ErrUnknown, endpoint, err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port+uint64(rank) > 65535 {
		return "", fmt.Errorf("%w: endpoint %s has no port for rank %d", ErrUnknown, endpoint, rank)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(port+uint64(rank), 10)), nil
}

func valueOf[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
