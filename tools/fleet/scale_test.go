package fleet

import (
	"cmp"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	scaleNodes    = flag.Int("scale.nodes", 12, "nodes of TestScale")
	scaleCopies   = flag.Int("scale.copies", 2, "replicas of each partition in TestScale")
	scaleZones    = flag.Int("scale.zones", 8, "zones of nodes in TestScale; the first zone fails; 0: no zones")
	scaleWorkers  = flag.Int("scale.workers", 1000, "workers of TestScale")
	scaleRequests = flag.Int("scale.requests", 1000, "requests under way in TestScale")
)

// TestScale stops a rack of nodes, which is a zone if zones are configured, with a proportional part of the workers,
// and restarts them. Then a node is paused, and then NATS has an outage. Bookings continue in all phases. With zones,
// no partition may be only in the rack. No lease may expire during the outage. At the end all nodes must have the same
// requests.
//
// The test prints the message rates, the work of the nodes and the durations of recoveries. The share of a core
// contains the state machines and the simulation, without NATS and without the decoding of workers' records. Flags set
// the size:
//
//	go test ./tools/fleet -run TestScale -v -timeout 0 -scale.nodes 64 -scale.workers 100000 -scale.requests 65000
func TestScale(t *testing.T) {
	t.Parallel()
	s := size{nodes: *scaleNodes, copies: *scaleCopies, workers: *scaleWorkers, partitions: 8 * uint32(*scaleNodes),
		zones: *scaleZones}
	racks := cmp.Or(s.zones, 8)
	w := newWorld(t, 1, s)
	w.book(*scaleRequests)
	b := w.bookings
	begun, before, busy, heard := w.now, w.counts, processorTime(t), b.traffic()
	peak, last := 0, 0 // renewals in a tenth of a second
	incomplete, right := time.Duration(0), time.Duration(0)
	var watch func()
	watch = func() {
		peak, last = max(peak, w.counts.renewals-last), w.counts.renewals
		w.after(100*ms, watch)
	}
	watch()
	phase := func(what string) {
		took, n, c, f := w.now-begun, float64(len(w.nodes)), w.counts, b.traffic()
		each := n * took.Seconds()
		t.Logf("%s: %v; a node uses %.1f %% of a core\n"+
			"  a node receives %.0f changes of records/s; at most %d renewals in 100 ms; %d expiries, %d cleared\n"+
			"  %d partitions restored; longest with one replica %v; answers incomplete for %v, "+
			"%d partitions missing in %d queries\n"+
			"  bookings: choices right after %v; a node receives %.0f messages/s of %.2f MB/s; "+
			"%d exchanges, %d pushed, %d healed",
			what, took.Round(100*ms), (processorTime(t)-busy).Seconds()/each*100,
			float64(c.heard-before.heard)/each, peak, c.expiries-before.expiries, c.clears-before.clears,
			c.restores-before.restores, w.longest.Round(100*ms), incomplete.Round(100*ms), c.missing-before.missing,
			c.queries-before.queries,
			right.Round(100*ms), float64(f.messages-heard.messages)/each, float64(f.bytes-heard.bytes)/each/1e6,
			f.exchanges-heard.exchanges, f.pushed-heard.pushed, f.healed-heard.healed)
		begun, before, busy, heard = w.now, c, processorTime(t), f
		peak, w.longest, incomplete, right = 0, 0, 0, 0
	}
	// settle runs until choices are right and all partitions are at their places.
	settle := func() {
		for from := w.now; !b.right(); right = w.now - from {
			if w.run(100 * ms); w.now-from > 2*time.Minute {
				t.Fatalf("choices are not right after %v", w.now-from)
			}
		}
		w.run(max(0, 2*time.Second-right))
		w.untilSettled()
	}
	for i := range s.nodes {
		w.start(fmt.Sprintf("indexer-%d", i))
	}
	w.untilSettled()
	w.settling = false
	phase("all nodes start at once")
	for range s.workers {
		w.after(w.between(0, renewal), w.hire)
	}
	w.run(renewal)
	phase("workers register")
	b.rate = b.under / 4
	w.run(5 * time.Second)
	phase("requests come")
	b.rate = b.under / 20
	var ask func()
	ask = func() {
		was := w.counts.missing
		if w.query(); w.counts.missing > was {
			incomplete = w.now - begun
		}
		w.after(100*ms, ask)
	}
	ask()
	w.run(renewal)
	phase("nothing happens")

	var dead cluster.Set // partitions only in the rack
	w.allowed = func(p events.Partition) bool { return dead.Has(p) }
	var rack []string
	for i := 0; i < s.nodes; i += racks {
		rack = append(rack, fmt.Sprintf("indexer-%d", i))
	}
	workers := w.workers[:s.workers/racks]
	held := make([]int, s.partitions)
	for _, name := range rack {
		for _, p := range w.nodes[name].serves.List() {
			if held[p]++; held[p] == s.copies {
				dead.Add(p)
			}
		}
	}
	if s.zones > 1 && s.copies > 1 && dead.Len() > 0 {
		t.Errorf("all replicas of partitions %v are in one zone of %d", dead, s.zones)
	}
	for _, name := range rack {
		w.nodes[name].end()
	}
	for _, k := range workers {
		k.dies(0)
	}
	b.abandon()
	settle()
	if n := b.traffic().exchanges - heard.exchanges; n > 3*uint64(s.nodes) { // not as many as pairs
		t.Errorf("%d exchanges when %d of %d nodes are gone", n, len(rack), s.nodes)
	}
	phase(fmt.Sprintf("a rack is gone, with all replicas of %d partitions", dead.Len()))
	for w.run(time.Second); w.counts.clears < len(workers); w.run(time.Second) {
		if w.now-begun > 3*lease {
			t.Fatalf("of %d leases %d are cleared after %v", len(workers), w.counts.clears, w.now-begun)
		}
	}
	phase("its workers' leases expire")

	for _, name := range rack {
		w.start(name)
	}
	for _, k := range workers {
		w.after(w.between(0, time.Second), k.live)
	}
	settle()
	phase("the rack is back")

	late := w.nodes[w.names()[1]]
	late.held = true
	w.run(6 * time.Second)
	phase("a node is held")
	late.resume()
	settle()
	phase("it goes on")

	w.down = true
	w.run(15 * time.Second)
	phase("NATS is away")
	w.back()
	settle()
	w.run(max(0, 5*time.Second-(w.now-begun)))
	phase("it is back")
	if w.counts.expiries > len(workers) {
		t.Errorf("%d leases expired while NATS was away", w.counts.expiries-len(workers))
	}
	for _, k := range w.workers {
		if k.state != registry.Held {
			t.Fatalf("%s is %q", k.record.Instance, k.state)
		}
	}
	if w.counts.missing > 0 && dead.Len() == 0 {
		t.Errorf("%d partitions were missing in answers", w.counts.missing)
	}
	for b.rate = 0; b.under > 0 && !b.same(); w.run(100 * ms) {
		if w.now-begun > time.Minute {
			t.Fatal("nodes do not come to the same tables")
		}
	}
	phase("no more requests come: all nodes have the same tables")
	t.Logf("%d booked, %d lost with a node; the largest message has %d bytes", b.made, b.lost(), b.largest)
}
