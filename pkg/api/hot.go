package api

import (
	"context"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a list of hot prefixes.
const (
	UsualHot = 10 // default of a request
	maxHot   = 64 // largest number in a request
)

// HotRequest is a request for the hot prefixes of a model.
type HotRequest struct {
	Model string `json:"model" msgpack:"model"`
	Limit uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"` // default 10
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *HotRequest) Check() error {
	if r.Limit > maxHot {
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, maxHot)
	}
	return checkModel(r.Model)
}

func (r *HotRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"limit", (*positiveNumber)(&r.Limit)})
}

// HotList has the prefixes of a model that a further copy would help, the largest benefit first, and the copies.
// Figures are forecasts of the policy kvatlas, and means of the recent minutes.
type HotList struct {
	Model     string       `json:"model" msgpack:"model"`
	BlockSize uint32       `json:"block_size" msgpack:"block_size"`
	Prefixes  []HotPrefix  `json:"prefixes" msgpack:"prefixes"`
	Copies    []PrefixCopy `json:"copies" msgpack:"copies"` // the newest first

	// Automatic is the largest number of copies in a minute without an operator; 0: none.
	Automatic int `json:"automatic_copies_per_minute" msgpack:"automatic_copies_per_minute"`

	Missing  []string `json:"missing,omitempty" msgpack:"missing,omitempty"`   // nodes without an answer
	Disabled []string `json:"disabled,omitempty" msgpack:"disabled,omitempty"` // nodes that count no prefixes
}

// HotPrefix is a prefix of many prompts.
type HotPrefix struct {
	Hash   string `json:"hash" msgpack:"hash"` // of the last block: 16 hexadecimal digits
	Blocks uint32 `json:"blocks" msgpack:"blocks"`
	Tokens uint64 `json:"tokens" msgpack:"tokens"`

	RequestsPerS float64 `json:"requests_per_s" msgpack:"requests_per_s"` // with this prefix

	// RecomputedPerS are the tokens of the prefix that workers without it computed, per second. WaitMS is how much longer
	// a request waited, in the mean, than at the least busy worker.
	RecomputedPerS float64 `json:"recomputed_tokens_per_s" msgpack:"recomputed_tokens_per_s"`
	WaitMS         float64 `json:"wait_ms" msgpack:"wait_ms"`

	// HelpedRequests are the recent requests that a copy on one more worker would have helped. Older ones count less.
	HelpedRequests float64 `json:"helped_requests" msgpack:"helped_requests"`

	Holders []events.WorkerID `json:"holders" msgpack:"holders"` // of the whole prefix, in the index

	// A copy on one more worker saves SavesMSPerHour and costs CostMS once. Target is the worker with the lowest cost;
	// empty: every worker holds the prefix, or the hashes of its blocks are not kept. BenefitMSPerHour is the difference
	// in an hour.
	SavesMSPerHour   float64         `json:"saves_ms_per_hour" msgpack:"saves_ms_per_hour"`
	CostMS           float64         `json:"cost_ms" msgpack:"cost_ms"`
	BenefitMSPerHour float64         `json:"benefit_ms_per_hour" msgpack:"benefit_ms_per_hour"`
	Target           events.WorkerID `json:"target,omitempty" msgpack:"target,omitempty"`
	TargetRank       events.Rank     `json:"target_rank,omitempty" msgpack:"target_rank,omitempty"`

	TokensKept bool `json:"tokens_kept" msgpack:"tokens_kept"` // a node has the tokens, so the hash is enough for a copy
}

// PrefixCopy is a prefix that a worker has computed for later requests, with the use of it since.
type PrefixCopy struct {
	Hash      string          `json:"hash" msgpack:"hash"`
	Blocks    uint32          `json:"blocks" msgpack:"blocks"`
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank" msgpack:"rank"`
	At        time.Time       `json:"at" msgpack:"at"`
	Automatic bool            `json:"automatic,omitempty" msgpack:"automatic,omitempty"`

	// Computed are the tokens of the copy that the worker did not hold before. TookMS is the time of the engine's answer.
	Computed uint64  `json:"computed_tokens" msgpack:"computed_tokens"`
	TookMS   float64 `json:"took_ms" msgpack:"took_ms"`

	// Requests have reused the copy on this worker, with Reused tokens beyond the blocks that the worker held before.
	// SavedMS is the forecast time to the first token of these requests without the copy, less the forecast with it.
	Requests uint64  `json:"requests" msgpack:"requests"`
	Reused   uint64  `json:"reused_tokens" msgpack:"reused_tokens"`
	SavedMS  float64 `json:"saved_ms" msgpack:"saved_ms"`
}

