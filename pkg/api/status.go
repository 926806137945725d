package api

import (
	"cmp"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Status is the status of a node.
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
	// Events counts events by outcome since the node's start.
	Events   map[string]uint64 `json:"events" msgpack:"events"`
	Problems []string          `json:"problems" msgpack:"problems"`
	Warnings []string          `json:"warnings,omitempty" msgpack:"warnings,omitempty"` // dangers without an effect yet

	// QuietSources lists sources of events without events. Problems or warnings name them too. One node of a cluster
	// has the list.
	QuietSources []QuietSource `json:"quiet_sources,omitempty" msgpack:"quiet_sources,omitempty"`

	// Requests counts requests to this node by outcome since its start.
	Requests []RequestCount `json:"requests" msgpack:"requests"`

	// Cluster is nil on a node older than v0.4.0 that is alone on its server.
	Cluster  *ClusterStatus      `json:"cluster,omitempty" msgpack:"cluster,omitempty"`
	Replicas []PartitionReplicas `json:"replicas,omitempty" msgpack:"replicas,omitempty"` // by verify, of all nodes

	Snapshots SnapshotCounts `json:"snapshots" msgpack:"snapshots"` // since the node started
	Resyncs   ResyncCounts   `json:"resyncs" msgpack:"resyncs"`     // since the node started
	// Rereads counts, since the node's start, losses of messages between log and index, after which the log was read
	// again.
	Rereads        uint64 `json:"rereads" msgpack:"rereads"`
	SnapshotBucket Usage  `json:"snapshot_bucket" msgpack:"snapshot_bucket"` // of all partitions
	// Store is the account's usage of the NATS servers.
	Store Usage `json:"store" msgpack:"store"`

	L3 []StoreStatus `json:"l3,omitempty" msgpack:"l3,omitempty"` // shared stores of workers that this node queries

	Engines *EngineCounts `json:"engines,omitempty" msgpack:"engines,omitempty"` // nil: the node does not report it

	Claims *ClaimStatus `json:"claims,omitempty" msgpack:"claims,omitempty"` // nil: the node is older than model claims
	// DialsDenied counts, since the node's start, connections to addresses of registrations that --dial-allow does not
	// permit.
	DialsDenied uint64 `json:"dials_denied,omitempty" msgpack:"dials_denied,omitempty"`

	Load *LoadStatus `json:"load,omitempty" msgpack:"load,omitempty"` // nil: the node is older than routing

	Guesses []GuessStatus `json:"guesses,omitempty" msgpack:"guesses,omitempty"` // of models with guesses

	Waiting  []WaitingStatus `json:"waiting,omitempty" msgpack:"waiting,omitempty"`   // of models with waiting requests
	Sessions *SessionStatus  `json:"sessions,omitempty" msgpack:"sessions,omitempty"` // nil: session affinity is off

	EngineReports *ReportCounts `json:"engine_reports,omitempty" msgpack:"engine_reports,omitempty"`

	RouterRequests *RouterRequestCounts `json:"router_requests,omitempty" msgpack:"router_requests,omitempty"`

	Recording *RecordingStatus `json:"recording,omitempty" msgpack:"recording,omitempty"` // nil: requests are not recorded

	// HotPrefixes is nil if prefixes are not counted.
	HotPrefixes *HotStatus `json:"hot_prefixes,omitempty" msgpack:"hot_prefixes,omitempty"`

	Regions *RegionsStatus `json:"regions,omitempty" msgpack:"regions,omitempty"` // nil: the node has no region
}

// RecordingStatus describes the recording of requests on a node since the node's start. A request has up to four
// records: the choice, the end, the engine's report, and the tokens of the answer.
type RecordingStatus struct {
	Records      uint64 `json:"records" msgpack:"records"` // accepted for the stream
	Stored       uint64 `json:"stored" msgpack:"stored"`   // of Records
	Dropped      uint64 `json:"dropped" msgpack:"dropped"` // the queue was full, or a batch was too large
	WaitingBytes uint64 `json:"waiting_bytes" msgpack:"waiting_bytes"`
	Span         uint32 `json:"span" msgpack:"span"` // tokens of a name of a prompt, at most

	Failing string           `json:"failing,omitempty" msgpack:"failing,omitempty"` // why batches cannot be stored now
	Stream  *RecordingStream `json:"stream,omitempty" msgpack:"stream,omitempty"`   // of all nodes; nil: unknown
}

