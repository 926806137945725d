package api

import "github.com/kvatlas/kvatlas/pkg/routing"

// Disaggregation is why a request has a prefill worker, or none.
type Disaggregation struct {
	Bypass       bool   `json:"bypass" msgpack:"bypass"`                 // there is none
	Reason       string `json:"reason" msgpack:"reason"`                 // for people
	NetNewTokens uint64 `json:"net_new_tokens" msgpack:"net_new_tokens"` // of the prompt, which the decode worker lacks
}

// WorkerLoad is what a rank has to do, and has room for.
type WorkerLoad struct {
	ActivePrefillTokens  uint64 `json:"active_prefill_tokens" msgpack:"active_prefill_tokens"`
	PrefillTokenCapacity uint64 `json:"prefill_token_capacity" msgpack:"prefill_token_capacity"`
	TotalKVBlocks        uint64 `json:"total_kv_blocks,omitempty" msgpack:"total_kv_blocks,omitempty"` // 0: not known

	// PrefillBusy is there if a threshold is set.
	PrefillBusy *bool `json:"prefill_busy,omitempty" msgpack:"prefill_busy,omitempty"`
}

// PrefillID is the id of the booking of a disaggregated request on its prefill worker. Who frees the request, or says
// that its prefill is complete, by its own id ends it too.
func PrefillID(id string) string { return id + "\x00prefill" }

// MaxSessionID is how many bytes a session's id may have.
const MaxSessionID = 256

// SessionBinding is what became of the binding of a session to a worker.
type SessionBinding struct {
	// ID is the id of the request's session. If the request had none, it begins with "prompt:" and names the last whole
	// block of the prompt.
	ID      string          `json:"id" msgpack:"id"`
	Binding string          `json:"binding" msgpack:"binding"`               // one of those below
	From    *routing.Target `json:"from,omitempty" msgpack:"from,omitempty"` // of one that has moved
}

// What becomes of a session's binding.
const (
	SessionMade  = "made"  // there was none
	SessionKept  = "kept"  // the worker is that of the session
	SessionMoved = "moved" // the session has followed the request
	SessionNone  = "none"  // too many sessions are bound, or another prompt without an id ended with the same block
)

// QueueRefusal is why a request does not wait until a worker has room.
type QueueRefusal struct {
	// Reason is full (of the node's queue), deadline (it has passed while the request waited), or the limit of the class
	// that is reached: requests, raw_tokens, cached_tokens.
	Reason           string  `json:"reason" msgpack:"reason"`
	Class            string  `json:"class" msgpack:"class"`
	Limit            float64 `json:"limit,omitempty" msgpack:"limit,omitempty"`
	Current          float64 `json:"current" msgpack:"current"`                       // what waits
	PendingCount     int     `json:"pending_count" msgpack:"pending_count"`           // of the model, on this node
	PendingISLTokens uint64  `json:"pending_isl_tokens" msgpack:"pending_isl_tokens"` // their tokens
}
