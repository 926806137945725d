package api

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a funnel's window.
const (
	FunnelSince    = 10 * time.Minute // default of a request
	MaxFunnelSince = time.Hour
)

// FunnelRequest is a request for the funnel of a model's prompts.
type FunnelRequest struct {
	Model string `json:"model" msgpack:"model"`

	// Since is the length of the window up to now, such as 10m or 90s; default 10m, at most 1h.
	Since string `json:"since,omitempty" msgpack:"since,omitempty"`
}

// FunnelStep is a step of the funnel. Each step has at most the tokens of the previous step.
type FunnelStep string

// The steps.
const (
	StepAsked    FunnelStep = "asked"    // tokens of all prompts
	StepSeen     FunnelStep = "seen"     // of prefixes that were requested or stored before: an unbounded cache
	StepHeld     FunnelStep = "held"     // of the prefix that some worker held at the request
	StepSelected FunnelStep = "selected" // of the prefix that the chosen worker held
	StepReused   FunnelStep = "reused"   // reused, by the engine's report
)

// A new cause also needs a text and a remedy in internal/serve/page/static/causes.js and docs/funnel.md.

// FunnelCause is the reason that tokens of a step are missing in the next step.
type FunnelCause string

// The causes.
const (
	// from asked to seen
	CauseNew            FunnelCause = "new"                // no request or worker has had the prefix before
	CausePartialBlock   FunnelCause = "partial_block"      // the end of the prompt after the last whole block
	CauseOtherSpace     FunnelCause = "other_salt_or_lora" // requested before with another LoRA and the same salt
	CauseOtherBlockSize FunnelCause = "other_block_size"   // the same tokens were seen in blocks of another size

	CauseNotTokenized FunnelCause = "not_tokenized" // the text could not be tokenized

	// CauseUnsupported: a field of the request is unknown, or determines tokens or tenant and is not supported.
	CauseUnsupported FunnelCause = "unsupported_field"

	// from seen to held
	CauseEvicted         FunnelCause = "evicted"            // a worker removed the block
	CauseCleared         FunnelCause = "cleared"            // a worker's cache was lost: a reset, restart or gap
	CauseWorkerGone      FunnelCause = "worker_gone"        // the worker's lease or registration has ended
	CauseNeverStored     FunnelCause = "never_stored"       // requested before, but no worker announced the block
	CauseTokens          FunnelCause = "tokenizer_mismatch" // the receiving worker stored other tokens
	CauseUncountedTier   FunnelCause = "uncounted_tier"     // only the shared store has the block
	CauseIndexIncomplete FunnelCause = "index_incomplete"   // the answer lacked partitions
	CauseNotAllowed      FunnelCause = "not_allowed"        // held by workers that the request excludes
	CauseUnexplained     FunnelCause = "unexplained"        // the node has no record of the block's end

	// from held to selected; CauseWorkerGone occurs there too
	CauseWorkerUnknown FunnelCause = "worker_unknown" // a holder in the log was not registered

	CauseLoad        FunnelCause = "lost_to_load" // the choice fell on a less busy worker with less of the prefix
	CauseBypass      FunnelCause = "bypass"       // a prefill worker had more, and the decode worker computed the prompt
	CauseNotEligible FunnelCause = "not_eligible" // the holder drains, has another role or is excluded
	CauseNotRouted   FunnelCause = "not_routed"   // only a find: the chosen worker is unknown

	// from selected to reused
	CauseNotReported FunnelCause = "not_reported" // no report came
	CauseEvictedLate FunnelCause = "evicted_late" // the chosen worker removed it between choice and report
	CauseLowerTier   FunnelCause = "lower_tier"   // the host, disk or external tier of the chosen worker had it
	CauseLastBlock   FunnelCause = "last_block"   // the whole prompt was held: engines compute the last block again
	CauseEngine      FunnelCause = "engine"       // the engine reused less than it had announced

	// CausePrefillFailed: the decode worker computed the prompt, because the request to the prefill worker failed.
	CausePrefillFailed FunnelCause = "prefill_failed"
)