// RecordingStream is the state of the stream with the records of all nodes.
type RecordingStream struct {
	Batches  uint64     `json:"batches" msgpack:"batches"`
	Bytes    uint64     `json:"bytes" msgpack:"bytes"`
	MaxBytes int64      `json:"max_bytes" msgpack:"max_bytes"`
	MaxAgeMS uint64     `json:"max_age_ms" msgpack:"max_age_ms"`
	Replicas int        `json:"replicas" msgpack:"replicas"`
	Oldest   *time.Time `json:"oldest,omitempty" msgpack:"oldest,omitempty"` // when the first batch was stored; nil: none
}

// ClaimStatus reports whether workers must claim their models, and the ranks that a node ignores for lack of a claim.
type ClaimStatus struct {
	// Required: the NATS server requires claims. A rank counts only under models that its worker has claimed.
	Required bool `json:"required" msgpack:"required"`
	Claims   int  `json:"claims" msgpack:"claims"` // of all workers

	// Ignored counts claims beyond 64 of one worker since the node started.
	Ignored uint64 `json:"ignored" msgpack:"ignored"`
	Leases  int    `json:"leases" msgpack:"leases"` // ignored, of the whole namespace
	Ranks   int    `json:"ranks" msgpack:"ranks"`   // of this node's index, excluded from answers

	// Unclaimed lists the first of these leases and ranks, of the partitions whose snapshots this node writes.
	Unclaimed []UnclaimedRank `json:"unclaimed,omitempty" msgpack:"unclaimed,omitempty"`
}

