// Package enginesim simulates an inference engine for tests, demonstrations and benchmarks: the KV-cache events that
// the engine announces for prompts, and the held blocks.
//
// [Start] runs the event part of an engine: a ZeroMQ publisher and a replay socket, by default on loopback, with the
// protocol of a given [Release] of vLLM. The block cache has a fixed size and evicts the least recently used block, the
// tail of a prompt before the head.
//
//	e, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 16, Capacity: 1000, Announced: twin.Apply})
//	hit, err := e.Serve(prompt, output) // tokens; hit is the number of the prompt's cached blocks
//	e.Crash()                           // closes the sockets and loses all state
//	err = e.Restart()                   // a new life at the same endpoints: sequence 0, empty cache
//
// [Cache] with [AppendNames] is the same cache without sockets and events, for comparison with another routing.
//
// # Promises
//
//  1. Announced is called with every event, in the order of the sequence, before the message is sent. A test can
//     compare a reader of the messages with a naive twin of the calls.
//  2. Serve is deterministic: equal calls on an equal Config give equal events and equal block names. Only timestamps,
//     and names under SeedPerLife, differ.
//  3. The order of fields and the types on the wire are equal to vLLM's own publisher (testdata).
//
// All methods are safe for concurrent use. Serve, Clear, Crash and Restart are serialized.
//
// # The step
//
// Serve splits the prompt and the output into whole blocks. The leading blocks in the cache are used. A single
// BlockStored announces the other blocks of the prompt. Every later block has a separate BlockStored, as in an engine's
// decoding. Then blocks above the capacity are evicted, with a BlockRemoved for every block. All events are in a single
// message, or in separate messages with PerEvent.
//
// With Config.Host, evicted blocks move to host memory, which also evicts the least recently used block. The events
// have the form of vLLM's offloading connector with chunks of one block. ServeTiers copies blocks back to the device.
//
// The simulation differs from an engine in three points. An engine does not evict blocks of running requests. It
// computes the last block of a prompt again to have a position to sample from, and so announces second copies. It
// evicts before a store. For tests of copies, the publisher of package pyenv announces given events.
package enginesim
