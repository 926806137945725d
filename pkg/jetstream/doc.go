// Package jetstream connects kvatlas to NATS. It writes events to the log, keeps them there, and delivers them in order
// without gaps. It stores snapshots so that two writers cannot corrupt them, and serves requests. It defines subjects,
// streams, buckets and headers, and is independent of the contents of events, indexes and snapshots.
//
// # In order of use
//
//	c, err := Connect(ctx, ConnOptions{URLs: []string{"nats://nats:4222"}})
//
//	ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "prod"}) // an indexer: creates
//	err = ns.EnsureStreams(ctx, LogConfig{})
//	ns, err := OpenNamespace(ctx, c, "prod")                        // a shim: reads
//
//	pub, err := ns.OpenPublisher(ctx, key, options) // the last message on the subject is the shim's cursor
//	seq, err := pub.Publish(ctx, messages)        // acknowledged, in order
//
//	r, err := ns.StartReader(ReaderConfig{Partition: 3, After: position, Deliver: deliver})
//	snaps, err := ns.EnsureSnapshots(ctx, BucketConfig{})
//	rev, err := snaps.Commit(ctx, chunks, manifest, expected)
//
//	svc, err := Serve(c, ServiceConfig{Endpoints: endpoints})
//	reply, err := c.Request(ctx, subject, ContentJSON, body)
//
// # Guarantees
//
//  1. Messages that Publish acknowledged are in the log, in the given order, stored once by that call. Publish resolves
//     doubts by reading before it sends a message again.
//  2. Of two publishers on one subject, at least one gets [ErrConflict]. A publisher detects that the log has lost
//     acknowledged messages ([ErrLost]).
//  3. A reader's messages have consecutive sequences. A trimmed start, a hole, and a stream that was recreated or
//     restored from a backup each cause a notice.
//  4. Of two commits on one guard one fails, and all values of the other are stored. A sweep never removes values of a
//     later commit.
//  5. An error has a class with a remedy: see the Err variables.
//
// # Goroutines
//
// [Conn], [Namespace], [Publisher], [Bucket] and [Service] may be used from any goroutine. A [Reader] calls Deliver
// from one goroutine of its own. A context bounds the time of a call: without NATS, calls wait and retry until their
// context ends. Functions in options are called from the goroutines in their comments, and must return soon.
//
// # Tasks of other packages
//
// The caller decides the contents of messages and the handling of repeated messages (readers of events skip known ids).
// It decides when to write a snapshot, what to purge, and the owner of each partition. cmd reads flags and environment.
//
// DESIGN.md beside this file has durability, permissions, and the decisions with their costs.
package jetstream
