package api

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a list of recorded requests.
const (
	UsualRecorded = 20  // of a request that says nothing
	MaxRecorded   = 128 // of any; as many are kept of a model on each node
)

// RecordedRequest asks for the newest recorded requests of a model, or for one of them.
type RecordedRequest struct {
	Model  string `json:"model" msgpack:"model"`
	Limit  uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"`   // default 20
	Before string `json:"before,omitempty" msgpack:"before,omitempty"` // the id of one: only those that are older

	// ID is that of the one that is wanted, with its hashes.
	ID string `json:"id,omitempty" msgpack:"id,omitempty"`
}

// Check refuses what no service could answer. The error is an [Error].
func (r *RecordedRequest) Check() error {
	switch {
	case r.Model == "":
		return Errorf(CodeMissingModel, "the request names no model")
	case r.Limit > MaxRecorded:
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxRecorded)
	case r.ID != "" && r.Before != "":
		return Errorf(CodeMalformed, "id asks for one request, and before for a list; send one of them")
	}
	return nil
}

func (r *RecordedRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"limit", (*positiveNumber)(&r.Limit)},
		member{"before", &r.Before}, member{"id", &r.ID})
}

// RecordedList is recorded requests.
type RecordedList struct {
	Requests []Recorded `json:"requests" msgpack:"requests"` // the newest first
	More     bool       `json:"more" msgpack:"more"`         // there are older ones

	Missing []string `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes that did not answer
}

// Recorded is a prompt that was asked for or routed, without what it was: the hashes of its blocks, and what was
// answered. Depths are in blocks from the start.
type Recorded struct {
	ID        string    `json:"id" msgpack:"id"`
	At        time.Time `json:"at" msgpack:"at"`
	Node      string    `json:"node" msgpack:"node"` // that answered
	Model     string    `json:"model" msgpack:"model"`
	BlockSize uint32    `json:"block_size" msgpack:"block_size"`
	ISLTokens uint64    `json:"isl_tokens" msgpack:"isl_tokens"` // of the prompt
	Blocks    uint32    `json:"blocks" msgpack:"blocks"`         // whole ones; 0 too if no tokens could be made of a text

	Held       uint32 `json:"held" msgpack:"held"`                                 // the most that any worker held
	Shared     uint32 `json:"shared" msgpack:"shared"`                             // what the shared store had
	Incomplete bool   `json:"incomplete,omitempty" msgpack:"incomplete,omitempty"` // the answer lacked partitions
	Restricted bool   `json:"restricted,omitempty" msgpack:"restricted,omitempty"` // it excluded workers

	// Of a choice: its outcome as in Funnel.Decisions, the worker, and what that held.
	Decision  string          `json:"decision,omitempty" msgpack:"decision,omitempty"`
	RequestID string          `json:"request_id,omitempty" msgpack:"request_id,omitempty"`
	Worker    events.WorkerID `json:"worker,omitempty" msgpack:"worker,omitempty"`
	Selected  uint32          `json:"selected,omitempty" msgpack:"selected,omitempty"`

	// Hashes are the local hashes of its blocks, if it was asked for by its id: in decimal, as text, since not every
	// reader of JSON keeps all digits of a number, and as a query takes them. Absent, they were too many to be kept.
	Hashes []string `json:"hashes,omitempty" msgpack:"hashes,omitempty"`
}
