package api

import (
	"cmp"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Status is how a node is doing.
type Status struct {
	Node       string            `json:"node" msgpack:"node"`
	Version    string            `json:"version" msgpack:"version"`
	Namespace  string            `json:"namespace" msgpack:"namespace"`
	Ready      bool              `json:"ready" msgpack:"ready"`
	Since      time.Time         `json:"since" msgpack:"since"`
	Now        time.Time         `json:"now" msgpack:"now"` // by the node's clock; zero: an older node
	Models     []ModelStatus     `json:"models" msgpack:"models"`
	Partitions []PartitionDetail `json:"partitions" msgpack:"partitions"`
	Index      IndexStatus       `json:"index" msgpack:"index"`
	// what became of events since the node started, by outcome
	Events   map[string]uint64 `json:"events" msgpack:"events"`
	Problems []string          `json:"problems" msgpack:"problems"`
	Warnings []string          `json:"warnings,omitempty" msgpack:"warnings,omitempty"` // dangers that stop nothing

	// sources of events that their shims do not hear; problems or warnings name them too. One node of a cluster lists them
	QuietSources []QuietSource `json:"quiet_sources,omitempty" msgpack:"quiet_sources,omitempty"`

	// what became of requests to this node since it started
	Requests []RequestCount `json:"requests" msgpack:"requests"`

	// nil: a node older than v0.4.0 that is alone on its server
	Cluster  *ClusterStatus      `json:"cluster,omitempty" msgpack:"cluster,omitempty"`
	Replicas []PartitionReplicas `json:"replicas,omitempty" msgpack:"replicas,omitempty"` // by OpVerify, of all nodes

	Snapshots SnapshotCounts `json:"snapshots" msgpack:"snapshots"` // since the node started
	Resyncs   ResyncCounts   `json:"resyncs" msgpack:"resyncs"`     // since the node started
	// since the node started: how often messages were lost between log and index, and read again
	Rereads        uint64 `json:"rereads" msgpack:"rereads"`
	SnapshotBucket Usage  `json:"snapshot_bucket" msgpack:"snapshot_bucket"` // of all partitions
	// what the account has on the NATS servers
	Store Usage `json:"store" msgpack:"store"`

	L3 []StoreStatus `json:"l3,omitempty" msgpack:"l3,omitempty"` // the stores that workers share and this node asks

	Engines *EngineCounts `json:"engines,omitempty" msgpack:"engines,omitempty"` // nil: the node does not say

	Claims *ClaimStatus `json:"claims,omitempty" msgpack:"claims,omitempty"` // nil: the node knows no model claims
	// connections to addresses of registrations that --dial-allow does not permit, since the node started
	DialsDenied uint64 `json:"dials_denied,omitempty" msgpack:"dials_denied,omitempty"`

	Load *LoadStatus `json:"load,omitempty" msgpack:"load,omitempty"` // nil: the node is older than routing

	Guesses []GuessStatus `json:"guesses,omitempty" msgpack:"guesses,omitempty"` // of models that have, or had, any

	Waiting  []WaitingStatus `json:"waiting,omitempty" msgpack:"waiting,omitempty"`   // of models for which requests wait
	Sessions *SessionStatus  `json:"sessions,omitempty" msgpack:"sessions,omitempty"` // nil: they are not kept together

	EngineReports *ReportCounts `json:"engine_reports,omitempty" msgpack:"engine_reports,omitempty"`

	RouterRequests *RouterRequestCounts `json:"router_requests,omitempty" msgpack:"router_requests,omitempty"`
}

// ClaimStatus says whether workers must claim the models that they serve, and which ranks a node ignores because their
// workers have not.
type ClaimStatus struct {
	// Required says that the NATS server requires claims of this node: a rank counts only under models that its worker
	// has claimed.
	Required bool `json:"required" msgpack:"required"`
	Claims   int  `json:"claims" msgpack:"claims"` // of all workers

	// Ignored counts claims beyond 64 of one worker since the node started.
	Ignored uint64 `json:"ignored" msgpack:"ignored"`
	Leases  int    `json:"leases" msgpack:"leases"` // ignored, of the whole namespace
	Ranks   int    `json:"ranks" msgpack:"ranks"`   // of this node's index, which answers leave out

	// Unclaimed are the first of these leases and ranks, of the partitions whose snapshots this node writes.
	Unclaimed []UnclaimedRank `json:"unclaimed,omitempty" msgpack:"unclaimed,omitempty"`
}

// UnclaimedRank is a rank that is ignored under a model: its worker has not claimed the model.
type UnclaimedRank struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Model    string          `json:"model" msgpack:"model"`
	Lease    bool            `json:"lease" msgpack:"lease"`   // its lease names the model
	Events   bool            `json:"events" msgpack:"events"` // its events name the model
}

