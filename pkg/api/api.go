package api

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Limits of a query, the same over every transport.
const (
	// MaxBody is the largest size of a request in bytes. Larger requests are refused.
	MaxBody = 8 << 20

	// MaxChatTemplate is the largest size of a request's chat template in bytes.
	MaxChatTemplate = 64 << 10

	// MaxTokens is the largest number of tokens, and of block hashes, in a query. MaxBody has room for as many
	// tokens in JSON.
	MaxTokens = 1 << 20
)

// Query is a request for the workers that hold a prefix of a prompt, with their depths.
type Query struct {
	Model string `json:"model" msgpack:"model"`

	// BlockSize, in tokens, is compared with the block size of the model; 0: no comparison.
	BlockSize uint32 `json:"block_size,omitempty" msgpack:"block_size,omitempty"`

	// Tokens are the tokens of the whole prompt. Tokens after the last whole block are not looked up.
	Tokens Tokens `json:"tokens,omitzero" msgpack:"tokens,omitempty"`

	// Hashes are the local hashes of the prompt's blocks, in place of Tokens, for clients that do not send tokens. The
	// lookup uses the hashes unchanged: if workers read ahead (WorkerInfo.Lookahead), only hashes with the same
	// lookahead match.
	Hashes Hashes `json:"hashes,omitzero" msgpack:"hashes,omitempty"`

	// Hashed are the local hashes of the prompt for each lookahead of the engines, in place of Tokens. The lookup for a
	// rank uses the hashes with the rank's lookahead. Nodes use Hashed for queries with tokens among themselves.
	// Lookaheads in the answer lists the required lookaheads.
	Hashed []Hashed `json:"hashed,omitzero" msgpack:"hashed,omitempty"`

	// EngineHashes are the engine's own hashes of the prompt's blocks, from the first block on, as in the engine's
	// events, in place of Tokens. A block counts for a rank that holds it under this hash. Ranks with a common naming
	// of blocks share one lookup. Other ranks have separate lookups.
	EngineHashes Hashes `json:"engine_hashes,omitzero" msgpack:"engine_hashes,omitempty"`

	// LoRA and CacheSalt change the hashes of Tokens as in the engine. They are valid with Tokens or Text only.
	LoRA      string `json:"lora_name,omitempty" msgpack:"lora_name,omitempty"`
	CacheSalt string `json:"cache_salt,omitempty" msgpack:"cache_salt,omitempty"`

	// Media are images and other items in Tokens, in the order of their offsets. Engines include the items in the
	// hashes of the blocks with the items' tokens. The shared store is queried for the blocks before the first item
	// only.
	Media []events.MediaItem `json:"media,omitzero" msgpack:"media,omitempty"`

	// Text is the prompt as text, in place of Tokens. The receiving node tokenizes it, if a tokenizer is configured for
	// the model. The fields of Text are fields of the query on the wire.
	*Text

	// Workers restricts the answer to these workers.
	Workers []events.WorkerID `json:"workers,omitzero" msgpack:"workers,omitempty"`

	// Ranks restricts the answer to these ranks, in place of Workers. The receiving node applies the restriction. Nodes
	// send each other the ranks' workers.
	Ranks []RankPlace `json:"ranks,omitzero" msgpack:"ranks,omitempty"`

	// Endpoints restricts the answer to ranks registered with one of these serving addresses, byte for byte, in place
	// of Workers and Ranks. UnknownEndpoints in the answer lists addresses without a rank of the model.
	Endpoints []string `json:"endpoints,omitzero" msgpack:"endpoints,omitempty"`

	// WithEndpoint adds each rank's serving address to the answer, as Endpoints does. ByEndpoint groups the answer by
	// address.
	WithEndpoint bool `json:"with_endpoint,omitempty" msgpack:"with_endpoint,omitempty"`
	ByEndpoint   bool `json:"by_endpoint,omitzero" msgpack:"by_endpoint,omitempty"`

	// Within adds to each rank the depth within some tiers alone, beside the chained depths: Overlap.Within has a depth
	// for each element.
	Within []Tiers `json:"within,omitzero" msgpack:"within,omitempty"`

	// WithEngineHashes adds the engine's hashes of the leading blocks to the rank of an answer, for a transfer between
	// engines (Overlap.EngineHashes). It is valid with tokens or local hashes, and one element in Workers or Ranks.
	WithEngineHashes bool `json:"with_engine_hashes,omitempty" msgpack:"with_engine_hashes,omitempty"`

	// Partitions restricts the query to workers of these partitions. Nodes split a query by partitions. The answer
	// lists each of them as searched (Answer.Partitions) or not (Answer.Missing).
	Partitions []events.Partition `json:"partitions,omitzero" msgpack:"partitions,omitempty"`

	// MinSeq lists positions in the log, such as the position of an event that the caller has published. The node waits
	// until it has applied the log up to these positions. The error is behind if the deadline passes first.
	MinSeq []PartitionSeq `json:"min_seq,omitempty" msgpack:"min_seq,omitempty"`

	// DeadlineMS is the longest time of the query in milliseconds, for all waits: tokens of a text, MinSeq and other
	// nodes. 0: the deadline of the request. Partitions without an answer in time are Missing. In a choice, the deadline
	// applies to the lookup in the index: ranks without an answer count as holding nothing.
	DeadlineMS uint32 `json:"deadline_ms,omitempty" msgpack:"deadline_ms,omitempty"`

	// Explain adds each rank's path along the prompt (Overlap.Path), and all ranks, as Idle does. An explanation is for
	// people, and costs much more than an answer.
	Explain bool `json:"explain,omitempty" msgpack:"explain,omitempty"`

	// Diagnostic marks a query of a person or a tool instead of a router. The funnel excludes diagnostic queries.
	Diagnostic bool `json:"diagnostic,omitempty" msgpack:"diagnostic,omitempty"`

	// Idle adds ranks of the model that hold no block of the prompt.
	Idle bool `json:"idle,omitempty" msgpack:"idle,omitempty"`

	// L3 selects the lookup in the shared store: L3All, L3Beyond or L3Off. By default, the lookup covers the blocks
	// that workers would load: the run of blocks without a hole after the blocks of each worker. If the run does not
	// decide the load, and with Explain, the lookup covers the whole prompt.
	L3 L3Ask `json:"l3,omitempty" msgpack:"l3,omitempty"`

	// L3TimeoutMS is the longest wait for the store in milliseconds; 0: the setting of the node, 20 ms by default.
	L3TimeoutMS uint32 `json:"l3_timeout_ms,omitempty" msgpack:"l3_timeout_ms,omitempty"`

	// Regions adds the longest prefix in each region (Answer.Regions). It needs nodes with a region.
	Regions bool `json:"regions,omitempty" msgpack:"regions,omitempty"`

	// Raw and Room are for callers in the same process that read all workers of an answer. With Raw, workers are
	// unordered and have no state of their engines. Room is memory for the list of workers. The caller owns Room again
	// after the last use of the answer. Neither field is encoded.
	Raw  bool      `json:"-" msgpack:"-"`
	Room []Overlap `json:"-" msgpack:"-"`

	// Answered, for callers in the same process, is called with the answer of the index. It must not keep the answer.
	// nil disables it.
	Answered func(*Answer) `json:"-" msgpack:"-"`

	// Tenant, for callers in the same process, is the name of the request's tenant in sums and quotas; empty: the node
	// determines the tenant.
	Tenant string `json:"-" msgpack:"-"`

	// Unsupported means that a field of the client's request prevented a look-up. The funnel records it.
	Unsupported bool `json:"-" msgpack:"-"`
}

