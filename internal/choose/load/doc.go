// Package load keeps the pending work of the workers: the requests that this service has sent to them.
//
// A router that has chosen a worker books the request, and reports its first output token and its end:
//
//	t := load.NewTable(origin, load.Limits{})
//	err := t.Book(now, load.Booking{ID: id, Rank: rank, Hashes: seq, PrefillTokens: uncached})
//	err = t.PrefillComplete(now, id)  // removes its prefill tokens
//	err = t.Progress(now, id)         // restarts its expiry
//	err = t.OutputBlock(now, id, 0.8) // adds a block; its private blocks weigh 0.8 from now on
//	err = t.Free(now, id)             // removes its whole load
//	rows = t.Loads(rows, seq)         // per rank: tokens, blocks, requests, and the depth of seq
//
// The definition of a load, and its weight in a choice, are Dynamo's (crate dynamo-kv-router 1.6.1, sequences/ and
// scheduling/selector). Blocks of several requests of one rank count once. A decay sets the weight of a request's
// outputs and of the blocks of its prompt that no other request has. The weight stays with a block when other requests
// begin to share it, and when the first one ends. A rank's sum is rounded half up. There are three intended
// differences. Weights are fixed-point numbers, so that sums do not depend on their order. The id of a request whose
// rank was removed is free again at the request's expiry, or after the first call that finds the request gone, instead
// of at a separate sweep. A booking expires after a time without progress, where Dynamo's expires at an absolute age.
//
// # Prompts are a trie
//
// All prompts are in one radix tree (internal/choose/prompts) whose nodes count the requests of each rank. A booking of
// 512 blocks changes one or two nodes. A query of any length visits a few nodes.
//
// # A weight is a copy
//
// Blocks have no weights of their own. Each request has a copy of its blocks' weights, as a few runs inherited from the
// rank's blocks at the booking. Only a request without sharers of a block may change its weight, so on one node all
// copies of a block are equal. A table is therefore a function of its requests, and each request can be sent to another
// node separately, in any order.
//
// # Every node has the same tables
//
// [Replica] keeps a table of each model on every node. A request under way is an entry of [shared.Machine], which
// defines the protocol and its guarantees. This package defines the contents of a request:
//
//   - States merge in any order: output blocks by node, with the greater count of each; flags by or; of two decays, the
//     one after more outputs; of two reports of progress, the later one.
//   - A request expires at its age on the node of its booking. On other nodes it expires after the remaining time in
//     the message, because clocks of hosts are not compared.
//   - Progress sets the state to the age of the request, which restarts the expiry on every node. It does so once in an
//     eighth of the expiry, so a stream of any rate sends at most eight messages within an expiry.
//   - Every node refuses an id while a request has it. Two nodes may both accept an id if they are disconnected, or
//     receive the bookings at the same moment. The writer of the request with the greater key ends it half a second
//     after it has received both. Until then a call with the id may end either request.
//   - A node uses an id again only after the end of its earlier request. So of two requests of one node with the same
//     id, the earlier one has ended.
//
// A watcher of a table (internal/choose/guess) remembers ended requests. A starting node receives them too, but waits
// for them for at most half a second.
//
// A table without requests for twice the expiry is dropped.
//
// # Measured rates
//
// A table measures the prefill rate of each rank, its utilization and the duration of requests ([routing.Pace]), from
// the times at which bookings, first tokens and ends reach the node. From the prompts of bookings it measures the time
// until blocks are requested again ([routing.Reuse]). All nodes receive all bookings, so their measurements are nearly
// equal. The measurements are neither in a digest nor sent: a starting node has none.
//
// # Guarantees of an answer
//
// A call returns after this node has applied it. Other nodes have the change a few milliseconds later, and disconnected
// ones within two seconds of the reconnection. For the changes that a node has confirmed:
//
//   - While the node lives, or after the change has reached another live node, a booking stays until it ends or
//     expires, its rank is removed, or another request has its id with a lesser key. Its later changes count.
//   - If the node is killed before any other node has the change, a booking is lost and its id is free. For a request
//     of other nodes, its prefill may still count, an output block may be missing, and a freed request may stay until
//     it expires.
//   - A node that stops in good order first sends its changes, without waiting for other nodes. If it is disconnected,
//     it guarantees as little as a killed node.
//   - No request exceeds Limits.Expiry without progress on the node of its booking. On other nodes it may live longer
//     by the transit time of the booking, until they receive its end.
//
// # The node's service
//
// [Service] owns a replica: it waits, receives and publishes, and lets readers share a lock on the tables.
package load
