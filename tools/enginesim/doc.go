// Package enginesim answers two questions, for tests, demos and benchmarks: what would an inference engine announce
// while it serves these prompts, and what would it hold?
//
// [Start] runs a whole engine as far as its events go: a ZeroMQ publisher and a replay socket, on loopback unless told
// otherwise, that speak as a given [Release] of vLLM does, over a block cache of fixed size that evicts the least
// recently used block, a prompt's tail before its head.
//
//	e, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 16, Capacity: 1000, Announced: twin.Apply})
//	hit, err := e.Serve(prompt, output) // tokens; how many of the prompt's blocks were in the cache
//	e.Crash()                           // the sockets are gone, and all that the engine knew
//	err = e.Restart()                   // a new life at the same endpoints: sequence from 0, empty
//
// [Cache] with [AppendNames] is the same without sockets and events, for asking what another routing would have hit.
//
// # Promises
//
//  1. The truth is told: Announced is called with every event, in the order of the sequence, before the message goes
//     out. What a reader makes of the messages can be compared with what a naive twin makes of the calls.
//  2. Serve is deterministic: the same calls on the same Config give the same events and the same names of blocks.
//     Timestamps, and names under SeedPerLife, are all that differ.
//  3. On the wire, field order and types are those of vLLM's own publisher (testdata).
//
// An engine's methods may be called from any goroutine; Serve, Clear, Crash and Restart take turns.
//
// # The step
//
// Serve works in whole blocks of the prompt followed by the output. The leading blocks that the cache holds are used;
// the prompt's others are announced in one BlockStored, each later block in one of its own, as engines do while
// decoding. Then what exceeds the capacity leaves, one BlockRemoved for each block. All of it is one message, or one
// message an event with PerEvent.
//
// Left out: an engine keeps the blocks of running requests from eviction, computes a prompt's last block again so
// that there is something to sample from (and so announces second copies), and evicts before it stores. For tests of
// copies there is package pyenv's publisher, which announces what it is told to.
package enginesim
