// Package jetstream is where kvatlas meets NATS: how do events get into the log, stay there, and come out again in
// order with nothing missing; where are snapshots kept so that two writers cannot spoil them; how does a request find
// whoever answers? It knows subjects, streams, buckets and headers; not what an event, an index or a snapshot says.
//
// # In order of use
//
//	srv, err := natsserver.Start(ctx, natsserver.Options{Dir: "data"}) // or a NATS cluster
//	c, err := Connect(ctx, ConnOptions{Server: srv})                   // or URLs
//
//	ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "prod"}) // an indexer: creates
//	err = ns.EnsureStreams(ctx, LogConfig{})
//	ns, err := OpenNamespace(ctx, c, "prod")                        // a shim: reads
//
//	pub, err := ns.OpenPublisher(ctx, key, hooks) // the last message on the subject is the shim's cursor
//	seq, err := pub.Publish(ctx, messages)        // acknowledged, in order
//
//	r, err := ns.StartReader(ReaderConfig{Partition: 3, After: position, Deliver: deliver})
//	snaps, err := ns.EnsureSnapshots(ctx, BucketConfig{})
//	rev, err := snaps.Commit(ctx, chunks, manifest, expected)
//
//	svc, err := Serve(c, ServiceConfig{Endpoints: endpoints})
//	reply, err := c.Request(ctx, subject, ContentJSON, body)
//
// # What it promises
//
//  1. What Publish acknowledged is in the log, in the order given, and was stored once by that call. What is in
//     doubt is cleared up by reading before anything is sent again.
//  2. Of two publishers on one subject one is told ([ErrConflict]); a publisher finds out that the log has lost what
//     it had acknowledged ([ErrLost]).
//  3. A reader's messages follow each other without a break in their sequences. A trimmed start, a hole, a stream
//     made anew or restored from a backup is a notice, never silence.
//  4. Of two commits on one guard one fails, and all values of the other are there. Sweeping never takes what a later
//     commit refers to.
//  5. An error has a class that says what to do next: see the Err variables.
//
// # Goroutines
//
// [Conn], [Namespace], [Publisher], [Bucket] and [Service] may be used from any goroutine. A [Reader] calls
// Deliver from one goroutine of its own. A context bounds how long a call tries: while NATS is
// away, calls wait and try again until theirs ends. Hooks are called from the goroutines that their types name and
// must return soon.
//
// # What it leaves to others
//
// What a message says, and what becomes of one that says again what was said before (readers of events drop ids that
// they have); when a snapshot is due and what may be purged; which node owns what. Flags and environment are read in
// cmd.
//
// Durability, permissions, and the reasons for the choices made with their price are in DESIGN.md beside this file.
package jetstream
