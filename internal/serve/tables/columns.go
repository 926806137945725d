package tables

import (
	"github.com/kvatlas/kvatlas/internal/operate/top"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// columns returns the columns of a table from pairs of a name and a meaning.
func columns(row string, pairs ...string) cli.Columns {
	c := cli.Columns{Row: row}
	for i := 0; i < len(pairs); i += 2 {
		c.List = append(c.List, cli.Column{Name: pairs[i], Meaning: pairs[i+1]})
	}
	return c
}

// TopColumns returns the columns of indexer top.
func TopColumns() cli.Columns {
	c := cli.Columns{Row: "rank"}
	for _, column := range top.Explained() {
		c.List = append(c.List, cli.Column{Name: column[0], Meaning: column[1]})
	}
	return c
}

// Columns of workers.
var (
	WorkersColumns = columns("rank",
		"WORKER", "name of the worker; the field instance of JSON",
		"RANK", "data-parallel rank of the worker",
		"MODEL", "model of the worker",
		"BLOCK SIZE", "tokens in a block",
		"PARTITION", "part of the log with the worker's events",
		"DEVICE", "blocks held in device memory",
		"HOST", "blocks held in host memory",
		"DISK", "blocks held on disk",
		"EXTERNAL", "blocks held in an external store of the engine",
		"PENDING", "blocks that wait for their parent",
		"LAST EVENT", "number of the last applied event",
		"LAST SEEN", "time of the last event in the log",
		"LEASE AGE", "time since the shim renewed the lease",
		"EXPIRES", "time until the lease expires",
		"ENGINE", "state of the connection between shim and engine",
		"STATE", "whether the rank may be chosen for new requests, and the role")

	WorkerColumns = columns("rank",
		"WORKER", "name of the worker; the field instance of JSON",
		"RANK", "data-parallel rank of the worker",
		"MODEL", "model of the worker",
		"ROLE", "part of a request: aggregated, prefill, decode or encode",
		"ENDPOINT", "address for requests of routers",
		"KV BLOCKS", "capacity of the rank's device memory",
		"BATCHED TOKENS", "maximum tokens that the rank computes in a step",
		"TAINTS", "taints, which requests prefer or require",
		"DOMAINS", "place of the worker, such as zone=eu-1",
		"ADAPTERS", "served LoRA adapters",
		"STATE", "whether the rank may be chosen for new requests")

	RemovalColumns = columns("worker, in the order of removal",
		"WORKER", "name of the worker",
		"UNIQUE", "blocks without a second holder, in any tier",
		"REQUESTS/H", "requests per hour that lose blocks",
		"BLOCKS/H", "blocks per hour to compute again",
		"COST S/H", "seconds of computing per hour for these blocks")

	LoadsColumns = columns("rank with booked requests",
		"MODEL", "model of the requests",
		"WORKER", "name of the worker",
		"RANK", "data-parallel rank of the worker",
		"REQUESTS", "booked requests in progress",
		"PREFILL TOKENS", "tokens of their prompts to compute",
		"BLOCKS", "blocks of the requests; a block of several requests counts once",
		"PREFILL RATE", "tokens per second, as measured by the answering node",
		"BUSY", "share of the time with prefill work, as measured by the answering node")
)

// Columns of queries and choices.
var (
	AnswerColumns = columns("rank with blocks of the prompt",
		"WORKER", "name of the worker; the field instance of JSON",
		"RANK", "data-parallel rank of the worker",
		"DEVICE", "leading blocks of the prompt in device memory",
		"HOST", "directly following blocks in host memory",
		"DISK", "directly following blocks on disk",
		"EXTERNAL", "directly following blocks in an external store of the engine",
		"OF PROMPT", "share of the prompt's blocks that the rank need not compute").And(storeColumns...).And(guessedColumn,
		engineColumn, endpointColumn)

	answerBase = cli.Columns{Row: AnswerColumns.Row, List: AnswerColumns.List[:7]}

	storeColumns = []cli.Column{
		{Name: "FROM STORE", Meaning: "following blocks that the engine loads from the shared store"},
		{Name: "STORE STOPS", Meaning: "reason for the end of the load"},
	}
	guessedColumn = cli.Column{Name: "GUESSED",
		Meaning: "blocks probably held, because of requests sent to the rank, without events so far"}
	engineColumn   = cli.Column{Name: "ENGINE", Meaning: "state of the engine, unless it is connected"}
	endpointColumn = cli.Column{Name: "ENDPOINT", Meaning: "registered address of the worker, with --with-endpoint"}

	BlocksColumns = columns("run of blocks with equal holders, with --explain",
		"BLOCKS", "first block and end of the run, counted from 0",
		"DEVICE", "ranks that hold the blocks in device memory",
		"HOST", "ranks that hold the blocks in host memory",
		"DISK", "ranks that hold the blocks on disk",
		"EXTERNAL", "ranks that hold the blocks in an external store",
		"STORE", "whether the shared store has the blocks")

	StopsColumns = columns("rank, with --explain",
		"WORKER", "worker and rank",
		"OWN", "blocks of the prefix in the rank's own tiers",
		"STOPPED", "rule at the end of this prefix",
		"LOADS", "following blocks that the engine loads from the shared store",
		"NO MORE, FOR", "rule at the end of the load")

	CandidatesColumns = columns("candidate, with --explain",
		"WORKER", "name of the worker; * marks the chosen worker",
		"RANK", "data-parallel rank of the worker",
		"COST", "the lowest is chosen; the sum of the terms of the policy kvatlas, in milliseconds",
		"PROBABILITY", "share of such requests for this rank; below 1 with a temperature",
		"CACHED TOKENS", "tokens of the prompt that the rank need not compute").And(guessedBlocks)

	candidatesBase = cli.Columns{List: append([]cli.Column{{}}, CandidatesColumns.List[:5]...)}

	KvatlasColumns = columns("candidate: the terms of the policy kvatlas",
		"QUEUE", "time until the rank has computed all earlier prompts",
		"ROOM", "time until requests end, if the request does not fit into the rank's memory",
		"PREFILL", "time to compute the rest of the prompt",
		"LOAD", "time to copy blocks from host memory, disk or a shared store into device memory",
		"CONTEXT", "delay of the output by the blocks in use on the rank",
		"DECODE", "delay of requests in their output phase by the prefill, weighted",
		"LATER", "delay of later requests by the prefill",
		"EVICT", "time in which later requests compute the blocks again that the prompt evicts")

	DynamoColumns = columns("candidate: the terms of the policy dynamo",
		"PREFILL", "blocks to compute, of this request and of the booked requests",
		"CREDIT", "reduction of the cost for held blocks, by tier",
		"DECODE", "blocks of all requests in progress on the rank",
		"REQUESTS", "cost of the number of requests in progress",
		"TAINTS", "factor of the cost for preferred taints")

	guessedBlocks = cli.Column{Name: "GUESSED BLOCKS",
		Meaning: "blocks probably held, because of requests sent to the rank, without events so far"}
)

// Columns of nodes and snapshots.
var (
	ReportColumns = columns("node",
		"NODE", "name of the node",
		"ZONE", "failure domain of the node",
		"VERSION", "release of the program",
		"STATE", "ready, NOT READY (some partition does not serve) or NO ANSWER",
		"UP", "time since the start",
		"PARTITIONS", "number of partitions of the node",
		"LAG", "messages of the log that the node has not applied",
		"BLOCKS HELD", "blocks of all workers in the node's index",
		"INDEX", "memory of the index",
		"PROBLEMS", "number of problems; the lines below the table describe them")

	PartitionsColumns = columns("partition, with --node or a single node",
		"PARTITION", "number of the partition",
		"STATE", "state of the node's copy, such as serving or restoring",
		"RANKS", "number of ranks with events in the partition",
		"APPLIED", "last applied message of the log",
		"LAG", "messages of the log that are not applied",
		"STALE", "age of the newest applied event, if the copy is behind the log",
		"LOG", "size of the log, and the limit",
		"SNAPSHOT SEQ", "last message of the log in the snapshot",
		"SIZE", "size of the snapshot",
		"TAKEN", "age of the snapshot",
		"WRITER", "node that writes the snapshots").And(checksumColumn)

	partitionsBase = cli.Columns{Row: PartitionsColumns.Row, List: PartitionsColumns.List[:11]}
	checksumColumn = cli.Column{Name: "CHECKSUM", Meaning: "checksum of the ranks' blocks, with --verify"}

	ReplicasColumns = columns("copy of a partition, with --verify",
		"PARTITION", "number of the partition",
		"NODE", "node with the copy",
		"SEQ", "last applied message of the log",
		"CHECKSUM", "checksum of the ranks' blocks at this message",
		"", "")

	ClusterColumns = columns("node",
		"NODE", "name of the node",
		"ZONE", "failure domain of the node",
		"VERSION", "release of the program",
		"PARTITIONS", "number of partitions that the node serves",
		"READY", "partitions that the node serves",
		"BEHIND", "partitions far behind the log",
		"RELEASING", "partitions that other nodes serve soon",
		"", "")

	SnapshotsColumns = columns("partition",
		"PARTITION", "number of the partition",
		"GENERATION", "number of the snapshot",
		"SEQ", "last message of the log in the snapshot",
		"SIZE", "bytes of all chunks",
		"NEW", "bytes of the written chunks; the chunks of the earlier snapshot are not written again")

	GenerationsColumns = columns("snapshot",
		"PARTITION", "number of the partition",
		"GENERATION", "number of the snapshot",
		"SEQ", "last message of the log in the snapshot",
		"TAKEN", "age of the snapshot",
		"RANKS", "number of ranks in the snapshot",
		"HOLDINGS", "number of blocks held by ranks",
		"CHUNKS", "number of chunks",
		"SIZE", "bytes of all chunks",
		"NEW", "bytes of the chunks that the earlier snapshot lacks",
		"STATE", "usable, ok (verified), BAD, or the reason why a restore skips the snapshot")
)

// Columns of requests.
var (
	SessionsColumns = columns("session",
		"SESSION", "id of the session",
		"MODEL", "model of the requests",
		"WORKER", "worker of the session",
		"RANK", "data-parallel rank of the worker",
		"LAST USE", "time since the last request",
		"EXPIRES", "time until the end, without a further request")

	HeldColumns = columns("rank with blocks of the session ID",
		"MODEL", "model of the blocks",
		"WORKER", "name of the worker",
		"RANK", "data-parallel rank of the worker",
		"BLOCKS", "blocks of the session on the rank",
		"DEVICE", "of these, in device memory",
		"HOST", "of these, in host memory",
		"DISK", "of these, on disk",
		"EXTERNAL", "of these, in an external store")

	FunnelColumns = columns("step and, with -, cause of a loss before it",
		"STEP", "step of the tokens on the way to reuse, or cause of a loss",
		"TOKENS", "tokens of the step, or lost tokens",
		"SHARE", "share of the requested tokens",
		"BY", "workers that lost the tokens last, with the time between the loss and the request")

	CapacityColumns = columns("tier",
		"TIER", "tier of memory",
		"BLOCKS", "size of the tier in all workers together",
		"SIZE", "source of the size",
		"HIT RATE", "share of the prompts' blocks found in this tier and the tiers before it; >= beyond the known sizes",
		"TWICE THE SIZE", "additional hit rate with twice the size of the tier; >= or unknown beyond the known sizes",
		"LAST 30 %", "loss of hit rate without 30 % of the tier; >= or unknown beyond the known sizes")

	CapacityPointsColumns = columns("size of the cache",
		"BLOCKS", "size in all workers together",
		"ONE CACHE", "hit rate of one LRU cache for all workers; usually the better one",
		"AS ROUTED", "hit rate with the requests on the workers that served them",
		"", "")

	HotColumns = columns("prefix",
		"PREFIX", "hash of the last block of the prefix, for indexer prefixes warm",
		"TOKENS", "length of the prefix",
		"REQUESTS/S", "requests per second with the prefix",
		"HOLDERS", "workers that hold the whole prefix",
		"WAIT MS", "how much longer a request waits, on average, than at the least busy worker",
		"RECOMPUTED/S", "tokens of the prefix per second that workers without it computed",
		"SAVES S/H", "seconds per hour that a further copy saves",
		"COST S", "seconds that the copy takes once",
		"TARGET", "worker for the copy with the lowest cost",
		"KEPT", "whether a node has the tokens, so that the hash is enough for a copy")

	CopiesColumns = columns("copy",
		"COPY", "hash of the last block of the prefix",
		"WORKER", "worker and rank with the copy",
		"BY", "operator, or warm-up for an automatic copy",
		"AGE", "time since the copy",
		"COMPUTED", "tokens that the worker computed for the copy",
		"TOOK MS", "time of the engine's answer",
		"REQUESTS", "requests that have reused the copy",
		"REUSED", "tokens of the copy in these requests",
		"SAVED S", "forecast seconds to the first token that the copy saved")

	TenantsColumns = columns("tenant",
		"TENANT", "source and value; (none): requests without a tenant, (other): tenants beyond --tenant-limit, (all): sums",
		"REQUESTS", "number of requests",
		"REQUESTED", "tokens of the prompts",
		"REUSED", "reused tokens, as reported by engines",
		"EXPECTED", "tokens held by the chosen workers, without a report",
		"COMPUTED", "other tokens of prompts with a chosen worker",
		"UNSERVED", "tokens of prompts without a chosen worker",
		"REJECTED", "requests rejected by a quota",
		"MISSED AT MOST", "limit of the tenant's tokens that count as (other)",
		"HELD BLOCKS", "blocks held now on all ranks and tiers, with --held")

	RecordingColumns = columns("node",
		"NODE", "name of the node",
		"RECORDING", "on, off, FAILING or NO ANSWER",
		"RECORDS", "records since the start of the node: choice, end, report and answer of a request count separately",
		"STORED", "records in the stream",
		"DROPPED", "records without room in memory",
		"WAITING", "bytes that wait for the stream")
)

// Columns of upkeep.
var (
	FindingsColumns = columns("finding, the worst first",
		"", "",
		"SEVERITY", "error or warning",
		"CHECK", "check with the finding",
		"WHERE", "node, worker or other place of the fault",
		"WHAT", "the fault; the paragraph with the row's number has the evidence and the remedy")

	ClearedColumns = columns("rank",
		"WORKER", "name of the worker; the field instance of JSON",
		"RANK", "data-parallel rank of the worker",
		"INCARNATION", "number of the ended incarnation",
		"LAST EVENT", "number of the last event",
		"NOW", "result for the rank")

	DeletionColumns = columns("stream",
		"STREAM", "name of the stream",
		"KIND", "log, or bucket with its name",
		"MESSAGES", "number of messages",
		"SIZE", "size of the messages")

	ShimsColumns = columns("rank",
		"WORKER", "name of the worker; the field instance of JSON",
		"RANK", "data-parallel rank of the worker",
		"INCARNATION", "number of the incarnation before the resync",
		"REPLAY", "whether the shim can read the engine's replay buffer",
		"HOST", "host of the shim",
		"PROCESS", "process id of the shim")

	ComparedColumns = columns("text with different results",
		"", "",
		"TEXT", "start of the text",
		"", "")
)