// Compare orders ranks by instance, rank and model.
func (u UnclaimedRank) Compare(v UnclaimedRank) int {
	return cmp.Or(cmp.Compare(u.Instance, v.Instance), cmp.Compare(u.Rank, v.Rank), cmp.Compare(u.Model, v.Model))
}

// Same reports whether two entries are of the same rank and model.
func (u UnclaimedRank) Same(v UnclaimedRank) bool { return u.Compare(v) == 0 }

// LoadStatus is what a node knows of requests under way. Counts are since it started.
type LoadStatus struct {
	Ready  bool   `json:"ready" msgpack:"ready"`   // it has what other nodes know
	Peers  int    `json:"peers" msgpack:"peers"`   // other nodes that were heard a moment ago
	Beats  uint64 `json:"beats" msgpack:"beats"`   // how often it told other nodes what it has: twice a second
	Healed uint64 `json:"healed" msgpack:"healed"` // requests that it ended late: another node knew of their end

	Models []ModelDigest `json:"models" msgpack:"models"` // by model and group
}

// ModelDigest sums up a model's requests under way. On all nodes it is the same, but for what is on its way between
// them.
type ModelDigest struct {
	Model         string `json:"model" msgpack:"model"`
	Group         string `json:"group,omitempty" msgpack:"group,omitempty"`
	Requests      int    `json:"requests" msgpack:"requests"`
	PrefillTokens int64  `json:"prefill_tokens" msgpack:"prefill_tokens"` // to be prefilled
	OutputBlocks  uint64 `json:"output_blocks" msgpack:"output_blocks"`
	Hash          string `json:"hash" msgpack:"hash"` // of all requests and their states, in hexadecimal

	Booked    uint64 `json:"booked" msgpack:"booked"`       // on this node
	Freed     uint64 `json:"freed" msgpack:"freed"`         // on this node
	Full      uint64 `json:"full" msgpack:"full"`           // refused on this node: too much is under way
	Gone      uint64 `json:"gone" msgpack:"gone"`           // ended with their rank
	Conflicts uint64 `json:"conflicts" msgpack:"conflicts"` // refused on this node: the id was under way
	Rivals    uint64 `json:"rivals" msgpack:"rivals"`       // ended: another node had booked the same id
	Twice     int    `json:"twice" msgpack:"twice"`         // ids of two requests now, of which one is about to end so
	Expired   uint64 `json:"expired" msgpack:"expired"`     // ended by their age
}

// WaitingStatus is how many requests of a model wait on this node for a worker that is not busy.
type WaitingStatus struct {
	Model    string `json:"model" msgpack:"model"`
	Requests int    `json:"requests" msgpack:"requests"`
	Tokens   uint64 `json:"tokens" msgpack:"tokens"` // of their prompts
}