// Hashed has the local hashes of a prompt's blocks for ranks with this lookahead in tokens.
type Hashed struct {
	Lookahead uint32 `json:"lookahead" msgpack:"lookahead"`
	Hashes    Hashes `json:"hashes" msgpack:"hashes"`
}

// HashedFor returns the query's hashes for ranks with this lookahead; nil if there are none.
func (q *Query) HashedFor(lookahead uint32) Hashes {
	for i := range q.Hashed {
		if q.Hashed[i].Lookahead == lookahead {
			return q.Hashed[i].Hashes
		}
	}
	return nil
}

// L3Ask selects the lookup in the shared store.
type L3Ask string

// The lookups.
const (
	L3All    L3Ask = "all"    // the whole prompt, at the same time as the index
	L3Beyond L3Ask = "beyond" // blocks that no worker holds, after the lookup in the index
	L3Off    L3Ask = "off"    // no lookup
)

// PartitionSeq is a position in a partition's log.
type PartitionSeq struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Seq       events.StreamSeq `json:"seq" msgpack:"seq"`
}

// Locals appends to dst the local hashes of the prompt's whole blocks for an engine with this lookahead. It hashes
// Tokens.
func (q *Query) Locals(dst []events.LocalHash, blockSize, lookahead uint32) ([]events.LocalHash, error) {
	hasher, err := events.NewLookaheadHasher(blockSize, lookahead, events.Space{LoRA: q.LoRA, Salt: q.CacheSalt})
	if err != nil {
		return dst, Errorf(CodeInternal, "hash the tokens: %v", err)
	}
	return hasher.HashItems(dst, q.Tokens, q.Media), nil
}

