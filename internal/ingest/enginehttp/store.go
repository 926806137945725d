package enginehttp

import (
	"context"
	"encoding/json"
	"net/http"
)

// Store is what SGLang says of the shared store behind its HiCache. What it does not say is empty.
type Store struct {
	// Layout is the reply of GET /get_hicache_l3_cache_layout, which SGLang serves from 0.5.23 on: a page's objects.
	Layout json.RawMessage

	HostTokens   uint64 // room of one rank's host pool; 0: it was given in bytes (--hicache-size), or is of another kind
	DeviceTokens uint64 // room of one rank's device pool
	BufferOnly   bool   // the host pool only passes pages on (--hicache-host-memory-mode buffer_only)
}

// hicacheInfo is what SGLang's /server_info says of HiCache.
type hicacheInfo struct {
	Backend *string  `json:"hicache_storage_backend"`
	Ratio   *float64 `json:"hicache_ratio"` // of the host pool to the device pool
	Size    *float64 `json:"hicache_size"`  // GB, in place of the ratio; 0: not given
	Mode    *string  `json:"hicache_host_memory_mode"`
}

// maxPoolTokens bounds a pool: beyond it floating-point numbers are not exact.
const maxPoolTokens = 1 << 50

// store returns what an engine says of its shared store; nil if it has none.
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

// hostTokens is the room of a host pool (HostKVCache.__init__ of
// sgl-project/sglang › python/sglang/srt/mem_cache/pool_host/base.py); 0 if it is not known.
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
