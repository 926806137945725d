// Package registry tracks workers. The shim of each rank registers the rank in a KV bucket and holds a lease on the
// record. After the end of a lease, a node writes to the log that the rank is gone. A lease ends if it expires, if the
// shim ends it together with the engine, or if a node finds the engine's address dead.
//
//	shim:  lease := registry.NewLease(ns, record, observer); lease.Keep(ctx, lost)   // take, renew; lost: read the log
//	node:  r := registry.New(cfg); r.Run(ctx)                                     // watch, probe, expire
//	       r.Workers(), r.Partitions(model), r.Changed()                          // registered workers
//	       r.Sharing(model)                                                       // their shared store
//	       r.Pool(model)                                                          // candidates for a choice
//	       r.Change(ctx, change), r.Declare(ctx, worker), r.Remove(ctx, instance) // changes by operators
//
// # One key, one owner
//
// A rank's [Record] is the JSON value of the key <partition>.<instance>.<rank> in bucket kvatlas_<namespace>_workers.
// Only the holder of the lease writes the record, by compare-and-set: a renewal writes the same bytes again. A starting
// shim takes over the record from any holder. The former holder detects the fencing at its next renewal. A rank with
// several shims in succession stays the same worker.
//
// # Changes by operators
//
// An [Operator] is the value of the key operator.<instance>: the changed attributes of a worker, its drain, or the
// declaration of a worker without a shim. Nodes write it by compare-and-set, and shims never do, so neither overwrites
// the other. A [Pool] combines both: the shim's attributes, overridden by the operator's, and the resulting state. The
// first query after a change builds the pool. A pool is immutable.
//
// # Model claims
//
// The key serves.<instance>.<model> claims that a worker serves a model. [Lease.Keep] writes the claim before the
// lease. A NATS server can restrict the key, unlike the text of a record: the user of a shim may claim only the models
// of its own worker. If the NATS user of the node requires claims ([jetstream.Namespace.ClaimsRequired]), a lease
// counts only with a claim for its model. Other leases are kept apart: they are unused, expire like any lease, and
// count as soon as the claim appears. Queries use a worker's blocks of a model only if [Registry.Claimed] is true.
// Claims are in the stream of the leases, so a node reads the claim first.
//
// A worker has at most 64 claims; nodes delete further claims. Nodes also delete the claims of a removed worker, and of
// a worker without a lease for half an hour. [Claim] writes permanent claims for workers without a lease.
//
// # Time
//
// No clocks of hosts or servers are compared. The age of a lease is the time without a renewal by the node's own
// monotonic clock. The age grows only while the node has proof that the bucket was writable: the node writes the key
// "probe" a few times per lease. After a late probe, a broken watch or a pause of the node, all ages restart. So an
// outage of NATS or of the node removes no worker. The cost: a worker with a failure meanwhile keeps the credit for up
// to one more lease.
//
// # Expiry happens once
//
//	held ──(a node, compare-and-set on the revision that has expired)──▶ expired ──▶ cleared event in the log ──▶ deleted
//	  ▲                                                                    │
//	  └────────────────(the shim is back: compare-and-set)─────────────────┘
//
// By compare-and-set, only one node succeeds, and none does if the shim renews at the last moment. The clear expects
// the rank's last message in the log, as read before the check of the expired record, and closes the rank's
// incarnation. After a failure at any step, any node with an expired record in the watch continues. A record that
// disappeared without a mark ends in the same way. A returning shim reads the log. If the incarnation is closed, the
// shim begins a new incarnation with all blocks that the engine can announce again. Otherwise the shim continues.
//
// An unreadable record, such as a record of a later release, renews and ends nothing. The overwritten registration
// counts until the lease expires. Then this node drops the worker. The log keeps the worker, because other nodes may be
// able to read the record.
//
// # Shims that stop or are killed
//
// A shim that receives a stop request waits for the end of its engine and writes Expired ([Lease.End]). If the engine
// continues, the shim writes the time of its stop ([Lease.Leave]), and the lease waits for the next shim.
//
// If engine and shim are killed, a node detects the failure: once a second, the node checks for shims without a
// connection to NATS, and connects to the serving addresses of the ranks. vigil.go has the states.
//
// # A lost bucket
//
// If the bucket is deleted, a node recreates it ([Config].Recreate), and the nodes write the known content of the old
// bucket. Shims renew there as usual, and all ages restart. So a worker without a shim is cleared a lease
// later.
//
// DESIGN.md lists every state that excludes a worker from a choice, a partition from service or an answer from
// completeness, with the exit of the state and its test.
//
// [Machine] decides. It is a stepped state machine, reads no clock and starts no goroutine. [Registry] and [Lease] are
// the shells around it, and are safe for concurrent use. internal/ingest/shim closes an incarnation in the log, and
// internal/index/node in the index.
package registry