// SessionStatus is how many sessions are bound to a worker, the same on all nodes but for what is on its way, and what
// became of bindings on this node since it started.
type SessionStatus struct {
	Sessions int    `json:"sessions" msgpack:"sessions"`
	Hash     string `json:"hash" msgpack:"hash"` // of all of them, in hexadecimal; the same on all nodes too
	Made     uint64 `json:"made" msgpack:"made"`
	Kept     uint64 `json:"kept" msgpack:"kept"`
	Moved    uint64 `json:"moved" msgpack:"moved"`
	Refused  uint64 `json:"refused" msgpack:"refused"` // bookings elsewhere than the session's worker
	Full     uint64 `json:"full" msgpack:"full"`       // bookings that were not bound, as too many sessions are
	Expired  uint64 `json:"expired" msgpack:"expired"`

	// Prompts are those of Sessions that have no id: ends of prompts. Continued are bookings without an id whose prompt
	// continued a session. Unclear are bookings whose prompt ended with the same block as another's.
	Prompts   int    `json:"prompts,omitempty" msgpack:"prompts,omitempty"`
	Continued uint64 `json:"continued,omitempty" msgpack:"continued,omitempty"`
	Unclear   uint64 `json:"unclear,omitempty" msgpack:"unclear,omitempty"`
}

// ReportCounts are reports of how full engines are, since the node started, by what became of them.
type ReportCounts struct {
	Taken     uint64 `json:"taken" msgpack:"taken"`
	Late      uint64 `json:"late" msgpack:"late"`           // too old
	Refused   uint64 `json:"refused" msgpack:"refused"`     // of too many ranks
	Malformed uint64 `json:"malformed" msgpack:"malformed"` // messages that could not be read
}

// RouterRequestCounts counts changes of requests that routers of another make sent to workers, since the node started,
// by result. Requests is how many are under way.
type RouterRequestCounts struct {
	Requests  int    `json:"requests" msgpack:"requests"`
	Added     uint64 `json:"added" msgpack:"added"`
	Prefilled uint64 `json:"prefilled" msgpack:"prefilled"`
	Freed     uint64 `json:"freed" msgpack:"freed"`
	Expired   uint64 `json:"expired" msgpack:"expired"`     // never freed
	Own       uint64 `json:"own" msgpack:"own"`             // booked with kvatlas too, and counted there only
	Duplicate uint64 `json:"duplicate" msgpack:"duplicate"` // reported twice
	Unknown   uint64 `json:"unknown" msgpack:"unknown"`     // of a request that was not reported before
	Refused   uint64 `json:"refused" msgpack:"refused"`     // beyond --max-requests, or of an unknown kind
}

// GuessStatus is what a node guesses of the workers of one model.
type GuessStatus struct {
	Model  string `json:"model" msgpack:"model"`
	Blocks int    `json:"blocks" msgpack:"blocks"` // counted for each rank

	// Dropped counts blocks since the node started, by reason: expired, evicted, pruned, refuted, removed.
	Dropped map[string]uint64 `json:"dropped" msgpack:"dropped"`
}

// EngineCounts is how many ranks of the namespace are registered, by how it stands with their engines; the same at each
// node. CatchingUp counts those whose shims are behind, whatever their engines do.
type EngineCounts struct {
	Connected  int `json:"connected" msgpack:"connected"`
	Silent     int `json:"silent" msgpack:"silent"`
	Gone       int `json:"gone" msgpack:"gone"`
	Asleep     int `json:"asleep,omitempty" msgpack:"asleep,omitempty"`
	Remote     int `json:"remote,omitempty" msgpack:"remote,omitempty"` // on hosts without a shim
	Unknown    int `json:"unknown" msgpack:"unknown"`
	CatchingUp int `json:"catching_up" msgpack:"catching_up"`

	// ranks that registered an address or a folder that is not used
	Skipped int `json:"skipped,omitempty" msgpack:"skipped,omitempty"`
}

