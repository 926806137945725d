package fleet

import (
	"cmp"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestScale has NATS go and come back, then a rack of nodes, which is a zone if nodes say zones, and as large a part of
// the workers. With zones no partition is only in that rack. It says what nodes hear and
// work meanwhile, and after how long all is as it should be. A node's share of a core is of the machines that decide,
// and of the simulation itself: there is no NATS, and records are not decoded. It is as large as flags say:
//
//	go test ./tools/fleet -run TestScale -v -timeout 0 -scale.nodes 64 -scale.workers 100000
func TestScale(t *testing.T) {
	s := size{nodes: *scaleNodes, copies: *scaleCopies, workers: *scaleWorkers, partitions: 8 * uint32(*scaleNodes),
		zones: *scaleZones}
	racks := cmp.Or(s.zones, 8)
	w := newWorld(t, 1, s)
	begun, before, busy := w.now, w.counts, processorTime(t)
	peak, last := 0, 0 // renewals in a tenth of a second
	incomplete := time.Duration(0)
	var watch func()
	watch = func() {
		peak, last = max(peak, w.counts.renewals-last), w.counts.renewals
		w.after(100*ms, watch)
	}
	watch()
	phase := func(what string) {
		took, n, c := w.now-begun, float64(len(w.nodes)), w.counts
		t.Logf("%s: %v; each node hears %.0f changes/s and works for %.1f %% of a core; at most %d renewals in 100 ms; "+
			"%d expiries, %d cleared; %d partitions restored; longest with one replica %v; answers incomplete for %v, "+
			"%d partitions missing in %d queries", what, took.Round(100*ms),
			float64(c.heard-before.heard)/n/took.Seconds(), (processorTime(t)-busy).Seconds()/n/took.Seconds()*100, peak,
			c.expiries-before.expiries, c.clears-before.clears, c.restores-before.restores, w.longest.Round(100*ms),
			incomplete.Round(100*ms), c.missing-before.missing, c.queries-before.queries)
		begun, before, busy = w.now, c, processorTime(t)
		peak, w.longest, incomplete = 0, 0, 0
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

	w.down = true
	w.run(15 * time.Second)
	w.back()
	w.run(5 * time.Second)
	w.untilSettled()
	phase("NATS is away for 15 s")
	if w.counts.expiries > 0 {
		t.Errorf("%d leases expired while NATS was away", w.counts.expiries)
	}

	var dead cluster.Set // partitions that only the rack serves
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
	w.run(2 * time.Second)
	w.untilSettled()
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
	w.run(2 * time.Second)
	w.untilSettled()
	phase("the rack is back")
	for _, k := range w.workers {
		if k.state != registry.Held {
			t.Fatalf("%s is %q", k.record.Instance, k.state)
		}
	}
	if w.counts.missing > 0 && dead.Len() == 0 {
		t.Errorf("%d partitions were missing in answers", w.counts.missing)
	}
}
