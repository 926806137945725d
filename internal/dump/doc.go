// Package dump answers: how does what the index holds leave it, and come back, in a form that others read too?
//
// A dump is NDJSON, one NVIDIA Dynamo RouterEvent a line (ai-dynamo/dynamo › lib/kv-router/src/protocols.rs):
//
//	{"worker_id":"w1","storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,
//	 "blocks":[{"block_hash":17,"tokens_hash":13226331709069118873,"mm_extra_info":null}]}},"dp_rank":0}}
//
// [Write] makes it from the newest usable snapshot of each partition, so that each rank's lines belong to exactly one
// place in the log. [Load] publishes such lines as a shim would whose engine is the file: [Read] takes apart what any
// release of Dynamo wrote.
//
// # Promises
//
//  1. Lines of a rank come together, event ids count from 1, a parent before its children.
//  2. Load(Write(x)) holds what x held: the same blocks in the same tiers as often, so that checksums are equal. A
//     block that was evicted from the middle is announced under a name of its own and removed at the end, which reveals
//     and hides what follows it as it was.
//  3. Loading begins a new incarnation of each rank with a clear. A rank that a living shim serves is refused.
//
// # What a RouterEvent cannot say
//
// It has no attention groups: of a rank with several main ones, a block is dumped, once, where all of them hold it,
// which is what queries see. Blocks of other groups (sliding windows, chunks, Mamba states), what these need of a
// prefix and what a draft model drops have no place in it either: of a hybrid model, answers from what was loaded are
// what the main groups hold, which bounds what an engine would reuse from above. Such blocks, and blocks that wait for
// their parents, are left out and counted in [Left].
package dump
