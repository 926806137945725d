package api

import (
	"context"
	"math"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// MaxRequestID is the largest length of a request's id in bytes.
const MaxRequestID = 1024

// Prompt is a prompt with a counted load: the model, and tokens or hashes, as in a Query.
type Prompt struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"` // compared with the model's; 0: not
	Tokens    Tokens `json:"tokens,omitzero" msgpack:"tokens,omitempty"`
	Hashes    Hashes `json:"hashes,omitzero" msgpack:"hashes,omitempty"` // local hashes, in place of Tokens
	LoRA      string `json:"lora_name,omitempty" msgpack:"lora_name,omitempty"`
	CacheSalt string `json:"cache_salt,omitempty" msgpack:"cache_salt,omitempty"`

	Media []events.MediaItem `json:"media,omitzero" msgpack:"media,omitempty"` // as in a Query

	EngineHashes Hashes `json:"engine_hashes,omitzero" msgpack:"engine_hashes,omitempty"` // in place of Tokens

	// SequenceHashes are the blocks that requests share, one for each whole block; nil: computed from the tokens or
	// local hashes by events.SeqHashes, or the engine hashes.
	SequenceHashes Hashes `json:"sequence_hashes,omitzero" msgpack:"sequence_hashes,omitempty"`

	// ISLTokens is the length of the prompt in tokens; 0: the length of Tokens, or of the hashes' whole blocks.
	ISLTokens uint64 `json:"isl_tokens,omitempty" msgpack:"isl_tokens,omitempty"`
}

// SelectRequest is a request to choose a worker for a prompt. The embedded fields have the meaning of a Query. Workers,
// or the workers registered with Endpoints, are the allowed workers.
type SelectRequest struct {
	Query `msgpack:",inline"`

	SequenceHashes Hashes `json:"sequence_hashes,omitzero" msgpack:"sequence_hashes,omitempty"` // as in a Prompt
	ISLTokens      uint64 `json:"isl_tokens,omitempty" msgpack:"isl_tokens,omitempty"`          // as in a Prompt

	// RequestID is the id of the request in later operations. With Book, the request is booked on the chosen worker.
	// Otherwise, the node keeps the choice for a while, for `book` with the id alone.
	RequestID string `json:"request_id,omitempty" msgpack:"request_id,omitempty"`
	Book      bool   `json:"book,omitempty" msgpack:"book,omitempty"`

	// Excluded are workers that must not be chosen, such as those at which an earlier try of the request failed.
	Excluded []events.WorkerID `json:"excluded_workers,omitempty" msgpack:"excluded_workers,omitempty"`

	Policy string       `json:"policy,omitempty" msgpack:"policy,omitempty"` // default: the setting of the service
	Role   routing.Role `json:"role,omitempty" msgpack:"role,omitempty"`     // default: aggregated and decode workers

	// Disaggregated requests a decode worker and a prefill worker. Pinned and Affinity apply to the decode worker.
	Disaggregated bool `json:"disaggregated,omitempty" msgpack:"disaggregated,omitempty"`

	// PrefillOptional permits the choice of one worker, a decode or an aggregated one, for a disaggregated request
	// without an eligible worker in one of the two pools.
	PrefillOptional bool `json:"prefill_optional,omitempty" msgpack:"prefill_optional,omitempty"`

	// Advisory requests a choice without effects: nothing is booked or kept, and the request does not wait. The answer
	// has WorkerLoad.
	Advisory bool `json:"advisory,omitempty" msgpack:"advisory,omitempty"`

	// SessionID is the id of the request's session. The session stays on one worker if the service has session
	// affinity.
	SessionID string `json:"session_id,omitempty" msgpack:"session_id,omitempty"`

	// StrictPriority, PriorityJump and PolicyClass apply to a waiting request: the priority in its class, the seconds
	// to add to its age, and its class or family of classes.
	StrictPriority uint32  `json:"strict_priority,omitempty" msgpack:"strict_priority,omitempty"`
	PriorityJump   float64 `json:"priority_jump,omitempty" msgpack:"priority_jump,omitempty"`
	PolicyClass    string  `json:"policy_class,omitempty" msgpack:"policy_class,omitempty"`

	Pinned   *routing.Target `json:"pinned_worker,omitempty" msgpack:"pinned_worker,omitempty"`
	Affinity *routing.Target `json:"affinity_target,omitempty" msgpack:"affinity_target,omitempty"`

	RequiredTaints  []string           `json:"required_taints,omitempty" msgpack:"required_taints,omitempty"`
	PreferredTaints map[string]float64 `json:"preferred_taints,omitempty" msgpack:"preferred_taints,omitempty"` // weights

	ExpectedOutputTokens uint32 `json:"expected_output_tokens,omitempty" msgpack:"expected_output_tokens,omitempty"`

	Overrides *routing.Overrides `json:"router_config_override,omitempty" msgpack:"router_config_override,omitempty"`
}

