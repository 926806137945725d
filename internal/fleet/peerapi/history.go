package peerapi

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MaxHistoryBlocks is the largest number of blocks in a BlockHistoryRequest.
const MaxHistoryBlocks = 1 << 16

// BlockHistoryRequest is a request for a node's records of blocks.
type BlockHistoryRequest struct {
	Blocks api.Hashes `json:"blocks,omitzero" msgpack:"blocks,omitempty"` // by their names in internal/operate/funnel

	// Workers lists workers. The answer has the first blocks of prompts that these workers stored last.
	Workers []events.WorkerID `json:"workers,omitzero" msgpack:"workers,omitempty"`

	// Models lists models. The answer has their block sizes.
	Models []string `json:"models,omitzero" msgpack:"models,omitempty"`
}

// Check returns an error for an invalid request. The error is an [api.Error].
func (b *BlockHistoryRequest) Check() error {
	if len(b.Blocks) > MaxHistoryBlocks {
		return api.Errorf(api.CodeTooLarge, "blocks has %d elements, more than %d", len(b.Blocks), MaxHistoryBlocks)
	}
	return nil
}

// BlockHistory has a node's records of blocks.
type BlockHistory struct {
	Blocks []BlockPast  `json:"blocks" msgpack:"blocks"` // recorded blocks, in the order of the request
	Roots  []StoredRoot `json:"roots,omitempty" msgpack:"roots,omitempty"`

	BlockSizes map[string][]uint32 `json:"block_sizes,omitempty" msgpack:"block_sizes,omitempty"` // by model
}

// StoredRoot is the first block of a prompt that a worker has stored.
type StoredRoot struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Block  uint64          `json:"block" msgpack:"block"`
	At     int64           `json:"at" msgpack:"at"` // in microseconds since 1970
}

// BlockPast is a node's record of a block. Times are in microseconds since 1970; 0: never, by the record.
type BlockPast struct {
	At     uint32 `json:"at" msgpack:"at"`         // index in the request
	Asked  int64  `json:"asked" msgpack:"asked"`   // first request
	Stored int64  `json:"stored" msgpack:"stored"` // first
	Last   int64  `json:"last" msgpack:"last"`     // last

	// Lost is the time of the last removal by a worker, or of the last clear of a worker that had stored the block.
	// Why, Worker and Tier belong to this removal.
	Lost   int64           `json:"lost" msgpack:"lost"`
	Why    api.FunnelCause `json:"why,omitempty" msgpack:"why,omitempty"`
	Worker events.WorkerID `json:"worker,omitempty" msgpack:"worker,omitempty"`
	Tier   events.Tier     `json:"tier,omitempty" msgpack:"tier,omitempty"`

	Held bool `json:"held,omitempty" msgpack:"held,omitempty"` // by some worker at the first request

	// Sent is the worker of the last choice for a prompt with this first block. SentAt is the time of the choice.
	Sent   events.WorkerID `json:"sent,omitempty" msgpack:"sent,omitempty"`
	SentAt int64           `json:"sent_at,omitempty" msgpack:"sent_at,omitempty"`
}
