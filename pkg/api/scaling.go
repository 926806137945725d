package api

import (
	"github.com/kvatlas/kvatlas/pkg/events"
)

// RemovalRequest is a request for the order in which workers of a model should be removed.
type RemovalRequest struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"` // required if the model has several

	// Partitions is for requests between nodes: the answer is then the part of these partitions.
	Partitions []events.Partition `json:"partitions,omitempty" msgpack:"partitions,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *RemovalRequest) Check() error {
	if r.Model == "" {
		return Errorf(CodeMissingModel, "the request has no model")
	}
	return nil
}

func (r *RemovalRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"block_size", (*positiveNumber)(&r.BlockSize)},
		member{"partitions", &r.Partitions})
}

// RemovalOrder has the workers of a model in the order of removal, the smallest loss first.
type RemovalOrder struct {
	Model     string        `json:"model" msgpack:"model"`
	BlockSize uint32        `json:"block_size" msgpack:"block_size"`
	Workers   []RemovalCost `json:"workers" msgpack:"workers"`

	// The demand: the newest recorded requests of each node, at most 32, which stand for all requests, and the requests
	// per hour.
	Sample          int     `json:"sample" msgpack:"sample"`
	RequestsPerHour float64 `json:"requests_per_hour" msgpack:"requests_per_hour"`
	MSPerBlock      float64 `json:"ms_per_block" msgpack:"ms_per_block"` // to compute a block, by the measured rates

	// BlockSample is 1 if every block was counted, or n if one block of n was counted, in a large fleet.
	BlockSample uint64 `json:"block_sample" msgpack:"block_sample"`

	Complete bool               `json:"complete" msgpack:"complete"` // false: partitions or nodes are missing
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`
	Unheard  []string           `json:"unheard,omitempty" msgpack:"unheard,omitempty"`
}

// RemovalCost is the loss by the removal of a worker, after the workers before it in the list.
type RemovalCost struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Unique uint64          `json:"unique_blocks" msgpack:"unique_blocks"` // only this worker holds them now

	RequestsPerHour float64 `json:"requests_per_hour" msgpack:"requests_per_hour"` // that lose blocks
	BlocksPerHour   float64 `json:"blocks_per_hour" msgpack:"blocks_per_hour"`     // to compute again
	MSPerHour       float64 `json:"ms_per_hour" msgpack:"ms_per_hour"`             // to compute the blocks again
}

// ScalingRequest is a request for the waiting work of a model.
type ScalingRequest struct {
	Model string `json:"model" msgpack:"model"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *ScalingRequest) Check() error {
	if r.Model == "" {
		return Errorf(CodeMissingModel, "the request has no model")
	}
	return nil
}

func (r *ScalingRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model})
}

// Scaling is the waiting work of a model, for an autoscaler. Uncached tokens are prompt tokens that no cache of the
// chosen worker holds.
type Scaling struct {
	Model string `json:"model" msgpack:"model"`

	// WaitingUncachedTokens are the uncached tokens of prompts that are booked without a first token, and of prompts in
	// the queues of all nodes.
	WaitingUncachedTokens uint64 `json:"waiting_uncached_tokens" msgpack:"waiting_uncached_tokens"`
	QueuedUncachedTokens  uint64 `json:"queued_uncached_tokens" msgpack:"queued_uncached_tokens"` // of them in queues
	QueuedRequests        int    `json:"queued_requests" msgpack:"queued_requests"`
	Workers               int    `json:"workers" msgpack:"workers"` // with a schedulable rank

	// WaitingPerWorker is WaitingUncachedTokens divided by Workers, at least 1.
	WaitingPerWorker float64 `json:"waiting_uncached_tokens_per_worker" msgpack:"waiting_uncached_tokens_per_worker"`

	Missing []string `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes whose queues are missing
}
