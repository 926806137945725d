package api

import "github.com/kvatlas/kvatlas/pkg/events"

// OpPrefixes asks for the largest part of the tree of prefixes that workers of a model share: PrefixesRequest →
// PrefixTree.
const OpPrefixes = "prefixes"

// Bounds of the runs of a PrefixTree.
const (
	UsualPrefixes = 500  // of a request that says nothing
	MaxPrefixes   = 5000 // of any
)

// PrefixesRequest asks for the tree as one node has it.
type PrefixesRequest struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"` // needed if the model has several
	Node      string `json:"node,omitempty" msgpack:"node,omitempty"`             // empty: whoever answers
	Limit     uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"`           // runs at most; default 500
}

// Check refuses what no node could answer. The error is an [Error].
func (r *PrefixesRequest) Check() error {
	if r.Model == "" {
		return Errorf(CodeMissingModel, "the request names no model")
	}
	if r.Limit > MaxPrefixes {
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxPrefixes)
	}
	return nil
}

func (r *PrefixesRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"block_size", (*positiveNumber)(&r.BlockSize)},
		member{"node", &r.Node}, member{"limit", (*positiveNumber)(&r.Limit)})
}

// PrefixTree is the largest part of the tree of prefixes that workers of a model hold, by what one node knows: of the
// workers in its partitions.
type PrefixTree struct {
	Node      string      `json:"node" msgpack:"node"`
	Model     string      `json:"model" msgpack:"model"`
	BlockSize uint32      `json:"block_size" msgpack:"block_size"`
	Runs      []PrefixRun `json:"runs" msgpack:"runs"` // parents before children; those with most blocks times holders

	// What the node has in all: runs that somebody holds, and their blocks.
	TotalRuns   int64 `json:"total_runs" msgpack:"total_runs"`
	TotalBlocks int64 `json:"total_blocks" msgpack:"total_blocks"`

	Ranks      int                `json:"ranks" msgpack:"ranks"`           // of the model, on this node
	Partitions []events.Partition `json:"partitions" msgpack:"partitions"` // that these ranks are in
}

// PrefixRun is a run of consecutive blocks with the same continuation.
type PrefixRun struct {
	Parent  int         `json:"parent" msgpack:"parent"`   // position in the list; -1: prompts begin with it
	Depth   uint32      `json:"depth" msgpack:"depth"`     // blocks before it
	Blocks  uint32      `json:"blocks" msgpack:"blocks"`   // its own
	Hash    string      `json:"hash" msgpack:"hash"`       // local hash of its first block, in hexadecimal
	Holders int         `json:"holders" msgpack:"holders"` // ranks that hold any of it
	Tiers   TierCounts  `json:"tiers" msgpack:"tiers"`     // the same in each tier
	Workers []RankPlace `json:"workers" msgpack:"workers"` // some of the holders, at most 32
}
