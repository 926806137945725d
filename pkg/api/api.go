package api

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits of a query, the same over every transport.
const (
	// MaxBody is the size of a request, in bytes, beyond which it is refused.
	MaxBody = 8 << 20

	// MaxChatTemplate is the size of the chat template of a request, in bytes.
	MaxChatTemplate = 64 << 10

	// MaxTokens is how many tokens, and as many block hashes, one query may have.
	MaxTokens = 1 << 20
)

// Query asks who holds how much of a prompt.
type Query struct {
	Model string `json:"model" msgpack:"model"`

	// BlockSize, in tokens, is checked against the model's if it is given.
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"`

	// Tokens of the whole prompt; what does not fill a block at its end is not looked up.
	Tokens Tokens `json:"tokens,omitzero" msgpack:"tokens,omitempty"`

	// Hashes are the local hashes of the prompt's blocks, in place of Tokens, for a client that keeps tokens to itself.
	// They are looked up as they are: where workers read ahead (WorkerInfo.Lookahead), those hashed as far ahead are
	// found.
	Hashes Hashes `json:"hashes,omitzero" msgpack:"hashes,omitempty"`

	// Hashed is the prompt as engines hash it that read ahead, in place of Tokens: for each rank those are looked up
	// that are as its own. Nodes share a query by tokens so; the answer's Lookaheads say which hashes there should have
	// been.
	Hashed []Hashed `json:"hashed,omitzero" msgpack:"hashed,omitempty"`

	// EngineHashes are the engine's own hashes of the prompt's blocks, from the first one on, as its events have them, in
	// place of Tokens. A block counts for a rank that holds it under that hash: what one rank of those that name blocks
	// alike has said is enough for all of these, and what a rank calls otherwise is asked of that rank alone.
	EngineHashes Hashes `json:"engine_hashes,omitzero" msgpack:"engine_hashes,omitempty"`

	// LoRA and CacheSalt change the hashes of Tokens as they do in the engine. They go with Tokens or Text only.
	LoRA      string `json:"lora_name,omitempty" msgpack:"lora_name,omitempty"`
	CacheSalt string `json:"cache_salt,omitempty" msgpack:"cache_salt,omitempty"`

	// Media are the images and the like in Tokens, in the order of their offsets. Engines hash them with the blocks that
	// have their tokens. Of the shared store, only what is before the first is asked for.
	Media []events.MediaItem `json:"media,omitzero" msgpack:"media,omitempty"`

	// Text is the prompt as text, in place of Tokens: the node that is asked makes tokens of it, if it is set to do that
	// for the model. Its fields are the query's own on the wire.
	*Text

	// Workers restricts the answer to these instances.
	Workers []events.WorkerID `json:"workers,omitzero" msgpack:"workers,omitempty"`

	// Ranks restricts the answer to these ranks, in place of Workers. The node that is asked sees to it: nodes ask each
	// other for the ranks' workers.
	Ranks []RankPlace `json:"ranks,omitzero" msgpack:"ranks,omitempty"`

	// Endpoints restricts the answer to ranks that are registered with one of these serving addresses, byte for byte, in
	// place of Workers and Ranks. Those that no rank of the model has are the answer's UnknownEndpoints.
	Endpoints []string `json:"endpoints,omitzero" msgpack:"endpoints,omitempty"`

	// WithEndpoint asks for each rank's serving address, as Endpoints does. ByEndpoint asks for the answer by address.
	WithEndpoint bool `json:"with_endpoint,omitempty" msgpack:"with_endpoint,omitempty"`
	ByEndpoint   bool `json:"by_endpoint,omitzero" msgpack:"by_endpoint,omitempty"`

	// Within asks how much of the prompt each rank holds within some tiers alone, beside its chained depths:
	// Overlap.Within has a depth for each of these.
	Within []Tiers `json:"within,omitzero" msgpack:"within,omitempty"`

	// Partitions restricts the question to workers of these partitions: it is how nodes share a query. An answer then
	// says of each whether it was looked at (Answer.Partitions) or could not be (Answer.Missing).
	Partitions []events.Partition `json:"partitions,omitzero" msgpack:"partitions,omitempty"`

	// MinSeq asks for an answer that reflects at least these places in the log: what the caller knows to be published.
	// The node waits for them until the deadline.
	MinSeq []PartitionSeq `json:"min_seq,omitempty" msgpack:"min_seq,omitempty"`

	// DeadlineMS is how many milliseconds the answer may take, as far as other nodes are waited for; 0: as many as the
	// request has. Partitions that have not answered by then are Missing. Of a choice, it is what the index has for its
	// answer: whoever is not heard of by then counts as holding nothing.
	DeadlineMS uint32 `json:"deadline_ms,omitempty" msgpack:"deadline_ms,omitempty"`

	// Explain asks for each rank's way along the prompt (Overlap.Path), and for all ranks, as Idle does. It is for
	// people, and costs much more than an answer.
	Explain bool `json:"explain,omitempty" msgpack:"explain,omitempty"`

	// Diagnostic marks a query of a person or a tool, not of a router. The funnel leaves it out.
	Diagnostic bool `json:"diagnostic,omitempty" msgpack:"diagnostic,omitempty"`

	// Idle asks for all ranks that might serve the query, those too that hold nothing of its prompt.
	Idle bool `json:"idle,omitempty" msgpack:"idle,omitempty"`

	// L3 is whether, and for what, the shared store is asked: L3All, L3Beyond or L3Off. By default it is asked for what
	// workers would load: for the blocks that follow what each has, as far as they are there without a hole. Where that
	// does not decide what is loaded, and with Explain, it is asked for all.
	L3 L3Ask `json:"l3,omitempty" msgpack:"l3,omitempty"`

	// L3TimeoutMS is how long the answer waits for the store at most; default what the node is set to, 20 ms.
	L3TimeoutMS uint32 `json:"l3_timeout_ms,omitempty" msgpack:"l3_timeout_ms,omitempty"`

	// Raw is for callers in the same process that look at all workers of an answer: they come in any order, and nothing
	// is said of their engines. Room is memory for the list of them, which is the caller's again when it needs the answer
	// no more. Neither travels.
	Raw  bool      `json:"-" msgpack:"-"`
	Room []Overlap `json:"-" msgpack:"-"`

	// Answered is for callers in the same process: it is told the index's answer, which it may not keep.
	Answered func(*Answer) `json:"-" msgpack:"-"`
}

