package fleet

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	scaleNodes    = flag.Int("scale.nodes", 12, "nodes of TestBookings and TestScale")
	scaleCopies   = flag.Int("scale.copies", 2, "replicas of each partition in TestScale")
	scaleZones    = flag.Int("scale.zones", 8, "zones of nodes in TestScale, the first of which goes; 0: they say none")
	scaleWorkers  = flag.Int("scale.workers", 1000, "workers of TestBookings and TestScale")
	scaleRequests = flag.Int("scale.requests", 1000, "requests under way in TestBookings")
)

// booker is a node's replica of the tables of requests under way.
type booker struct {
	*load.Replica
	origin   uint64
	gone     bool
	away     bool // from NATS
	messages int  // that it has received
	bytes    int
	own      []own // its requests under way, the oldest first
}

type own struct {
	id string
	at time.Duration
}

// bookings are nodes that tell each other what they book, over a net that takes a millisecond.
type bookings struct {
	testing.TB
	rng     *rand.Rand
	now     time.Duration
	nodes   []*booker
	flying  []flying
	sent    int
	bytes   int
	largest int
	booked  int
	refused int
}

type flying struct {
	at   time.Duration
	from *booker
	to   uint64
	data []byte
}

func newBookings(t testing.TB, nodes int) *bookings {
	b := &bookings{TB: t, rng: rand.New(rand.NewPCG(1, 9))}
	for range nodes {
		b.nodes = append(b.nodes, b.node(0))
	}
	return b
}

// node is a node that starts.
func (b *bookings) node(now time.Duration) *booker {
	origin := b.rng.Uint64() | 1
	return &booker{Replica: load.NewReplica(now, load.ReplicaConfig{Origin: origin,
		Limits: load.Limits{Requests: load.MaxRequests}}), origin: origin}
}

var bookedModel = load.Model{Name: "m"}

// step is a millisecond.
func (b *bookings) step() {
	b.now += ms
	n := 0
	for _, f := range b.flying {
		if f.at > b.now {
			break
		}
		n++
		for _, to := range b.nodes {
			if to.gone || to.away || to == f.from || f.to != 0 && f.to != to.origin {
				continue
			}
			if err := to.Receive(b.now, f.data); err != nil {
				b.Fatal(err)
			}
			to.messages++
			to.bytes += len(f.data)
		}
	}
	b.flying = b.flying[n:]
	for _, from := range b.nodes {
		if from.gone || from.Wake() > b.now {
			continue
		}
		for _, m := range from.Step(b.now) {
			if from.away {
				continue
			}
			b.flying = append(b.flying, flying{b.now + ms, from, m.To, m.Data})
			b.sent++
			b.bytes += len(m.Data)
			b.largest = max(b.largest, len(m.Data))
		}
	}
}

func (b *bookings) run(d time.Duration) {
	for end := b.now + d; b.now < end; {
		b.step()
	}
}

// live books and frees requests for a while, so many each second, so that so many are under way.
func (b *bookings) live(d time.Duration, rate, under int) {
	due := 0.0
	for end := b.now + d; b.now < end; {
		for due += float64(rate) / 1000; due >= 1; due-- {
			n := b.nodes[b.rng.IntN(len(b.nodes))]
			if n.gone || n.away || !n.Ready() {
				continue
			}
			hashes := make([]events.SeqHash, 16)
			for i := range hashes {
				hashes[i] = events.SeqHash(b.rng.Uint64())
			}
			id := fmt.Sprint("request-", b.booked)
			rank := events.RankKey{Instance: events.WorkerID(fmt.Sprintf("vllm-decode-%05d", b.rng.IntN(*scaleWorkers)))}
			if err := n.Book(b.now, bookedModel, load.Booking{ID: id, Rank: rank, Hashes: hashes,
				PrefillTokens: 256}); err != nil {
				b.refused++
				continue
			}
			b.booked++
			if n.own = append(n.own, own{id, b.now}); len(n.own) > under/len(b.nodes) {
				if err := n.Free(b.now, bookedModel, n.own[0].id); err != nil {
					b.Fatal(err)
				}
				n.own = n.own[1:]
			}
		}
		b.step()
	}
}

