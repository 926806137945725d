// Package compat serves the HTTP API of NVIDIA Dynamo's standalone indexer, which implements Mooncake's RFC #1403
// (kvcache-ai/Mooncake). Clients change only the address. The package also runs shims in the indexer's process for
// engines without a shim beside them.
//
// [Shims] runs a shim for every registered (instance, rank). The bucket of workers stores the registrations, so a
// restarted indexer starts the shims again. Every shim has a lease. [Handler] serves POST /register, /unregister,
// /query, /query_by_hash, /overlap_scores and GET /workers, /dump, /health. Depths count tokens; in [OverlapScores]
// depths count blocks. The numbers of cpu and disk include the tiers above.
//
// DIFFERENCES.md lists the intended differences. All functions are safe for concurrent use.
package compat