// Hashed are the local hashes of a prompt's blocks as ranks have them that read so many tokens ahead.
type Hashed struct {
	Lookahead uint32 `json:"lookahead" msgpack:"lookahead"`
	Hashes    Hashes `json:"hashes" msgpack:"hashes"`
}

// HashedFor returns the hashes for ranks that read so far ahead, as far as the query has them.
func (q *Query) HashedFor(lookahead uint32) Hashes {
	for i := range q.Hashed {
		if q.Hashed[i].Lookahead == lookahead {
			return q.Hashed[i].Hashes
		}
	}
	return nil
}

// L3Ask is what the shared store is asked for.
type L3Ask string

// What it may be asked for.
const (
	L3All    L3Ask = "all"    // the whole prompt, at the same time as the index
	L3Beyond L3Ask = "beyond" // all that no worker has, after the index
	L3Off    L3Ask = "off"    // nothing
)

// PartitionSeq is a place in a partition's log.
type PartitionSeq struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Seq       events.StreamSeq `json:"seq" msgpack:"seq"`
}

// Locals appends to dst the local hashes of the prompt's whole blocks as an engine hashes Tokens that reads so far
// ahead.
func (q *Query) Locals(dst []events.LocalHash, blockSize, lookahead uint32) ([]events.LocalHash, error) {
	hasher, err := events.NewLookaheadHasher(blockSize, lookahead, events.Space{LoRA: q.LoRA, Salt: q.CacheSalt})
	if err != nil {
		return dst, Errorf(CodeInternal, "hash the tokens: %v", err)
	}
	return hasher.HashItems(dst, q.Tokens, q.Media), nil
}

// Plain are the tokens before the first of Media.
func (q *Query) Plain() Tokens {
	if len(q.Media) == 0 {
		return q.Tokens
	}
	return q.Tokens[:q.Media[0].Offset]
}

