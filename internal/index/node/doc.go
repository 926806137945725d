// Package node keeps the index of a namespace's partitions: of all partitions, or of the partitions that the cluster
// assigns to the node (keep.go). The package restores partitions from snapshots, applies the log after the snapshot,
// answers queries and writes snapshots.
//
// [Machine] interprets the messages of the log: new events of a rank, the end of an incarnation, and gaps after which
// the rank must be cleared. partition decides the node's next action for one partition: restore, catch up, serve,
// request a resync, write a snapshot. Both are state machines without goroutines or clocks, so tests can replay them.
// [Node] adds the waiting. Every kept partition has a runner, a goroutine that performs the action of the partition's
// phase.
//
//	        restore                 read                      save
//	bucket ─────────▶  runner  ◀──────────── log      saver ─────────▶ bucket
//	                     │ work                         │ capture, then export in small steps
//	                     ▼                              ▼
//	                  writer of the partition's shard: owns its Machine and writes to its index
//	                     │ View, and the applied position of each partition
//	                     ▼
//	                  queries, in any goroutine, over all shards
//
// # Guarantees
//
//  1. A partition's index reflects the log, from the first message or from a snapshot on, with every message applied
//     once.
//  2. An answer reflects at least the log positions in its partition list.
//  3. A restore skips an unusable snapshot and reports the reason. If a write of a snapshot fails, earlier snapshots
//     stay intact.
//  4. If earlier events can no longer be read, the partition reports resync_needed and requests a resync from the shims
//     (resync.go). The index then credits no rank with unconfirmed blocks.
//
// internal/fleet/registry/DESIGN.md lists how each state visible to users ends.
//
// Partitions are distributed over shards ([Config.Shards], shards.go). A shard has an index, a machine and one
// goroutine, the writer, as the owner of index and machine. All further goroutines reach the writer through a bounded
// queue. Queries read the indexes and the node's View without waiting for writers. The number of shards changes the
// memory of the index, but no answer. pkg/radix defines the index, pkg/snapshot the bytes of snapshots, and
// pkg/jetstream the names and guarantees of the log.
package node
