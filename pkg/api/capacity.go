package api

import "time"

// CapacityRequest is a request for the hit rate of a model's prompts by size of the cache.
type CapacityRequest struct {
	Model string `json:"model" msgpack:"model"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (c *CapacityRequest) Check() error { return checkModel(c.Model) }

func (c *CapacityRequest) members(list []member) []member {
	return append(list, member{"model", &c.Model})
}

func checkModel(model string) error {
	if model == "" {
		return Errorf(CodeMissingModel, "the request has no model")
	}
	return nil
}

// Capacity shows the hit rate of a model's prompts by size of the cache. Shares are of the requested blocks.
type Capacity struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"` // tokens; 0: no request is known

	From     time.Time `json:"from" msgpack:"from"`         // first counted request
	To       time.Time `json:"to" msgpack:"to"`             // last counted request
	Blocks   uint64    `json:"blocks" msgpack:"blocks"`     // of the counted requests
	Rate     float64   `json:"rate" msgpack:"rate"`         // share of the sampled blocks
	Samples  int       `json:"samples" msgpack:"samples"`   // counted references to sampled blocks
	Workers  int       `json:"workers" msgpack:"workers"`   // of the model
	Skipped  uint64    `json:"skipped" msgpack:"skipped"`   // blocks in another block size
	Dropped  uint64    `json:"dropped" msgpack:"dropped"`   // requests that the nodes could not record, since their start
	Disabled []string  `json:"disabled" msgpack:"disabled"` // nodes that store no samples

	// Limit is the largest size in blocks with a known hit rate. The rate of a larger cache is at least the rate at Limit.
	Limit uint64 `json:"limit" msgpack:"limit"`

	// Routed means that Tiers and Advice follow from Points.Routed, otherwise from Points.Shared.
	Routed bool `json:"routed" msgpack:"routed"`

	Tiers  []CapacityTier  `json:"tiers" msgpack:"tiers"`   // in the order of use
	Points []CapacityPoint `json:"points" msgpack:"points"` // by size, ascending
	Advice []string        `json:"advice" msgpack:"advice"` // sentences for people

	Nodes   []string `json:"nodes" msgpack:"nodes"`                         // nodes that answered
	Missing []string `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes without an answer
}

// CapacitySource is the source of a tier's size.
type CapacitySource string

// The sources.
const (
	CapacityRegistered CapacitySource = "registered" // total_kv_blocks of all ranks
	CapacityHeld       CapacitySource = "held"       // blocks that the ranks hold now: the tier may be larger
)

// CapacityTier is a tier of all workers of a model.
type CapacityTier struct {
	Tier   string         `json:"tier" msgpack:"tier"`     // device, host, disk or external
	Blocks uint64         `json:"blocks" msgpack:"blocks"` // size
	Source CapacitySource `json:"source" msgpack:"source"`

	// Share is the hit rate of this tier and the tiers before it.
	Share float64 `json:"share" msgpack:"share"`

	// Doubled is the additional hit rate of all tiers if this tier has twice the size. Last is the loss if the tier lacks
	// 30 % of its size.
	Doubled float64 `json:"doubled" msgpack:"doubled"`
	Last    float64 `json:"last" msgpack:"last"`

	// Beyond means that twice the size exceeds Limit: Doubled is then a lower bound.
	Beyond bool `json:"beyond" msgpack:"beyond"`

	// ShareBound means that this tier and the tiers before it exceed Limit: Share is then a lower bound.
	ShareBound bool `json:"share_bound,omitempty" msgpack:"share_bound,omitempty"`

	// LastBound means that all tiers together exceed Limit: Doubled is then unknown, and Last is a lower bound.
	LastBound bool `json:"last_bound,omitempty" msgpack:"last_bound,omitempty"`
}

// CapacityPoint is the hit rate of a size.
type CapacityPoint struct {
	Blocks uint64 `json:"blocks" msgpack:"blocks"` // of all workers

	// Shared is the hit rate of one LRU cache for the whole fleet. Usually it is the better one; at small sizes, separate
	// caches can exceed it.
	Shared float64 `json:"shared" msgpack:"shared"`

	// Routed is the hit rate with a cache of equal size in each worker and the requests as routed; nil: the workers of
	// most requests are unknown.
	Routed *float64 `json:"routed,omitempty" msgpack:"routed,omitempty"`
}
