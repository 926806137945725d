package fleet

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// bookings are the running requests and every node's replica of the load tables. Messages take a millisecond. During an
// outage of NATS, nodes continue to book, as over HTTP, and receive no messages.
type bookings struct {
	w     *world
	rng   *rand.Rand
	under int     // intended number of running requests
	rate  int     // bookings in a second; the same number ends after the start-up
	due   float64 // to be booked now
	made  int     // bookings

	all    []*booker // of every life of a node
	flying []flying

	largest int // bytes of a message
}

// booker is the replica of a node's life.
type booker struct {
	*load.Replica
	node     *node
	origin   uint64
	messages int // number of received messages
	bytes    int
	own      []own // running requests of this node, the oldest first
}

type own struct {
	id string
	of *worker
	at time.Duration
}

type flying struct {
	at   time.Duration
	from *booker
	to   uint64 // 0: all
	data []byte
}

// book starts bookings. Nodes that start later take part.
func (w *world) book(under int) {
	w.bookings = &bookings{w: w, rng: rand.New(rand.NewPCG(1, 9)), under: under}
	w.after(ms, w.bookings.tick)
}

// join adds a starting node.
func (b *bookings) join(n *node) {
	origin := b.rng.Uint64() | 1
	n.booker = &booker{Replica: load.NewReplica(b.w.now, load.ReplicaConfig{Origin: origin,
		Limits: load.Limits{Requests: load.MaxRequests}}), node: n, origin: origin}
	b.all = append(b.all, n.booker)
}

// runs reports whether a life goes on and is not held.
func (k *booker) runs() bool { return !k.node.ended && !k.node.held }

var bookedModel = load.Model{Name: "m"}

// tick is a millisecond.
func (b *bookings) tick() {
	now, n := b.w.now, 0
	for ; n < len(b.flying) && b.flying[n].at <= now; n++ {
		f := &b.flying[n]
		for _, to := range b.all {
			if b.w.down || !to.runs() || to == f.from || f.to != 0 && f.to != to.origin {
				continue
			}
			to.Receive(now, f.data)
			to.messages++
			to.bytes += len(f.data)
		}
	}
	b.flying = b.flying[n:]
	for b.due += float64(b.rate) / 1000; b.due >= 1; b.due-- {
		b.bookOne()
	}
	for _, from := range b.all {
		if !from.runs() || from.Wake() > now {
			continue
		}
		for _, m := range from.Step(now) {
			if !b.w.down {
				b.flying = append(b.flying, flying{now + ms, from, m.To, m.Data})
				b.largest = max(b.largest, len(m.Data))
			}
		}
	}
	b.w.after(ms, b.tick)
}

// bookOne books a request on a random node and worker, and ends the oldest request of the node above the node's share.
func (b *bookings) bookOne() {
	k, of := b.all[b.rng.IntN(len(b.all))], b.w.workers[b.rng.IntN(len(b.w.workers))]
	for !k.runs() || !k.Ready() {
		k = b.all[b.rng.IntN(len(b.all))]
	}
	for !of.alive {
		of = b.w.workers[b.rng.IntN(len(b.w.workers))]
	}
	hashes := make([]events.SeqHash, 16)
	for i := range hashes {
		hashes[i] = events.SeqHash(b.rng.Uint64())
	}
	id := fmt.Sprint("request-", b.made)
	if err := k.Book(b.w.now, bookedModel, load.Booking{ID: id, Rank: of.record.Key(), Hashes: hashes,
		PrefillTokens: 256}); err != nil {
		b.w.Fatal(err)
	}
	b.made++
	if k.own = append(k.own, own{id, of, b.w.now}); len(k.own) > b.under/b.w.size.nodes {
		b.free(k, k.own[0])
		k.own = k.own[1:]
	}
}

func (b *bookings) free(k *booker, o own) {
	if err := k.Free(b.w.now, bookedModel, o.id); err != nil {
		b.w.Fatalf("at %v %s of %s: %v", b.w.now, o.id, o.of.record.Instance, err)
	}
}

// abandon ends the requests of dead workers, as their callers would.
func (b *bookings) abandon() {
	for _, k := range b.all {
		kept := k.own[:0]
		for _, o := range k.own {
			if o.of.alive || !k.runs() {
				kept = append(kept, o)
			} else {
				b.free(k, o)
			}
		}
		k.own = kept
	}
}

// lost returns the number of requests that were running on nodes at their death. Such requests may remain until expiry.
func (b *bookings) lost() (n int) {
	for _, k := range b.all {
		if k.node.ended {
			n += len(k.own)
		}
	}
	return n
}

// right reports whether the nodes have the running requests. Every node must have all bookings of living nodes, except
// for the last 50 ms. A node may have the lost bookings in addition, and one percent for messages on the way.
func (b *bookings) right() bool {
	if b.under == 0 {
		return true
	}
	live, lost := 0, b.lost()
	for _, of := range b.all {
		if !of.node.ended {
			live += len(of.own)
		}
	}
	for _, k := range b.all {
		if k.node.ended {
			continue
		}
		t := k.Table(bookedModel)
		if t == nil || t.Len() > live+lost+b.under/100 {
			return false
		}
		for _, of := range b.all {
			if of.node.ended {
				continue
			}
			for _, o := range of.own {
				if b.w.now-o.at > 50*ms && !t.Has(o.id) {
					return false
				}
			}
		}
	}
	return true
}

// same reports whether all nodes have the same table.
func (b *bookings) same() bool {
	var first *load.Digest
	for _, k := range b.all {
		if k.node.ended {
			continue
		}
		d := k.Table(bookedModel).Digest()
		if first == nil {
			first = &d
		}
		if d != *first {
			return false
		}
	}
	return true
}

// traffic is the sum of received messages over all lives.
type traffic struct {
	messages, bytes           int
	exchanges, pushed, healed uint64
}

func (b *bookings) traffic() (f traffic) {
	for _, k := range b.all {
		f.messages, f.bytes = f.messages+k.messages, f.bytes+k.bytes
		f.exchanges += k.Counts.Exchanges
		f.pushed += k.Counts.Pushed
		f.healed += k.Counts.Healed
	}
	return f
}

// processorTime returns the processor time of this process.
func processorTime(t testing.TB) time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
