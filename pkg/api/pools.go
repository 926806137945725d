package api

import "github.com/kvatlas/kvatlas/pkg/routing"

// The outcomes of a disaggregated request. All except WithPrefill mean that the chosen worker computes the prompt.
const (
	WithPrefill     = "prefill"           // the request has a prefill worker
	ShortPrompt     = "short_prompt"      // bypass: the decode worker lacks only a short part of the prompt
	PrefillBusy     = "prefill_busy"      // bypass: the prefill workers are busy
	NoPrefillWorker = "no_prefill_worker" // no prefill worker is eligible; see SelectRequest.PrefillOptional
	NoDecodeWorker  = "no_decode_worker"  // the same for decode workers
)

// Disaggregation has the reason for a request with or without a prefill worker.
type Disaggregation struct {
	Outcome      string `json:"outcome" msgpack:"outcome"`               // one of the constants above
	Bypass       bool   `json:"bypass" msgpack:"bypass"`                 // there is no prefill worker
	Reason       string `json:"reason" msgpack:"reason"`                 // for people
	NetNewTokens uint64 `json:"net_new_tokens" msgpack:"net_new_tokens"` // tokens that the decode worker lacks
}

// WorkerLoad has the outstanding work and the capacity of a rank.
type WorkerLoad struct {
	ActivePrefillTokens  uint64 `json:"active_prefill_tokens" msgpack:"active_prefill_tokens"`
	PrefillTokenCapacity uint64 `json:"prefill_token_capacity" msgpack:"prefill_token_capacity"`
	TotalKVBlocks        uint64 `json:"total_kv_blocks,omitempty" msgpack:"total_kv_blocks,omitempty"` // 0: unknown

	// PrefillBusy is set if there is a threshold.
	PrefillBusy *bool `json:"prefill_busy,omitempty" msgpack:"prefill_busy,omitempty"`
}

// PrefillID returns the id of a disaggregated request's booking on the prefill worker. The end of the request, or the
// end of its prefill, ends this booking too.
func PrefillID(id string) string { return id + "\x00prefill" }

// MaxSessionID is the largest length of a session's id in bytes.
const MaxSessionID = 256

// SessionBinding is the effect of a request on the binding of its session.
type SessionBinding struct {
	// ID is the id of the request's session. For a request without one, it is "prompt:" with the hash of the last whole
	// block of the prompt.
	ID      string          `json:"id" msgpack:"id"`
	Binding string          `json:"binding" msgpack:"binding"`               // one of the constants below
	From    *routing.Target `json:"from,omitempty" msgpack:"from,omitempty"` // the previous worker of a moved session
}

// The effects.
const (
	SessionMade  = "made"  // there was no binding
	SessionKept  = "kept"  // the request is on the worker of the session
	SessionMoved = "moved" // the session has moved to the worker of the request
	SessionNone  = "none"  // no binding: too many sessions, or another prompt without an id ended with the same block
)

// QueueRefusal is the reason that a request does not wait for a worker.
type QueueRefusal struct {
	// Reason is full (the node's queue is full), deadline (the deadline passed while the request waited), or the
	// exceeded limit of the class: requests, raw_tokens, cached_tokens.
	Reason           string  `json:"reason" msgpack:"reason"`
	Class            string  `json:"class" msgpack:"class"`
	Limit            float64 `json:"limit,omitempty" msgpack:"limit,omitempty"`
	Current          float64 `json:"current" msgpack:"current"`                       // the waiting amount
	PendingCount     int     `json:"pending_count" msgpack:"pending_count"`           // of the model, on this node
	PendingISLTokens uint64  `json:"pending_isl_tokens" msgpack:"pending_isl_tokens"` // their tokens
}