// RequestCount is how many requests had an outcome.
type RequestCount struct {
	Transport Transport `json:"transport" msgpack:"transport"`
	Operation string    `json:"operation" msgpack:"operation"`
	Outcome   string    `json:"outcome" msgpack:"outcome"` // ok, an error's code, canceled, expired or unsent
	Count     uint64    `json:"count" msgpack:"count"`
}

// StoreStatus is how a node gets on with one store that workers share. Counts are since the node began to ask it.
type StoreStatus struct {
	// HOST:PORT of its master's HTTP, etcd:// and the cluster of its masters, or a folder; several if objects are called
	// in several ways there
	Store      string `json:"store" msgpack:"store"`
	Down       string `json:"down,omitempty" msgpack:"down,omitempty"` // why it is not asked now
	Remembered int    `json:"remembered" msgpack:"remembered"`         // runs of 16 or 64 blocks
	Questions  uint64 `json:"questions" msgpack:"questions"`
	Failed     uint64 `json:"failed" msgpack:"failed"` // of these, that ended with an error
	// queries that went without, as too many questions were under way
	Busy uint64 `json:"busy" msgpack:"busy"`
	// answers to queries that lacked something of what the store was asked for
	Partial uint64 `json:"partial" msgpack:"partial"`
	// how often all was forgotten, as the store may have become another
	Forgotten uint64 `json:"forgotten" msgpack:"forgotten"`
	Strange   uint64 `json:"strange" msgpack:"strange"` // objects in answers that nobody had asked about

	Set *StoreSet `json:"set,omitempty" msgpack:"set,omitempty"` // nil where no events of the store are heard

	Election *StoreElection `json:"election,omitempty" msgpack:"election,omitempty"` // nil: the store has one master
}

// StoreElection is who leads a store's masters, as etcd says.
type StoreElection struct {
	Leader   string `json:"leader,omitempty" msgpack:"leader,omitempty"` // HOST:PORT of its HTTP; empty: none is known
	Changes  uint64 `json:"changes" msgpack:"changes"`                   // leaders that were found
	Failures uint64 `json:"failures" msgpack:"failures"`                 // of etcd, and answers without a usable leader
	Error    string `json:"error,omitempty" msgpack:"error,omitempty"`   // why no leader is known, or etcd cannot be asked
}

// StoreSet is what a node has of a store from its events.
type StoreSet struct {
	Objects   int    `json:"objects" msgpack:"objects"`
	Whole     bool   `json:"whole" msgpack:"whole"`         // what is not in it is not in the store
	Gaps      uint64 `json:"gaps" msgpack:"gaps"`           // how often it was given up as events were missing
	Overflows uint64 `json:"overflows" msgpack:"overflows"` // how often it was given up for its size
	Lists     uint64 `json:"lists" msgpack:"lists"`
	Answered  uint64 `json:"answered" msgpack:"answered"` // objects that were answered for from it
	Asked     uint64 `json:"asked" msgpack:"asked"`       // objects that the store was asked about
}

// Usage is how much of a bound is used.
type Usage struct {
	Bytes int64 `json:"bytes" msgpack:"bytes"`
	Limit int64 `json:"limit" msgpack:"limit"` // 0: none is known

	// Refused is why nothing can be written there, whatever the limit; empty if it can, as far as the NATS server
	// knows.
	Refused string `json:"refused,omitempty" msgpack:"refused,omitempty"`
}

// SnapshotCounts says what became of snapshots.
type SnapshotCounts struct {
	Written  uint64            `json:"written" msgpack:"written"`
	Failed   uint64            `json:"failed" msgpack:"failed"`     // not written; tried again
	Rejected map[string]uint64 `json:"rejected" msgpack:"rejected"` // could not be restored, by reason
}

// ResyncCounts says what became of requests to shims to say again what their engines hold.
type ResyncCounts struct {
	Asked    uint64 `json:"asked" msgpack:"asked"`
	Answered uint64 `json:"answered" msgpack:"answered"`
	Ended    uint64 `json:"ended" msgpack:"ended"` // partitions that were whole again
}