// Funnel shows where reusable tokens are lost.
type Funnel struct {
	Model string `json:"model" msgpack:"model"`

	// From and To bound the window: the requested window, rounded to whole buckets, from the begin of the nodes'
	// records at the earliest.
	From time.Time `json:"from" msgpack:"from"`
	To   time.Time `json:"to" msgpack:"to"`

	Requests uint64 `json:"requests" msgpack:"requests"` // finds and choices
	Routed   uint64 `json:"routed" msgpack:"routed"`     // choices among them
	Reported uint64 `json:"reported" msgpack:"reported"` // choices with a report of the engine's reuse

	Steps []FunnelTokens `json:"steps" msgpack:"steps"` // all five, in order

	// Decisions are the choices by outcome: best, lost_to_load, bypass, cold, pinned, no_index, no_worker.
	Decisions map[string]uint64 `json:"decisions" msgpack:"decisions"`

	Buckets []FunnelBucket `json:"buckets" msgpack:"buckets"` // by time, ascending, without empty spans

	Nodes   []FunnelNode `json:"nodes" msgpack:"nodes"`                         // nodes that answered, by name
	Missing []string     `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes without an answer
}

// FunnelTokens is a step of a funnel.
type FunnelTokens struct {
	Step   FunnelStep   `json:"step" msgpack:"step"`
	Tokens uint64       `json:"tokens" msgpack:"tokens"`
	Share  *float64     `json:"share" msgpack:"share"` // of the requested tokens; null: unknown, without reports
	Lost   []FunnelLoss `json:"lost" msgpack:"lost"`   // between the previous step and this step, most first

	// NotReported, in the step reused: no engine has reported the reuse. Tokens is 0 then.
	NotReported bool `json:"not_reported,omitempty" msgpack:"not_reported,omitempty"`
}

// FunnelLoss is the loss by one cause.
type FunnelLoss struct {
	Cause  FunnelCause `json:"cause" msgpack:"cause"`
	Tokens uint64      `json:"tokens" msgpack:"tokens"`
	Share  float64     `json:"share" msgpack:"share"` // of the requested tokens

	// Workers lists the workers that lost the tokens last, most first, as far as recorded.
	Workers []FunnelWorker `json:"workers,omitempty" msgpack:"workers,omitempty"`
}

// FunnelWorker has the tokens that a worker removed before a later request. The worker "other" stands for all workers
// after the first few.
type FunnelWorker struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Tier   string          `json:"tier,omitempty" msgpack:"tier,omitempty"` // tier of the last removal; empty: all
	Tokens uint64          `json:"tokens" msgpack:"tokens"`
	AgeMS  uint64          `json:"age_ms" msgpack:"age_ms"` // mean time from the removal to the request
}

// FunnelBucket is a span of the window: ten seconds, or a minute for times more than ten minutes ago.
type FunnelBucket struct {
	From     time.Time `json:"from" msgpack:"from"`
	Seconds  uint32    `json:"seconds" msgpack:"seconds"`
	Requests uint64    `json:"requests" msgpack:"requests"`
	Reported uint64    `json:"reported" msgpack:"reported"` // choices with a report of the engine's reuse

	// Tokens of each step, as in Funnel.Steps.
	Asked    uint64 `json:"asked" msgpack:"asked"`
	Seen     uint64 `json:"seen" msgpack:"seen"`
	Held     uint64 `json:"held" msgpack:"held"`
	Selected uint64 `json:"selected" msgpack:"selected"`
	Reused   uint64 `json:"reused" msgpack:"reused"`

	Lost map[FunnelCause]uint64 `json:"lost,omitempty" msgpack:"lost,omitempty"` // tokens by cause
}

// FunnelNode describes the records of a node. Counts are since the node's start.
type FunnelNode struct {
	Node string `json:"node" msgpack:"node"`

	From         time.Time `json:"from" msgpack:"from"`                   // begin of the node's part of the window
	HistoryFrom  time.Time `json:"history_from" msgpack:"history_from"`   // begin of the history of blocks
	HistoryLost  uint64    `json:"history_lost" msgpack:"history_lost"`   // blocks dropped for lack of room
	Dropped      uint64    `json:"dropped" msgpack:"dropped"`             // requests not recorded: overload
	EventsUnread uint64    `json:"events_unread" msgpack:"events_unread"` // messages of the log not recorded: overload
	Forgotten    uint64    `json:"forgotten" msgpack:"forgotten"`         // choices without a report in time
	PeersUnheard uint64    `json:"peers_unheard" msgpack:"peers_unheard"` // requests to other nodes without an answer
}

// Window returns the length of the window. The error is an [Error].
func (f *FunnelRequest) Window() (time.Duration, error) {
	if f.Since == "" {
		return FunnelSince, nil
	}
	d, err := time.ParseDuration(f.Since)
	if err != nil || d <= 0 {
		return 0, Errorf(CodeMalformed, "since is %.40q, not a span of time such as 10m or 90s", f.Since)
	}
	if d > MaxFunnelSince {
		return 0, Errorf(CodeTooLarge, "since is %.40q; no more than %v is kept", f.Since, MaxFunnelSince)
	}
	return d, nil
}

// Check returns an error for an invalid request. The error is an [Error].
func (f *FunnelRequest) Check() error {
	if err := checkModel(f.Model); err != nil {
		return err
	}
	_, err := f.Window()
	return err
}

// Report is an engine's reuse of a prompt after a choice.
type Report struct {
	RequestID string `json:"request_id" msgpack:"request_id"` // of the choice

	// CachedTokens is the engine's usage.prompt_tokens_details.cached_tokens.
	CachedTokens uint64 `json:"cached_tokens" msgpack:"cached_tokens"`
}

// Check returns an error for an invalid report. The error is an [Error].
func (r *Report) Check() error {
	if r.CachedTokens > MaxISL {
		return Errorf(CodeMalformed, "cached_tokens is %d, more than %d", r.CachedTokens, uint64(MaxISL))
	}
	return checkID(r.RequestID, true)
}

// Funnels reports where tokens are lost. Errors are of type *Error.
type Funnels interface {
	Funnel(ctx context.Context, r *FunnelRequest) (*Funnel, error)
	Report(ctx context.Context, r *Report) error
	Recorded(ctx context.Context, r *RecordedRequest) (*RecordedList, error)
	Capacity(ctx context.Context, r *CapacityRequest) (*Capacity, error)
}

func (f *FunnelRequest) members(list []member) []member {
	return append(list, member{"model", &f.Model}, member{"since", &f.Since})
}

func (r *Report) members(list []member) []member {
	return append(list, member{"request_id", &r.RequestID}, member{"cached_tokens", (*tokenCount)(&r.CachedTokens)})
}
