package enginehttp

import (
	"context"
	"encoding/json"
	"net/http"
)

// Store contains SGLang's settings of the shared store behind its HiCache. Fields without a report are empty.
type Store struct {
	// Layout is the reply of GET /get_hicache_l3_cache_layout, which SGLang serves from 0.5.23 on: a page's objects.
	Layout json.RawMessage

	HostTokens   uint64 // capacity of one rank's host pool; 0: given in bytes (--hicache-size), or unknown
	DeviceTokens uint64 // capacity of one rank's device pool
	BufferOnly   bool   // the host pool only forwards pages (--hicache-host-memory-mode buffer_only)
}

// hicacheInfo contains the fields of SGLang's /server_info about HiCache.
type hicacheInfo struct {
	Backend *string  `json:"hicache_storage_backend"`
	Ratio   *float64 `json:"hicache_ratio"` // size of the host pool relative to the device pool
	Size    *float64 `json:"hicache_size"`  // GB, instead of the ratio; 0: not given
	Mode    *string  `json:"hicache_host_memory_mode"`
}

// maxPoolTokens bounds a pool: floating-point numbers above the bound are not exact.
const maxPoolTokens = 1 << 50

// store returns the settings of the engine's shared store; nil without a store.
func (a *Asker) store(ctx context.Context, info *serverInfo) (*Store, error) {
	if valueOf(info.hicacheInfo.Backend) == "" {
		return nil, nil
	}
	s := &Store{DeviceTokens: valueOf(info.MaxTokens), BufferOnly: valueOf(info.Mode) == "buffer_only"}
	s.HostTokens = info.hostTokens()
	const path = "/get_hicache_l3_cache_layout"
	body, status, err := a.get(ctx, path)
	switch {
	case status == 0 && err != nil:
		return nil, err
	case status == http.StatusOK && json.Valid(body):
		s.Layout = body
	}
	return s, nil
}

// hostTokens returns the capacity of a host pool (HostKVCache.__init__ of sgl-project/sglang ›
// python/sglang/srt/mem_cache/pool_host/base.py). 0 means unknown.
func (i *serverInfo) hostTokens() uint64 {
	page, device, ratio := uint64(valueOf(i.PageSize)), valueOf(i.MaxTokens), valueOf(i.Ratio)
	if valueOf(i.Size) > 0 || page == 0 || device == 0 || !(ratio > 0) || valueOf(i.DCPSize) > 1 {
		return 0
	}
	size := float64(device) * ratio
	if size > maxPoolTokens {
		return 0
	}
	return (uint64(size)/page + 1) * page
}