// Selection is the chosen worker for a prompt. Depths are in blocks.
type Selection struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"`
	Blocks    int    `json:"blocks" msgpack:"blocks"` // whole blocks of the prompt
	ISLTokens uint64 `json:"isl_tokens" msgpack:"isl_tokens"`

	RequestID string `json:"request_id,omitempty" msgpack:"request_id,omitempty"`
	Booked    bool   `json:"booked" msgpack:"booked"`

	Worker   events.WorkerID `json:"worker" msgpack:"worker"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Endpoint string          `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	// The depths of the worker for the prompt, as in an Overlap.
	Device   uint32 `json:"device" msgpack:"device"`
	Host     uint32 `json:"host" msgpack:"host"`
	Disk     uint32 `json:"disk" msgpack:"disk"`
	External uint32 `json:"external" msgpack:"external"`
	L3       uint32 `json:"l3" msgpack:"l3"`
	Guessed  uint32 `json:"guessed,omitempty" msgpack:"guessed,omitempty"` // in place of Device, in the choice

	Policy      string  `json:"policy" msgpack:"policy"`
	Candidates  int     `json:"candidates" msgpack:"candidates"` // ranks before all filters
	Cost        float64 `json:"cost" msgpack:"cost"`
	Probability float64 `json:"probability" msgpack:"probability"`

	// The figures of the choice: see routing.Choice.
	RequiredBlocks         uint64  `json:"required_blocks" msgpack:"required_blocks"`
	EffectiveOverlap       float64 `json:"effective_overlap" msgpack:"effective_overlap"`
	CachedTokens           uint64  `json:"cached_tokens" msgpack:"cached_tokens"`
	EffectivePrefillTokens uint64  `json:"effective_prefill_tokens" msgpack:"effective_prefill_tokens"`
	TrackPrefillTokens     bool    `json:"track_prefill_tokens" msgpack:"track_prefill_tokens"`
	PotentialDecodeBlocks  uint64  `json:"potential_decode_blocks" msgpack:"potential_decode_blocks"`

	// Complete is false if workers of the Missing partitions could not be searched. They count as holding nothing.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// UnknownEndpoints lists the addresses of the request without a registered rank of the model.
	UnknownEndpoints []string `json:"unknown_endpoints,omitempty" msgpack:"unknown_endpoints,omitempty"`

	Explanation *routing.Explanation `json:"explanation,omitempty" msgpack:"explanation,omitempty"`

	// DecodeBusy reports whether the worker would be too busy to compute prompts as well; nil without a threshold.
	DecodeBusy *bool       `json:"decode_busy,omitempty" msgpack:"decode_busy,omitempty"`
	WorkerLoad *WorkerLoad `json:"worker_load,omitempty" msgpack:"worker_load,omitempty"` // of an advisory choice

	// In a disaggregated choice, all fields above are of the decode worker. Prefill is the choice of the prefill
	// worker; nil: the decode worker computes the prompt too. Disaggregation has the reason.
	Prefill        *Selection      `json:"prefill,omitempty" msgpack:"prefill,omitempty"`
	Disaggregation *Disaggregation `json:"disaggregation,omitempty" msgpack:"disaggregation,omitempty"`

	Session *SessionBinding `json:"session,omitempty" msgpack:"session,omitempty"` // of a booked choice

	// KVSource is a worker that can send further blocks of the prompt to the chosen worker. It is nil without the setting
	// --kv-source-tokens, and without such a worker. A disaggregated choice with a prefill worker has it in Prefill.
	KVSource *KVSource `json:"kv_source,omitempty" msgpack:"kv_source,omitempty"`

	// Quota is the state of the tenant's quota if the request has lost its priority.
	Quota *QuotaState `json:"quota,omitempty" msgpack:"quota,omitempty"`

	// Regions has the longest prefix in each region if the request has Regions, as in an Answer.
	Regions []RegionPrefix `json:"regions,omitempty" msgpack:"regions,omitempty"`

	*Tokenization // if the request has a Text
}