// Plain returns the tokens before the first item of Media.
func (q *Query) Plain() Tokens {
	if len(q.Media) == 0 {
		return q.Tokens
	}
	return q.Tokens[:q.Media[0].Offset]
}

// A new field of Answer also needs code in packAnswer, jsonAnswer and unpackAnswer, and in scatter.Union.

// Answer has the depths of the workers for a query's prompt.
type Answer struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"`
	Blocks    int    `json:"blocks" msgpack:"blocks"` // whole blocks of the lookup

	// Lookaheads lists the lookaheads of the model's ranks, ascending, if the query has Hashed.
	Lookaheads []uint32 `json:"lookaheads,omitempty" msgpack:"lookaheads,omitempty"`

	// Complete is false if workers of the model may be missing from the answer: workers of the Missing partitions.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	Workers []Overlap `json:"workers" msgpack:"workers"` // best first, without missing partitions

	// ByEndpoint has the ranks by serving address, best first, if the query has ByEndpoint. Workers then has only ranks
	// without a registered address.
	ByEndpoint map[string][]Overlap `json:"by_endpoint,omitempty" msgpack:"by_endpoint,omitempty"`

	// UnknownEndpoints lists the addresses of the query without a registered rank of the model.
	UnknownEndpoints []string `json:"unknown_endpoints,omitempty" msgpack:"unknown_endpoints,omitempty"`

	// Partitions has the positions in the log that the answer reflects. It lists the partitions with workers of the
	// model, or all partitions of the query, without missing partitions.
	Partitions []PartitionStatus `json:"partitions" msgpack:"partitions"`

	// Reason is set if no worker holds a block of the prompt.
	Reason Reason `json:"reason,omitempty" msgpack:"reason,omitempty"`

	L3 L3 `json:"l3" msgpack:"l3"`

	// Regions has the longest prefix in each region if the query has Regions: the own region first, the others by name.
	Regions []RegionPrefix `json:"regions,omitempty" msgpack:"regions,omitempty"`

	*Tokenization // if the query has a Text
}

// UpToDate reports whether the answer reflects the whole log.
func (a *Answer) UpToDate() bool {
	old := func(p PartitionStatus) bool { return p.StaleMS > 0 || p.ResyncNeeded }
	return a.Complete && !slices.ContainsFunc(a.Partitions, old)
}

// Present reports whether the depths of a rank of a partition are of the present: the shim is connected to the engine
// and publishes no backlog, and the node follows the log.
func (a *Answer) Present(o *Overlap, of events.Partition) bool {
	return o.Engine == "" && !o.CatchingUp && !slices.ContainsFunc(a.Partitions, func(p PartitionStatus) bool {
		return p.Partition == of && (p.StaleMS > 0 || p.ResyncNeeded)
	})
}

// Finish sorts workers, removes workers without blocks unless idle is set, and sets Reason to why if no worker has a
// block.
func (a *Answer) Finish(idle bool, why Reason) {
	a.FinishRaw(idle, why)
	SortOverlaps(a.Workers)
}

// FinishRaw is Finish without the sort, for a query with Raw.
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

// holds reports whether the rank holds a block, would load a block, or has a guess.
func (o *Overlap) holds() bool { return o.Total()+o.L3+o.Guessed > 0 || o.Within != nil }