// Answer says who holds how much of a query's prompt.
type Answer struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"`
	Blocks    int    `json:"blocks" msgpack:"blocks"` // whole blocks that were looked up

	// Lookaheads says how far ahead ranks of the model read, ascending, if the query has Hashed.
	Lookaheads []uint32 `json:"lookaheads,omitempty" msgpack:"lookaheads,omitempty"`

	// Complete is false if there may be workers of the model that could not be looked at: those in the Missing
	// partitions.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	Workers []Overlap `json:"workers" msgpack:"workers"` // best first; of no missing partition

	// ByEndpoint has the ranks by their serving addresses, best first, if the query asks for that; Workers are those then
	// of which no address is registered.
	ByEndpoint map[string][]Overlap `json:"by_endpoint,omitempty" msgpack:"by_endpoint,omitempty"`

	// UnknownEndpoints are those of the query that no rank of the model is registered with.
	UnknownEndpoints []string `json:"unknown_endpoints,omitempty" msgpack:"unknown_endpoints,omitempty"`

	// Partitions is what the answer reflects: those that have workers of the model, or all that the query named, but
	// the missing ones.
	Partitions []PartitionStatus `json:"partitions" msgpack:"partitions"`

	// Reason says why no worker has anything of the prompt; it is empty if one has.
	Reason Reason `json:"reason,omitempty" msgpack:"reason,omitempty"`

	L3 L3 `json:"l3" msgpack:"l3"`

	*Tokenization // if the query has a Text
}

// UpToDate reports whether the answer lacks nothing of what the log has.
func (a *Answer) UpToDate() bool {
	old := func(p PartitionStatus) bool { return p.StaleMS > 0 || p.ResyncNeeded }
	return a.Complete && !slices.ContainsFunc(a.Partitions, old)
}

// Finish puts workers into their order, drops those that have nothing unless idle ones are wanted, and says why if
// nobody has anything.
func (a *Answer) Finish(idle bool, why Reason) {
	a.FinishRaw(idle, why)
	SortOverlaps(a.Workers)
}

// FinishRaw is Finish for a query that is Raw.
func (a *Answer) FinishRaw(idle bool, why Reason) {
	if !idle {
		n := 0
		for i := range a.Workers {
			if !a.Workers[i].holds() {
				continue
			}
			if n < i {
				a.Workers[n] = a.Workers[i]
			}
			n++
		}
		clear(a.Workers[n:])
		a.Workers = a.Workers[:n]
	}
	for i := range a.Workers {
		if a.Workers[i].holds() {
			a.Reason = ""
			return
		}
	}
	a.Reason = why
}

// holds reports whether there is anything that the rank holds, would load, or is guessed to hold.
func (o *Overlap) holds() bool { return o.Total()+o.L3+o.Guessed > 0 || o.Within != nil }

// L3 is what the shared store holds of a prompt. However it stands with the store, the rest of the answer is what it
// would be without.
type L3 struct {
	Status L3Status `json:"status" msgpack:"status"`
	Reason string   `json:"reason,omitempty" msgpack:"reason,omitempty"` // for people: why the status is not ok

	// blocks that are there: from, up to (not including)
	Ranges [][2]uint32 `json:"ranges,omitempty" msgpack:"ranges,omitempty"`
	Total  uint32      `json:"total" msgpack:"total"`   // blocks that are there
	AgeMS  float64     `json:"age_ms" msgpack:"age_ms"` // how old the oldest of this information is

	Unknown [][2]uint32 `json:"unknown,omitempty" msgpack:"unknown,omitempty"` // blocks of which it is not known

	// Broken are blocks at which some rank's run in the store ends though a part of their objects is there, if the
	// query asks for explanations.
	Broken []BrokenBlock `json:"broken,omitempty" msgpack:"broken,omitempty"`

	// FromStart is how many blocks a rank would load that holds nothing itself.
	FromStart uint32 `json:"from_start" msgpack:"from_start"`
}

// BrokenBlock is a block of which a store has some objects and lacks others: an engine cannot load it.
type BrokenBlock struct {
	Block   uint32 `json:"block" msgpack:"block"`
	Objects int    `json:"objects" msgpack:"objects"` // that it has
	Of      int    `json:"of" msgpack:"of"`
}

