package api

import "github.com/kvatlas/kvatlas/pkg/events"

// Bounds of the runs of a PrefixTree.
const (
	UsualPrefixes = 500  // of a request that says nothing
	MaxPrefixes   = 5000 // of any

	// MaxPrefixHashes bounds the hashes that a node tells of all runs, so that they can be joined with other nodes'.
	MaxPrefixHashes = 40_000
)

// PrefixesRequest asks for the tree of all nodes, or as one node has it.
type PrefixesRequest struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"` // needed if the model has several
	Node      string `json:"node,omitempty" msgpack:"node,omitempty"`             // empty: all nodes together
	Limit     uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"`           // runs at most; default 500

	// Partitions are those of which the workers count, with a node; nil: all that it has. Nodes ask each other so, and
	// are told what it takes to join the runs.
	Partitions []events.Partition `json:"partitions,omitempty" msgpack:"partitions,omitempty"`
}

// Check refuses what no node could answer. The error is an [Error].
func (r *PrefixesRequest) Check() error {
	switch {
	case r.Model == "":
		return Errorf(CodeMissingModel, "the request names no model")
	case r.Limit > MaxPrefixes:
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxPrefixes)
	case r.Partitions != nil && len(r.Partitions) == 0:
		return Errorf(CodeMalformed, "partitions is an empty list, which allows none; leave it out to allow all")
	case len(r.Partitions) > 0 && r.Node == "":
		return Errorf(CodeMalformed, "partitions go with a node")
	}
	return nil
}

func (r *PrefixesRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"block_size", (*positiveNumber)(&r.BlockSize)},
		member{"node", &r.Node}, member{"limit", (*positiveNumber)(&r.Limit)}, member{"partitions", &r.Partitions})
}

// PrefixTree is the largest part of the tree of prefixes that workers of a model hold: of all workers, or of those in
// one node's partitions.
type PrefixTree struct {
	Node      string      `json:"node,omitempty" msgpack:"node,omitempty"` // whose it is; empty: all nodes'
	Model     string      `json:"model" msgpack:"model"`
	BlockSize uint32      `json:"block_size" msgpack:"block_size"`
	Runs      []PrefixRun `json:"runs" msgpack:"runs"` // parents before children; those with most blocks times holders

	// What there is in all: runs that somebody holds, and their blocks. Where nodes have more than they tell, runs that
	// several of them have are counted for each.
	TotalRuns   int64 `json:"total_runs" msgpack:"total_runs"`
	TotalBlocks int64 `json:"total_blocks" msgpack:"total_blocks"`

	Ranks      int                `json:"ranks" msgpack:"ranks"`           // of the model
	Partitions []events.Partition `json:"partitions" msgpack:"partitions"` // that these ranks are in

	// Complete is false if partitions are missing, with the nodes that were asked for them and did not answer.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`
	Unheard  []string           `json:"unheard,omitempty" msgpack:"unheard,omitempty"`

	// Shards are the trees of the node's other indexes, of a request with partitions.
	Shards []*PrefixTree `json:"shards,omitempty" msgpack:"shards,omitempty"`
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

	// Of a request with partitions: local hashes of the first blocks, of all if there is room, and who does not hold all
	// of the run in a tier; of too many of these none is told, and they are taken to hold all.
	Hashes Hashes       `json:"hashes,omitzero" msgpack:"hashes,omitempty"`
	Partly []PrefixPart `json:"partly,omitempty" msgpack:"partly,omitempty"`
}

// PrefixPart is a part of a run that a rank holds, from one of the run's blocks to before another.
type PrefixPart struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Tier     string          `json:"tier" msgpack:"tier"` // its name
	From     uint32          `json:"from" msgpack:"from"`
	To       uint32          `json:"to" msgpack:"to"`
	Whole    bool            `json:"whole,omitempty" msgpack:"whole,omitempty"` // it holds all of the run in another tier
}
