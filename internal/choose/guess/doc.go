// Package guess answers: which blocks does a worker probably hold, of which its events say nothing (yet)? A request
// that is sent to a worker leaves its prompt's blocks there. Until events say so, or where there are none, that it was
// sent is all there is to go by.
//
//	s, err := guess.New(guess.Config{Settings: settings, Pool: registry.Pool})
//	loads := load.New(load.Config{Watch: s.Observe}) // hears of every booking, of whichever node
//	go s.Run(ctx)
//	s.Depths(model, pool.Ranks, seq, depths)         // how many leading blocks each rank is guessed to hold
//
// Guesses are in no log, snapshot, dump or checksum, and never in the index. Whoever answers puts them beside what the
// index says: the larger device depth of the two counts. Without this package, or while it knows nothing, the index
// alone answers.
//
// # Who gets guesses
//
// A [Rule] follows from a rank's registration and the [Settings]:
//
//	events: none    the guesses are all that there is: for TTL since a request with the block was last sent there, or
//	                as the engine itself would evict (lru), if its capacity is registered
//	with events     predict-on-route, off by default: for a TTL of seconds
//
// With lru, a rank has room for its total_kv_blocks. Blocks of requests under way are leased: they are never evicted.
// Their output blocks take room too, and go as all others when the request has ended; so do prompts that are booked as
// shared with nobody, which give no guesses. Of what is not leased the block that was used longest ago goes first, and
// of one prompt its end, as in vLLM.
//
// # When events have passed a guess
//
// Events of other requests come all the time and say nothing of one that still waits at its engine: that a rank has
// announced something after a booking refutes nothing. But the engine has announced a prompt's blocks when its first
// output token comes. So a guess stands until the router has said so, or that the request has ended, and for one
// second more, in which the events pass shim and log ([Service.Refute]). After that an answer of a log that was read
// to its end knows better: a block that it does not confirm is dropped, with all behind it. An engine that clears its
// cache keeps its guesses no longer than that: what it has not computed yet will be there after the clear. Clocks of
// hosts are not compared. A router that says neither leaves it to the TTL.
//
// An engine that has ended holds nothing: all guesses of its ranks are dropped when its shim says so, or that another
// has taken its place (its state `gone`, or `connected` since another time).
//
// # The table
//
// A [Table] has the guesses of one model. It is stepped: time is an argument. Prompts are in a trie keyed by sequence
// hashes, whose nodes have a slot for each rank that is guessed to hold all of the node's blocks. Invariants, which
// Check verifies:
//
//  1. A rank that has a node has all nodes before it: a slot is used no later, and leased no more often, than the slot
//     before it. So the least recently used block is always an end, and what is dropped leaves no hole.
//  2. A rank's queue has its slots without leases: the first to go is on top.
//  3. A rank's size is the sum of its slots' blocks, of what its leased requests have beside, and of what such requests
//     have left behind.
//
// Memory is bounded: by capacities, by TTLs, and in all by [Settings].MaxBlocks per model; beyond, the soonest to
// expire go until a share of it is left.
//
// # Every node has the same guesses
//
// Nodes share bookings (internal/choose/load), and guesses follow from them: what a node hears of a request that
// another node has booked is what it would hear of its own. A booking that comes late is as old as it is: its TTL began
// when it was made. One that comes twice, or after its end, is not heard here at all. One that is lost leaves a guess
// out, which does no harm.
//
// Requests that have ended are in no table of bookings. A node that starts gets them from another ([Service.Past]): as
// few requests as say what is guessed, and what they have left behind beside their prompts, the latest first, 16 MiB at
// most. A node that was cut off does not: it lacks what began and ended meanwhile. Until new requests come, for one TTL
// at most, it routes as if those workers had forgotten that.
//
// # Concurrency
//
// A table belongs to who locks it. [Service] may be used by any number of goroutines: queries share a lock, bookings
// take it alone, for microseconds.
package guess