// KVSource is the rank with the longest prefix of a prompt beyond the prefix of the chosen worker.
type KVSource struct {
	Worker   events.WorkerID `json:"worker" msgpack:"worker"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Endpoint string          `json:"endpoint" msgpack:"endpoint"` // serving address

	Blocks uint32 `json:"blocks" msgpack:"blocks"` // leading blocks of the prompt that the source can send
	Tokens uint64 `json:"tokens" msgpack:"tokens"` // of these, tokens after the prefix of the chosen worker
}

// BookRequest books a request on a worker. Without a worker, it books the choice of `select` under the id.
type BookRequest struct {
	Prompt    `msgpack:",inline"`
	RequestID string          `json:"request_id" msgpack:"request_id"`
	Worker    events.WorkerID `json:"worker,omitempty" msgpack:"worker,omitempty"`
	Rank      events.Rank     `json:"rank,omitempty" msgpack:"rank,omitempty"`

	// EffectivePrefillTokens is the number of tokens to prefill; default 0.
	EffectivePrefillTokens uint64 `json:"effective_prefill_tokens,omitempty" msgpack:"effective_prefill_tokens,omitempty"`
	TrackPrefillTokens     *bool  `json:"track_prefill_tokens,omitempty" msgpack:"track_prefill_tokens,omitempty"` // default true
	AssumeKVReuse          *bool  `json:"assume_kv_reuse,omitempty" msgpack:"assume_kv_reuse,omitempty"`           // default true
	ExpectedOutputTokens   uint32 `json:"expected_output_tokens,omitempty" msgpack:"expected_output_tokens,omitempty"`

	SessionID string `json:"session_id,omitempty" msgpack:"session_id,omitempty"` // as in a SelectRequest
}

// Booking is the place of a booked request.
type Booking struct {
	Model     string          `json:"model" msgpack:"model"`
	RequestID string          `json:"request_id" msgpack:"request_id"`
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank" msgpack:"rank"`
}

// RequestRef is the id of a booked request.
type RequestRef struct {
	Model     string `json:"model" msgpack:"model"`
	RequestID string `json:"request_id" msgpack:"request_id"`

	// DecayFraction, from 0 to 1, is the new weight of the request's own blocks, for `output_block`; nil: unchanged.
	DecayFraction *float64 `json:"decay_fraction,omitempty" msgpack:"decay_fraction,omitempty"`

	// Result is the end of the request at the worker, for `free`; empty: unknown. A failure penalises the worker, and a
	// success ends the penalty.
	Result Result `json:"result,omitempty" msgpack:"result,omitempty"`
}

// Done is the answer of operations without another answer.
type Done struct {
	Done bool `json:"done" msgpack:"done"`
}

// LoadsRequest is a request for the loads of all models, or of one.
type LoadsRequest struct {
	Model string `json:"model,omitempty" msgpack:"model,omitempty"`
}

// LoadList has the outstanding work of workers, by model.
type LoadList struct {
	Models []ModelLoads `json:"models" msgpack:"models"` // by name
}

// ModelLoads has the outstanding work of a model's workers.
type ModelLoads struct {
	Model    string     `json:"model" msgpack:"model"`
	Requests int        `json:"requests" msgpack:"requests"` // under way
	Ranks    []RankLoad `json:"ranks" msgpack:"ranks"`       // by worker and rank

	// Paces has the ranks with a reported first token, by worker and rank.
	Paces []RankPace `json:"paces,omitempty" msgpack:"paces,omitempty"`

	// Requests in this node's queue, and the tokens of their prompts.
	PendingCount     int    `json:"pending_count" msgpack:"pending_count"`
	PendingISLTokens uint64 `json:"pending_isl_tokens" msgpack:"pending_isl_tokens"`
}

// RankPace is the prefill speed of a rank. Each node measures it from bookings and first tokens of all nodes, for the
// policy kvatlas.
type RankPace struct {
	Worker            events.WorkerID `json:"worker" msgpack:"worker"`
	Rank              events.Rank     `json:"rank" msgpack:"rank"`
	PrefillTokensPerS float64         `json:"prefill_tokens_per_s" msgpack:"prefill_tokens_per_s"`
	Busy              float64         `json:"busy" msgpack:"busy"` // share of the time with prefill to do, 0 to 1
}

// RankLoad is the outstanding work of a rank.
type RankLoad struct {
	Worker              events.WorkerID `json:"worker" msgpack:"worker"`
	Rank                events.Rank     `json:"rank" msgpack:"rank"`
	ActivePrefillTokens uint64          `json:"active_prefill_tokens" msgpack:"active_prefill_tokens"`
	ActiveBlocks        uint64          `json:"active_blocks" msgpack:"active_blocks"`
	ActiveRequests      uint64          `json:"active_requests" msgpack:"active_requests"`
}

