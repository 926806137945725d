package peerapi

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// RemovalPart is a node's part of a RemovalOrder.
type RemovalPart struct {
	BlockSize uint32             `json:"block_size" msgpack:"block_size"`
	Holders   []RemovalHolder    `json:"holders" msgpack:"holders"`
	Missing   []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Bits limits the answer: Holders has only blocks with so many zero bits at the begin of the hash, one of 2^Bits.
	Bits uint32 `json:"bits,omitempty" msgpack:"bits,omitempty"`

	// The node's recorded requests with the depths of all workers of all nodes.
	Requests []RemovalDepths `json:"requests" msgpack:"requests"`
	PerHour  float64         `json:"per_hour" msgpack:"per_hour"` // requests on this node
}

// RemovalHolder has the blocks that only one worker of the node holds. The blocks of several workers are under the
// empty worker.
type RemovalHolder struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Blocks api.Hashes      `json:"blocks" msgpack:"blocks"` // each with all blocks before it
}

// RemovalDepths has the workers that hold a prefix of a request, at most the 32 with the longest ones.
type RemovalDepths struct {
	Workers []events.WorkerID `json:"workers" msgpack:"workers"`
	Blocks  []uint32          `json:"blocks" msgpack:"blocks"` // of each worker
}
