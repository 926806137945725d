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

// State tells if a worker accepts new requests. The names are those on the wire.
type State string

// The states. A worker without one is schedulable; only those are chosen.
const (
	Schedulable   State = "schedulable"
	Draining      State = "draining"
	Unschedulable State = "unschedulable"
	Incomplete    State = "incomplete"
)

// Worker describes a worker independently of any request. Candidates of many requests may share one. It must not change
// while they do.
type Worker struct {
	ID      events.WorkerID
	Role    Role
	State   State
	Reasons []string // why it is not schedulable, for people

	Endpoint string // its serving address; "": not known

	// Taints are compared with the required and preferred taints of requests. Topology domains are taints too, as
	// dynamo.topology/DOMAIN=VALUE.
	Taints []string

	LoRAs []string // adapters that it is known to have

	TotalKVBlocks       uint64 // a rank's capacity; 0: not known
	MaxNumBatchedTokens uint64 // 0: not known
}

// PrefillCapacity returns the tokens of prefill that a rank of w has room for: MaxNumBatchedTokens, or 10,000,000.
func (w *Worker) PrefillCapacity() uint64 {
	if w.MaxNumBatchedTokens == 0 {
		return 10_000_000
	}
	return w.MaxNumBatchedTokens
}

// taintWith returns the first taint with a prefix; "" if there is none.
func (w *Worker) taintWith(prefix string) string {
	for _, t := range w.Taints {
		if strings.HasPrefix(t, prefix) {
			return t
		}
	}
	return ""
}

// Candidate is a rank of a worker with its state for one request. Depths are in blocks of the request.
type Candidate struct {
	Worker *Worker
	Rank   events.Rank

	// Device counts the leading blocks of the prompt in device memory. Host counts the blocks that follow directly in
	// host memory, and Disk the blocks after these on disk and in external stores. In an api.Overlap they are Device,
	// Host, and Disk + External.
	Device, Host, Disk uint32

	// Guessed counts the blocks of Device that are a guess: a request with them was sent to the worker, and events have
	// not confirmed them yet. See [Candidate.Guess].
	Guessed uint32

	// WouldLoad counts the further blocks that its engine would load from the shared store. In an api.Overlap it is L3.
	WouldLoad uint32

	// HasLoad: the fields up to NewBlocks are known. Without it, the rank counts as idle, with 0 new blocks.
	HasLoad             bool
	ActivePrefillTokens uint64 // of requests whose prefill is not done
	ActiveBlocks        uint64 // of requests under way, each block once
	ActiveRequests      uint64
	NewBlocks           uint64 // whole blocks of the prompt that no request under way on the rank has
	PrefillRequests     uint64 // of ActiveRequests: those whose prefill is not done

	// A [Pace] measures these: tokens per millisecond (0: no measurement), the share of time with prefill to do, the
	// milliseconds of work on the present request, and the mean lifetime of a request in milliseconds.
	PrefillRate float64
	Busy        float64
	WorkingMS   float64
	LifeMS      float64

	// Memory describes the rank's device memory. nil: it has evicted nothing, as far as is known.
	Memory *Memory

	// UsedBlocks are the blocks in use as the engine reports them (ActiveLoad.kv_used_blocks, in older engines
	// ForwardPassMetrics.kv_active_blocks); HasUsed: it has reported them. UsedOf is the reported capacity
	// (kv_total_blocks), or 0. It counts if Worker.TotalKVBlocks is not known. UsedPrefillTokens is the prefill that
	// other routers report (ActiveLoad.active_prefill_tokens). These fields decide if the rank is overloaded. They are
	// in no cost.
	HasUsed           bool
	UsedBlocks        uint64
	UsedOf            uint64
	UsedPrefillTokens uint64

	// Overlap is the weighted sum of all tiers, in blocks, from a source without depths by tier. It counts, also as the
	// device depth, only if no candidate of the call has a depth of a tier.
	Overlap float64
}

// Guess sets a guessed depth in device memory that is greater than Device, which is confirmed. Blocks of lower tiers
// follow the confirmed ones. Those of them that the guess covers do not count a second time.
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

// Target is a worker, or one rank of it if Rank is not nil.
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

// Request is a request for which a worker is chosen.
type Request struct {
	ISL       uint64 // tokens of the prompt
	BlockSize uint32 // in tokens

	// Blocks counts the whole blocks of the prompt in a booking. It is 0 if blocks of requests are not tracked, as in a
	// prefill pool.
	Blocks uint64

	ExpectedOutputTokens uint32 // 0: not known; no cost here reads it

	Role      Role // the pool; "": any worker
	LoRA      string
	Overrides Overrides

	// Pin is the only worker, or rank, that may be chosen. All filters still apply to it.
	Pin *Target

	// Affinity is the worker of the request's session. It is chosen if it is eligible. Otherwise the choice is free.
	Affinity *Target

	// AffinityBy is the source of Affinity, or Pin, for the explanation. Empty: Affinity is the request's own, and Pin is
	// no affinity.
	AffinityBy AffinitySource

	Allowed   []events.WorkerID // nil: all; empty: none
	Endpoints []string          // a worker must have one of them; nil: any worker is allowed

	RequiredTaints  []string // a worker must have all
	PreferredTaints []TaintWeight

	// Near are taints of which a worker must have one; nil: any worker is allowed. A decode worker gets them if a prefill
	// worker must be near it.
	Near []string

	// Queue decides which candidates are busy. If all eligible ones are, the refusal is AllBusy. nil: none is busy.
	Queue *Queue

	// Shared are ranges of the prompt's blocks in a shared store: from, up to (not including), ascending and disjoint. It
	// counts with SharedDynamo only.
	Shared [][2]uint32

	// Explain asks for Choice.Explanation.
	Explain bool
}

// RequestBlocks returns the length of the prompt in blocks. The last one may be partial.
func (r *Request) RequestBlocks() uint64 {
	size := uint64(r.BlockSize)
	blocks := r.ISL / size
	if r.ISL%size != 0 {
		blocks++
	}
	return blocks
}

// Validate returns all errors of r, each with the field's name on the wire.
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
