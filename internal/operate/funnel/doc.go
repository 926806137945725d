// Package funnel answers: of the tokens that are asked for, how many could have been reused, and where are the others
// lost?
//
//	t := funnel.New(funnel.Config{...})
//	go t.Run(ctx)
//	t.Applying(message, batch)       // a batch of the log, before the index has it
//	t.Record(funnel.Request{...})    // what was asked, and what the index and the choice have said
//	found, err := t.Report(ctx, report)  // what the engine has reused
//	part, err := t.Funnel(ctx, "m", 10*time.Minute)
//
// Five steps follow each other, each with at most the tokens of the one before: asked, seen, held, selected, reused
// (package api has their meaning). What is lost between two of them is divided among causes, so that a step and its
// losses are the step before.
//
// Nothing of this is in the way of an answer or of the index. Requests, and copies of the batches that the index
// applies, go in their order into one bounded queue. What finds the queue full is counted and left out; and of requests
// and of batches no more are taken in a second than [Config.MaxRate] and [Config.MaxRead] allow. One goroutine, Run,
// takes them out:
//
//   - [History] remembers blocks: who asked for and stored them first, who stored and lost them last. A block's name is
//     made of its sequence hash, the model and the block size, so that it says all of the prompt up to its end, and
//     nothing of what it was. Its memory is bounded: two generations, of which the older one is forgotten when the
//     younger is full; what is used again moves to the younger.
//   - [divide] is the arithmetic of one request: steps and causes from what the history says.
//   - [Buckets] are sums over spans of ten seconds, for ten minutes, and over minutes, for an hour.
//   - Of each model the newest requests are kept, with the hashes of their blocks, so that one can be looked at.
//
// A node remembers what it was asked itself, and what the log of its own partitions says. Of blocks that a request has
// beyond what is held, it asks the other nodes ([Config.Peers]), for many requests at once. Times of other nodes are
// compared with its own: clocks should differ by less than requests follow each other.
package funnel