// L3 has the blocks of a prompt in the shared store. The state of the store does not change the rest of the answer.
type L3 struct {
	Status L3Status `json:"status" msgpack:"status"`
	Reason string   `json:"reason,omitempty" msgpack:"reason,omitempty"` // for people: why the status is not ok

	// Ranges are the stored blocks: from, up to (not including).
	Ranges [][2]uint32 `json:"ranges,omitempty" msgpack:"ranges,omitempty"`
	Total  uint32      `json:"total" msgpack:"total"`   // stored blocks
	AgeMS  float64     `json:"age_ms" msgpack:"age_ms"` // age of the oldest entry

	Unknown [][2]uint32 `json:"unknown,omitempty" msgpack:"unknown,omitempty"` // blocks of unknown state

	// Broken lists blocks with some of the needed objects, at which the run of a rank ends. Only answers with Explain
	// have the list.
	Broken []BrokenBlock `json:"broken,omitempty" msgpack:"broken,omitempty"`

	// FromStart is the number of blocks that a rank without blocks of its own would load.
	FromStart uint32 `json:"from_start" msgpack:"from_start"`
}

// BrokenBlock is a block with some objects in the store and some missing. An engine cannot load the block.
type BrokenBlock struct {
	Block   uint32 `json:"block" msgpack:"block"`
	Objects int    `json:"objects" msgpack:"objects"` // stored objects
	Of      int    `json:"of" msgpack:"of"`
}

// L3Status is the result of the lookup in the shared store.
type L3Status string

// The results.
const (
	L3OK            L3Status = "ok"
	L3Partial       L3Status = "partial"        // the state of some blocks is unknown
	L3Unavailable   L3Status = "unavailable"    // the state of all blocks is unknown
	L3NotConfigured L3Status = "not_configured" // no worker of the model has a store, or the query excludes the store
	L3Mismatch      L3Status = "mismatch"       // the workers' configurations contradict each other
)

// Reason is the reason for an empty answer.
type Reason string

// The reasons.
const (
	ReasonNoBlocks   Reason = "no_whole_block" // the prompt is shorter than one block
	ReasonNotCached  Reason = "nothing_cached" // no worker holds the first block
	ReasonNoTokens   Reason = "not_tokenized"  // the text could not be tokenized
	ReasonNotAllowed Reason = "none_allowed"   // no allowed worker serves the model
)

// Tiers is a set of tiers: device, host, disk, external, or several joined by a plus, such as device+host.
type Tiers string

// List returns the tiers of the set.
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