// ModelStatus is a model that some rank serves.
type ModelStatus struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"`
	Ranks     int    `json:"ranks" msgpack:"ranks"`
}

// PartitionState is what a node does with a partition.
type PartitionState string

const (
	PartitionAbsent      PartitionState = "absent" // the node does not keep it; no status has it
	PartitionRestoring   PartitionState = "restoring"
	PartitionCatchingUp  PartitionState = "catching_up"
	PartitionServing     PartitionState = "serving"
	PartitionResync      PartitionState = "resync_needed" // it serves; its workers may hold more than is known
	PartitionUnavailable PartitionState = "unavailable"   // its log cannot be read for now
)

// Serves reports whether queries are answered from a partition in this state.
func (s PartitionState) Serves() bool { return s == PartitionServing || s == PartitionResync }

// PartitionDetail is how a node stands with one partition.
type PartitionDetail struct {
	PartitionStatus `msgpack:",inline"`

	State        PartitionState   `json:"state" msgpack:"state"`
	LogLast      events.StreamSeq `json:"log_last" msgpack:"log_last"`
	Lag          uint64           `json:"lag" msgpack:"lag"` // messages of the log not applied yet
	Ranks        int              `json:"ranks" msgpack:"ranks"`
	SnapshotSeq  events.StreamSeq `json:"snapshot_seq" msgpack:"snapshot_seq"`
	SnapshotTime time.Time        `json:"snapshot_time" msgpack:"snapshot_time"`
	SnapshotSize int64            `json:"snapshot_bytes" msgpack:"snapshot_bytes"`
	// the snapshot this process began with; 0: none
	RestoredFrom events.StreamSeq `json:"restored_from" msgpack:"restored_from"`
	RestoreMS    float64          `json:"restore_ms" msgpack:"restore_ms"`
	Log          Usage            `json:"log" msgpack:"log"`
	// of all its ranks' holdings, at Seq
	Checksum string `json:"checksum,omitempty" msgpack:"checksum,omitempty"`
	// far behind the log, for longer than usual
	Behind bool `json:"behind,omitempty" msgpack:"behind,omitempty"`
	// the node that writes its snapshots; none: nobody that is known
	Writer string `json:"writer,omitempty" msgpack:"writer,omitempty"`
}

// StatusRequest says whose status is wanted.
type StatusRequest struct {
	Node string `json:"node,omitempty" msgpack:"node,omitempty"` // empty: whoever answers
}

// VerifyRequest says at which places in the log checksums are wanted, so that those of several nodes can be compared.
type VerifyRequest struct {
	At []PartitionSeq `json:"at,omitempty" msgpack:"at,omitempty"`
}

// PartitionReplicas are the checksums of one partition on all nodes that serve it.
type PartitionReplicas struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Equal     bool             `json:"equal" msgpack:"equal"` // all have the same checksum at the same place
	Replicas  []ReplicaSum     `json:"replicas" msgpack:"replicas"`
}

// ReplicaSum is one node's checksum of a partition.
type ReplicaSum struct {
	Node     string           `json:"node" msgpack:"node"`
	Seq      events.StreamSeq `json:"seq" msgpack:"seq"`
	Checksum string           `json:"checksum" msgpack:"checksum"`
}

// ClusterStatus is what a node knows of the nodes that share its namespace.
type ClusterStatus struct {
	// how many nodes keep each partition, when all is settled
	Copies int          `json:"copies" msgpack:"copies"`
	Nodes  []NodeStatus `json:"nodes" msgpack:"nodes"` // by name
	// fewer nodes than that are ready
	Short    []events.Partition `json:"short,omitempty" msgpack:"short,omitempty"`
	Unserved []events.Partition `json:"unserved,omitempty" msgpack:"unserved,omitempty"` // nobody serves them

	// Gone are nodes that are not among Nodes any more: they are dead, or cut off from NATS. Those that were told to
	// end are not listed, and none is for longer than ten minutes.
	Gone []string `json:"gone,omitempty" msgpack:"gone,omitempty"`
}