// UnclaimedRank is a rank that the node ignores under a model, because the worker has not claimed the model.
type UnclaimedRank struct {
	Instance events.WorkerID `json:"instance" msgpack:"instance"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Model    string          `json:"model" msgpack:"model"`
	Lease    bool            `json:"lease" msgpack:"lease"`   // its lease has the model
	Events   bool            `json:"events" msgpack:"events"` // its events have the model
}

// Compare orders ranks by instance, rank and model.
func (u UnclaimedRank) Compare(v UnclaimedRank) int {
	return cmp.Or(cmp.Compare(u.Instance, v.Instance), cmp.Compare(u.Rank, v.Rank), cmp.Compare(u.Model, v.Model))
}

// Same reports whether two entries are of the same rank and model.
func (u UnclaimedRank) Same(v UnclaimedRank) bool { return u.Compare(v) == 0 }

// LoadStatus is a node's record of requests under way. Counts are since the node's start.
type LoadStatus struct {
	Ready  bool   `json:"ready" msgpack:"ready"`   // it has the state of the other nodes
	Peers  int    `json:"peers" msgpack:"peers"`   // other nodes with a recent message
	Beats  uint64 `json:"beats" msgpack:"beats"`   // messages with its state to other nodes, two a second
	Healed uint64 `json:"healed" msgpack:"healed"` // requests ended late, by another node's state

	Models []ModelDigest `json:"models" msgpack:"models"` // by model and group
}

// ModelDigest summarizes a model's requests under way. It is equal on all nodes, except for changes in flight.
type ModelDigest struct {
	Model         string `json:"model" msgpack:"model"`
	Group         string `json:"group,omitempty" msgpack:"group,omitempty"`
	Requests      int    `json:"requests" msgpack:"requests"`
	PrefillTokens int64  `json:"prefill_tokens" msgpack:"prefill_tokens"` // to be prefilled
	OutputBlocks  uint64 `json:"output_blocks" msgpack:"output_blocks"`
	Hash          string `json:"hash" msgpack:"hash"` // of all requests and their states, in hexadecimal

	Booked    uint64 `json:"booked" msgpack:"booked"`       // on this node
	Freed     uint64 `json:"freed" msgpack:"freed"`         // on this node
	Full      uint64 `json:"full" msgpack:"full"`           // refused on this node: too many are under way
	Gone      uint64 `json:"gone" msgpack:"gone"`           // ended with their rank
	Conflicts uint64 `json:"conflicts" msgpack:"conflicts"` // refused on this node: the id was under way
	Rivals    uint64 `json:"rivals" msgpack:"rivals"`       // ended: another node had booked the same id
	Twice     int    `json:"twice" msgpack:"twice"`         // ids with two requests now; one of the two will end
	Expired   uint64 `json:"expired" msgpack:"expired"`     // ended by their age
}

// WaitingStatus counts a model's requests that wait on this node for a worker.
type WaitingStatus struct {
	Model    string `json:"model" msgpack:"model"`
	Requests int    `json:"requests" msgpack:"requests"`
	Tokens   uint64 `json:"tokens" msgpack:"tokens"` // of their prompts
}

// SessionStatus counts sessions with a binding, equal on all nodes except for changes in flight, and the events of
// bindings on this node since its start.
type SessionStatus struct {
	Sessions int    `json:"sessions" msgpack:"sessions"`
	Hash     string `json:"hash" msgpack:"hash"` // of all sessions, in hexadecimal; equal on all nodes
	Made     uint64 `json:"made" msgpack:"made"`
	Kept     uint64 `json:"kept" msgpack:"kept"`
	Moved    uint64 `json:"moved" msgpack:"moved"`
	Refused  uint64 `json:"refused" msgpack:"refused"` // bookings away from the session's worker
	Full     uint64 `json:"full" msgpack:"full"`       // bookings without a binding: too many sessions
	Expired  uint64 `json:"expired" msgpack:"expired"`

	// Prompts counts the Sessions without an id: ends of prompts. Continued counts bookings without an id whose prompt
	// continued a session. Unclear counts bookings whose prompt ended with the same block as another prompt.
	Prompts   int    `json:"prompts,omitempty" msgpack:"prompts,omitempty"`
	Continued uint64 `json:"continued,omitempty" msgpack:"continued,omitempty"`
	Unclear   uint64 `json:"unclear,omitempty" msgpack:"unclear,omitempty"`
}

// ReportCounts counts reports of engines' load, and of failed requests, since the node's start, by result.
type ReportCounts struct {
	Taken     uint64 `json:"taken" msgpack:"taken"`
	Late      uint64 `json:"late" msgpack:"late"`           // too old
	Refused   uint64 `json:"refused" msgpack:"refused"`     // of too many ranks
	Malformed uint64 `json:"malformed" msgpack:"malformed"` // undecodable messages

	// Failures counts failed requests at workers, by reason.
	Failures  map[string]uint64 `json:"failures,omitempty" msgpack:"failures,omitempty"`
	Penalised int               `json:"penalised,omitempty" msgpack:"penalised,omitempty"` // workers now
}

// RouterRequestCounts counts changes of requests by foreign routers, since the node's start, by result. Requests is the
// number under way.
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

// GuessStatus has a node's guesses about the workers of a model.
type GuessStatus struct {
	Model  string `json:"model" msgpack:"model"`
	Blocks int    `json:"blocks" msgpack:"blocks"` // counted for each rank

	// Dropped counts blocks since the node started, by reason: expired, evicted, pruned, refuted, removed.
	Dropped map[string]uint64 `json:"dropped" msgpack:"dropped"`
}

// EngineCounts counts the registered ranks of the namespace by the state of their engines. It is equal on all nodes.
// CatchingUp counts ranks with a shim that is behind, in any state of the engine.
type EngineCounts struct {
	Connected  int `json:"connected" msgpack:"connected"`
	Silent     int `json:"silent" msgpack:"silent"`
	Gone       int `json:"gone" msgpack:"gone"`
	Asleep     int `json:"asleep,omitempty" msgpack:"asleep,omitempty"`
	Remote     int `json:"remote,omitempty" msgpack:"remote,omitempty"` // on hosts without a shim
	Unknown    int `json:"unknown" msgpack:"unknown"`
	CatchingUp int `json:"catching_up" msgpack:"catching_up"`

	// Skipped counts ranks with a registered address or folder that is not used.
	Skipped int `json:"skipped,omitempty" msgpack:"skipped,omitempty"`
}

// Transport is the transport of a request.
type Transport string

// The transports.
const (
	OverNATS  Transport = "nats" // the subjects of all nodes
	OverHTTP  Transport = "http"
	OverGRPC  Transport = "grpc"
	FromNodes Transport = "node" // the subjects of this node, for other nodes' parts of a query
)

// RequestCount is the number of requests with an outcome.
type RequestCount struct {
	Transport Transport `json:"transport" msgpack:"transport"`
	Operation string    `json:"operation" msgpack:"operation"`
	Outcome   string    `json:"outcome" msgpack:"outcome"` // ok, an error's code, canceled, expired or unsent
	Count     uint64    `json:"count" msgpack:"count"`
}

// StoreStatus is the state of a node's queries to a shared store. Counts are since the first query.
type StoreStatus struct {
	// Store is HOST:PORT of the master's HTTP, etcd:// with the cluster of the masters, or a folder. It has several
	// elements if object names differ.
	Store      string `json:"store" msgpack:"store"`
	Down       string `json:"down,omitempty" msgpack:"down,omitempty"` // why it is not queried now
	Remembered int    `json:"remembered" msgpack:"remembered"`         // cached runs of 16 or 64 blocks
	Questions  uint64 `json:"questions" msgpack:"questions"`
	Failed     uint64 `json:"failed" msgpack:"failed"` // questions that ended with an error
	// Busy counts queries without the store, because of too many questions under way.
	Busy uint64 `json:"busy" msgpack:"busy"`
	// Partial counts answers without some of the requested blocks.
	Partial uint64 `json:"partial" msgpack:"partial"`
	// Forgotten counts resets of the cache, since the contents of the store may have changed.
	Forgotten uint64 `json:"forgotten" msgpack:"forgotten"`
	Strange   uint64 `json:"strange" msgpack:"strange"` // objects in answers without a question

	Set *StoreSet `json:"set,omitempty" msgpack:"set,omitempty"` // nil without events of the store

	Election *StoreElection `json:"election,omitempty" msgpack:"election,omitempty"` // nil: the store has one master
}

// StoreElection is the election among a store's masters, by etcd.
type StoreElection struct {
	Leader   string `json:"leader,omitempty" msgpack:"leader,omitempty"` // HOST:PORT of its HTTP; empty: unknown
	Changes  uint64 `json:"changes" msgpack:"changes"`                   // changes of the leader
	Failures uint64 `json:"failures" msgpack:"failures"`                 // of etcd, and answers without a usable leader
	Error    string `json:"error,omitempty" msgpack:"error,omitempty"`   // why the leader is unknown, or etcd's error
}

// StoreSet is a node's copy of a store's contents, by the store's events.
type StoreSet struct {
	Objects   int    `json:"objects" msgpack:"objects"`
	Whole     bool   `json:"whole" msgpack:"whole"`         // it has all objects of the store
	Gaps      uint64 `json:"gaps" msgpack:"gaps"`           // resets after missing events
	Overflows uint64 `json:"overflows" msgpack:"overflows"` // resets because of the size
	Lists     uint64 `json:"lists" msgpack:"lists"`
	Answered  uint64 `json:"answered" msgpack:"answered"` // objects answered from the set
	Asked     uint64 `json:"asked" msgpack:"asked"`       // objects in questions to the store
}

// Usage is the used part of a limit.
type Usage struct {
	Bytes int64 `json:"bytes" msgpack:"bytes"`
	Limit int64 `json:"limit" msgpack:"limit"` // 0: unknown

	// Refused is the reason that writes fail, whatever the limit; empty if writes succeed, as far as the NATS server
	// reports.
	Refused string `json:"refused,omitempty" msgpack:"refused,omitempty"`
}

// SnapshotCounts counts snapshots by result.
type SnapshotCounts struct {
	Written  uint64            `json:"written" msgpack:"written"`
	Failed   uint64            `json:"failed" msgpack:"failed"`     // not written; retried later
	Rejected map[string]uint64 `json:"rejected" msgpack:"rejected"` // not restored, by reason
}

// ResyncCounts counts requests to shims to publish their engines' blocks again.
type ResyncCounts struct {
	Asked    uint64 `json:"asked" msgpack:"asked"`
	Answered uint64 `json:"answered" msgpack:"answered"`
	Ended    uint64 `json:"ended" msgpack:"ended"` // partitions that were complete again
}

// ModelStatus is a model with at least one rank.
type ModelStatus struct {
	Model     string `json:"model" msgpack:"model"`
	BlockSize uint32 `json:"block_size" msgpack:"block_size"`
	Ranks     int    `json:"ranks" msgpack:"ranks"`
}

// PartitionState is a node's state of a partition.
type PartitionState string

const (
	PartitionAbsent      PartitionState = "absent" // not kept by the node; in no status
	PartitionRestoring   PartitionState = "restoring"
	PartitionCatchingUp  PartitionState = "catching_up"
	PartitionServing     PartitionState = "serving"
	PartitionResync      PartitionState = "resync_needed" // serving; workers may hold more than is known
	PartitionUnavailable PartitionState = "unavailable"   // its log cannot be read now
)

// Serves reports whether queries are answered from a partition in this state.
func (s PartitionState) Serves() bool { return s == PartitionServing || s == PartitionResync }

// PartitionDetail is the state of a partition on a node.
type PartitionDetail struct {
	PartitionStatus `msgpack:",inline"`

	State        PartitionState   `json:"state" msgpack:"state"`
	LogLast      events.StreamSeq `json:"log_last" msgpack:"log_last"`
	Lag          uint64           `json:"lag" msgpack:"lag"` // messages of the log not applied yet
	Ranks        int              `json:"ranks" msgpack:"ranks"`
	SnapshotSeq  events.StreamSeq `json:"snapshot_seq" msgpack:"snapshot_seq"`
	SnapshotTime time.Time        `json:"snapshot_time" msgpack:"snapshot_time"`
	SnapshotSize int64            `json:"snapshot_bytes" msgpack:"snapshot_bytes"`
	// RestoredFrom is the snapshot of this process's start; 0: none.
	RestoredFrom events.StreamSeq `json:"restored_from" msgpack:"restored_from"`
	RestoreMS    float64          `json:"restore_ms" msgpack:"restore_ms"`
	Log          Usage            `json:"log" msgpack:"log"`
	// Checksum is of the holdings of all its ranks, at Seq.
	Checksum string `json:"checksum,omitempty" msgpack:"checksum,omitempty"`
	// Behind: far behind the log, for longer than usual.
	Behind bool `json:"behind,omitempty" msgpack:"behind,omitempty"`
	// Writer is the node that writes its snapshots; empty: unknown.
	Writer string `json:"writer,omitempty" msgpack:"writer,omitempty"`
}

// StatusRequest is a request for the status of a node.
type StatusRequest struct {
	Node string `json:"node,omitempty" msgpack:"node,omitempty"` // empty: any node
}

// VerifyRequest has the positions in the log for checksums, so that checksums of several nodes are comparable.
type VerifyRequest struct {
	At []PartitionSeq `json:"at,omitempty" msgpack:"at,omitempty"`
}

// PartitionReplicas has the checksums of a partition on all serving nodes.
type PartitionReplicas struct {
	Partition events.Partition `json:"partition" msgpack:"partition"`
	Equal     bool             `json:"equal" msgpack:"equal"` // all have the same checksum at the same position
	Replicas  []ReplicaSum     `json:"replicas" msgpack:"replicas"`
}

// ReplicaSum is a node's checksum of a partition.
type ReplicaSum struct {
	Node     string           `json:"node" msgpack:"node"`
	Seq      events.StreamSeq `json:"seq" msgpack:"seq"`
	Checksum string           `json:"checksum" msgpack:"checksum"`
}

// ClusterStatus is a node's view of the nodes of its namespace.
type ClusterStatus struct {
	// Copies is the intended number of nodes for each partition.
	Copies int          `json:"copies" msgpack:"copies"`
	Nodes  []NodeStatus `json:"nodes" msgpack:"nodes"` // by name
	// Short lists partitions with fewer ready nodes.
	Short    []events.Partition `json:"short,omitempty" msgpack:"short,omitempty"`
	Unserved []events.Partition `json:"unserved,omitempty" msgpack:"unserved,omitempty"` // no node serves them

	// Gone lists nodes that are no longer in Nodes: dead, or cut off from NATS. Nodes that were stopped are not listed,
	// and every node for at most ten minutes.
	Gone []string `json:"gone,omitempty" msgpack:"gone,omitempty"`
}

// NodeStatus is a node's announcement.
type NodeStatus struct {
	Node      string             `json:"node" msgpack:"node"`
	Build     string             `json:"build" msgpack:"build"`
	Zone      string             `json:"zone,omitempty" msgpack:"zone,omitempty"`
	Answers   bool               `json:"answers,omitempty" msgpack:"answers,omitempty"` // it gave this status
	Leaving   bool               `json:"leaving,omitempty" msgpack:"leaving,omitempty"`
	Ready     []events.Partition `json:"ready" msgpack:"ready"`
	Behind    []events.Partition `json:"behind" msgpack:"behind"`       // serves them, far behind the log
	Releasing []events.Partition `json:"releasing" msgpack:"releasing"` // serves them, and will release them soon
}

// IndexStatus is the size of a node's index.
type IndexStatus struct {
	Blocks   TierCounts `json:"blocks" msgpack:"blocks"` // holdings: (rank, block) pairs
	Distinct uint64     `json:"distinct" msgpack:"distinct"`
	Bytes    uint64     `json:"bytes" msgpack:"bytes"`
	// BlocksApplied counts blocks in stored events, since the node's start.
	BlocksApplied uint64 `json:"blocks_applied" msgpack:"blocks_applied"`
	// DecoderBytes is the memory of the log's decoder, which is not in Bytes.
	DecoderBytes uint64 `json:"decoder_bytes" msgpack:"decoder_bytes"`
}

// SnapshotList lists the written snapshots.
type SnapshotList struct {
	Snapshots []SnapshotInfo `json:"snapshots" msgpack:"snapshots"`

	// Missing lists partitions without a new snapshot: no node serves them, or their writer changed meanwhile.
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`
}