// Overlap counts the blocks at the beginning of a prompt that a rank holds: first the blocks on the device, then the
// further blocks in each lower tier. The sum is the length of the prefix that the rank need not compute.
type Overlap struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Device   uint32          `json:"device" msgpack:"device"`
	Host     uint32          `json:"host" msgpack:"host"`
	Disk     uint32          `json:"disk" msgpack:"disk"`
	External uint32          `json:"external" msgpack:"external"`

	// L3 is the number of further blocks, directly after the tiers above, that the rank would load from the shared
	// store. L3Stop is the reason for the end of the run.
	L3 uint32 `json:"l3" msgpack:"l3"`
	// prompt_ends, not_in_store, not_known, below_threshold, capacity, no_store; vLLM's: gap, other_groups, alignment,
	// last_token
	L3Stop string `json:"l3_stop,omitempty" msgpack:"l3_stop,omitempty"`

	// Path is set for the best few hundred ranks if the query has Explain.
	Path *Path `json:"path,omitempty" msgpack:"path,omitempty"`

	// Bound is set if the depths, or L3, are an upper bound; empty: the numbers are exact.
	Bound Bound `json:"bound,omitempty" msgpack:"bound,omitempty"`

	// Engine is the state of the rank's engine if the shim has no connection to the engine; empty: connected, or
	// unknown.
	Engine EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`

	// CatchingUp: the rank's shim still publishes a backlog of the engine's events, so the depths are of an earlier
	// time.
	CatchingUp bool `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	// Guessed is a guess of the leading blocks in device memory, if greater than Device, the number confirmed by
	// events. The rank received a request with these blocks, and events have not confirmed the blocks yet, or the rank
	// has no events. The other depths follow the confirmed blocks.
	Guessed uint32 `json:"guessed,omitempty" msgpack:"guessed,omitempty"`

	// Endpoint is the registered serving address of the rank, if the query has WithEndpoint.
	Endpoint string `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	// Within has the number of leading blocks that the rank's engine can use from each of the query's sets of tiers
	// alone, in any tier of the set. It is nil if all numbers are 0, or the query has no Within.
	Within []uint32 `json:"within,omitempty" msgpack:"within,omitempty"`

	// EngineHashes are the engine's own hashes of the leading blocks that the rank holds in any tier, as in the engine's
	// events, if the query has WithEngineHashes. An event between two steps of the search may change their number, so
	// callers use no more hashes than blocks.
	EngineHashes Hashes `json:"engine_hashes,omitempty" msgpack:"engine_hashes,omitempty"`

	// Held counts the blocks of all prompts in the rank's device memory. Only answers between nodes have the count.
	Held uint32 `json:"held,omitempty" msgpack:"held,omitempty"`

	// Full is the greatest number of blocks in the rank's device memory after an eviction, in answers between nodes:
	// the capacity by the rank's events. 0: no eviction yet.
	Full uint32 `json:"full,omitempty" msgpack:"full,omitempty"`

	// Number is one more than the rank's number in the index of the answering node, in an answer with Raw. Callers may
	// use Number as a key. A later rank may get the same number. 0: unknown.
	Number uint32 `json:"-" msgpack:"-"`
}

// Bound is a kind of upper bound.
type Bound string

// BoundFullAttentionOnly: the model has groups with unknown needs of a prefix, such as sliding windows of unknown size.
// The depths ignore these groups, so the engine may reuse less.
const BoundFullAttentionOnly Bound = "full_attention_only"

// BoundStoreObjects: the depths are exact, and L3 is an upper bound. The model may be hybrid, so that an engine needs
// more objects of a page than the lookup covered. The engine may then load less. For a model without objects of keys
// and values, such as DeepSeek V4, the engine may load more.
const BoundStoreObjects Bound = "store_objects"

// EngineState is the state of a shim's connection to the engine.
type EngineState string

// The states.
const (
	EngineConnected EngineState = "connected"
	EngineSilent    EngineState = "silent" // no answer; the engine may still hold all blocks
	// The connection ended and the port refuses: the process is gone, with the device memory.
	EngineGone EngineState = "gone"
	// The engine reports over HTTP that it sleeps: it holds nothing and accepts no requests until it wakes up.
	EngineAsleep EngineState = "asleep"
	// The rank publishes its events on another host, and no shim on that host has registered the rank. The engine
	// serves, and its blocks are unknown.
	EngineRemote EngineState = "remote"
)

// Path is a rank's path along a prompt.
type Path struct {
	// Held are the blocks of the prompt in any tier of the rank, in order. Consecutive blocks with equal tiers form one
	// run. More: the list is cut off.
	Held []HeldRun `json:"held,omitempty" msgpack:"held,omitempty"`
	More bool      `json:"more,omitempty" msgpack:"more,omitempty"`

	// Stop is the rule that ended the rank's own prefix. query_ends: the prompt ended. unknown_block: no rank of the
	// node holds the next block, or the node has no record of it. not_held: the rank holds the block in no tier.
	// held_in_earlier_tier: the block is only in a tier before the current tier of the prefix. part_of_chunk: the
	// engine loads only whole chunks of several blocks. group_lacks_blocks: a group of a hybrid model, named by Group,
	// lacks blocks for a longer prefix. draft_model: the engine computes the last held block again.
	Stop  string     `json:"stop" msgpack:"stop"`
	Group *PathGroup `json:"group,omitempty" msgpack:"group,omitempty"`

	// Behind is the number of held blocks after the end of the prefix, which are useless to the engine.
	Behind   uint32 `json:"behind" msgpack:"behind"`
	L3Behind uint32 `json:"l3_behind" msgpack:"l3_behind"` // blocks of the shared store after the run to load
}

// PathGroup is a KV-cache group of a hybrid model.
type PathGroup struct {
	Index events.GroupIndex `json:"index" msgpack:"index"`
	// vLLM's name: sliding_window, chunked_local_attention, mamba
	Kind   string `json:"kind" msgpack:"kind"`
	Window uint32 `json:"window,omitempty" msgpack:"window,omitempty"` // tokens: the window, or the chunk
}

// HeldRun is a run of blocks in the same tiers of a rank.
type HeldRun struct {
	From  uint32   `json:"from" msgpack:"from"`
	To    uint32   `json:"to" msgpack:"to"` // not included
	Tiers []string `json:"tiers" msgpack:"tiers"`
}

// Total is the length in blocks of the prefix in all of the rank's own tiers.
func (o *Overlap) Total() uint32 { return o.Device + o.Host + o.Disk + o.External }

// WithGuess returns the overlap for a correct guess. Blocks covered by the guess count once: lower tiers and the shared
// store keep only the blocks after it.
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

// PartitionStatus is the position in a partition's log that an answer reflects.
type PartitionStatus struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Epoch     time.Time        `json:"epoch" msgpack:"epoch"` // creation time of the partition's stream
	Seq       events.StreamSeq `json:"seq" msgpack:"seq"`

	// StaleMS is the time in milliseconds since the node last read the partition's log to the end while the log
	// accepted messages of shims. 0: less than three seconds.
	StaleMS uint64 `json:"stale_ms,omitempty" msgpack:"stale_ms,omitempty"`

	// ResyncNeeded: the log has lost messages, and some of the partition's workers have not announced their blocks
	// again yet.
	ResyncNeeded bool `json:"resync_needed,omitempty" msgpack:"resync_needed,omitempty"`
}

// WorkersPage is the number of ranks in a page of a client's request, so that a long list fits into messages of usual
// size.
const WorkersPage = 500

// WorkersRequest is a request for a page of the list of workers. The zero value requests the whole list.
type WorkersRequest struct {
	After *RankPlace `json:"after,omitempty" msgpack:"after,omitempty"` // only ranks after this place
	Limit int        `json:"limit,omitempty" msgpack:"limit,omitempty"` // at most this many ranks; 0 or less: all
}

// RankPlace is a place in the order of ranks.
type RankPlace struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
}

// Compare orders by instance, then by rank.
func (p RankPlace) Compare(q RankPlace) int {
	return cmp.Or(cmp.Compare(p.Instance, q.Instance), cmp.Compare(p.Rank, q.Rank))
}

// WorkerList has all ranks of the log, or a page of them.
type WorkerList struct {
	Workers []WorkerInfo `json:"workers" msgpack:"workers"` // ordered by instance and rank

	// Next is the place of the last rank if there may be further ranks; nil at the end of the list.
	Next *RankPlace `json:"next,omitempty" msgpack:"next,omitempty"`

	// Complete is false if workers of the Missing partitions may be missing from the list.
	Complete bool               `json:"complete" msgpack:"complete"`
	Missing  []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Expired lists ranks with a lease that expired within the last hour, as seen by the answering node. They are not
	// in Workers. Ranks that returned, were drained before, or were removed later are not listed. The first page has
	// the list.
	Expired []ExpiredWorker `json:"expired,omitempty" msgpack:"expired,omitempty"`
}

// ExpiredWorker is a rank without a shim. Its blocks have been cleared.
type ExpiredWorker struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Model    string          `json:"model" msgpack:"model"`
	Lease    Lease           `json:"lease" msgpack:"lease"` // the last lease
}

// WorkerInfo has the state of a rank by the log.
type WorkerInfo struct {
	Instance    events.WorkerID    `json:"instance" msgpack:"instance"`
	Rank        events.Rank        `json:"rank" msgpack:"rank"`
	Model       string             `json:"model" msgpack:"model"`
	BlockSize   uint32             `json:"block_size" msgpack:"block_size"`
	Partition   events.Partition   `json:"partition" msgpack:"partition"`
	Incarnation events.Incarnation `json:"incarnation" msgpack:"incarnation"`
	LastEvent   events.EventID     `json:"last_event" msgpack:"last_event"`
	LastSeen    time.Time          `json:"last_seen" msgpack:"last_seen"` // time of the last batch in the log
	Blocks      TierCounts         `json:"blocks" msgpack:"blocks"`       // held now
	Pending     int                `json:"pending" msgpack:"pending"`     // blocks that wait for their parents

	// Parked is the old name of Pending, and the only name that nodes up to v0.4.0 send. The field will be removed in
	// the release after the next.
	Parked int `json:"parked" msgpack:"parked"`

	Copies  uint64 `json:"copies" msgpack:"copies"`   // of blocks held, beyond the first in a tier
	Stored  uint64 `json:"stored" msgpack:"stored"`   // blocks in all stored events of the incarnation
	Removed uint64 `json:"removed" msgpack:"removed"` // blocks in all removed events

	// Cleared is the number of cleared events that the answering node has applied to the rank since the start of the
	// incarnation or of the node. Two values that differ show a clear between the answers, or another node.
	Cleared uint64 `json:"cleared,omitempty" msgpack:"cleared,omitempty"`

	// Lookahead is the number of tokens after a block in the block's local hash, as with an engine that drafts. Clients
	// need the number to query by Hashes.
	Lookahead uint32 `json:"lookahead,omitempty" msgpack:"lookahead,omitempty"`

	// Lease is nil if no shim has registered the rank. A rank without a lease is not cleared automatically.
	Lease *Lease `json:"lease,omitempty" msgpack:"lease,omitempty"`

	// Engine is the state of the connection between the rank's shim and the engine, with EngineSince and EngineWhy;
	// empty: unknown. CatchingUp is as in an Overlap.
	Engine      EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`
	EngineSince *time.Time  `json:"engine_since,omitempty" msgpack:"engine_since,omitempty"`
	EngineWhy   string      `json:"engine_why,omitempty" msgpack:"engine_why,omitempty"`
	CatchingUp  bool        `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	// Reported is the latest report of the engine's load; nil: there is none. Engines report while a node chooses workers.
	Reported *routing.Reported `json:"reported,omitempty" msgpack:"reported,omitempty"`

	// Record is the registration of the rank, with the result of the check whether the rank may be chosen; nil: not
	// registered.
	Record *WorkerRecord `json:"record,omitempty" msgpack:"record,omitempty"`
}

// Place returns the rank's place in a list.
func (w *WorkerInfo) Place() RankPlace { return RankPlace{w.Instance, w.Rank} }

// Cut sorts the list and reduces it to the page of the request.
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

// Append appends the next page of the list.
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

// Lease is a shim's lease of a rank.
type Lease struct {
	Holder string    `json:"holder" msgpack:"holder"` // one run of one process
	Host   string    `json:"host" msgpack:"host"`
	PID    int       `json:"pid" msgpack:"pid"`
	Since  time.Time `json:"since" msgpack:"since"`
	// held; expired: not renewed in time, and being cleared; ended: the shim has ended the lease, after the engine's
	// end
	State string `json:"state" msgpack:"state"`
	// Stopped is the time of an orderly stop of the shim, by the shim's clock, while the engine ran on; nil: not
	// stopped.
	Stopped *time.Time `json:"stopped,omitempty" msgpack:"stopped,omitempty"`
	// for people: the registered shared store of the rank
	L3 string `json:"l3,omitempty" msgpack:"l3,omitempty"`

	// Renewed and Expires are by the NATS servers' clock. A lease expires later than Expires if NATS or the indexer was
	// away.
	Renewed time.Time `json:"renewed" msgpack:"renewed"`
	Expires time.Time `json:"expires" msgpack:"expires"`
}

// TierCounts has a number of blocks for each tier.
type TierCounts struct {
	Device   uint64 `json:"device" msgpack:"device"`
	Host     uint64 `json:"host" msgpack:"host"`
	Disk     uint64 `json:"disk" msgpack:"disk"`
	External uint64 `json:"external" msgpack:"external"`
}

// Indexer answers queries. internal/index/node implements it. All methods may be called from any goroutine. Errors are
// of type *Error.
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

// Registrar registers workers. All methods may be called from any goroutine. Errors are of type *Error.
type Registrar interface {
	RegisterWorker(ctx context.Context, r *WorkerRegistration) (*Worker, error)
	ChangeWorker(ctx context.Context, c *WorkerChange) (*Worker, error)
}
