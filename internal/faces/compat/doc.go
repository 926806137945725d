// Package compat lets a client of NVIDIA Dynamo's standalone indexer, which renders Mooncake's RFC #1403
// (kvcache-ai/Mooncake), talk to kvatlas by changing only the address; and it runs shims in the indexer's own process
// for engines that have none beside them.
//
// [Shims] are those: one for each (instance, rank) that was registered, remembered in the bucket of workers and started
// again with the indexer. Each has its lease like any other. [Handler] is the HTTP: POST /register, /unregister,
// /query, /query_by_hash, /overlap_scores; GET /workers, /dump, /health. Depths are in tokens there (in blocks in
// [OverlapScores]), and cpu and disk count what lies above them too.
//
// docs/compatibility.md lists what differs on purpose. Both may be used from any goroutine.
package compat
