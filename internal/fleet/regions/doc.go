// Package regions exchanges digests of cached prefixes between regions. A region is a NATS deployment with its own
// indexer nodes and its own index. Each node publishes a digest of the written partitions, and keeps the digests of the
// nodes of other regions:
//
//	messages, err := digest.Messages(incarnation, number, ageMS) // to publish, in order
//	m := regions.New(regions.Config{Region: "eu", Prices: prices, MaxAge: time.Minute})
//	changed, err := m.Receive(now, "us", "node-1", data)            // a message of another region
//	changed = m.Tick(now)                                        // a few times in the maximum age
//	list, err := m.View().Prefixes(now, &question)               // from any goroutine
//
// # Guarantees
//
//   - A prefix in a digest is of a single rank. A region's prefix is not too short, except for blocks that changed
//     after the digest, or that the digest has no room for; the answer reports both.
//   - A prefix is too long with a probability of 1/256 for each digest; see [FalsePositives].
//   - A region without a recent digest is unknown, not empty.
//   - Messages may be lost, late and duplicated. A digest with a lost message is skipped. Clocks of hosts are not
//     compared; a digest's age excludes the time on the network.
//   - Every list of a receiver is bounded. Input beyond the bounds is counted.
//
// internal/index/node makes the lists of hashes, and internal/serve/server is the shell with clock and NATS. DESIGN.md
// has the format and the reasons.
package regions
