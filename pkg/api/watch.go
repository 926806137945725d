package api

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// The events of GET /v1/watch, a stream of server-sent events for pages that show the fleet. The node computes each
// event once for all readers.
const (
	EventFleet   = "fleet"   // a FleetEvent
	EventCluster = "cluster" // a ClusterEvent
)

// FleetEvent has the states of all ranks, or of the ranks that changed since the previous event.
type FleetEvent struct {
	At time.Time `json:"at" msgpack:"at"`

	// Full: Ranks has all ranks. Otherwise Ranks has the changed ranks, and Gone the removed ranks.
	Full  bool        `json:"full" msgpack:"full"`
	Ranks []FleetRank `json:"ranks" msgpack:"ranks"` // by instance and rank
	Gone  []RankPlace `json:"gone,omitempty" msgpack:"gone,omitempty"`

	// Missing is as in a WorkerList.
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Expired is as in a WorkerList, without ranks of Ranks. If absent, it is unchanged.
	Expired []ExpiredWorker `json:"expired,omitzero" msgpack:"expired,omitempty"`

	Error *Error `json:"error,omitempty" msgpack:"error,omitempty"` // why the state is unknown; Ranks is empty then
}

// FleetRank is the state of a rank, from WorkerInfo, RankLoad and EngineLoad.
type FleetRank struct {
	Instance  events.WorkerID  `json:"instance" msgpack:"instance"`
	Rank      events.Rank      `json:"rank" msgpack:"rank"`
	Model     string           `json:"model" msgpack:"model"`
	BlockSize uint32           `json:"block_size" msgpack:"block_size"`
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Blocks    TierCounts       `json:"blocks" msgpack:"blocks"`                       // held now
	Pending   int              `json:"pending,omitempty" msgpack:"pending,omitempty"` // blocks that wait for their parents
	LastSeen  time.Time        `json:"last_seen,omitzero" msgpack:"last_seen"`        // when the log took its last batch

	Incarnation events.Incarnation `json:"incarnation" msgpack:"incarnation"`
	Stored      uint64             `json:"stored" msgpack:"stored"`   // blocks in all stored events of the incarnation
	Removed     uint64             `json:"removed" msgpack:"removed"` // blocks in all removed events

	// Rates are in blocks per second since the previous event.
	StoredRate  float64 `json:"stored_rate,omitempty" msgpack:"stored_rate,omitempty"`
	RemovedRate float64 `json:"removed_rate,omitempty" msgpack:"removed_rate,omitempty"`

	// Lease is held or expired; empty: not registered.
	Lease      string      `json:"lease,omitempty" msgpack:"lease,omitempty"`
	LeaseHost  string      `json:"lease_host,omitempty" msgpack:"lease_host,omitempty"`
	Engine     EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`
	EngineWhy  string      `json:"engine_why,omitempty" msgpack:"engine_why,omitempty"`
	CatchingUp bool        `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	State    WorkerState `json:"state,omitempty" msgpack:"state,omitempty"` // empty: not registered
	Why      string      `json:"why,omitempty" msgpack:"why,omitempty"`     // for people: why it is not schedulable
	Role     Role        `json:"role,omitempty" msgpack:"role,omitempty"`
	Endpoint string      `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	// Requests under way on the rank, and their load.
	Requests      uint64 `json:"requests,omitempty" msgpack:"requests,omitempty"`
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`
	ActiveBlocks  uint64 `json:"active_blocks,omitempty" msgpack:"active_blocks,omitempty"`

	// The engine's device memory in blocks, as reported or registered; 0: unknown.
	UsedBlocks  uint64 `json:"used_blocks,omitempty" msgpack:"used_blocks,omitempty"`
	TotalBlocks uint64 `json:"total_blocks,omitempty" msgpack:"total_blocks,omitempty"`
}

// Place returns the rank's place in a list.
func (r *FleetRank) Place() RankPlace { return RankPlace{r.Instance, r.Rank} }

// ClusterEvent is the status of every node.
type ClusterEvent struct {
	At    time.Time   `json:"at" msgpack:"at"`
	Node  string      `json:"node" msgpack:"node"`   // the watched node
	Nodes []NodeState `json:"nodes" msgpack:"nodes"` // by name
}

// NodeState is the status of a node, or the reason that it is missing.
type NodeState struct {
	Node   string  `json:"node" msgpack:"node"`
	Zone   string  `json:"zone,omitempty" msgpack:"zone,omitempty"` // empty: none announced
	Status *Status `json:"status,omitempty" msgpack:"status,omitempty"`
	Error  *Error  `json:"error,omitempty" msgpack:"error,omitempty"`
}
