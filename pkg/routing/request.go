package routing

import (
	"errors"
	"math"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Role is a pool of workers. The names are those on the wire.
type Role string

// The roles. A worker without one is aggregated.
const (
	Aggregated Role = "aggregated" // prefill and decode in one engine
	Prefill    Role = "prefill"
	Decode     Role = "decode"
)

// State is whether a worker takes new requests. The names are those on the wire.
type State string

// The states. A worker without one is schedulable; only those are chosen.
const (
	Schedulable   State = "schedulable"
	Draining      State = "draining"
	Unschedulable State = "unschedulable"
	Incomplete    State = "incomplete"
)

// Worker is what is known of a worker apart from any request. Candidates of many requests may share one; nobody changes
// it meanwhile.
type Worker struct {
	ID      events.WorkerID
	Role    Role
	State   State
	Reasons []string // why it is not schedulable, for people

	Endpoint string // where it takes requests; "": not known

	// Taints are what a request's required and preferred taints are compared with: those of its topology domains too, as
	// dynamo.topology/DOMAIN=VALUE.
	Taints []string

	LoRAs []string // adapters that it is known to have

	TotalKVBlocks       uint64 // a rank's capacity; 0: not known
	MaxNumBatchedTokens uint64 // 0: not known
}

// PrefillCapacity is how many tokens of prefill a rank of w has room for: MaxNumBatchedTokens, or 10,000,000.
func (w *Worker) PrefillCapacity() uint64 {
	if w.MaxNumBatchedTokens == 0 {
		return 10_000_000
	}
	return w.MaxNumBatchedTokens
}

// taintWith is the first taint that begins so; "" if there is none.
func (w *Worker) taintWith(prefix string) string {
	for _, t := range w.Taints {
		if strings.HasPrefix(t, prefix) {
			return t
		}
	}
	return ""
}

// Candidate is one rank of a worker, as far as one request is concerned. Depths are in blocks of the request.
type Candidate struct {
	Worker *Worker
	Rank   events.Rank

	// Device is how many leading blocks of the prompt it holds in device memory, Host how many more follow directly in
	// host memory, Disk how many follow those on disk and in external stores: of an api.Overlap, Device, Host, and
	// Disk + External.
	Device, Host, Disk uint32

	// Guessed is how many of Device are a guess: blocks that the worker was sent a request with, and of which its events
	// say nothing yet. See [Candidate.Guess].
	Guessed uint32

	// WouldLoad is how many more its engine would load from the shared store: of an api.Overlap, L3.
	WouldLoad uint32

	// HasLoad says that the fields up to NewBlocks are known. Without, it counts as idle, new blocks as 0.
	HasLoad             bool
	ActivePrefillTokens uint64 // of requests whose prefill is not done
	ActiveBlocks        uint64 // of requests under way, each block once
	ActiveRequests      uint64
	NewBlocks           uint64 // whole blocks of the prompt that no request under way there has
	PrefillRequests     uint64 // of ActiveRequests: those that ActivePrefillTokens are of

	// PrefillRate, Busy, WorkingMS and LifeMS are what a [Pace] has measured: tokens per millisecond (0: nothing was), the
	// share of time with prefill to do, how long the rank has worked on what it has to prefill, and how long a request
	// takes.
	PrefillRate float64
	Busy        float64
	WorkingMS   float64
	LifeMS      float64

	// Memory describes the rank's device memory. nil: it has evicted nothing, as far as is known.
	Memory *Memory

	// HasUsed says that it was reported how many of the engine's blocks are used (ActiveLoad.kv_used_blocks, in older
	// engines ForwardPassMetrics.kv_active_blocks). UsedOf is the capacity that the engine reports (kv_total_blocks), or
	// 0; it counts where Worker.TotalKVBlocks is not known. UsedPrefillTokens is what others have sent there to be
	// prefilled (ActiveLoad.active_prefill_tokens). They decide whether it is overloaded, never its cost.
	HasUsed           bool
	UsedBlocks        uint64
	UsedOf            uint64
	UsedPrefillTokens uint64

	// Overlap is the weighted sum of all tiers, in blocks, from a source that does not know them apart. It is used, as
	// device depth too, only if no candidate of the call has a tier's depth.
	Overlap float64
}

// Guess says that the candidate probably holds more leading blocks in device memory than Device, which is confirmed.
// What it holds in other tiers, or would load, follows what is confirmed: of that, what the guess covers does not count
// again.
func (c *Candidate) Guess(depth uint32) {
	c.Guessed = depth - c.Device
	c.Device = depth
	covered := c.Guessed
	for _, tier := range []*uint32{&c.Host, &c.Disk, &c.WouldLoad} {
		n := min(*tier, covered)
		*tier -= n
		covered -= n
	}
}

// Target is a worker, and one rank of it if Rank is not nil.
type Target struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Rank   *events.Rank    `json:"rank,omitempty" msgpack:"rank,omitempty"`
}

