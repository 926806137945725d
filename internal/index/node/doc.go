// Package node keeps the index of a namespace's partitions, all of them or those that the cluster assigns to it
// (keep.go): it brings them back from their snapshots, applies the log that follows, answers queries, and writes
// snapshots.
//
// [Machine] decides what a message of the log means: which events of a rank are new, which incarnation is over, where
// something is missing and the rank must be cleared. partition decides what the node does with one partition, and when:
// restore, catch up, serve, ask for a resync, write a snapshot. Both are stepped and replayable. [Node] does the
// waiting around them: each partition that is kept has an owner, a goroutine that does what the partition's phase asks
// for.
//
//	        restore                 read                      save
//	bucket ─────────▶  owner   ◀──────────── log      saver ─────────▶ bucket
//	                     │ work                         │ capture, export a little at a time
//	                     ▼                              ▼
//	                  writer of the partition's shard: owns its Machine and writes to its index
//	                     │ View, how far each partition has come
//	                     ▼
//	                  queries, in whatever goroutine, of all shards
//
// # Promises
//
//  1. A partition's index is what its log says, from its first message or from a snapshot on, each message once.
//  2. An answer reflects at least the places in the log that it names.
//  3. A snapshot that cannot be used is passed over with a reason; whatever fails while one is written, those before
//     stay whole.
//  4. Where what was said before cannot be known any more, the partition says that it needs a resync, asks the shims
//     for one (resync.go), and credits nobody with what it does not know.
//
// The exits of all states that a user sees are in internal/fleet/registry/DESIGN.md.
//
// Partitions are dealt out among shards ([Config.Shards], shards.go), each with an index, a machine, and one goroutine,
// the writer, which owns both; everything else asks it through a bounded queue. Queries read the indexes and the node's
// View, which do not wait for writers. What is said does not depend on how many shards there are, but for the memory
// that an index takes. What an index is, is for pkg/radix; bytes of snapshots for pkg/snapshot; names and guarantees of
// the log for pkg/jetstream.
package node
