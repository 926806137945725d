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
//
// # Every node has the same tables
//
// [Replica] keeps a table of each model on every node. It is stepped: [Replica.Step] gets the time and returns what is
// to be published, [Replica.Receive] takes what others have published. Nothing of that is acknowledged, and it may be
// lost, late, twice or out of order.
//
// Each booking has a [Key]: the session of the node that took it, and its number there. Three kinds of events name it:
//
//	booked   all of the booking, and its state
//	updated  its state: prefill complete, rank gone, output blocks by node, the last decay, weights
//	freed    nothing more
//
// Two states join into one in any order: counts by their maximum, flags by or, the decay after more outputs. So a later
// event makes up for a lost one. A table remembers which numbers of each session it has seen, as spans. That costs a
// few bytes and holds while there is the table: a booking that comes after its end stays out, and of a booking that
// only one of two tables has it is known whether it is new to the other or has ended there. There are no tombstones
// with a lifetime.
//
// Twice a second each node publishes a beat: for each table a [Digest], and how many messages of events it has sent.
// Two nodes exchange summaries if one has missed such a message. If their digests differ while neither table changes,
// if something may have reached some nodes only (a node has gone silent, or an update came before its booking), or if
// tables change all the time, each node exchanges summaries with the next one in a ring by session. That is enough: of
// what some nodes lack, one that lacks it is before one that has it, and what is sent for it goes to all. So when one
// of 64 nodes dies there are 63 exchanges and not 1,953. A node that has missed messages of many asks one, and the next
// when that has answered, since each sends what it lacks; and as many in 400 ms as have 65,536 requests together, or
// one.
//
// Beside its answer a peer sends a version vector: up to which message of each node it had all before it was asked.
// Of these the asker misses none any more, since what they changed is in the answer. It asks the first node in the ring
// of those of which it has missed messages. So where all have missed messages of all, as when NATS was away, a node has
// those of one other, then of 3, then of 7, and compares with six of 64 and not with 63. While not all that is lacking
// fits into an answer, and to a node that starts, no vector is sent.
//
// Summaries, and what a node lacks that starts, go to the node that they are for. Where many nodes change much,
// batches wait up to a millisecond for each 16 nodes. A summary says what was seen, what is under way, and a hash of
// each state: some twelve bytes per request. Each node then ends what the other has seen the end of, and publishes what
// the other lacks. A node that starts asks, gets the summary of a node that is ready, and is ready when all of that has
// come, or when nobody that is ready was heard for 1.5 s.
//
// A request expires when its age says so on the node that booked it, and on others when the rest of its life has passed
// that came with it: clocks of hosts are not compared. Whoever forgets it first has seen its end.
//
// An id is refused on every node while a request has it. Two nodes that are cut off from each other, or asked at the
// same moment, may both take it. Half a second after a node has found both it ends the one of the greater key; all
// nodes do the same. Until then the end of one of the two may be heard.
//
// Who watches a table (internal/choose/guess) remembers requests that have ended. A node that starts asks for them too,
// and is ready a second later at most though they may not have come.
//
// A table that had nothing for twice the expiry is dropped: whatever was booked in it has expired everywhere, so nobody
// needs to know what it has seen. Each node drops its own in its own time, and makes no table for a beat in which
// another's has nothing. Others may remember what was said of the table that was dropped. So one that is made again
// counts its keys and messages on, from the greatest of all tables that were dropped. Who lacks what was before finds
// that by the beats, and has it after one exchange.
//
// While no other node is heard nothing but beats is published.
//
// # Measured rates
//
// A table measures how fast each rank prefills, how busy it is and how long requests take ([routing.Pace]), from the
// times at which bookings, first tokens and ends become known to the node. All nodes hear all of them, so that their
// figures are nearly equal. They are in no digest, and are not sent: a node that starts measures anew.
//
// # What an answer promises
//
// A call is answered when this node has applied it. Other nodes have it a millisecond later; those that it cannot reach
// have it within two seconds of hearing it again. So, of what a node has answered:
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
