package api

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a funnel's window.
const (
	FunnelSince    = 10 * time.Minute // of a request that names none
	MaxFunnelSince = time.Hour
)

// FunnelRequest asks for the funnel of one model's prompts.
type FunnelRequest struct {
	Model string `json:"model" msgpack:"model"`

	// Since is how far back to look, such as 10m or 90s; default 10m, at most 1h.
	Since string `json:"since,omitempty" msgpack:"since,omitempty"`
}

// FunnelStep is a step of the funnel. Each has at most the tokens of the one before.
type FunnelStep string

// The steps.
const (
	StepAsked    FunnelStep = "asked"    // tokens of all prompts
	StepSeen     FunnelStep = "seen"     // of their prefixes that were asked for or stored before: an unbounded cache
	StepHeld     FunnelStep = "held"     // of the prefix that some worker held when asked
	StepSelected FunnelStep = "selected" // of the prefix that the chosen worker held
	StepReused   FunnelStep = "reused"   // that the engine says it has reused
)

// FunnelCause is why tokens of one step are not among those of the next.
type FunnelCause string

// The causes.
const (
	// from asked to seen
	CauseNew            FunnelCause = "new"                // nobody has had this prefix before
	CausePartialBlock   FunnelCause = "partial_block"      // the prompt's end, which fills no block
	CauseOtherSpace     FunnelCause = "other_salt_or_lora" // they were asked for with another LoRA and the same salt
	CauseOtherBlockSize FunnelCause = "other_block_size"   // the same tokens were seen in blocks of another size

	CauseNotTokenized FunnelCause = "not_tokenized" // no tokens could be made of the text

	// from seen to held
	CauseEvicted         FunnelCause = "evicted"            // a worker removed the block
	CauseCleared         FunnelCause = "cleared"            // a worker's cache was emptied or lost: a reset, restart, gap
	CauseWorkerGone      FunnelCause = "worker_gone"        // the worker's lease or registration has ended
	CauseNeverStored     FunnelCause = "never_stored"       // asked for before, and no worker announced it
	CauseTokens          FunnelCause = "tokenizer_mismatch" // the worker that it was sent to stored other tokens
	CauseUncountedTier   FunnelCause = "uncounted_tier"     // only the shared store has it, which no worker holds
	CauseIndexIncomplete FunnelCause = "index_incomplete"   // the answer lacked partitions
	CauseNotAllowed      FunnelCause = "not_allowed"        // held by workers that the request excludes
	CauseUnexplained     FunnelCause = "unexplained"        // what became of it is not remembered

	// from held to selected; CauseWorkerGone is there too
	CauseWorkerUnknown FunnelCause = "worker_unknown" // the log has a holder that was not registered

	CauseLoad        FunnelCause = "lost_to_load" // the choice went to a worker that had less and was less busy
	CauseNotEligible FunnelCause = "not_eligible" // the holder drains, has another role or is excluded
	CauseNotRouted   FunnelCause = "not_routed"   // only asked (find): who was chosen is not known here

	// from selected to reused
	CauseNotReported FunnelCause = "not_reported" // no report came
	CauseEvictedLate FunnelCause = "evicted_late" // the chosen worker removed it between the choice and the report
	CauseLowerTier   FunnelCause = "lower_tier"   // it lay on the chosen worker's host, disk or external tier
	CauseLastBlock   FunnelCause = "last_block"   // the prompt was held whole: engines compute its last block again
	CauseEngine      FunnelCause = "engine"       // the engine reused less than it had announced
)

