package compat

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// OverlapScores is the reply to Dynamo's /overlap_scores: the matching blocks of a prompt on every rank.
type OverlapScores struct {
	BlockSize uint32           `json:"block_size"`
	NumBlocks int              `json:"num_blocks"` // whole blocks of the prompt
	Workers   []RankOverlap    `json:"workers"`    // by worker and rank
	Shared    SharedCacheScore `json:"shared_cache"`
}

// RankOverlap is the match of a rank. Host and Disk include the tiers above. The extensions do not.
type RankOverlap struct {
	Worker        ID          `json:"worker_id"`
	Rank          events.Rank `json:"dp_rank"`
	Device        uint32      `json:"device_blocks"`
	Host          uint32      `json:"host_pinned_blocks"`
	Disk          uint32      `json:"disk_blocks"` // and external stores
	HostExtension uint32      `json:"host_pinned_extension_blocks"`
	DiskExtension uint32      `json:"disk_extension_blocks"`

	// Shared counts the shared store's blocks at or beyond the device depth. The count includes blocks behind a hole
	// and blocks in host memory or on disk. Shared is nil if the store did not report the blocks.
	Shared *uint32 `json:"shared_beyond_device_blocks"`
}

// SharedCacheScore is the match of a shared store.
type SharedCacheScore struct {
	Enabled bool        `json:"enabled"`
	Total   uint32      `json:"total_hit_blocks"`
	Ranges  [][2]uint32 `json:"ranges"` // from, up to (not including)
	Error   *string     `json:"error"`  // why the store's blocks, or some of them, are not known
}

// NewOverlapScores converts an answer to the reply. The reply has a row for every rank of the answer and of ranks.
func NewOverlapScores(a *api.Answer, ranks []events.RankKey) *OverlapScores {
	out := &OverlapScores{BlockSize: a.BlockSize, NumBlocks: a.Blocks, Workers: []RankOverlap{},
		Shared: SharedCacheScore{Ranges: [][2]uint32{}}}
	said := a.L3.Status == api.L3OK || a.L3.Status == api.L3Partial
	switch {
	case said:
		out.Shared.Enabled, out.Shared.Total = true, a.L3.Total
		out.Shared.Ranges = append(out.Shared.Ranges, a.L3.Ranges...)
	case a.L3.Status == api.L3Unavailable, a.L3.Status == api.L3Mismatch:
		out.Shared.Enabled = true
	}
	if out.Shared.Enabled && a.L3.Status != api.L3OK {
		why := cmp.Or(a.L3.Reason, string(a.L3.Status))
		out.Shared.Error = &why
	}
	row := func(key events.RankKey, o *api.Overlap) {
		r := RankOverlap{Worker: ID(key.Instance), Rank: key.Rank, Device: o.Device, Host: o.Device + o.Host,
			Disk: o.Total(), HostExtension: o.Host, DiskExtension: o.Disk + o.External}
		if said {
			beyond := blocksBeyond(a.L3.Ranges, o.Device)
			r.Shared = &beyond
		}
		out.Workers = append(out.Workers, r)
	}
	named := map[events.RankKey]bool{}
	for i := range a.Workers {
		key := events.RankKey{Instance: a.Workers[i].Instance, Rank: a.Workers[i].Rank}
		named[key] = true
		o := a.Workers[i].WithGuess()
		row(key, &o)
	}
	for _, key := range ranks {
		if !named[key] {
			row(key, &api.Overlap{})
		}
	}
	slices.SortFunc(out.Workers, func(a, b RankOverlap) int {
		return cmp.Or(CompareIDs(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	return out
}

// blocksBeyond counts the blocks at or beyond depth. The ranges are ascending and disjoint.
func blocksBeyond(ranges [][2]uint32, depth uint32) (n uint32) {
	for _, r := range ranges {
		n += max(r[1], depth) - max(r[0], depth)
	}
	return n
}

// CompareIDs orders ids: numbers by value, then texts.
func CompareIDs[T ~string](a, b T) int {
	x, noX := strconv.ParseUint(string(a), 10, 64)
	y, noY := strconv.ParseUint(string(b), 10, 64)
	switch {
	case noX == nil && noY == nil:
		return cmp.Or(cmp.Compare(x, y), cmp.Compare(a, b))
	case noX == nil:
		return -1
	case noY == nil:
		return 1
	}
	return cmp.Compare(a, b)
}

// overlapScores serves /overlap_scores, with a row for every rank of the model in the log.
func (cfg *Config) overlapScores(ctx context.Context, body []byte, _ url.Values) (any, error) {
	req, err := read(body)
	if err != nil {
		return nil, err
	}
	if req.Model == nil {
		name := DefaultGroup // Dynamo's name of a model without a name
		req.Model = &name
	}
	if (req.Tokens == nil) == (req.Hashes == nil) {
		return nil, fail(http.StatusBadRequest, api.CodeMalformed, "give one of token_ids and block_hashes")
	}
	answer, err := cfg.find(ctx, req, req.Tokens == nil, true)
	if err != nil {
		return nil, err
	}
	return NewOverlapScores(answer, nil), nil
}
