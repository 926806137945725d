package fleet

import (
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// worker is a rank with a record in the workers' bucket and a subject in the log.
type worker struct {
	w         *world
	record    registry.Record // the record without the state
	partition events.Partition

	state    registry.State // in the bucket; empty: no record
	revision uint64
	renewed  time.Duration // time of the last write of the lease

	alive  bool
	life   int           // number of the shim's life
	died   time.Duration // end of the last life
	seq    int           // of the last message in the log
	closed bool          // whether the last message closes the incarnation
	clears int           // of all incarnations
	expect int           // number of expiries of the lease
	back   int           // number of times that the shim took over an expired record, perhaps before the clear
}

// change is a change of the workers' bucket.
type change struct {
	at       time.Duration
	of       *worker
	state    registry.State // empty: deleted
	revision uint64
}

func (w *world) changed(k *worker, s registry.State) {
	w.revision++
	k.state, k.revision = s, w.revision
	w.changes = append(w.changes, change{w.now, k, s, w.revision})
}

func (w *world) hire() {
	i := len(w.workers)
	k := &worker{w: w}
	k.record = registry.Record{
		Version: 1, Instance: events.WorkerID(fmt.Sprintf("vllm-decode-%05d", i)), Model: "m", BlockSize: 16,
		Source: "vllm",
		State:  registry.Held, LeaseMS: lease.Milliseconds(),
	}
	k.partition = w.partitionOf(k.record.Instance)
	w.workers = append(w.workers, k)
	k.live()
}

// live starts the worker's shim. The shim acquires the record, reads the log, and continues the incarnation unless the
// incarnation is closed.
func (k *worker) live() {
	k.alive = true
	k.life++
	k.renew(k.life, true)
}

// renew writes the lease, three times within the lease's length.
func (k *worker) renew(life int, first bool) {
	w := k.w
	if !k.alive || life != k.life {
		return
	}
	if w.down {
		w.offline = append(w.offline, func() { k.renew(life, first) })
		return
	}
	lost := k.state != registry.Held && !first
	if k.state == registry.Expired {
		k.back++
	}
	w.changed(k, registry.Held)
	w.counts.renewals++
	k.renewed = w.now
	if lost {
		w.Fatalf("at %v the lease of the live worker %s had expired", w.now, k.record.Instance)
	}
	if first {
		w.after(w.between(0, 20*ms), func() {
			if life == k.life && (k.closed || k.seq == 0) { // a new incarnation
				k.seq++
				k.closed = false
			}
		})
		w.after(2*renewal, func() { // look again, in case a clear was running
			if k.alive && life == k.life && k.closed {
				k.seq++
				k.closed = false
			}
		})
	}
	w.after(w.between(renewal*9/10, renewal), func() { k.renew(life, false) })
}

// dies ends the worker. After a while the worker restarts, unless back is zero.
func (k *worker) dies(back time.Duration) {
	k.alive, k.died = false, k.w.now
	if back > 0 {
		life := k.life
		k.w.after(back, func() {
			if k.life == life {
				k.w.counts.returns++
				k.live()
			}
		})
	}
}

// applyChanges passes the changes of the workers' bucket to a node's state machine.
func (n *node) applyChanges() {
	w := n.w
	for ; n.applied < len(w.changes); n.applied++ {
		c := &w.changes[n.applied]
		if c.at > w.now-20*ms {
			return
		}
		w.counts.heard++
		if c.state == "" {
			n.leases.Gone(c.of.record.Key())
			if n.booker != nil && c.of.state == "" { // the model passes the end at once
				n.booker.RemoveRank(w.now, c.of.record.Key())
			}
			continue
		}
		r := c.of.record
		r.State = c.state
		n.leases.Seen(r, c.revision, c.at)
	}
}

// probe is a turn of the node's judge of leases.
func (n *node) probe() {
	w := n.w
	every := n.leases.Every()
	if every == 0 {
		every = time.Second
	}
	n.after(every, n.probe)
	n.applyChanges()
	sent := w.now
	n.after(w.between(0, 20*ms), func() {
		if w.down {
			return
		}
		n.leases.Probed(sent)
		if n.acked == 0 {
			return
		}
		for _, d := range n.leases.Due(w.now,
			func(k events.RankKey) bool { return n.View().Writes(w.partitionOf(k.Instance)) }) {
			n.after(w.between(0, 20*ms), func() { n.expire(w.byName(d.Record.Instance), d) })
		}
	})
}

// back ends the outage of NATS. A shim with a missed renewal renews after a random time, as in registry.Lease.
func (w *world) back() {
	w.down = false
	for _, renew := range w.offline {
		w.after(w.between(100*ms, lease/12), renew)
	}
	w.offline = nil
}

func (w *world) byName(id events.WorkerID) *worker {
	var i int
	if _, err := fmt.Sscanf(string(id), "vllm-decode-%d", &i); err != nil {
		w.Fatal(err)
	}
	return w.workers[i]
}

// expire ends a lease as registry.Registry does: mark, read the end of the log, check the mark, clear, delete. Every
// step takes time.
func (n *node) expire(k *worker, d registry.Due) {
	w := n.w
	if w.down {
		return
	}
	revision := d.Revision
	if d.Record.State == registry.Held {
		if k.revision != revision {
			return // the lease was renewed, or another node is clearing the worker
		}
		if k.alive || w.now-k.renewed < lease {
			w.Fatalf("at %v a node ends the lease of %s, renewed %v before; alive: %v", w.now, k.record.Instance,
				w.now-k.renewed, k.alive)
		}
		w.changed(k, registry.Expired)
		w.counts.expiries++
		k.expect++
		revision = k.revision
	}
	n.after(w.between(0, 20*ms), func() { n.clear(k, revision) })
}

func (n *node) clear(k *worker, revision uint64) {
	w := n.w
	last, closed := k.seq, k.closed
	n.after(w.between(0, 20*ms), func() {
		if k.revision != revision || w.down {
			return
		}
		n.after(w.between(0, 20*ms), func() {
			switch {
			case w.down:
				return
			case closed:
			case k.seq != last: // fenced: read the end again
				w.counts.fenced++
				n.clear(k, revision)
				return
			default:
				k.seq++
				k.closed = true
				k.clears++
				w.counts.clears++
			}
			n.after(w.between(0, 20*ms), func() {
				if k.revision == revision && !w.down {
					w.changed(k, "")
				}
			})
		})
	})
}

// churn stops and starts workers every second.
func (w *world) churn(each int) {
	if w.calm {
		return
	}
	for range each {
		if k := w.workers[w.rng.IntN(len(w.workers))]; k.alive {
			switch w.rng.IntN(4) {
			case 0:
				k.dies(w.between(time.Second, lease*2/3)) // restarted by the host
			case 1:
				k.dies(w.between(lease*9/10, lease*3/2)) // near the expiry of the lease
			default:
				k.dies(0)
				w.hire()
			}
		}
	}
	w.after(time.Second, func() { w.churn(each) })
}