// WarmRequest is a request to compute a prefix on a worker for later requests. The prefix is Tokens with their adapter
// and salt, or the hash of a [HotPrefix] with kept tokens.
type WarmRequest struct {
	Model     string          `json:"model" msgpack:"model"`
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank,omitempty" msgpack:"rank,omitempty"`
	Hash      string          `json:"hash,omitempty" msgpack:"hash,omitempty"`
	Tokens    Tokens          `json:"tokens,omitzero" msgpack:"tokens,omitempty"`
	LoRA      string          `json:"lora_name,omitempty" msgpack:"lora_name,omitempty"`
	CacheSalt string          `json:"cache_salt,omitempty" msgpack:"cache_salt,omitempty"`

	// Automatic marks a copy without an operator. Nodes set it.
	Automatic bool `json:"automatic,omitempty" msgpack:"automatic,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *WarmRequest) Check() error {
	switch {
	case r.Worker == "":
		return Errorf(CodeMalformed, "the request has no worker")
	case (r.Hash == "") == (len(r.Tokens) == 0):
		return Errorf(CodeMalformed, "the request needs either tokens or hash")
	case r.Hash != "" && (r.LoRA != "" || r.CacheSalt != ""):
		return Errorf(CodeMalformed, "lora_name and cache_salt are only for tokens")
	case r.Hash != "":
		if _, err := ParsePrefixHash(r.Hash); err != nil {
			return err
		}
	}
	return checkModel(r.Model)
}

func (r *WarmRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"worker", &r.Worker}, member{"rank", &r.Rank},
		member{"hash", &r.Hash}, member{"tokens", &r.Tokens}, member{"lora_name", &r.LoRA},
		member{"cache_salt", &r.CacheSalt}, member{"automatic", &r.Automatic})
}

// PrefixHash formats the hash of a prefix.
func PrefixHash(h events.SeqHash) string {
	const digits = 16
	text := strconv.FormatUint(uint64(h), 16)
	return "0000000000000000"[:digits-len(text)] + text
}

// ParsePrefixHash reads the format of [PrefixHash]. The error is an [Error].
func ParsePrefixHash(text string) (events.SeqHash, error) {
	h, err := strconv.ParseUint(text, 16, 64)
	if err != nil || len(text) != 16 {
		return 0, Errorf(CodeMalformed, "hash is %.40q; a hash has 16 hexadecimal digits, as in indexer prefixes hot", text)
	}
	return events.SeqHash(h), nil
}

// Hots finds and copies hot prefixes. Errors are of type *Error.
type Hots interface {
	HotPrefixes(ctx context.Context, r *HotRequest) (*HotList, error)

	// Warm computes a prefix on a worker. It returns after the answer of the engine.
	Warm(ctx context.Context, r *WarmRequest) (*PrefixCopy, error)
}

// HotStatus counts the copies of hot prefixes on a node since the node's start.
type HotStatus struct {
	Copies   uint64 `json:"copies" msgpack:"copies"`                   // that this node has made
	Failed   uint64 `json:"failed" msgpack:"failed"`                   // attempts of this node
	Computed uint64 `json:"computed_tokens" msgpack:"computed_tokens"` // of Copies

	// The use of all copies by requests that this node has routed.
	Requests uint64  `json:"requests" msgpack:"requests"`
	Reused   uint64  `json:"reused_tokens" msgpack:"reused_tokens"`
	SavedMS  float64 `json:"saved_ms" msgpack:"saved_ms"`

	PromptBytes uint64 `json:"prompt_bytes" msgpack:"prompt_bytes"` // memory for tokens of hot prefixes
}
