// Package corpus generates the events of a fleet of engines during a trace, as a file for measurements of any index.
//
// A corpus is a file of operations in order of time: blocks stored by a worker, blocks removed by a worker, and before
// every request the query of a router. [Write] makes a corpus from a trace (tools/trace). The result is deterministic:
// equal options and requests give equal bytes. [Open] reads a corpus into memory as columns of typed hashes, so a
// benchmark needs no decoding and no allocation. [Digest] is a checksum of answers: two indexes with equal answers have
// equal digests. [Expected] returns the correct digest of the corpora in [Named].
//
// # What is simulated
//
// Every worker is an engine with room for Capacity blocks. With probability Sticky, a request goes to the worker that
// last served the longest known prefix, otherwise to a random worker. The worker finds the leading blocks in the cache
// and stores the rest. The blocks of the prompt are a single operation. Every block of the answer is a separate
// operation, as engines announce blocks during decoding. Then the worker evicts blocks above the capacity. [LRU] evicts
// the least recently used block, and the tail of a prompt before the head. [Random] evicts any copy of any block, which
// leaves holes. The blocks after a hole are computed again and become second copies. [Holes] has holes without second
// copies.
//
// # Format
//
// Little-endian, without alignment.
//
//	header   0  magic "KVCORP01"
//	         8  workers u32, block size u32 (tokens)
//	        16  ops, stored, removed, queries, query blocks, store ops, remove ops, held at the end, distinct at the end: u64 each
//	op       0  kind u8 (1 store, 2 remove, 3 query), flags u8 (bit 0: has a parent), reserved u16 = 0, worker u32, n u32
//	store   12  parent u64 (engine hash; 0 without the flag: the first block starts a prompt), n × (engine hash u64, local hash u64)
//	remove  12  n × engine hash u64
//	query   12  n × local hash u64; worker is 0
//
// Engine hashes are opaque. All workers have the same engine hash for the same prefix. With [Private] every worker has
// different hashes. The blocks of a store are consecutive. The counts in the header determine the length of the file. A
// reader checks the length before using the counts.
//
// # Goroutines
//
// A [Reader] is immutable after [Open] and safe for concurrent use until Close. All other types are values.
package corpus