// PotentialRequest is a request for the outstanding work of each worker with a further prompt.
type PotentialRequest struct {
	Prompt `msgpack:",inline"`

	// Overrides are for callers in this process. Only AssumeKVReuse and TrackPrefillTokens have an effect.
	Overrides routing.Overrides `json:"-" msgpack:"-"`
}

// PotentialList has the outstanding work of each worker with the prompt.
type PotentialList struct {
	Model string          `json:"model" msgpack:"model"`
	Ranks []PotentialLoad `json:"ranks" msgpack:"ranks"` // by worker and rank

	// As in ModelLoads.
	PendingCount     int    `json:"pending_count" msgpack:"pending_count"`
	PendingISLTokens uint64 `json:"pending_isl_tokens" msgpack:"pending_isl_tokens"`
}

// PotentialLoad is the outstanding work of a rank with the prompt.
type PotentialLoad struct {
	Worker                 events.WorkerID `json:"worker" msgpack:"worker"`
	Rank                   events.Rank     `json:"rank" msgpack:"rank"`
	PotentialPrefillTokens uint64          `json:"potential_prefill_tokens" msgpack:"potential_prefill_tokens"`
	PotentialDecodeBlocks  uint64          `json:"potential_decode_blocks" msgpack:"potential_decode_blocks"`
	ActiveRequests         uint64          `json:"active_requests" msgpack:"active_requests"`
}

// Router chooses workers and counts their load. All methods may be called from any goroutine. Errors are of type
// *Error.
type Router interface {
	Select(ctx context.Context, r *SelectRequest) (*Selection, error)
	Book(ctx context.Context, r *BookRequest) (*Booking, error)
	PrefillComplete(ctx context.Context, r *RequestRef) error
	Progress(ctx context.Context, r *RequestRef) error
	OutputBlock(ctx context.Context, r *RequestRef) error
	Free(ctx context.Context, r *RequestRef) error
	Loads(ctx context.Context, r *LoadsRequest) (*LoadList, error)
	PotentialLoads(ctx context.Context, r *PotentialRequest) (*PotentialList, error)
	EngineLoad(ctx context.Context, l *EngineLoads) error
	EngineLoads(ctx context.Context) (*EngineLoads, error)
}

// Query returns the query for the index.
func (p *Prompt) Query() Query {
	return Query{Model: p.Model, BlockSize: p.BlockSize, Tokens: p.Tokens, Hashes: p.Hashes, LoRA: p.LoRA,
		CacheSalt: p.CacheSalt, Media: p.Media, EngineHashes: p.EngineHashes}
}

// Prompt returns the prompt of the request.
func (s *SelectRequest) Prompt() Prompt {
	return Prompt{Model: s.Model, BlockSize: s.BlockSize, Tokens: s.Tokens, Hashes: s.Hashes, LoRA: s.LoRA,
		CacheSalt: s.CacheSalt, Media: s.Media, EngineHashes: s.EngineHashes, SequenceHashes: s.SequenceHashes,
		ISLTokens: s.ISLTokens}
}

// Check returns an error for an invalid request. The error is an [Error].
func (s *SelectRequest) Check() error {
	if err := s.Query.Check(); err != nil {
		return err
	}
	if s.Book && s.RequestID == "" {
		return Errorf(CodeMalformed, "book needs a request_id")
	}
	if err := checkID(s.RequestID, false); err != nil {
		return err
	}
	if err := checkSession(s.SessionID); err != nil {
		return err
	}
	switch {
	case s.Text != nil && (s.SequenceHashes != nil || s.ISLTokens != 0):
		return Errorf(CodeMalformed, "sequence_hashes and isl_tokens follow from the text; omit them")
	case s.Advisory && s.Book:
		return Errorf(CodeMalformed, "advisory and book exclude each other: an advisory choice books nothing")
	case s.Disaggregated && s.Role != "":
		return Errorf(CodeMalformed, "disaggregated and role exclude each other: the choice has a decode and a prefill worker")
	case s.PrefillOptional && !s.Disaggregated:
		return Errorf(CodeMalformed, "prefill_optional goes with disaggregated")
	case s.Disaggregated && len(s.RequestID)+len(PrefillID("")) > MaxRequestID:
		return Errorf(CodeMalformed, "request_id has %d bytes; a disaggregated request's has at most %d",
			len(s.RequestID), MaxRequestID-len(PrefillID("")))
	}
	prompt := s.Prompt()
	return prompt.Check()
}

