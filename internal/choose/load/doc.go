// Package load keeps the pending work of the workers: the requests that this service has sent to workers.
//
// A router books a request at the chosen worker, and reports the first output token and the end of the request:
//
//	t := load.NewTable(origin, load.Limits{})
//	err := t.Book(now, load.Booking{ID: id, Rank: rank, Hashes: seq, PrefillTokens: uncached})
//	err = t.PrefillComplete(now, id)  // removes the prefill tokens
//	err = t.Progress(now, id)         // restarts the expiry
//	err = t.OutputBlock(now, id, 0.8) // adds a block; outputs and unshared blocks weigh 0.8 from now on
//	err = t.Free(now, id)             // removes the whole load of the request
//	rows = t.Loads(rows, seq)         // per rank: tokens, blocks, requests, and the depth of seq
//
// Dynamo defines a load and the weight of a load in a choice (crate dynamo-kv-router 1.6.1, sequences/ and
// scheduling/selector). Blocks of several requests of one rank count once. A decay sets the weight of a request's
// outputs and of the prompt's unshared blocks. A block keeps the weight when more requests begin to share the block,
// and when the first request ends. A rank's sum is rounded half up. This package has three intended differences:
//
//   - Weights are fixed-point numbers, so sums do not depend on the order of additions.
//   - If a rank is removed, the id of its request becomes free at the request's expiry, or after the first call that
//     finds the request gone. Dynamo frees the id in a separate sweep.
//   - A booking expires after a time without progress. In Dynamo, a booking expires at an absolute age.
//
// # Prompts are a trie
//
// All prompts are in one radix tree (internal/choose/prompts). Its nodes count the requests of each rank. A booking of
// 512 blocks changes one or two nodes. A query of any length visits a few nodes.
//
// # A weight is a copy
//
// Blocks have no weights of their own. Each request has a copy of its blocks' weights, as a few runs. The booking
// copies the runs from the rank's blocks. A request may only change the weight of a block that it does not share, so on
// one node all copies of a block are equal. A table is therefore a function of its requests. A node can send each
// request to another node separately, in any order.
//
// # Every node has the same tables
//
// [Replica] keeps a table of each model on every node. A request under way is an entry of [shared.Machine], which
// defines the protocol and its guarantees. This package defines the contents of a request:
//
//   - States merge in any order. The greater count of output blocks per node wins. A flag is set if either state has
//     it. The decay after more outputs wins. The later report of progress wins.
//   - A request expires by age on the booking node. Another node uses the remaining time in the message, because nodes
//     do not compare clocks of hosts.
//   - Progress sets the state to the age of the request. The new state restarts the expiry on every node. Progress
//     changes the state at most once in an eighth of the expiry. A stream of any rate therefore sends at most eight
//     messages within an expiry.
//   - Every node refuses an id in use. Two nodes may accept the same id if the nodes are disconnected, or receive the
//     bookings at the same moment. The request with the greater key loses. Keys compare by the session of the node,
//     which is a random number, and not by time. The writer of this request ends it half a second after the arrival of
//     the second booking. Until then, a call with the id may end either request.
//   - A node uses an id again only after the end of the earlier request. So if two requests of a node have the same id,
//     the earlier request has ended.
//
// A watcher of a table (internal/choose/guess) stores ended requests. A starting node receives the ended requests too,
// but waits for them for at most half a second.
//
// The replica drops a table after twice the expiry without requests.
//
// # Measured rates
//
// A table measures the prefill rate and the utilization of each rank, and the duration of requests ([routing.Pace]).
// The table uses the times at which bookings, first tokens and ends reach the node. From the prompts of bookings, the
// table measures the time until blocks are requested again ([routing.Reuse]). All nodes receive all bookings, so the
// measurements of different nodes are nearly equal. Digests and messages do not contain the measurements. A starting
// node has no measurements.
//
// # Guarantees of an answer
//
// A call returns after the local node has applied the change. Connected nodes have the change a few milliseconds later.
// Disconnected nodes have the change within two seconds of the reconnection. The guarantees for confirmed changes are:
//
//   - A booking stays while the node lives, or after another live node has received the change. The booking ends by a
//     call, by expiry, by removal of the rank, or if another request with a lesser key has the same id. Later changes
//     of the booking count.
//   - If the node is killed before another node has the change, a booking is lost and the id is free. For a request
//     booked on another node, the prefill may still count, an output block may be missing, and a freed request may stay
//     until the expiry.
//   - A graceful stop first sends all changes, without waiting for another node. If the stopping node is disconnected,
//     only the guarantees of a killed node apply.
//   - On the booking node, no request exceeds Limits.Expiry without progress. On another node, a request may live
//     longer by the transit time of the booking, until the node receives the end.
//
// # The node's service
//
// [Service] owns a replica. The service waits, receives and publishes, and lets readers share a lock on the tables.
package load