// Funnel says where tokens are lost that could have been reused.
type Funnel struct {
	Model string `json:"model" msgpack:"model"`

	// From and To are the window: that which was asked for, rounded to whole buckets, and not before the nodes began to
	// record.
	From time.Time `json:"from" msgpack:"from"`
	To   time.Time `json:"to" msgpack:"to"`

	Requests uint64 `json:"requests" msgpack:"requests"` // finds and choices
	Routed   uint64 `json:"routed" msgpack:"routed"`     // choices among them
	Reported uint64 `json:"reported" msgpack:"reported"` // choices of which the engine's reuse is known

	Steps []FunnelTokens `json:"steps" msgpack:"steps"` // all five, in order

	// Decisions are the choices by outcome: best, lost_to_load, cold, pinned, no_index, no_worker.
	Decisions map[string]uint64 `json:"decisions" msgpack:"decisions"`

	Buckets []FunnelBucket `json:"buckets" msgpack:"buckets"` // by time, ascending; spans without requests are left out

	Nodes   []FunnelNode `json:"nodes" msgpack:"nodes"`                         // those that answered, by name
	Missing []string     `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes that did not answer
}

// FunnelTokens is one step.
type FunnelTokens struct {
	Step   FunnelStep   `json:"step" msgpack:"step"`
	Tokens uint64       `json:"tokens" msgpack:"tokens"`
	Share  *float64     `json:"share" msgpack:"share"` // of the tokens asked; null: not known, as nothing was reported
	Lost   []FunnelLoss `json:"lost" msgpack:"lost"`   // between the step before and this one, most first

	// NotReported says of the step reused that no engine has reported how much it reused. Tokens is 0 then.
	NotReported bool `json:"not_reported,omitempty" msgpack:"not_reported,omitempty"`
}

// FunnelLoss is what one cause has lost.
type FunnelLoss struct {
	Cause  FunnelCause `json:"cause" msgpack:"cause"`
	Tokens uint64      `json:"tokens" msgpack:"tokens"`
	Share  float64     `json:"share" msgpack:"share"` // of the tokens asked

	// Workers are those that lost it last, most first, where that is known.
	Workers []FunnelWorker `json:"workers,omitempty" msgpack:"workers,omitempty"`
}

// FunnelWorker is what one worker has removed that was asked for later. The worker "other" stands for all beyond the
// first few.
type FunnelWorker struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Tier   string          `json:"tier,omitempty" msgpack:"tier,omitempty"` // that it left last; empty: all
	Tokens uint64          `json:"tokens" msgpack:"tokens"`
	AgeMS  uint64          `json:"age_ms" msgpack:"age_ms"` // how long before it was asked for, on average
}

// FunnelBucket is a span of time of the window: ten seconds, or, of what is older than ten minutes, a minute.
type FunnelBucket struct {
	From     time.Time `json:"from" msgpack:"from"`
	Seconds  uint32    `json:"seconds" msgpack:"seconds"`
	Requests uint64    `json:"requests" msgpack:"requests"`
	Reported uint64    `json:"reported" msgpack:"reported"` // choices of which the engine's reuse is known

	// Tokens of each step, as in Funnel.Steps.
	Asked    uint64 `json:"asked" msgpack:"asked"`
	Seen     uint64 `json:"seen" msgpack:"seen"`
	Held     uint64 `json:"held" msgpack:"held"`
	Selected uint64 `json:"selected" msgpack:"selected"`
	Reused   uint64 `json:"reused" msgpack:"reused"`

	Lost map[FunnelCause]uint64 `json:"lost,omitempty" msgpack:"lost,omitempty"` // tokens by cause
}

// FunnelNode says what one node's part rests on. The counts are since it started.
type FunnelNode struct {
	Node string `json:"node" msgpack:"node"`

	From         time.Time `json:"from" msgpack:"from"`                   // of its part of the window
	HistoryFrom  time.Time `json:"history_from" msgpack:"history_from"`   // what was stored and asked is remembered since
	HistoryLost  uint64    `json:"history_lost" msgpack:"history_lost"`   // blocks forgotten for want of room
	Dropped      uint64    `json:"dropped" msgpack:"dropped"`             // requests that were too many to be recorded
	EventsUnread uint64    `json:"events_unread" msgpack:"events_unread"` // messages of the log that were too many
	Forgotten    uint64    `json:"forgotten" msgpack:"forgotten"`         // choices whose report did not come in time
	PeersUnheard uint64    `json:"peers_unheard" msgpack:"peers_unheard"` // questions to other nodes without an answer
}

// Window is how far back the request looks. The error is an [Error].
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

// Check refuses what no service could answer. The error is an [Error].
func (f *FunnelRequest) Check() error {
	if f.Model == "" {
		return Errorf(CodeMissingModel, "the request names no model")
	}
	_, err := f.Window()
	return err
}

// Report says what an engine has reused of a prompt for which a worker was chosen.
type Report struct {
	RequestID string `json:"request_id" msgpack:"request_id"` // of the choice

	// CachedTokens is the engine's usage.prompt_tokens_details.cached_tokens.
	CachedTokens uint64 `json:"cached_tokens" msgpack:"cached_tokens"`
}

// Check refuses what no service could answer. The error is an [Error].
func (r *Report) Check() error {
	if r.CachedTokens > MaxISL {
		return Errorf(CodeMalformed, "cached_tokens is %d, more than %d", r.CachedTokens, uint64(MaxISL))
	}
	return checkID(r.RequestID, true)
}

// MaxHistoryBlocks is how many blocks one BlockHistoryRequest may name.
const MaxHistoryBlocks = 1 << 16

// BlockHistoryRequest asks a node what it remembers of blocks.
type BlockHistoryRequest struct {
	Blocks Hashes `json:"blocks,omitzero" msgpack:"blocks,omitempty"` // by their names in internal/operate/funnel

	// Workers are those of which the beginnings of prompts that they stored last are asked for.
	Workers []events.WorkerID `json:"workers,omitzero" msgpack:"workers,omitempty"`

	// Models are those of which the block sizes are asked for.
	Models []string `json:"models,omitzero" msgpack:"models,omitempty"`
}

// Check refuses what no service could answer. The error is an [Error].
func (b *BlockHistoryRequest) Check() error {
	if len(b.Blocks) > MaxHistoryBlocks {
		return Errorf(CodeTooLarge, "blocks has %d elements, more than %d", len(b.Blocks), MaxHistoryBlocks)
	}
	return nil
}

// BlockHistory is what a node remembers of blocks.
type BlockHistory struct {
	Blocks []BlockPast  `json:"blocks" msgpack:"blocks"` // those that it knows, in the order of the question
	Roots  []StoredRoot `json:"roots,omitempty" msgpack:"roots,omitempty"`

	BlockSizes map[string][]uint32 `json:"block_sizes,omitempty" msgpack:"block_sizes,omitempty"` // by model
}

// StoredRoot is a block that begins a prompt, which a worker has stored.
type StoredRoot struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Block  uint64          `json:"block" msgpack:"block"`
	At     int64           `json:"at" msgpack:"at"` // in microseconds since 1970
}

// BlockPast is what a node remembers of one block. Times are in microseconds since 1970; 0: never, as far as known.
type BlockPast struct {
	At     uint32 `json:"at" msgpack:"at"`         // its place in the question
	Asked  int64  `json:"asked" msgpack:"asked"`   // first
	Stored int64  `json:"stored" msgpack:"stored"` // first
	Last   int64  `json:"last" msgpack:"last"`     // stored last

	// Lost is when it was last removed by a worker, or the cache of one that had stored it was emptied; and why, by
	// whom, and from which tier.
	Lost   int64           `json:"lost" msgpack:"lost"`
	Why    FunnelCause     `json:"why,omitempty" msgpack:"why,omitempty"`
	Worker events.WorkerID `json:"worker,omitempty" msgpack:"worker,omitempty"`
	Tier   events.Tier     `json:"tier,omitempty" msgpack:"tier,omitempty"`

	Held bool `json:"held,omitempty" msgpack:"held,omitempty"` // by somebody, when first asked for

	// Sent is the worker that was last chosen for a prompt that begins with this block, and when.
	Sent   events.WorkerID `json:"sent,omitempty" msgpack:"sent,omitempty"`
	SentAt int64           `json:"sent_at,omitempty" msgpack:"sent_at,omitempty"`
}

// Funnels say where tokens are lost. Errors are of type *Error.
type Funnels interface {
	Funnel(ctx context.Context, r *FunnelRequest) (*Funnel, error)
	Report(ctx context.Context, r *Report) error
	BlockHistory(ctx context.Context, r *BlockHistoryRequest) (*BlockHistory, error)
	Recorded(ctx context.Context, r *RecordedRequest) (*RecordedList, error)
}

func (f *FunnelRequest) members(list []member) []member {
	return append(list, member{"model", &f.Model}, member{"since", &f.Since})
}

func (r *Report) members(list []member) []member {
	return append(list, member{"request_id", &r.RequestID}, member{"cached_tokens", (*tokenCount)(&r.CachedTokens)})
}

func (b *BlockHistoryRequest) members(list []member) []member {
	return append(list, member{"blocks", &b.Blocks}, member{"workers", &b.Workers},
		member{"models", &b.Models})
}
