// Package dump exports and imports the holdings of the index, in a format for other programs too.
//
// A dump is NDJSON, with one NVIDIA Dynamo RouterEvent per line (ai-dynamo/dynamo › lib/kv-router/src/protocols.rs):
//
//	{"worker_id":"w1","storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,
//	 "blocks":[{"block_hash":17,"tokens_hash":13226331709069118873,"mm_extra_info":null}]}},"dp_rank":0}}
//
// [Write] reads the newest usable snapshot of each partition, so the lines of a rank describe exactly one position in
// the log. [Load] publishes lines of any release of Dynamo, in the way of a shim with the file as its engine.
//
// # Promises
//
//  1. The lines of a rank are contiguous. Event ids count from 1, and a parent comes before its children.
//  2. Load(Write(x)) restores the holdings of x: the same blocks, tiers and numbers of copies. Checksums and answers
//     are equal, also for hybrid models. A block that was evicted from the middle is stored under a new name and
//     removed at the end, so the visible prefixes are equal.
//  3. Loading begins a new incarnation of every rank with a clear. A rank with a live shim is refused.
//
// # Extensions of Dynamo's format
//
// A RouterEvent has no attention groups. Three additional fields contain the groups; Dynamo ignores them. For a rank of
// a hybrid model, or with a draft model, the first line is a cleared event with "kv_groups". The field lists the
// specification of each group, and the blocks of windows, chunks and Mamba states. A block appears once per copy:
//
//	{"worker_id":"w1","event":{"event_id":1,"data":"cleared","dp_rank":0},"kv_groups":[
//	 {"group_idx":1,"kv_cache_spec_kind":"sliding_window","window":1024,"storage_tier":"device","block_hashes":[17,18]}]}
//
// "eagle" means that the last block is recomputed for a draft model. "group_idx" in a stored or removed event means
// that the main group is not group 0. "lookahead" is the number of tokens after a block in its hash. Without
// these fields, a program reads the holdings of the main groups, an upper bound on the engine's reuse.
//
// For a rank with several main groups, a block is dumped once, if all main groups hold it. Queries see the same blocks,
// but checksums differ. Blocks without a known parent are left out, and counted in [Dumped].
package dump