// Check returns an error for an invalid prompt. The error is an [Error].
func (p *Prompt) Check() error {
	switch {
	case p.Model == "":
		return Errorf(CodeMissingModel, "the request has no model")
	case p.Tokens != nil && p.Hashes != nil:
		return Errorf(CodeMalformed, "the request has tokens and hashes; give one of them")
	case p.EngineHashes != nil && (p.Tokens != nil || p.Hashes != nil):
		return Errorf(CodeMalformed, "the request has engine_hashes, and tokens or hashes; give one of them")
	case p.EngineHashes != nil && p.SequenceHashes != nil && len(p.EngineHashes) != len(p.SequenceHashes):
		return Errorf(CodeMalformed, "there are %d engine_hashes and %d sequence_hashes; each block has one of both",
			len(p.EngineHashes), len(p.SequenceHashes))
	case p.Tokens == nil && (p.LoRA != "" || p.CacheSalt != "") && (p.Hashes != nil || p.EngineHashes != nil):
		return Errorf(CodeMalformed,
			"lora_name and cache_salt are valid with tokens only; hashes include them")
	case p.Hashes != nil && p.SequenceHashes != nil && len(p.Hashes) != len(p.SequenceHashes):
		return Errorf(CodeMalformed, "there are %d hashes and %d sequence_hashes; each block has one of both",
			len(p.Hashes), len(p.SequenceHashes))
	case p.Tokens != nil && p.ISLTokens != 0 && p.ISLTokens != uint64(len(p.Tokens)):
		return Errorf(CodeMalformed, "isl_tokens is %d; there are %d tokens", p.ISLTokens, len(p.Tokens))
	case p.ISLTokens > MaxISL:
		return Errorf(CodeTooLarge, "isl_tokens is %d, more than %d", p.ISLTokens, uint64(MaxISL))
	}
	return checkMedia(p.Media, p.Tokens)
}

// MaxISL is the largest length of a prompt without tokens.
const MaxISL = 1 << 32

// Check returns an error for an invalid request. The error is an [Error].
func (b *BookRequest) Check() error {
	if err := b.Prompt.Check(); err != nil {
		return err
	}
	if err := checkID(b.RequestID, true); err != nil {
		return err
	}
	if err := checkSession(b.SessionID); err != nil {
		return err
	}
	given := b.SessionID != "" || b.Tokens != nil || b.Hashes != nil || b.EngineHashes != nil ||
		b.SequenceHashes != nil || b.ISLTokens != 0 || b.EffectivePrefillTokens != 0 || b.Rank != 0
	switch {
	case b.Worker == "" && given:
		return Errorf(CodeMalformed, "the booking has no worker; it then books the choice of the id, "+
			"and all other fields must be absent")
	case b.ISLTokens > 0 && b.EffectivePrefillTokens > b.ISLTokens:
		return Errorf(CodeMalformed, "effective_prefill_tokens is %d; the prompt has %d tokens",
			b.EffectivePrefillTokens, b.ISLTokens)
	}
	return nil
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *RequestRef) Check() error {
	if r.Model == "" {
		return Errorf(CodeMissingModel, "the request has no model")
	}
	if f := r.DecayFraction; f != nil && !(*f >= 0 && *f <= 1) {
		return Errorf(CodeMalformed, "decay_fraction is %v, not from 0 to 1", *f)
	}
	if r.Result != "" {
		if err := r.Result.Check(); err != nil {
			return Errorf(CodeMalformed, "result %v", err)
		}
	}
	return checkID(r.RequestID, true)
}

func checkID(id string, needed bool) error {
	if len(id) > MaxRequestID || needed && id == "" {
		return Errorf(CodeMalformed, "request_id has %d bytes; it has 1 to %d", len(id), MaxRequestID)
	}
	return nil
}

func checkSession(id string) error {
	if len(id) > MaxSessionID {
		return Errorf(CodeMalformed, "session_id has %d bytes; it has at most %d", len(id), MaxSessionID)
	}
	if !utf8.ValidString(id) {
		return Errorf(CodeMalformed, "session_id %.64q is not valid UTF-8", id)
	}
	return nil
}

// float reads a finite number.
func (r *reader) float(field string) (float64, error) {
	if r.kind() != kindNumber {
		return 0, r.isNot(field, "a number")
	}
	shown := r.shown()
	v, err := r.number()
	if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) {
		return 0, Errorf(CodeMalformed, "%s is %s, not a finite number", r.name(field), shown)
	}
	return v, err
}
