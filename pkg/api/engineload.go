package api

import (
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// EngineLoad is how full a rank is, as its engine says, or as a router of another make counts what it has sent there.
type EngineLoad = events.EngineLoad

// EngineLoads are reports of engines: what they say, or what is known of all of them.
type EngineLoads struct {
	Loads []EngineLoad `json:"loads" msgpack:"loads"` // by worker and rank, newest first, where they are known

	// Requests are changes of requests that routers of another make sent to workers, in order. Answers have none.
	Requests []RouterRequest `json:"requests,omitempty" msgpack:"requests,omitempty"`
}

// RouterRequest is one change of a request that a router of another make sent to a worker.
type RouterRequest struct {
	Model     string          `json:"model" msgpack:"model"`
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank" msgpack:"rank"`
	RequestID string          `json:"request_id" msgpack:"request_id"` // at most 1,022 bytes

	// Change is added, prefilling, prefilled or freed. Later versions may have more, which are counted and ignored.
	Change events.RequestChange `json:"change" msgpack:"change"`
	// SequenceHashes are the names of the prompt's whole blocks; of added.
	SequenceHashes Hashes `json:"sequence_hashes,omitzero" msgpack:"sequence_hashes,omitempty"`
	// PrefillTokens are the tokens that the worker has to compute; of added and prefilling.
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`
}

// Check refuses a change that names no model, worker or request. The error has no code.
func (r *RouterRequest) Check() error {
	switch {
	case r.Model == "":
		return errors.New("model is missing")
	case r.Worker == "":
		return errors.New("worker is missing")
	case r.RequestID == "" || len(r.RequestID) > maxRouterRequestID:
		return fmt.Errorf("request_id has %d bytes; it has 1 to %d", len(r.RequestID), maxRouterRequestID)
	case r.Change == "":
		return errors.New("change is missing")
	}
	return nil
}

// maxRouterRequestID leaves room for what nodes put before the id.
const maxRouterRequestID = MaxRequestID - 2

// MaxEngineLoads is how many reports, and how many changes of requests, one request may have.
const MaxEngineLoads = 8192

// Check refuses what says nothing. The error is an [Error].
func (l *EngineLoads) Check() error {
	if len(l.Loads) > MaxEngineLoads {
		return Errorf(CodeTooLarge, "loads has %d elements, more than %d", len(l.Loads), MaxEngineLoads)
	}
	for i := range l.Loads {
		if err := l.Loads[i].Check(); err != nil {
			return Errorf(CodeMalformed, "loads[%d]: %v", i, err)
		}
	}
	if len(l.Requests) > MaxEngineLoads {
		return Errorf(CodeTooLarge, "requests has %d elements, more than %d", len(l.Requests), MaxEngineLoads)
	}
	for i := range l.Requests {
		if err := l.Requests[i].Check(); err != nil {
			return Errorf(CodeMalformed, "requests[%d]: %v", i, err)
		}
	}
	return nil
}

// ReadEngineLoads reads reports that were published, by nodes and shims of newer versions too: fields that are not
// known are ignored, and all others are read strictly. The error is an [Error].
func ReadEngineLoads(contentType string, body []byte) (*EngineLoads, error) {
	var l EngineLoads
	err := (&reader{unknown: IgnoreUnknown, what: "the request"}).read(contentType, body, &l)
	if err == nil {
		err = l.Check()
	}
	return &l, err
}
