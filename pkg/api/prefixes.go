package api

import "github.com/kvatlas/kvatlas/pkg/events"

// Bounds of the runs of a PrefixTree.
const (
	UsualPrefixes = 500  // default of a request
	MaxPrefixes   = 5000 // largest number in a request
)

// PrefixesRequest is a request for the tree of all nodes or of one node.
type PrefixesRequest struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"` // required if the model has several
	Node      string `json:"node,omitempty" msgpack:"node,omitempty"`             // empty: all nodes together
	Limit     uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"`           // runs at most; default 500

	// Partitions restricts the tree to workers of these partitions of the node; nil: all. Nodes set it in requests to
	// each other. The answer then has the data to join the runs.
	Partitions []events.Partition `json:"partitions,omitempty" msgpack:"partitions,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *PrefixesRequest) Check() error {
	switch {
	case r.Model == "":
		return Errorf(CodeMissingModel, "the request has no model")
	case r.Limit > MaxPrefixes:
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxPrefixes)
	case r.Partitions != nil && len(r.Partitions) == 0:
		return Errorf(CodeMalformed, "partitions is an empty list and allows none; omit it to allow all")
	case len(r.Partitions) > 0 && r.Node == "":
		return Errorf(CodeMalformed, "partitions is valid with node only")
	}
	return nil
}

func (r *PrefixesRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"block_size", (*positiveNumber)(&r.BlockSize)},
		member{"node", &r.Node}, member{"limit", (*positiveNumber)(&r.Limit)}, member{"partitions", &r.Partitions})
}

// PrefixTree is the largest part of the tree of prefixes that workers of a model hold: of all workers, or of the
// workers in a node's partitions.
type PrefixTree struct {
	Node      string      `json:"node,omitempty" msgpack:"node,omitempty"` // empty: all nodes
	Model     string      `json:"model" msgpack:"model"`
	BlockSize uint32      `json:"block_size" msgpack:"block_size"`
	Runs      []PrefixRun `json:"runs" msgpack:"runs"` // parents before children; most blocks times holders

	// TotalRuns and TotalBlocks count all held runs and their blocks. If nodes shorten their answers, a run on several
	// nodes counts once for each.
	TotalRuns   int64 `json:"total_runs" msgpack:"total_runs"`
	TotalBlocks int64 `json:"total_blocks" msgpack:"total_blocks"`

	Ranks      int                `json:"ranks" msgpack:"ranks"`           // of the model
	Partitions []events.Partition `json:"partitions" msgpack:"partitions"` // of these ranks

	// Complete is false if partitions are missing. Unheard lists the nodes that did not answer.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`
	Unheard  []string           `json:"unheard,omitempty" msgpack:"unheard,omitempty"`

	// Shards are the trees of the node's other indexes, in an answer to a request with partitions.
	Shards []*PrefixTree `json:"shards,omitempty" msgpack:"shards,omitempty"`
}

// PrefixRun is a run of consecutive blocks with the same continuation.
type PrefixRun struct {
	Parent  int         `json:"parent" msgpack:"parent"`   // index in the list; -1: the run begins prompts
	Depth   uint32      `json:"depth" msgpack:"depth"`     // blocks before it
	Blocks  uint32      `json:"blocks" msgpack:"blocks"`   // its own blocks
	Hash    string      `json:"hash" msgpack:"hash"`       // local hash of its first block, in hexadecimal
	Holders int         `json:"holders" msgpack:"holders"` // ranks that hold any block
	Tiers   TierCounts  `json:"tiers" msgpack:"tiers"`     // holders in each tier
	Workers []RankPlace `json:"workers" msgpack:"workers"` // some of the holders, at most 32

	// Hashes and Partly are in answers to requests with partitions. Hashes are the local hashes of the first blocks, or
	// of all blocks if there is room. Partly lists ranks that hold a part of the run in a tier. A list that is too long
	// is omitted, and the ranks then count as holding the whole run.
	Hashes Hashes       `json:"hashes,omitzero" msgpack:"hashes,omitempty"`
	Partly []PrefixPart `json:"partly,omitempty" msgpack:"partly,omitempty"`
}

// PrefixPart is a part of a run that a rank holds: the blocks From up to To (not included).
type PrefixPart struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Tier     string          `json:"tier" msgpack:"tier"` // its name
	From     uint32          `json:"from" msgpack:"from"`
	To       uint32          `json:"to" msgpack:"to"`
	Whole    bool            `json:"whole,omitempty" msgpack:"whole,omitempty"` // the rank holds all in another tier
}
