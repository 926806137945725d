package api

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// MaxRecorded is the largest number of recorded requests in a list. Each node keeps as many of a model.
const MaxRecorded = 128

// RecordedRequest is a request for the newest recorded requests of a model, or for one of them.
type RecordedRequest struct {
	Model  string `json:"model" msgpack:"model"`
	Limit  uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"`   // default 20
	Before string `json:"before,omitempty" msgpack:"before,omitempty"` // an id: only older requests

	// ID is the id of a single request, which is returned with its hashes.
	ID string `json:"id,omitempty" msgpack:"id,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *RecordedRequest) Check() error {
	switch {
	case r.Model == "":
		return checkModel(r.Model)
	case r.Limit > MaxRecorded:
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxRecorded)
	case r.ID != "" && r.Before != "":
		return Errorf(CodeMalformed, "id selects one request, and before a list; send one of them")
	}
	return nil
}

func (r *RecordedRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"limit", (*positiveNumber)(&r.Limit)},
		member{"before", &r.Before}, member{"id", &r.ID})
}

// RecordedList is a list of recorded requests.
type RecordedList struct {
	Requests []Recorded `json:"requests" msgpack:"requests"` // newest first
	More     bool       `json:"more" msgpack:"more"`         // there are older requests

	Missing []string `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes without an answer
}

// Recorded is the record of a query or a choice, without the prompt: the hashes of its blocks, and the answer. Depths
// are in blocks from the start.
type Recorded struct {
	ID        string    `json:"id" msgpack:"id"`
	At        time.Time `json:"at" msgpack:"at"`
	Node      string    `json:"node" msgpack:"node"` // the answering node
	Model     string    `json:"model" msgpack:"model"`
	BlockSize uint32    `json:"block_size" msgpack:"block_size"`
	ISLTokens uint64    `json:"isl_tokens" msgpack:"isl_tokens"` // of the prompt
	Blocks    uint32    `json:"blocks" msgpack:"blocks"`         // whole blocks; 0 too without tokens

	Held       uint32 `json:"held" msgpack:"held"`                                 // most blocks of any worker
	Shared     uint32 `json:"shared" msgpack:"shared"`                             // blocks of the shared store
	Incomplete bool   `json:"incomplete,omitempty" msgpack:"incomplete,omitempty"` // the answer lacked partitions
	Restricted bool   `json:"restricted,omitempty" msgpack:"restricted,omitempty"` // the request excluded workers

	// For a choice: the outcome as in Funnel.Decisions, the chosen worker, and the worker's blocks.
	Decision  string          `json:"decision,omitempty" msgpack:"decision,omitempty"`
	RequestID string          `json:"request_id,omitempty" msgpack:"request_id,omitempty"`
	Worker    events.WorkerID `json:"worker,omitempty" msgpack:"worker,omitempty"`
	Selected  uint32          `json:"selected,omitempty" msgpack:"selected,omitempty"`

	// Hashes are the local hashes of its blocks, if the request has an ID. They are text in decimal digits, since some
	// readers of JSON round numbers. A query accepts this form. The list is absent if it was too long to keep.
	Hashes []string `json:"hashes,omitempty" msgpack:"hashes,omitempty"`
}