// L3Status is how it stands with the shared store.
type L3Status string

// How it may stand.
const (
	L3OK            L3Status = "ok"
	L3Partial       L3Status = "partial"        // of some blocks it is not known whether they are there
	L3Unavailable   L3Status = "unavailable"    // of none is it known
	L3NotConfigured L3Status = "not_configured" // no worker of the model has a store, or it was not to be asked
	L3Mismatch      L3Status = "mismatch"       // the workers' configurations do not go together
)

// Reason is why an answer is empty.
type Reason string

// The reasons.
const (
	ReasonNoBlocks   Reason = "no_whole_block" // the prompt is shorter than one block
	ReasonNotCached  Reason = "nothing_cached" // no worker holds the first block
	ReasonNoTokens   Reason = "not_tokenized"  // no tokens could be made of the text
	ReasonNotAllowed Reason = "none_allowed"   // none of the workers that the query allows serves the model
)

// Tiers is a set of tiers: device, host, disk, external, or several with a plus between, such as device+host.
type Tiers string

// List is the tiers of a set.
func (t Tiers) List() (list []events.Tier, err error) {
next:
	for name := range strings.SplitSeq(string(t), "+") {
		for tier := events.Device; tier <= events.External; tier++ {
			if name == tier.String() && !slices.Contains(list, tier) {
				list = append(list, tier)
				continue next
			}
		}
		return nil, Errorf(CodeMalformed, "%.60q is not a set of tiers, which are %v, %v, %v and %v, such as device+host",
			string(t), events.Device, events.Host, events.Disk, events.External)
	}
	return list, nil
}