// right reports whether nodes choose by what is under way: by all requests that were booked on nodes that live, but for
// the last 50 ms, and as many as those and what nodes that died have booked.
func (b *bookings) right(nodes []*booker, most int) bool {
	for _, n := range nodes {
		t, live := n.Table(bookedModel), 0
		if t == nil {
			return false
		}
		for _, of := range b.nodes {
			for _, q := range of.own {
				if live++; !of.gone && b.now-q.at > 50*ms && !t.Has(q.id) {
					return false
				}
			}
		}
		if t.Len() > live+most {
			return false
		}
	}
	return true
}

// figures are of all nodes together.
type figures struct {
	sent, bytes, messages, received int
	busy                            time.Duration // of this process, on all cores
	counts                          load.ReplicaCounts
}

func (b *bookings) figures() (f figures) {
	f.sent, f.bytes = b.sent, b.bytes
	for _, n := range b.nodes {
		f.messages, f.received = f.messages+n.messages, f.received+n.bytes
		f.counts.Exchanges += n.Counts.Exchanges
		f.counts.Pushed += n.Counts.Pushed
		f.counts.Healed += n.Counts.Healed
	}
	f.busy = processorTime(b)
	return f
}

// processorTime is how long this process has kept cores busy.
func processorTime(t testing.TB) time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// tell prints what a second has cost since, on each node.
func (b *bookings) tell(what string, since figures, d time.Duration) {
	f, n, s := b.figures(), float64(len(b.nodes)), d.Seconds()
	b.Logf("%s: each node hears %.0f messages/s of %.2f MB/s and works for %.2f %% of a core; %d exchanges, %d pushed, %d healed",
		what, float64(f.messages-since.messages)/n/s, float64(f.received-since.received)/n/s/1e6,
		(f.busy-since.busy).Seconds()/n/s*100, f.counts.Exchanges-since.counts.Exchanges,
		f.counts.Pushed-since.counts.Pushed, f.counts.Healed-since.counts.Healed)
}

// TestBookings keeps requests under way on many nodes, and has an eighth of the nodes die at once and come back. The
// others compare what they have in as many exchanges as they are, not as there are pairs, and have the same afterwards.
// Then a node misses everything for six seconds. It is as large as flags say:
//
//	go test ./tools/fleet -run TestBookings -v -timeout 0 -scale.nodes 64 -scale.workers 100000 -scale.requests 65000
func TestBookings(t *testing.T) {
	b := newBookings(t, *scaleNodes)
	b.run(3 * time.Second)
	phase := func(what string, d time.Duration, do func(time.Duration)) (exchanges uint64) {
		f := b.figures()
		do(d)
		b.tell(what, f, d)
		return b.figures().counts.Exchanges - f.counts.Exchanges
	}
	r := *scaleRequests
	rate := func(n int) func(time.Duration) { return func(d time.Duration) { b.live(d, n, r) } }
	lost := 0 // requests whose node has died: they stay until they expire
	// heal runs until nodes choose rightly again.
	heal := func(what string, nodes ...*booker) {
		begun, f := b.now, b.figures()
		for !b.right(nodes, lost+r/100) {
			if b.live(100*ms, r/20, r); b.now-begun > time.Minute {
				t.Fatalf("%s: choices are not right after %v", what, b.now-begun)
			}
		}
		b.tell(fmt.Sprint(what, ", right after ", b.now-begun), f, max(100*ms, b.now-begun))
	}
	phase("nothing", 2*time.Second, b.run)
	phase("filling", 4*time.Second, rate(r/4))
	phase("steady", 5*time.Second, rate(r/20))
	rack := b.nodes[:len(b.nodes)/8]
	for _, n := range rack {
		n.gone = true
	}
	if n := phase("a rack is gone", 5*time.Second, rate(r/20)); n > 2*uint64(len(b.nodes)) {
		t.Errorf("%d exchanges when an eighth of %d nodes is gone", n, len(b.nodes))
	}
	for _, n := range rack {
		lost += len(n.own)
		*n = *b.node(b.now)
	}
	heal("the rack is back", rack...)
	one := b.nodes[len(b.nodes)-1]
	one.away = true
	phase("one misses everything", 6*time.Second, rate(r/20))
	one.away = false
	heal("it is back", one)
	phase("steady", 5*time.Second, rate(r/20))
	phase("calm", 3*time.Second, b.run)
	var first load.Digest
	for i, n := range b.nodes {
		if d := n.Table(bookedModel).Digest(); i == 0 {
			first = d
		} else if d != first {
			t.Errorf("node %d has %+v, others %+v", i, d, first)
		}
	}
	t.Logf("%d booked, %d refused, %d lost their node; the largest message has %d bytes", b.booked, b.refused, lost,
		b.largest)
}