func (t *Target) is(c *Candidate) bool {
	return t.Worker == c.Worker.ID && (t.Rank == nil || *t.Rank == c.Rank)
}

// TaintWeight is a taint that a request prefers (above 0) or avoids (below 0).
type TaintWeight struct {
	Taint  string  `json:"taint" msgpack:"taint"`
	Weight float32 `json:"weight" msgpack:"weight"`
}

// Request is what is to be served.
type Request struct {
	ISL       uint64 // tokens of the prompt
	BlockSize uint32 // in tokens

	// Blocks is how many whole blocks of the prompt a booking counts; 0 where blocks of requests are not tracked, as in
	// a prefill pool.
	Blocks uint64

	ExpectedOutputTokens uint32 // 0: not said; no cost here reads it

	Role      Role // the pool; "": any worker
	LoRA      string
	Overrides Overrides

	// Pin leaves no choice but this worker, or this rank; everything else about it is checked.
	Pin *Target

	// Affinity is where the request's session is: chosen if eligible, and else there is a free choice.
	Affinity *Target

	// AffinityBy is where Affinity, or Pin, comes from, for the explanation. Empty: Affinity is the request's own, and Pin
	// is no affinity.
	AffinityBy AffinitySource

	Allowed   []events.WorkerID // nil: all; empty: none
	Endpoints []string          // a worker must have one of them; nil: it need not

	RequiredTaints  []string // a worker must have all
	PreferredTaints []TaintWeight

	// Near are taints of which a worker must have one; nil: it need not. It is for decode workers near which there must
	// be a prefill worker.
	Near []string

	// Queue is asked whether candidates are busy: if all that are eligible are, the refusal is AllBusy. nil: none is.
	Queue *Queue

	// Shared are the blocks that a shared store has of the prompt: from, up to (not including), ascending and disjoint.
	// It counts with SharedDynamo only.
	Shared [][2]uint32

	// Explain asks for Choice.Explanation.
	Explain bool
}

// RequestBlocks is the length of the prompt in blocks, the last one perhaps not full.
func (r *Request) RequestBlocks() uint64 {
	size := uint64(r.BlockSize)
	blocks := r.ISL / size
	if r.ISL%size != 0 {
		blocks++
	}
	return blocks
}

// Validate returns all that is wrong with r, each under its name on the wire.
func (r *Request) Validate() error {
	var x complaints
	if r.BlockSize == 0 {
		x.add("block_size is 0")
	}
	if r.Role != "" && r.Role != Aggregated && r.Role != Prefill && r.Role != Decode {
		x.add("role is %q: it must be %q, %q or %q", r.Role, Aggregated, Prefill, Decode)
	}
	if r.Pin != nil && r.Pin.Worker == "" {
		x.add("pinned_worker names no worker")
	}
	if r.Affinity != nil && r.Affinity.Worker == "" {
		x.add("affinity_target names no worker")
	}
	for i := range r.PreferredTaints {
		t := &r.PreferredTaints[i]
		if w := float64(t.Weight); math.IsNaN(w) || math.IsInf(w, 0) {
			x.add("preferred_taints: the weight of %q is %v: it must be finite", t.Taint, w)
		}
	}
	end := uint32(0)
	for i, s := range r.Shared {
		if s[0] < end || s[0] >= s[1] {
			x.add("shared: range %d, [%d, %d), is empty or not after the one before", i, s[0], s[1])
			break
		}
		end = s[1]
	}
	if err := r.Overrides.Validate(); err != nil {
		x = append(x, err)
	}
	if len(x) == 0 {
		return nil
	}
	return errors.Join(x...)
}
