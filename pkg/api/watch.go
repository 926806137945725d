package api

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// The events of GET /v1/watch, a stream of server-sent events: what a page that shows the fleet needs, computed once
// for all who watch.
const (
	EventFleet   = "fleet"   // a FleetEvent
	EventCluster = "cluster" // a ClusterEvent
)

// FleetEvent says how all ranks are, or which have changed since the event before.
type FleetEvent struct {
	At time.Time `json:"at" msgpack:"at"`

	// Full says that Ranks are all that there are. Else they are those that have changed, and Gone those that went.
	Full  bool        `json:"full" msgpack:"full"`
	Ranks []FleetRank `json:"ranks" msgpack:"ranks"` // by instance and rank
	Gone  []RankPlace `json:"gone,omitempty" msgpack:"gone,omitempty"`

	// as in a WorkerList
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Expired are as in a WorkerList: none of them is among Ranks. Left out, they are as in the event before.
	Expired []ExpiredWorker `json:"expired,omitzero" msgpack:"expired,omitempty"`

	Error *Error `json:"error,omitempty" msgpack:"error,omitempty"` // why nothing is known now; there are no Ranks then
}

// FleetRank is how one rank is: what WorkerInfo, RankLoad and EngineLoad say of it.
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

	// blocks a second since the list before
	StoredRate  float64 `json:"stored_rate,omitempty" msgpack:"stored_rate,omitempty"`
	RemovedRate float64 `json:"removed_rate,omitempty" msgpack:"removed_rate,omitempty"`

	// held, expired; empty: nobody has registered it
	Lease      string      `json:"lease,omitempty" msgpack:"lease,omitempty"`
	LeaseHost  string      `json:"lease_host,omitempty" msgpack:"lease_host,omitempty"`
	Engine     EngineState `json:"engine,omitempty" msgpack:"engine,omitempty"`
	EngineWhy  string      `json:"engine_why,omitempty" msgpack:"engine_why,omitempty"`
	CatchingUp bool        `json:"catching_up,omitempty" msgpack:"catching_up,omitempty"`

	State    WorkerState `json:"state,omitempty" msgpack:"state,omitempty"` // empty: nobody has registered it
	Why      string      `json:"why,omitempty" msgpack:"why,omitempty"`     // for people: why it is not schedulable
	Role     Role        `json:"role,omitempty" msgpack:"role,omitempty"`
	Endpoint string      `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	// Requests under way that were booked on it, and what they come to.
	Requests      uint64 `json:"requests,omitempty" msgpack:"requests,omitempty"`
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`
	ActiveBlocks  uint64 `json:"active_blocks,omitempty" msgpack:"active_blocks,omitempty"`

	// The engine's device memory in blocks, as it was reported or registered; 0: not known.
	UsedBlocks  uint64 `json:"used_blocks,omitempty" msgpack:"used_blocks,omitempty"`
	TotalBlocks uint64 `json:"total_blocks,omitempty" msgpack:"total_blocks,omitempty"`
}

// Place is where the rank stands in a list.
func (r *FleetRank) Place() RankPlace { return RankPlace{r.Instance, r.Rank} }

// ClusterEvent is the status of every node.
type ClusterEvent struct {
	At    time.Time   `json:"at" msgpack:"at"`
	Node  string      `json:"node" msgpack:"node"`   // the one that is watched
	Nodes []NodeState `json:"nodes" msgpack:"nodes"` // by name
}

// NodeState is the status of one node, or why there is none.
type NodeState struct {
	Node   string  `json:"node" msgpack:"node"`
	Zone   string  `json:"zone,omitempty" msgpack:"zone,omitempty"` // empty: it said none
	Status *Status `json:"status,omitempty" msgpack:"status,omitempty"`
	Error  *Error  `json:"error,omitempty" msgpack:"error,omitempty"`
}
