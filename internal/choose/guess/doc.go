// Package guess predicts the blocks that a worker probably holds before its events announce them. A request leaves the
// blocks of its prompt at its worker. Until the worker's events confirm them, or if the worker has no events, the
// request itself is the only evidence.
//
//	s, err := guess.New(guess.Config{Settings: settings, Pool: registry.Pool})
//	loads := load.New(load.Config{Watch: s.Observe}) // receives every booking, of all nodes
//	go s.Run(ctx)
//	s.Depths(model, pool.Ranks, seq, depths)         // the predicted number of leading blocks of each rank
//
// Guesses are in no log, snapshot, dump or checksum, and never in the index. A node compares them with the answer of
// the index; the greater device depth counts. Without guesses, the index alone answers.
//
// # Rules
//
// The registration of a rank and the [Settings] determine its [Rule]:
//
//	events: none    the guesses are the only source. A guess holds for TTL after the last request with the block, or
//	                (lru) as long as the engine itself would keep the block, if its capacity is registered
//	with events     predict-on-route, off by default: a guess holds for a TTL of seconds
//
// With lru, a rank has room for its total_kv_blocks. Requests under way lease their blocks, which are never evicted.
// The output blocks of requests take room too, and remain after the request like other blocks. So do unshared prompts,
// which give no guesses. Of the blocks without a lease, the least recently used is evicted first, and within a prompt
// the last block, as in vLLM.
//
// # The end of a guess by events
//
// Events of other requests are no evidence about a request that still waits at its engine. But an engine announces the
// blocks of a prompt before the first output token. A guess therefore holds until the router reports the first token or
// the end of the request, and one second longer, while the events pass shim and log ([Service.Refute]). After that, an
// up-to-date index is right: a block that the index does not confirm is dropped, with all blocks after it. The same
// rule applies after an engine clears its cache, since blocks still to be computed will exist after the clear. No
// clocks of different hosts are compared. If the router reports nothing, the TTL ends the guess.
//
// An engine that ended holds nothing. All guesses of its ranks are dropped when its shim reports the end or a new
// engine process (the state `gone`, or `connected` since another time).
//
// # The table
//
// A [Table] has the guesses of one model. It is stepped: time is an argument. Prompts are in a trie keyed by sequence
// hashes. A node of the trie has a slot for each rank with all of the node's blocks. Invariants, which Check verifies:
//
//  1. A rank with a slot in a node has slots in all nodes before it. A slot's last use and number of leases do not
//     exceed those of the slot before. Therefore the least recently used block is always at the end of a path, and an
//     eviction leaves no hole.
//  2. A rank's queue has its slots without leases, with the first one to evict on top.
//  3. A rank's size is the sum of the blocks of its slots, of the blocks beside the prompts of its leased requests, and
//     of the blocks that ended requests left there.
//
// Memory is bounded: by capacities, by TTLs, and by [Settings].MaxBlocks per model. Above MaxBlocks, the blocks that
// expire first are dropped until a share of MaxBlocks is left.
//
// # Equality of nodes
//
// All nodes share the bookings (internal/choose/load), from which guesses follow: a booking has the same effect on all
// nodes. The TTL of a late booking counts from its creation. Repeated bookings, and bookings after the request's end,
// do not arrive here. A lost booking only lacks a guess.
//
// Ended requests are in no table of bookings. A starting node receives them from another node ([Service.Past]): the
// minimum of requests for the same guesses, and the blocks that they left beside their prompts, the latest first, at
// most 16 MiB. A node that was cut off does not receive them: it lacks the requests that began and ended meanwhile. For
// one TTL at most, it routes as if those workers had lost these blocks.
//
// # Concurrency
//
// A table belongs to one goroutine at a time. Any number of goroutines may use a [Service]: queries share a read lock,
// and bookings hold the lock for microseconds.
package guess
