// Package capacity computes the hit rate of a model's prompts as a function of the size of the cache.
//
//	t := capacity.New(capacity.Config{Samples: capacity.MaxSamples, ...})
//	t.Requested("m", 16, time.Now(), "w1", names)   // the blocks of a routed request
//	part := t.Samples("m", 65536)                   // of this node
//	curve := capacity.Compute([]*capacity.Samples{part, other}, workers)
//	curve.Shared.At(200_000)                        // the hit rate of 200,000 blocks
//
// # Reuse distances
//
// The reuse distance of a requested block is the number of different blocks with a later use than the block's last use.
// A cache with LRU eviction has the block if its size exceeds the distance. So one list of distances contains the hit
// rates of all sizes (Mattson et al., 1970). Tiers in series, such as device and host memory, are one cache of their
// total size if a block is in one tier at a time.
//
// A request first reads all its blocks, and then uses them from the last block to the first, as vLLM frees the blocks
// of a request. A block then never has a smaller distance than the blocks before it. Therefore the hits of a request
// are a prefix at every size.
//
// # Samples
//
// [Log] stores only references to blocks with a name below a threshold: SHARDS, "Efficient MRC Construction with
// SHARDS", Waldspurger et al., FAST '15. A name is a uniform hash, so all references to a block are stored or none.
// At the sampling rate R, the distance of a block is about the number of sampled blocks between the uses, divided by R.
// A full log lowers the threshold until the log has enough blocks for the distances of interest ([Config.Blocks]), and
// then drops the oldest references. It raises the threshold when the log has more blocks than necessary. A log has at
// most [Config.Samples] references of 32 bytes.
//
// Hot blocks, such as a system prompt, are few, so a sample of blocks has too many or too few of them. The hits of a
// request are a prefix, so the first sampled miss of a request determines the estimated number of its hits. Cold blocks
// are many, and almost every request has a sampled one. This estimate replaces the correction of SHARDS-adj.
//
// # Curves of a fleet
//
// A node stores only its own requests. Their distances are too small, and reuse across nodes is invisible. Compute
// therefore merges the logs of all nodes in order of time, and then computes the distances. The first half of the
// merged references is only history for the others. A curve ends at the number of blocks in this history
// ([Curve.Limit]).
//
// Compute returns two curves. Shared is one LRU cache of the size for the whole fleet. Routed has one LRU cache for
// each worker, with an equal share of the size, and the requests as they were routed. Shared is usually above Routed,
// but is no bound: in a small cache, requests of one worker may evict blocks that the next request of another needs.
//
// [Tracker] and [Log] know nothing of the output: an answer becomes part of a prompt only with the next turn.
//
// A [Tracker] is safe for concurrent use. A [Log] has no lock. Compute uses no shared state.
package capacity
