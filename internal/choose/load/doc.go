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
// All prompts are in one radix tree (internal/choose/prompts) whose nodes count the requests of each rank. A booking of
// 512 blocks changes a node or two. A query visits a few nodes, whatever its length.
//
// # A weight is a copy
//
// Blocks have no weights of their own. Each request has a copy of what its blocks weigh: as a few runs, taken over from
// the rank's blocks when it is booked. Only who has a block alone may change its weight, so on one node all copies of a
// block are equal. Thereby a table is a function of its requests, each of which can be sent to another node by itself,
// in any order.
//
// # Every node has the same tables
//
// [Replica] keeps a table of each model on every node. A request under way is an entry of [shared.Machine], which has
// the protocol and its guarantees. This package has what a request means:
//
//   - Its state is merged in any order: output blocks by node, each by the greater count; flags by or; of two decays
//     the one after more outputs.
//   - It expires when its age is reached on the node that booked it, and on others when the rest of its life has passed
//     that came with it: clocks of hosts are not compared.
//   - An id is refused on every node while a request has it. Two nodes that are cut off from each other, or asked at
//     the same moment, may both take it. Half a second after the writer of the request with the greater key has found
//     both, it ends that request. Until then a call with the id may end one of the two.
//   - A node uses an id again only after the request before has ended. So of two requests of one node with the same id
//     the earlier one has ended.
//
// A watcher of a table (internal/choose/guess) remembers requests that have ended. A node that starts gets them too. It
// does not wait for them for longer than half a second.
//
// A table without requests for twice the expiry is dropped.
//
// # Measured rates
//
// A table measures how fast each rank prefills, how busy it is and how long requests take ([routing.Pace]), from the
// times at which bookings, first tokens and ends reach the node. It measures from the prompts of bookings after what
// time blocks are requested again ([routing.Reuse]). All nodes receive all bookings, so that their figures are nearly
// equal. The figures are in no digest, and are not sent: a node that starts measures from the beginning.
//
// # What an answer promises
//
// A call is answered when this node has applied it. Other nodes have it a few milliseconds later; those that it cannot
// reach have it within two seconds of hearing it again. So, of what a node has answered:
//
//   - While the node lives, or once it is known to a node that lives, a booking stays until it ends or expires, or its
//     rank is gone, or another request has its id by a lesser key; and what was said of it counts.
//   - If the node is killed before any other knows, a booking is as if it was never made, and its id is free; of a
//     request of other nodes, its prefill may be counted on, an output block may be missing, and a request that was
//     freed may stay until it expires.
//   - A node that stops in good order sends what it has first, and waits for nobody: it promises as little as one that
//     is killed if it is cut off.
//   - Nothing lives longer than Limits.Expiry on the node that took the booking; on others, by as much as the booking
//     was under way to them, until they hear a node that has seen its end.
//
// # The node's service
//
// [Service] owns a replica: it waits, listens and publishes, and gives out tables to read under a lock that readers
// share.
package load
