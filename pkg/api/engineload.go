package api

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// EngineLoad is the load of a rank: its memory and requests by the engine's report, or its load by a report of a
// foreign router.
type EngineLoad = events.EngineLoad

// EngineLoads has load reports: new reports, or the latest reports of all ranks.
type EngineLoads struct {
	Loads []EngineLoad `json:"loads" msgpack:"loads"` // in answers by worker and rank, newest first

	// Requests are changes of requests that foreign routers sent to workers, in order. Answers have none.
	Requests []RouterRequest `json:"requests,omitempty" msgpack:"requests,omitempty"`

	// Results are ends of requests at workers, from routers that book no requests. Answers have the last failure of each
	// penalised worker.
	Results []WorkerResult `json:"results,omitempty" msgpack:"results,omitempty"`
}

// Result is the end of a request at a worker.
type Result string

// The results. All except ResultOK are failures of the worker. An answer with a status of 4xx is none.
const (
	ResultOK      Result = "ok"
	ResultRefused Result = "refused" // no connection to the worker
	ResultBroken  Result = "broken"  // the connection ended before the whole answer
	ResultStatus  Result = "status"  // an answer with a status of 5xx
	ResultTimeout Result = "timeout" // no answer in time
)

// Results lists all results.
var Results = []Result{ResultOK, ResultRefused, ResultBroken, ResultStatus, ResultTimeout}

// Check returns an error for an unknown result. The error has no code.
func (r Result) Check() error {
	if !slices.Contains(Results, r) {
		return fmt.Errorf("is %.40q, none of %v", string(r), Results)
	}
	return nil
}

// WorkerResult is the end of a request at a worker.
type WorkerResult struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Result Result          `json:"result" msgpack:"result"`
	AgeMS  uint64          `json:"age_ms,omitempty" msgpack:"age_ms,omitempty"` // milliseconds since the end
}

// Check returns an error for a missing worker or an unknown result. The error has no code.
func (r *WorkerResult) Check() error {
	if r.Worker == "" {
		return errors.New("worker is missing")
	}
	if err := r.Result.Check(); err != nil {
		return fmt.Errorf("result %w", err)
	}
	return nil
}

// RouterRequest is a change of a request that a foreign router sent to a worker.
type RouterRequest struct {
	Model     string          `json:"model" msgpack:"model"`
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank" msgpack:"rank"`
	RequestID string          `json:"request_id" msgpack:"request_id"` // at most 1,022 bytes

	// Change is added, prefilling, prefilled or freed. Later versions may add values, which are counted and ignored.
	Change events.RequestChange `json:"change" msgpack:"change"`
	// SequenceHashes are the names of the prompt's whole blocks; for added only.
	SequenceHashes Hashes `json:"sequence_hashes,omitzero" msgpack:"sequence_hashes,omitempty"`
	// PrefillTokens is the number of tokens to compute on the worker; for added and prefilling.
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`
}

// Check returns an error for a change without a model, worker or request. The error has no code.
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

// maxRouterRequestID leaves room for the nodes' prefix of the id.
const maxRouterRequestID = MaxRequestID - 2

// MaxEngineLoads is the largest number of reports, and of changes of requests, in a request.
const MaxEngineLoads = 8192

// Check returns an error for invalid reports. The error is an [Error].
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
	if len(l.Results) > MaxEngineLoads {
		return Errorf(CodeTooLarge, "results has %d elements, more than %d", len(l.Results), MaxEngineLoads)
	}
	for i := range l.Results {
		if err := l.Results[i].Check(); err != nil {
			return Errorf(CodeMalformed, "results[%d]: %v", i, err)
		}
	}
	return nil
}

// ReadEngineLoads decodes published reports, also of nodes and shims of newer versions. It ignores unknown fields and
// reads all other fields strictly. The error is an [Error].
func ReadEngineLoads(contentType string, body []byte) (*EngineLoads, error) {
	var l EngineLoads
	err := (&reader{unknown: ignoreUnknown, what: "the request"}).read(contentType, body, &l)
	if err == nil {
		err = l.Check()
	}
	return &l, err
}