// SnapshotInfo is a partition's snapshot.
type SnapshotInfo struct {
	Partition  events.Partition `json:"partition" msgpack:"partition"`
	Generation uint64           `json:"generation" msgpack:"generation"`
	Seq        events.StreamSeq `json:"seq" msgpack:"seq"`
	Bytes      int64            `json:"bytes" msgpack:"bytes"`     // of all its chunks
	Written    int64            `json:"written" msgpack:"written"` // of the new chunks
}

// GenerationList lists the snapshots in the bucket.
type GenerationList struct {
	Generations []GenerationInfo `json:"generations"` // by partition, then newest first
}

// GenerationInfo is a snapshot in the bucket.
type GenerationInfo struct {
	Partition  events.Partition `json:"partition"`
	Key        string           `json:"key,omitempty"` // of the manifest, if the snapshot is unusable
	Generation uint64           `json:"generation"`    // 0 if the manifest is unreadable
	Epoch      time.Time        `json:"epoch"`
	Seq        events.StreamSeq `json:"seq"`
	Created    time.Time        `json:"created"`
	Writer     string           `json:"writer"`
	Ranks      int              `json:"ranks"`
	Holdings   uint64           `json:"holdings"`
	Chunks     int              `json:"chunks"`
	Bytes      uint64           `json:"bytes"` // of all its chunks
	New        uint64           `json:"new"`   // of the chunks that the previous generation lacks

	// Unusable is the reason, as in metrics, that an indexer would not restore it.
	Unusable  string     `json:"unusable,omitempty"`
	Why       string     `json:"why,omitempty"` // the same, in words
	Verified  bool       `json:"verified"`      // its chunks were read
	Bad       bool       `json:"bad"`           // it differs from the written data
	BadChunks []BadChunk `json:"bad_chunks,omitempty"`
}

// BadChunk is a chunk that differs from the written data.
type BadChunk struct {
	Key    string `json:"key,omitempty"` // empty: the chunks are intact and contradict each other
	Kind   string `json:"kind,omitempty"`
	Reason string `json:"reason"`
	Why    string `json:"why"`
}
