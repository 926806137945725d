// Package jetstream is where kvatlas meets NATS: how do events get into the log, stay there, and come out again in order with nothing
// missing; where are snapshots kept so that two writers cannot spoil them; how does a request find whoever answers? It is the only package
// that imports nats.go and nats-server. It knows subjects, streams, buckets and headers; not what an event, an index or a snapshot says.
//
// # In order of use
//
//	srv, err := jetstream.StartServer(ctx, jetstream.ServerOptions{Dir: "data"})  // or a NATS cluster
//	c, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: srv})          // or URLs
//
//	ns, err := jetstream.JoinNamespace(ctx, c, jetstream.NamespaceConfig{Name: "prod"})  // indexer: creates
//	err = ns.EnsureStreams(ctx, jetstream.LogConfig{})
//	ns, err := jetstream.OpenNamespace(ctx, c, "prod")                                   // shim: reads
//
//	pub, err := ns.OpenPublisher(ctx, key, hooks)    // the last message is the shim's cursor
//	seq, err := pub.Publish(ctx, messages)           // acknowledged, in order, nothing in between
//
//	r, err := ns.StartReader(jetstream.ReaderConfig{Partition: 3, After: position, Out: updates})
//	snaps, err := ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
//	rev, err := snaps.Commit(ctx, chunks, manifest, expected)
//	svc, err := jetstream.Serve(c, jetstream.ServiceConfig{…})
//	reply, err := c.Request(ctx, subject, jetstream.ContentJSON, body)
//
// # What it promises
//
//  1. What Publish acknowledged is stored in the order given, once per call that succeeded, and nothing by others lies between the messages of one
//     atomic batch. Whatever is in doubt is cleared up by reading before anything is sent again.
//  2. Of two publishers on one subject one is told ([ErrConflict]); a log that lost what it had acknowledged is found out ([ErrLost]).
//  3. A reader's messages follow each other without a break in their sequences. A trimmed start, a hole, a stream made anew or
//     restored from a backup is a notice, never silence.
//  4. Of two commits on one guard one fails, and the other's values are all there. Sweeping never takes what a later commit refers to.
//  5. Every error has a class that says what to do next: see the Err variables.
//
// # Goroutines
//
// [Server], [Conn], [Namespace], [Publisher], [Bucket] and [Service] may be used from any goroutine. A [Reader] sends from one goroutine of its own
// and waits while nobody takes. Contexts bound how long a call tries; while NATS is away calls wait and try again until theirs ends.
// Hooks are called from the goroutines that their types name and must return soon.
//
// # What it leaves to others
//
// What a message says and when it repeats what was said before (readers of events drop ids that they have), when a snapshot is due
// and what may be purged, which node owns what. Flags and environment are read in cmd.
//
// Durability, the reasons for the choices made and their price are in DESIGN.md beside this file.
package jetstream
