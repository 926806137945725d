package routing

import (
	"errors"
	"math"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Role is a pool of workers. The names equal the names on the wire.
type Role string

// The roles. A worker without a role is aggregated.
const (
	Aggregated Role = "aggregated" // prefill and decode in one engine
	Prefill    Role = "prefill"
	Decode     Role = "decode"
	Encode     Role = "encode" // encodes images and other media for workers of the other roles
)

// Answers reports whether a worker of the role can answer a request. Workers of the other roles only compute parts for
// such a worker.
func (r Role) Answers() bool { return r != Prefill && r != Encode }

// In reports whether a worker of the role is in a request's pool. Without a pool, all workers that answer requests are.
func (r Role) In(pool Role) bool {
	if r == "" {
		r = Aggregated
	}
	return r == pool || pool == "" && r.Answers()
}

// State is the registration's state of a worker. The names equal the names on the wire.
type State string

// The states. A worker without a state is schedulable. Only schedulable workers are chosen.
const (
	Schedulable   State = "schedulable"
	Draining      State = "draining"
	Unschedulable State = "unschedulable"
	Incomplete    State = "incomplete"
)

// Worker describes a worker independently of any request. Candidates of many requests may share a Worker, which must
// not change meanwhile.
type Worker struct {
	ID      events.WorkerID
	Role    Role
	State   State
	Reasons []string // for people: reasons for a state other than schedulable

	Endpoint string // serving address; "": unknown

	// Taints are compared with the required and preferred taints of requests. Topology domains are taints too, as
	// dynamo.topology/DOMAIN=VALUE.
	Taints []string

	LoRAs []string // loaded adapters, and [AnyLoRA] if it loads others; nil: unknown

	TotalKVBlocks       uint64 // a rank's capacity; 0: unknown
	MaxNumBatchedTokens uint64 // 0: unknown
}

// unschedulable reports whether the worker's state excludes it from all choices.
func (w *Worker) unschedulable() bool { return w.State != Schedulable && w.State != "" }

// PrefillCapacity returns the tokens of prefill for which a rank of w has room: MaxNumBatchedTokens, or 10,000,000.
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

	// Guessed counts the blocks of Device that are a guess: the worker received a request with these blocks, and events
	// have not confirmed the blocks yet. See [Candidate.Guess].
	Guessed uint32

	// WouldLoad counts the further blocks that the engine would load from the shared store: L3 of an api.Overlap.
	WouldLoad uint32

	// HasLoad: the fields up to NewBlocks have values. Otherwise the rank counts as idle, with 0 new blocks.
	HasLoad             bool
	ActivePrefillTokens uint64 // of requests in the prefill phase
	ActiveBlocks        uint64 // of requests under way, each block once
	ActiveRequests      uint64
	NewBlocks           uint64 // whole blocks of the prompt that no request under way on the rank has
	PrefillRequests     uint64 // number of ActiveRequests in the prefill phase

	// A [Pace] measures these: tokens per millisecond (0: no measurement), the share of time with prefill to do, the
	// milliseconds of work on the present request, and the mean lifetime of a request in milliseconds.
	PrefillRate float64
	Busy        float64
	WorkingMS   float64
	LifeMS      float64

	// Memory describes the rank's device memory; nil: the rank has no known eviction.
	Memory *Memory

	// HasUsed: the engine has reported the blocks in use. UsedBlocks has the number (ActiveLoad.kv_used_blocks, in
	// older engines ForwardPassMetrics.kv_active_blocks). UsedOf is the reported capacity (kv_total_blocks), or 0; it
	// counts if Worker.TotalKVBlocks is unknown. UsedPrefillTokens is the prefill in reports of other routers
	// (ActiveLoad.active_prefill_tokens). These fields decide if the rank is overloaded. No cost reads them.
	HasUsed           bool
	UsedBlocks        uint64
	UsedOf            uint64
	UsedPrefillTokens uint64

	// Engine describes the report of the engine, for the explanation; nil: no report. The caller has added the requests of
	// others to the load above.
	Engine *EngineReport

	// Penalty describes failed requests of the worker; nil: none. Penalised workers are chosen only if no other candidate
	// may be chosen.
	Penalty *Penalty

	// Overlap is the weighted sum of all tiers, in blocks, from a source without depths by tier. The sum counts, also
	// as the device depth, only if no candidate of the call has a depth of a tier.
	Overlap float64
}

// EngineReport describes a report about a rank.
type EngineReport struct {
	Requests *EngineRequests // nil: not reported
	Source   string          // the sender, such as vllm
	AgeS     float64         // seconds since the latest number
}

// EngineRequests is an engine's report of its requests, with the estimated part that no router has reported.
type EngineRequests struct {
	Running uint64 `json:"running" msgpack:"running"`
	Waiting uint64 `json:"waiting" msgpack:"waiting"`

	// The requests of others, which count as load: all, the waiting ones, their blocks, and the tokens to compute.
	Others              uint64 `json:"others" msgpack:"others"`
	OthersWaiting       uint64 `json:"others_waiting" msgpack:"others_waiting"`
	OthersBlocks        uint64 `json:"others_blocks" msgpack:"others_blocks"`
	OthersPrefillTokens uint64 `json:"others_prefill_tokens" msgpack:"others_prefill_tokens"`
}

// Penalty describes a worker with failed requests. Routers report the failures.
type Penalty struct {
	Failures uint64  // since the last success
	Reason   string  // of the last failure, such as "timeout"
	LeftS    float64 // the rest of the penalty in seconds
}

// Guess sets a guessed depth in device memory. The depth must be greater than Device, the confirmed depth. Blocks of
// lower tiers follow the confirmed blocks, and blocks covered by the guess do not count a second time.
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

// Request is a request that needs a worker.
type Request struct {
	ISL       uint64 // tokens of the prompt
	BlockSize uint32 // in tokens

	// Blocks counts the whole blocks of the prompt in a booking; 0 if blocks of requests are not tracked, as in a
	// prefill pool.
	Blocks uint64

	ExpectedOutputTokens uint32 // 0: unknown; no cost here reads the field

	Role      Role // the pool; "": all workers whose role answers requests
	LoRA      string
	Overrides Overrides

	// Pin is the only allowed worker, or rank. All filters still apply.
	Pin *Target

	// Affinity is the worker of the request's session. Choose returns this worker if it is eligible. Otherwise the
	// choice is free.
	Affinity *Target

	// AffinityBy is the source of Affinity, or Pin, for the explanation. Empty: Affinity is the request's own, and Pin is
	// no affinity.
	AffinityBy AffinitySource

	Allowed   []events.WorkerID // nil: all; empty: none
	Excluded  []events.WorkerID // never chosen: workers at which an earlier try of the request failed
	Endpoints []string          // allowed serving addresses; nil: all

	RequiredTaints  []string // a worker must have all
	PreferredTaints []TaintWeight

	// Near has taints; a worker must have at least one of them. nil: any worker is allowed. A decode worker gets Near
	// if the prefill worker must be near.
	Near []string

	// Queue decides which candidates are busy. If all eligible candidates are busy, the refusal is AllBusy. nil: no
	// candidate is busy.
	Queue *Queue

	// Shared are ranges of the prompt's blocks in a shared store: from, up to (not including), ascending and disjoint.
	// Only SharedDynamo reads the ranges.
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
		x.add("pinned_worker has no worker")
	}
	if r.Affinity != nil && r.Affinity.Worker == "" {
		x.add("affinity_target has no worker")
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