// NodeStatus is what a node announces of itself.
type NodeStatus struct {
	Node      string             `json:"node" msgpack:"node"`
	Build     string             `json:"build" msgpack:"build"`
	Zone      string             `json:"zone,omitempty" msgpack:"zone,omitempty"`
	Answers   bool               `json:"answers,omitempty" msgpack:"answers,omitempty"` // it gave this status
	Leaving   bool               `json:"leaving,omitempty" msgpack:"leaving,omitempty"`
	Ready     []events.Partition `json:"ready" msgpack:"ready"`
	Behind    []events.Partition `json:"behind" msgpack:"behind"`       // serves them, far behind the log
	Releasing []events.Partition `json:"releasing" msgpack:"releasing"` // serves them, and is about to let them go
}

// IndexStatus is the size of a node's index.
type IndexStatus struct {
	Blocks   TierCounts `json:"blocks" msgpack:"blocks"` // holdings: (rank, block) pairs
	Distinct uint64     `json:"distinct" msgpack:"distinct"`
	Bytes    uint64     `json:"bytes" msgpack:"bytes"`
	// in stored events, since the node started
	BlocksApplied uint64 `json:"blocks_applied" msgpack:"blocks_applied"`
	// memory for what is read from the log, not in Bytes
	DecoderBytes uint64 `json:"decoder_bytes" msgpack:"decoder_bytes"`
}

// SnapshotList tells of the snapshots that were written.
type SnapshotList struct {
	Snapshots []SnapshotInfo `json:"snapshots" msgpack:"snapshots"`

	// Missing are partitions of which no node has written one: nobody serves them, or their writer changed meanwhile.
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`
}

// SnapshotInfo is one partition's snapshot.
type SnapshotInfo struct {
	Partition  events.Partition `json:"partition" msgpack:"partition"`
	Generation uint64           `json:"generation" msgpack:"generation"`
	Seq        events.StreamSeq `json:"seq" msgpack:"seq"`
	Bytes      int64            `json:"bytes" msgpack:"bytes"`     // of all its chunks
	Written    int64            `json:"written" msgpack:"written"` // of the chunks that were not there already
}

// GenerationList tells of the snapshots that are in the bucket.
type GenerationList struct {
	Generations []GenerationInfo `json:"generations"` // by partition, then newest first
}

// GenerationInfo is one snapshot in the bucket.
type GenerationInfo struct {
	Partition  events.Partition `json:"partition"`
	Key        string           `json:"key,omitempty"` // of the manifest, if the snapshot cannot be used
	Generation uint64           `json:"generation"`    // 0 if it cannot be read
	Epoch      time.Time        `json:"epoch"`
	Seq        events.StreamSeq `json:"seq"`
	Created    time.Time        `json:"created"`
	Writer     string           `json:"writer"`
	Ranks      int              `json:"ranks"`
	Holdings   uint64           `json:"holdings"`
	Chunks     int              `json:"chunks"`
	Bytes      uint64           `json:"bytes"` // of all its chunks
	New        uint64           `json:"new"`   // of those that the generation before did not have

	// why an indexer would not begin with it, as a reason that metrics have too
	Unusable  string     `json:"unusable,omitempty"`
	Why       string     `json:"why,omitempty"` // the same, in words
	Verified  bool       `json:"verified"`      // its chunks were read
	Bad       bool       `json:"bad"`           // it is not what was written
	BadChunks []BadChunk `json:"bad_chunks,omitempty"`
}

// BadChunk is a chunk that is not what was written.
type BadChunk struct {
	Key    string `json:"key,omitempty"` // empty: the chunks are whole and contradict each other
	Kind   string `json:"kind,omitempty"`
	Reason string `json:"reason"`
	Why    string `json:"why"`
}
