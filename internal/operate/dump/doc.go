// Package dump answers: how does what the index holds leave it, and come back, in a form that others read too?
//
// A dump is NDJSON, one NVIDIA Dynamo RouterEvent a line (ai-dynamo/dynamo › lib/kv-router/src/protocols.rs):
//
//	{"worker_id":"w1","storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,
//	 "blocks":[{"block_hash":17,"tokens_hash":13226331709069118873,"mm_extra_info":null}]}},"dp_rank":0}}
//
// [Write] makes it from the newest usable snapshot of each partition, so that each rank's lines belong to exactly one
// place in the log. [Load] publishes such lines, as any release of Dynamo wrote them, as a shim would whose engine is
// the file.
//
// # Promises
//
//  1. Lines of a rank come together, event ids count from 1, a parent before its children.
//  2. Load(Write(x)) holds what x held: the same blocks in the same tiers as often, so that checksums and answers are
//     equal, those of hybrid models too. A block that was evicted from the middle is announced under a name of its own
//     and removed at the end, which reveals and hides what follows it as it was.
//  3. Loading begins a new incarnation of each rank with a clear. A rank that a living shim serves is refused.
//
// # What is not Dynamo's
//
// A RouterEvent has no attention groups. Three fields, which Dynamo ignores, carry them: of a hybrid model's rank, or
// one with a draft model, the first line is a cleared event, with "kv_groups" beside it. That is a list of what each
// group serves, and of the blocks that windows, chunks and Mamba states hold, a block as often as there are copies of
// it:
//
//	{"worker_id":"w1","event":{"event_id":1,"data":"cleared","dp_rank":0},"kv_groups":[
//	 {"group_idx":1,"kv_cache_spec_kind":"sliding_window","window":1024,"storage_tier":"device","block_hashes":[17,18]}]}
//
// "eagle" says that a draft model has the last block computed anew, "group_idx" in a stored or removed event that the
// main group is not group 0, "lookahead" how far hashes read ahead. Who ignores all that sees what the main groups
// hold, which bounds what an engine would reuse from above.
//
// Of a rank with several main groups a block is dumped, once, where all of them hold it, which is what queries see;
// checksums differ then. Blocks that wait for their parents are left out, and counted in [Dumped].
package dump
