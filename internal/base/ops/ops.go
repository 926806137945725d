// Package ops has the names of the operations and the outcomes of requests, as in subjects and metrics.
package ops

import "time"

// Deadline is the time limit of a request that has no deadline of its own, in all transports and clients. Every wait of
// the request counts: for other nodes, for min_seq, and for tokens of a text.
const Deadline = 5 * time.Second

// The names of the operations, with the types of request and answer.
const (
	Find            = "find"             // Query → Answer
	Workers         = "workers"          // WorkersRequest, or nothing → WorkerList
	Status          = "status"           // StatusRequest, or nothing → Status
	Verify          = "verify"           // VerifyRequest, or nothing → Status with checksums of all nodes
	Snapshot        = "snapshot"         // nothing → SnapshotList, after the snapshots of all partitions are written
	Prefixes        = "prefixes"         // PrefixesRequest → PrefixTree
	Select          = "select"           // SelectRequest → Selection
	Book            = "book"             // BookRequest → Booking
	PrefillComplete = "prefill_complete" // RequestRef → Done
	Progress        = "progress"         // RequestRef → Done
	OutputBlock     = "output_block"     // RequestRef → Done
	Free            = "free"             // RequestRef → Done
	Loads           = "loads"            // LoadsRequest, or nothing → LoadList
	PotentialLoads  = "potential_loads"  // PotentialRequest → PotentialList
	EngineLoads     = "engine_loads"     // nothing → EngineLoads
	EngineLoad      = "engine_load"      // EngineLoads → Done
	Recorded        = "recorded"         // RecordedRequest → RecordedList
	Funnel          = "funnel"           // FunnelRequest → Funnel
	Report          = "report"           // Report → Done
	BlockHistory    = "block_history"    // BlockHistoryRequest → BlockHistory
	Capacity        = "capacity"         // CapacityRequest → Capacity
	CapacitySamples = "capacity_samples" // CapacitySamplesRequest → CapacitySamples
	Sessions        = "sessions"         // SessionsRequest, or nothing → SessionList
	EndSession      = "session_end"      // SessionEnd → SessionList, of the ended sessions
	SessionBlocks   = "session_blocks"   // SessionBlocksRequest → SessionBlocks
	RemovalOrder    = "removal_order"    // RemovalRequest → RemovalOrder
	RemovalPart     = "removal_part"     // RemovalRequest → RemovalPart
	Scaling         = "scaling"          // ScalingRequest → Scaling
	HotPrefixes     = "hot_prefixes"     // HotRequest → HotList
	HotPart         = "hot_part"         // HotRequest → HotPart
	Warm            = "warm"             // WarmRequest → PrefixCopy
	Copied          = "prefix_copied"    // CopyNote → Done
	Tenants         = "tenants"          // TenantsRequest, or nothing → TenantList
	TenantsPart     = "tenants_part"     // TenantsPartRequest → TenantsPart
	TenantCharges   = "tenant_charges"   // nothing → TenantCharges
	RegisterWorker  = "worker_register"  // WorkerRegistration → Worker
	ChangeWorker    = "worker_change"    // WorkerChange → Worker, after the change
	RemoveWorker    = "worker_remove"    // WorkerRemoval, or the worker in the path → Worker, before the removal
)

// Other is the operation of a request that was refused before its operation was read.
const Other = "other"

// Outcomes of a request beside the code of its error.
const (
	OK       = "ok"
	Canceled = "canceled" // the caller ended the request before its answer; neither a problem nor a failure
	Expired  = "expired"  // the caller's deadline passed before the answer
	Unsent   = "unsent"   // the answer could not be sent

	// ReplyRefused: the request names a reply subject that is no inbox. It was not handled.
	ReplyRefused = "reply_refused"
)
