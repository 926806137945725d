// Package registry knows which workers there are: each rank's shim registers it in a KV bucket and holds a lease on it.
// A node writes into the log that a rank is gone when its lease has ended: it has expired, the shim has ended it with
// its engine, or a node has found the engine's address dead.
//
//	shim:  lease := registry.NewLease(ns, record, hooks); lease.Keep(ctx, lost)   // take, renew; lost: look into the log
//	node:  r := registry.New(cfg); r.Run(ctx)                                     // watch, probe, expire
//	       r.Workers(), r.Partitions(model), r.Changed()                          // who is there
//	       r.Sharing(model)                                                       // and what store they share
//	       r.Pool(model)                                                          // and which may be chosen
//	       r.Change(ctx, change), r.Declare(ctx, worker), r.Remove(ctx, instance) // what operators say
//
// # One key, one owner
//
// A rank's [Record] is the value of the key <partition>.<instance>.<rank> in bucket kvatlas_<namespace>_workers, in
// JSON. Only the holder of its lease writes it, by compare-and-set: renewing writes the same bytes again. A shim that
// starts takes the record over, whoever held it, and the former holder finds that out at its next renewal: it is
// fenced. A rank with several shims one after the other stays one worker.
//
// # What operators say
//
// An [Operator] is the value of the key operator.<instance>: what was changed of the worker, that it is drained, or
// that there is such a worker though it has no shim. Any node writes it, by compare-and-set, and no shim does, so
// neither overwrites the other. A [Pool] has both put together: what the shim says, with what operators say above it,
// and the state that follows. It is made at the first question after a change and does not change itself.
//
// # Model claims
//
// The key serves.<instance>.<model> claims that a worker serves a model. [Lease.Keep] writes it before the lease.
// Unlike the record's text, a NATS server can restrict this key: the user of a shim may claim the models of its own
// worker only. If the NATS user of the node requires claims ([jetstream.Namespace.ClaimsRequired]), a lease counts only
// while its worker has claimed the model that the lease names. Another lease is kept apart: nothing of it is used, and
// it expires as any other. It counts at once when the claim appears. Queries find what a worker has announced under a
// model only if [Registry.Claimed] is true. Claims are in the stream of the leases, so a node reads a claim first.
//
// A worker has at most 64 claims; nodes delete further ones. Nodes also delete the claims of a worker that is removed,
// and of a worker without a lease for half an hour. [Claim] writes claims that stay, for workers that have no lease.
//
// # Time
//
// No clock of a host, nor of a server, is compared with another's. A lease's age is how long the watching node has not
// seen it renewed, by that node's own monotonic clock, and only while the node has seen for itself that the bucket
// could be written: it writes the key "probe" a few times per lease. A probe that is not acknowledged in its turn, a
// watch that breaks, or a node that stood still begins all ages anew. So nobody is cleared because NATS was away, or
// because the judge was; the price is that a worker which dies meanwhile is credited for up to one lease longer.
//
// # Expiry happens once
//
//	held ──(a node, compare-and-set on the revision that has expired)──▶ expired ──▶ cleared event in the log ──▶ deleted
//	  ▲                                                                    │
//	  └────────────────(the shim is back: compare-and-set)─────────────────┘
//
// The compare-and-set lets one node win, and none if the shim renews at the last moment. The clear expects the rank's
// last message to be the one that was read before it was made sure that the record still says expired; it closes the
// rank's incarnation. Whatever fails in between, any node that sees an expired record goes on with it. A record that
// has vanished without a mark is ended in the same way. A shim that comes back looks into the log: if its incarnation
// was closed it begins a new one with all that its engine can say again, else it takes up where it was.
//
// A record that cannot be read, such as one of a later release, renews nothing and ends nothing. The registration that
// it was written over counts until its lease has run out, and then this node does not know the worker. In the log it
// stays, as the record may be good for others.
//
// # A shim that stops, or is killed
//
// A shim that is told to stop waits for its engine's end and writes Expired itself ([Lease.End]). If the engine runs
// on, it writes when it stopped ([Lease.Leave]), and the lease waits for the next shim.
//
// If engine and shim are killed, a node finds out: it looks once a second which shims have left NATS, and connects to
// the serving addresses of their ranks. vigil.go has the states.
//
// # A bucket that is lost
//
// If somebody deletes the bucket, a node makes it anew ([Config].Recreate), and the nodes write into it what they had
// seen in the old one. Shims renew there as if nothing had been, and ages begin anew, so who died with it is cleared a
// lease later.
//
// DESIGN.md lists every state that keeps a worker from being chosen, a partition from serving or an answer from being
// whole, with its exit and the test of that.
//
// [Machine] decides, and is stepped: it reads no clock and starts nothing. [Registry] and [Lease] wait around it. They
// may be used from any goroutine. What closing an incarnation means in the log is internal/ingest/shim's, what it does
// to the index internal/index/node's.
package registry
