// Package load answers: what have the workers to do, of what this service has sent them?
//
// A router that has chosen a worker books the request, says when its first output token comes and when it has ended:
//
//	t := load.NewTable(origin, load.Limits{})
//	err := t.Book(now, load.Booking{ID: id, Rank: rank, Hashes: seq, PrefillTokens: uncached})
//	err = t.PrefillComplete(now, id)  // its prefill tokens leave
//	err = t.OutputBlock(now, id, 0.8) // one block more; its own blocks weigh 0.8 from now on
//	err = t.Free(now, id)             // all of it leaves
//	rows = t.Loads(rows, seq)         // per rank: tokens, blocks, requests, and how much of seq it is working on
//
// What a load is, and how it counts in a choice, is Dynamo's (crate dynamo-kv-router 1.6.1, sequences/ and
// scheduling/selector): blocks that requests of one rank share count once; a decay weighs a request's outputs, and what
// of its prompt it has alone; the weight stays with a block when others come to share it, and when the first one ends;
// a rank's sum is rounded half up. A booking expires at an absolute age. Differences by intent: weights are fixed-point
// numbers, so that sums do not depend on their order; and the id of a request whose rank was removed is free again when
// the request would have expired, or at the first call that finds it gone, not at a sweep of its own.
//
// # Prompts are a trie
//
// All prompts are in one radix tree (trie.go) whose nodes count each rank's requests. Booking 512 blocks enters a node
// or two, and a query passes a few nodes, whatever its length: the ranks of a node are among those of the node before,
// so only nodes where ranks drop out are looked at.
//
// # A weight is a copy
//
// Blocks have no weights of their own. Each request has a copy of what its blocks weigh: as a few runs, taken over from
// the rank's blocks when it is booked. Only who has a block alone may change its weight, so on one node all copies of a
// block are equal. Thereby a table is a function of its requests, each of which can be sent to another node by itself,
// in any order.
package load
