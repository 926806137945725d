package doctor

// Fault is the stable id of a kind of finding, for programs: it does not change with the text.
type Fault string

// faults lists all faults.
var faults []Fault

// Faults returns all faults, in the order of the checks.
func Faults() []Fault { return faults }

func fault(name Fault) Fault {
	faults = append(faults, name)
	return name
}

// The faults, in the order of the checks. TestEachFaultIsFound provokes each fault. TestDoctorFindsFaults of package
// integration provokes them with real processes where possible.
var (
	natsUnreachable    = fault("nats_unreachable")
	natsRefused        = fault("nats_refused")
	natsPayload        = fault("nats_payload")
	natsFar            = fault("nats_far")
	jetStreamOff       = fault("jetstream_off")
	jetStreamDown      = fault("jetstream_down")
	jetStreamOld       = fault("jetstream_old")
	jetStreamStorage   = fault("jetstream_storage")
	namespaceMissing   = fault("namespace_missing")
	namespaceVersion   = fault("namespace_version")
	namespaceRecord    = fault("namespace_record")
	namespaceStreams   = fault("namespace_streams")
	streamMissing      = fault("stream_missing")
	streamLeaderless   = fault("stream_leaderless")
	streamChanged      = fault("stream_changed")
	streamUnwritable   = fault("stream_unwritable")
	streamNoDirect     = fault("stream_no_direct_gets")
	streamNoBatches    = fault("stream_no_batches")
	streamRollups      = fault("stream_rollups")
	streamBehind       = fault("stream_replicas_behind")
	bucketFull         = fault("bucket_full")
	streamReplicas     = fault("stream_replicas_differ")
	nodeNone           = fault("node_none")
	nodeSilent         = fault("node_silent")
	nodeNotReady       = fault("node_not_ready")
	nodeProblem        = fault("node_problem")
	nodeWarning        = fault("node_warning")
	sourceSilent       = fault("source_silent")
	sourceUnreachable  = fault("source_unreachable")
	partitionsUnserved = fault("partitions_unserved")
	nodeVersions       = fault("node_versions")
	nodeZone           = fault("node_without_zone")
	zoneShared         = fault("zone_shared")
	clockOffset        = fault("clock_offset")
	replicasUnequal    = fault("replicas_unequal")
	replicasApart      = fault("replicas_apart")
	workersMissing     = fault("workers_missing")
	workerNone         = fault("worker_none")
	leaseNone          = fault("lease_none")
	leaseExpired       = fault("lease_expired")
	workerExpired      = fault("worker_expired")
	modelUnclaimed     = fault("model_unclaimed")
	engineSilent       = fault("engine_silent")
	engineGone         = fault("engine_gone")
	engineQuiet        = fault("engine_quiet")
	workerIncomplete   = fault("worker_incomplete")
	blockSizes         = fault("block_sizes")
	storeUncredited    = fault("store_uncredited")
	storeNames         = fault("store_names")
	shimStopped        = fault("shim_stopped")
	shimSilent         = fault("shim_silent")
	engineUnusable     = fault("engine_unusable")
	severalEngines     = fault("several_engines")
	shimWaiting        = fault("shim_waiting")
	shimNoReplay       = fault("shim_no_replay")
	replayDead         = fault("replay_dead")
	messagesUnreadable = fault("messages_unreadable")
	eventsSkipped      = fault("events_skipped")
	copiesSkipped      = fault("copies_skipped")
	messagesLost       = fault("messages_lost")
	joinedLate         = fault("joined_late")
	engineNoEvents     = fault("engine_no_events")
	engineUnreachable  = fault("engine_unreachable")
	engineUnknown      = fault("engine_unknown")
	engineBlockSize    = fault("engine_block_size")
	engineModel        = fault("engine_model")
	engineAdapters     = fault("engine_unnamed_adapters")
	engineNoReplay     = fault("engine_no_replay")
	ranksUnserved      = fault("ranks_without_shim")
	storeDown          = fault("store_down")
	storeBusy          = fault("store_busy")
	storeEvents        = fault("store_events")
	tokenizerFailed    = fault("tokenizer_failed")
)
