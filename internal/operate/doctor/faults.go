package doctor

import "slices"

// Fault is the stable id of a kind of finding, for programs: it does not change with the text.
type Fault string

// Description describes a fault in docs/reference.md.
type Description struct {
	ID       Fault
	Severity Severity // empty: an error or a warning
	Meaning  string
}

// varies is the severity of a fault with errors and warnings.
const varies Severity = ""

// faults lists all faults, in the order of the checks.
var faults []Description

// Faults returns the descriptions of all faults, in the order of the checks.
func Faults() []Description { return slices.Clone(faults) }

func fault(id Fault, severity Severity, meaning string) Fault {
	faults = append(faults, Description{id, severity, meaning})
	return id
}

// The faults, in the order of the checks. TestEachFaultIsFound provokes each fault. TestDoctorFindsFaults of package
// integration provokes them with real processes where possible.
var (
	natsUnreachable  = fault("nats_unreachable", Error, "no NATS server answers")
	natsRefused      = fault("nats_refused", Error, "NATS rejects the user")
	natsPayload      = fault("nats_payload", Error, "max_payload is too small for snapshots")
	natsFar          = fault("nats_far", Warning, "a round trip to NATS needs more than 50 ms")
	jetStreamOff     = fault("jetstream_off", Error, "the account has no JetStream")
	jetStreamDown    = fault("jetstream_down", Error, "JetStream has no leader")
	jetStreamOld     = fault("jetstream_old", Warning, "NATS servers before 2.12 have no atomic batches")
	jetStreamStorage = fault("jetstream_storage", varies, "the account's storage is exhausted, or nearly")
	namespaceMissing = fault("namespace_missing", Error, "the namespace does not exist")
	namespaceVersion = fault("namespace_version", Error, "the namespace's record has another version")
	namespaceRecord  = fault("namespace_record", Error, "the namespace's record is missing or unreadable")
	namespaceStreams = fault("namespace_streams", Error, "max_streams is too low for all streams")
	streamMissing    = fault("stream_missing", Error, "a stream or bucket is missing")
	streamLeaderless = fault("stream_leaderless", Error,
		"streams have no leader: most of the NATS servers with their replicas are away")
	streamChanged    = fault("stream_changed", Error, "a stream or bucket has settings that can lose events")
	streamUnwritable = fault("stream_unwritable", Error, "a stream rejects writes: its disk is full")
	streamNoDirect   = fault("stream_no_direct_gets", Warning, "a stream does not permit direct gets")
	streamNoBatches  = fault("stream_no_batches", Warning, "a stream does not permit atomic batches")
	streamRollups    = fault("stream_rollups", Warning,
		"a bucket permits rollups: a message on a key can remove all other keys")
	streamBehind   = fault("stream_replicas_behind", Warning, "replicas of a stream are missing or behind")
	bucketFull     = fault("bucket_full", Error, "a bucket is full, or nearly")
	streamReplicas = fault("stream_replicas_differ", Warning, "streams have different numbers of replicas")
	nodeNone       = fault("node_none", Error, "no indexer node answers")
	nodeSilent     = fault("node_silent", Error, "a registered node does not answer")
	nodeNotReady   = fault("node_not_ready", Error, "a node is restoring or catching up")
	nodeProblem    = fault("node_problem", Error, "a node reports a problem")
	nodeWarning    = fault("node_warning", Warning,
		"a node reports a warning, such as bearer tokens in clear text or an unknown region")
	sourceSilent = fault("source_silent", Warning,
		"a source of many ranks, or a shared store's master, has published no event since the start of its shim")
	sourceUnreachable = fault("source_unreachable", varies,
		"a source (error) or a shared store's master (warning) is unreachable for its shim")
	partitionsUnserved = fault("partitions_unserved", Error, "partitions have no serving node")
	nodeVersions       = fault("node_versions", Warning, "nodes have different versions")
	nodeZone           = fault("node_without_zone", Warning, "some nodes have no zone")
	zoneShared         = fault("zone_shared", Warning,
		"replicas of a partition share a zone although other zones are available")
	clockOffset = fault("clock_offset", varies,
		"this host's clock differs from a server's clock by 2 s or more (error: 30 s)")
	replicasUnequal = fault("replicas_unequal", Error,
		"replicas of a partition differ at the same position in the log")
	replicasApart  = fault("replicas_apart", Warning, "replicas did not reach the same position in the log")
	workersMissing = fault("workers_missing", Error, "the list of workers lacks partitions")
	workerNone     = fault("worker_none", Warning, "no worker is registered")
	leaseNone      = fault("lease_none", Warning, "a rank has blocks and no lease")
	leaseExpired   = fault("lease_expired", Error, "a lease has expired, and the worker's blocks are being cleared")
	workerExpired  = fault("worker_expired", Warning,
		"a lease has expired within the last hour, and its shim is gone")
	modelUnclaimed   = fault("model_unclaimed", Error, "a worker is ignored, because it has not claimed its model")
	engineSilent     = fault("engine_silent", Error, "an engine does not answer its shim")
	engineGone       = fault("engine_gone", Warning, "an engine has ended")
	engineQuiet      = fault("engine_quiet", Warning, "an engine is connected and has announced no block")
	workerIncomplete = fault("worker_incomplete", Error, "a worker's registration lacks a field")
	blockSizes       = fault("block_sizes", Error, "workers of a model have different block sizes")
	storeUncredited  = fault("store_uncredited", Error, "no block of the shared store can count for a worker")
	storeNames       = fault("store_names", Error,
		"workers of a store never find each other's blocks: different hash seeds, algorithms or releases")
	shimStopped = fault("shim_stopped", Warning,
		"a shim was stopped while its engine ran, and no other shim has replaced it")
	shimSilent         = fault("shim_silent", Warning, "a shim has a lease and does not answer")
	engineUnusable     = fault("engine_unusable", Error, "all events of an engine are skipped")
	severalEngines     = fault("several_engines", Error, "several engines publish to the shim of one worker")
	shimWaiting        = fault("shim_waiting", Error, "the log accepts no events from a shim")
	shimNoReplay       = fault("shim_no_replay", Warning, "a shim has no replay endpoint")
	replayDead         = fault("replay_dead", Error, "the replay endpoint does not answer")
	messagesUnreadable = fault("messages_unreadable", Error, "messages of an engine are unreadable")
	eventsSkipped      = fault("events_skipped", Error, "events of an engine are skipped")
	copiesSkipped      = fault("copies_skipped", Warning,
		"copies in host memory or on disk are not whole blocks, and do not count")
	messagesLost      = fault("messages_lost", Warning, "messages of an engine were lost")
	joinedLate        = fault("joined_late", Warning, "an engine published before the start of its shim")
	engineNoEvents    = fault("engine_no_events", Error, "an engine publishes no events")
	engineUnreachable = fault("engine_unreachable", Warning, "an engine does not answer over HTTP")
	engineUnknown     = fault("engine_unknown", Warning, "an HTTP server is no supported engine, or requires a key")
	engineBlockSize   = fault("engine_block_size", Error, "the engine and its shim have different block sizes")
	engineModel       = fault("engine_model", Warning, "the engine has another name for the model")
	engineAdapters    = fault("engine_unnamed_adapters", Error,
		"SGLang serves adapters, and its events do not name them: its blocks are skipped")
	engineNoReplay   = fault("engine_no_replay", Warning, "the engine publishes without a replay endpoint")
	ranksUnserved    = fault("ranks_without_shim", Error, "ranks of the engine have no shim")
	recordingMissing = fault("recording_missing", Warning, "the stream of recorded requests is missing")
	recordingChanged = fault("recording_changed", Warning,
		"the stream of recorded requests has settings that can lose records")
	recordingUnlimited = fault("recording_unlimited", Warning,
		"the stream of recorded requests has no limit of bytes or age")
	recordingShort = fault("recording_short", Warning,
		"records are removed before their age, because of --record-bytes")
	recordingFailing = fault("recording_failing", Warning, "a node cannot store recorded requests")
	recordingDropped = fault("recording_dropped", Warning, "a node has dropped recorded requests since its start")
	storeDown        = fault("store_down", Error, "a node does not query a shared store")
	storeBusy        = fault("store_busy", Warning, "queries skipped the store")
	storeEvents      = fault("store_events", Warning, "a store's events are incomplete")
	tokenizerFailed  = fault("tokenizer_failed", Error, "texts of a model are not tokenized")
)
