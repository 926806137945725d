// Package corpus answers: what would a fleet of engines announce while serving a trace, in bytes that every index can
// be measured with?
//
// A corpus is a file of operations in order of time: blocks that a worker stored, blocks that it removed, and before
// each request the query that a router would ask. [Write] makes one from a trace (tools/trace), deterministically:
// equal options and requests give equal bytes. [Open] reads one into memory as columns of typed hashes, so that a
// benchmark goes through it without decoding or allocating anything. [Digest] sums up answers: two indexes that agree
// on every answer agree on the digest, and [Expected] knows the right one for the corpora in [Named].
//
// # What is simulated
//
// Each worker is an engine with room for Capacity blocks. A request goes to the worker that last served its longest
// known beginning (with probability Sticky), or to any. The worker finds the leading blocks that it holds and stores
// the rest: the prompt's in one operation, each block of the answer in one of its own, as engines announce them while
// decoding. Then it removes what exceeds its room: the least recently used, a prompt's tail before its head ([LRU]), or
// any copy of any block ([Random]), which leaves holes, and makes second copies when what follows a hole is computed
// again. [Holes] has no second copies.
//
// # Format
//
// Little-endian, nothing aligned.
//
//	header   0  magic "KVCORP01"
//	         8  workers u32, block size u32 (tokens)
//	        16  ops, stored, removed, queries, query blocks, store ops, remove ops, held at the end, distinct at the end: u64 each
//	op       0  kind u8 (1 store, 2 remove, 3 query), flags u8 (bit 0: has a parent), reserved u16 = 0, worker u32, n u32
//	store   12  parent u64 (engine hash; 0 without the flag: the first block starts a prompt), n × (engine hash u64, local hash u64)
//	remove  12  n × engine hash u64
//	query   12  n × local hash u64; worker is 0
//
// Engine hashes are opaque; they are the same on all workers for the same prefix, or with [Private] names on none. The
// blocks of one store follow each other. The counts in the header fix the file's length, which a reader checks before
// it believes any of them.
//
// # Goroutines
//
// A [Reader] does not change after [Open]: any number of goroutines may read it, until Close. Everything else is a
// value.
package corpus