// Overlap is what one rank holds of a prompt, in blocks. The depths follow each other; their sum is the length of the
// prefix that this rank need not compute.
type Overlap struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Device   uint32          `json:"device" msgpack:"device"`
	Host     uint32          `json:"host" msgpack:"host"`
	Disk     uint32          `json:"disk" msgpack:"disk"`
	External uint32          `json:"external" msgpack:"external"`

	// L3 is how many more blocks, directly after these, the rank would load from the shared store, and L3Stop why no
	// more.
	L3 uint32 `json:"l3" msgpack:"l3"`
	// prompt_ends, not_in_store, not_known, below_threshold, capacity, no_store; vLLM's: gap, other_groups,
	// alignment, last_token
	L3Stop string `json:"l3_stop,omitempty" msgpack:"l3_stop,omitempty"`

	// if the query asks for explanations, of the best few hundred ranks
	Path *Path `json:"path,omitempty" msgpack:"path,omitempty"`

	// Bound says that the depths, or L3, are an upper bound, and of which kind; empty: they are exact.
	Bound Bound `json:"bound,omitempty" msgpack:"bound,omitempty"`

	// Engine is the state of the rank's engine if it is not connected to its shim; empty: it is, or nobody says.
	Engine EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`

	// CatchingUp: the rank's shim still publishes a backlog of what its engine said earlier, so that the depths are of
	// an earlier time.
	CatchingUp bool `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	// Guessed is how many leading blocks the rank is guessed to hold in device memory, if that is more than Device, which
	// its events confirm: it was sent a request with them, and its events say nothing of that yet, or it has none. The
	// other depths follow what is confirmed.
	Guessed uint32 `json:"guessed,omitempty" msgpack:"guessed,omitempty"`

	// Endpoint is where the rank takes requests, as it was registered, if the query asks for it.
	Endpoint string `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	// Within is how many leading blocks of the prompt the rank's engine can use with what it holds in each of the
	// query's sets of tiers alone, whichever of them a block is in; nil where that is nothing, or nobody asked.
	Within []uint32 `json:"within,omitempty" msgpack:"within,omitempty"`

	// Held counts the blocks of all prompts that the rank holds in device memory. Only answers between nodes have it.
	Held uint32 `json:"held,omitempty" msgpack:"held,omitempty"`

	// Full is the most blocks that the rank held in device memory after it evicted some, in answers between nodes.
	// This is its capacity, as far as its events show it. 0: it has evicted none.
	Full uint32 `json:"full,omitempty" msgpack:"full,omitempty"`

	// Number is of the rank in the index of the node that answers, and one: of an answer that is Raw, for callers that
	// remember what is where. Another rank may have it later. 0: not known.
	Number uint32 `json:"-" msgpack:"-"`
}

// Bound is a kind of upper bound.
type Bound string

// BoundFullAttentionOnly: the model has groups of which it is not known what they need of a prefix, such as sliding
// windows of unknown size. The depths take no account of them: the engine may reuse less.
const BoundFullAttentionOnly Bound = "full_attention_only"

// BoundStoreObjects: the depths are exact, and L3 is an upper bound. The model may be a hybrid one, of which an engine
// needs more objects of a page than those that were looked for: the engine may load less. Of a model without objects of
// keys and values, such as DeepSeek V4, it may load more.
const BoundStoreObjects Bound = "store_objects"

// EngineState is how a shim's connection to its engine stands.
type EngineState string

// The states.
const (
	EngineConnected EngineState = "connected"
	EngineSilent    EngineState = "silent" // it does not answer; that proves nothing of what it holds
	// its connection ended and its port refuses: its process is gone, and its device memory with it
	EngineGone EngineState = "gone"
	// it sleeps, as it reports over HTTP: it holds nothing and takes no requests until it wakes up
	EngineAsleep EngineState = "asleep"
	// the rank publishes its events on another host, and no shim there has registered it: it serves, and what it holds
	// is not known
	EngineRemote EngineState = "remote"
)

// Path is a rank's way along a prompt.
type Path struct {
	// Held are the blocks that the rank holds in some tier, in order; equal ones that follow each other are one run.
	// More says that there are more.
	Held []HeldRun `json:"held,omitempty" msgpack:"held,omitempty"`
	More bool      `json:"more,omitempty" msgpack:"more,omitempty"`

	// Stop is the rule that ended the rank's own prefix: query_ends; unknown_block (nobody that the rank's node knows
	// holds or remembers it, or what follows); not_held (this rank holds it in no tier); held_in_earlier_tier (only in
	// a tier before the one that the prefix has come to); part_of_chunk (the engine loads a chunk of several blocks
	// only as a whole); group_lacks_blocks (a group of a hybrid model, named by Group, does not have what it needs of a
	// longer prefix); draft_model (the engine computes the last block that it holds anew).
	Stop  string     `json:"stop" msgpack:"stop"`
	Group *PathGroup `json:"group,omitempty" msgpack:"group,omitempty"`

	// blocks that the rank holds behind the end of its prefix, of no use
	Behind   uint32 `json:"behind" msgpack:"behind"`
	L3Behind uint32 `json:"l3_behind" msgpack:"l3_behind"` // blocks of the shared store behind what the rank would load
}

// PathGroup is a KV-cache group of a hybrid model.
type PathGroup struct {
	Index events.GroupIndex `json:"index" msgpack:"index"`
	// as vLLM calls it: sliding_window, chunked_local_attention, mamba
	Kind   string `json:"kind" msgpack:"kind"`
	Window uint32 `json:"window,omitempty" msgpack:"window,omitempty"` // tokens: the window, or the chunk
}

// HeldRun is a run of blocks that a rank holds in the same tiers.
type HeldRun struct {
	From  uint32   `json:"from" msgpack:"from"`
	To    uint32   `json:"to" msgpack:"to"` // not included
	Tiers []string `json:"tiers" msgpack:"tiers"`
}

// Total is the length of the prefix that lies in any of the rank's own tiers, in blocks.
func (o *Overlap) Total() uint32 { return o.Device + o.Host + o.Disk + o.External }

// WithGuess is the overlap if the guess is right. What it covers counts once: of the other tiers, and of the shared
// store, what lies behind it stays.
func (o Overlap) WithGuess() Overlap {
	covered := max(o.Guessed, o.Device) - o.Device
	o.Device, o.Guessed = o.Device+covered, 0
	for _, tier := range []*uint32{&o.Host, &o.Disk, &o.External, &o.L3} {
		n := min(*tier, covered)
		*tier -= n
		covered -= n
	}
	return o
}

// PartitionStatus says which place in a partition's log an answer reflects.
type PartitionStatus struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Epoch     time.Time        `json:"epoch" msgpack:"epoch"` // when the partition's stream was created
	Seq       events.StreamSeq `json:"seq" msgpack:"seq"`

	// StaleMS is how long ago, in milliseconds, the node last knew that it had read the partition's log to its end, and
	// that the log took what shims have to say; 0: just now, which is less than three seconds.
	StaleMS uint64 `json:"stale_ms,omitempty" msgpack:"stale_ms,omitempty"`

	// ResyncNeeded: the log has lost messages, and some of the partition's workers have not said yet what they hold.
	ResyncNeeded bool `json:"resync_needed,omitempty" msgpack:"resync_needed,omitempty"`
}

// WorkersPage is how many ranks a client asks for at a time, so that a list of any length travels in messages of the
// usual size.
const WorkersPage = 500

// WorkersRequest asks for a part of the list of workers, of all that there is if nothing is set.
type WorkersRequest struct {
	After *RankPlace `json:"after,omitempty" msgpack:"after,omitempty"` // only those behind this place
	Limit int        `json:"limit,omitempty" msgpack:"limit,omitempty"` // no more than so many; 0 or less: all
}

// RankPlace is a place in the order of ranks.
type RankPlace struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
}

// Compare orders by instance, and then by rank.
func (p RankPlace) Compare(q RankPlace) int {
	return cmp.Or(cmp.Compare(p.Instance, q.Instance), cmp.Compare(p.Rank, q.Rank))
}

// WorkerList is every rank that the log knows, or a part of them.
type WorkerList struct {
	Workers []WorkerInfo `json:"workers" msgpack:"workers"` // by instance and rank

	// Next is the place behind which there may be more; nil: this is the end of the list.
	Next *RankPlace `json:"next,omitempty" msgpack:"next,omitempty"`

	// Complete is false if there may be workers in the Missing partitions, which could not be looked at.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Expired are ranks that are not among Workers: their leases have expired within the last hour, as far as the node
	// that answers has seen. Those that came back, were drained before, or were removed since are not listed. They are
	// in the first part of a list.
	Expired []ExpiredWorker `json:"expired,omitempty" msgpack:"expired,omitempty"`
}

// ExpiredWorker is a rank whose shim is gone. What the rank held is cleared.
type ExpiredWorker struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Model    string          `json:"model" msgpack:"model"`
	Lease    Lease           `json:"lease" msgpack:"lease"` // its last
}

// WorkerInfo is what the log knows of one rank.
type WorkerInfo struct {
	Instance    events.WorkerID    `json:"instance" msgpack:"instance"`
	Rank        events.Rank        `json:"rank" msgpack:"rank"`
	Model       string             `json:"model" msgpack:"model"`
	BlockSize   uint32             `json:"block_size" msgpack:"block_size"`
	Partition   events.Partition   `json:"partition" msgpack:"partition"`
	Incarnation events.Incarnation `json:"incarnation" msgpack:"incarnation"`
	LastEvent   events.EventID     `json:"last_event" msgpack:"last_event"`
	LastSeen    time.Time          `json:"last_seen" msgpack:"last_seen"` // when the log took its last batch
	Blocks      TierCounts         `json:"blocks" msgpack:"blocks"`       // held now
	Pending     int                `json:"pending" msgpack:"pending"`     // blocks that wait for their parents

	// Parked is the old name of Pending, and the only one that nodes up to v0.4.0 send. It goes in the release after the
	// next.
	Parked int `json:"parked" msgpack:"parked"`

	Copies  uint64 `json:"copies" msgpack:"copies"`   // of blocks held, beyond the first in a tier
	Stored  uint64 `json:"stored" msgpack:"stored"`   // blocks in all stored events of the incarnation
	Removed uint64 `json:"removed" msgpack:"removed"` // blocks in all removed events

	// Lookahead is how many tokens beyond a block are in its local hash, as with an engine that drafts: for who asks by
	// Hashes.
	Lookahead uint32 `json:"lookahead,omitempty" msgpack:"lookahead,omitempty"`

	// none: nobody has registered the rank, and it is not cleared by itself
	Lease *Lease `json:"lease,omitempty" msgpack:"lease,omitempty"`

	// Engine is how the rank's shim stands with its engine, since when and why; empty: nobody says. CatchingUp is as in
	// an Overlap.
	Engine      EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`
	EngineSince *time.Time  `json:"engine_since,omitempty" msgpack:"engine_since,omitempty"`
	EngineWhy   string      `json:"engine_why,omitempty" msgpack:"engine_why,omitempty"`
	CatchingUp  bool        `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	// Record is what is registered of the rank, and whether it may be chosen; nil: nobody has registered it.
	Record *WorkerRecord `json:"record,omitempty" msgpack:"record,omitempty"`
}

// Place is where the rank stands in a list.
func (w *WorkerInfo) Place() RankPlace { return RankPlace{w.Instance, w.Rank} }

// Cut puts the list into its order and makes it what was asked for.
func (l *WorkerList) Cut(r WorkersRequest) {
	if r.After != nil {
		l.Workers = slices.DeleteFunc(l.Workers, func(w WorkerInfo) bool { return w.Place().Compare(*r.After) <= 0 })
	}
	slices.SortFunc(l.Workers, func(a, b WorkerInfo) int { return a.Place().Compare(b.Place()) })
	if r.Limit > 0 && len(l.Workers) > r.Limit {
		l.Workers = l.Workers[:r.Limit]
		next := l.Workers[r.Limit-1].Place()
		l.Next = &next
	}
}

// Append puts the next part of the list behind this one.
func (l *WorkerList) Append(next *WorkerList) {
	l.Workers, l.Next = append(l.Workers, next.Workers...), next.Next
	l.Expired = append(l.Expired, next.Expired...)
	for _, p := range next.Missing {
		if at, there := slices.BinarySearch(l.Missing, p); !there {
			l.Missing = slices.Insert(l.Missing, at, p)
		}
	}
	l.Complete = len(l.Missing) == 0
}

// Lease is a shim's hold on a rank.
type Lease struct {
	Holder string    `json:"holder" msgpack:"holder"` // one life of one process
	Host   string    `json:"host" msgpack:"host"`
	PID    int       `json:"pid" msgpack:"pid"`
	Since  time.Time `json:"since" msgpack:"since"`
	// held; expired: it was not renewed in time, and is being cleared; ended: its shim has ended it, with its engine
	State string `json:"state" msgpack:"state"`
	// when its shim was stopped in good order, by its clock, while the engine ran on; nil: it was not
	Stopped *time.Time `json:"stopped,omitempty" msgpack:"stopped,omitempty"`
	// for people: the shared store that the rank registered
	L3 string `json:"l3,omitempty" msgpack:"l3,omitempty"`

	// Renewed and Expires are by the NATS servers' clock. A lease expires later than this if NATS or the indexer was
	// away.
	Renewed time.Time `json:"renewed" msgpack:"renewed"`
	Expires time.Time `json:"expires" msgpack:"expires"`
}

// TierCounts is a number of blocks for each tier.
type TierCounts struct {
	Device   uint64 `json:"device" msgpack:"device"`
	Host     uint64 `json:"host" msgpack:"host"`
	Disk     uint64 `json:"disk" msgpack:"disk"`
	External uint64 `json:"external" msgpack:"external"`
}

// Indexer answers. internal/index/node implements it. All methods may be called from any goroutine; errors are of type
// *Error.
type Indexer interface {
	Find(ctx context.Context, q *Query) (*Answer, error)
	Workers(ctx context.Context, r WorkersRequest) (*WorkerList, error)
	Status(ctx context.Context) (*Status, error)
	StatusOf(ctx context.Context, node string) (*Status, error) // of this node or another
	Verify(ctx context.Context, at []PartitionSeq) (*Status, error)
	Snapshot(ctx context.Context) (*SnapshotList, error)
	Prefixes(ctx context.Context, r *PrefixesRequest) (*PrefixTree, error)
	RemoveWorker(ctx context.Context, instance events.WorkerID) (*Worker, error)
}

// Registrar registers workers. All methods may be called from any goroutine; errors are of type *Error.
type Registrar interface {
	RegisterWorker(ctx context.Context, r *WorkerRegistration) (*Worker, error)
	ChangeWorker(ctx context.Context, c *WorkerChange) (*Worker, error)
}
