// Package funnel computes the share of requested tokens that could be reused, and the causes for the loss of the
// others.
//
//	t := funnel.New(funnel.Config{...})
//	go t.Run(ctx)
//	t.Applying(message, batch)       // a batch of the log, before the index applies it
//	t.Record(funnel.Request{...})    // a request, with the answers of the index and the choice
//	found, err := t.Report(ctx, report)  // the reuse that the engine reports
//	part, err := t.Funnel(ctx, "m", 10*time.Minute)
//
// The funnel has five steps: asked, seen, held, selected, reused (defined in package api). A step has at most the
// tokens of the step before. The difference is divided among causes, so a step and its losses add up to the step
// before.
//
// The funnel does not delay answers or the index. Requests, and copies of the batches for the index, enter one bounded
// queue, in order. A full queue drops and counts entries. [Config.MaxRate] and [Config.MaxRead] bound the requests and
// the batches per second. The goroutine of Run processes the queue:
//
//   - [History] stores the past of blocks: the first request and the first store, the last store and the last loss,
//     with the ranks. A block's name is a hash of its sequence hash, the model and the block size. It identifies the
//     prompt up to the block's end and reveals no content. Memory is bounded by two generations: a full younger
//     generation replaces the older one. Blocks in use move to the younger generation.
//   - [divide] is the arithmetic of one request up to the step selected: steps and causes from the history. The
//     engine's report ([Tracker.Report]) decides the causes of the step reused.
//   - [Buckets] are sums over spans of ten seconds, for ten minutes, and over minutes, for an hour.
//   - For each model, the newest requests are stored with their block hashes, for inspection.
//
// A node stores its own requests, and the log of its own partitions. For blocks of a request beyond the held blocks, it
// queries the other nodes ([Config.Peers]), for many requests at once. Times of other nodes are compared with its own:
// clocks should differ by less than the time between requests.
package funnel
