package cluster

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// naiveOwners chooses the owners one by one: of the remaining nodes, those in zones with the fewest owners, and of
// these the first without zones.
func naiveOwners(nodes []string, zones map[string]string, p events.Partition, copies int) (owners []string) {
	zoneOf := func(name string) string {
		if zone := zones[name]; zone != "" {
			return "zone " + zone
		}
		return "node " + name
	}
	left, taken := Order(nodes, nil, p), map[string]int{}
	for range copies {
		best := left[0]
		for _, name := range left {
			if taken[zoneOf(name)] < taken[zoneOf(best)] {
				best = name
			}
		}
		taken[zoneOf(best)]++
		owners = append(owners, best)
		left = slices.DeleteFunc(left, func(name string) bool { return name == best })
	}
	return owners
}

// TestZones adds and removes nodes with random zones. The owners equal the naive rule and are in as many zones as
// possible. Only a new node acquires additional partitions, and for a partition of a removed node only one other
// node does.
func TestZones(t *testing.T) {
	testkit.Sequential(t)
	const partitions = 32
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 3))
		names, copies := 1+rng.IntN(6), 1+rng.IntN(4)
		var nodes []string
		zones := map[string]string{}
		var before [][]string
		for step := range 30 {
			was, changed := len(nodes), ""
			if was == 0 || was < 16 && rng.IntN(3) > 0 {
				changed = fmt.Sprint("node-", step)
				if nodes = append(nodes, changed); rng.IntN(8) > 0 {
					zones[changed] = fmt.Sprint("z", rng.IntN(names))
				}
			} else {
				i := rng.IntN(was)
				changed = nodes[i]
				nodes = slices.Delete(nodes, i, i+1)
			}
			there := map[string]bool{}
			for _, name := range nodes {
				if zone := zones[name]; zone != "" {
					there["zone "+zone] = true
				} else {
					there[name] = true
				}
			}
			n := min(copies, len(nodes))
			var now [][]string
			for p := range events.Partition(partitions) {
				owners := Order(nodes, zones, p)[:n]
				if want := naiveOwners(nodes, zones, p, n); !slices.Equal(owners, want) {
					t.Fatalf("seed %d: partition %d is of %v, want %v", seed, p, owners, want)
				}
				in := map[string]bool{}
				for _, name := range owners {
					if zone := zones[name]; zone != "" {
						in["zone "+zone] = true
					} else {
						in[name] = true
					}
				}
				if len(in) != min(n, len(there)) {
					t.Fatalf("seed %d: partition %d is in %d zones of %d: %v", seed, p, len(in), len(there), owners)
				}
				now = append(now, owners)
				if step == 0 || was < copies || len(nodes) < copies { // every node has every partition
					continue
				}
				var taken []string
				for _, name := range owners {
					if !slices.Contains(before[p], name) {
						taken = append(taken, name)
					}
				}
				switch joined := len(nodes) > was; {
				case joined && len(taken) > 0 && !slices.Equal(taken, []string{changed}),
					!joined && (len(taken) == 1) != slices.Contains(before[p], changed):
					t.Fatalf("seed %d: %s joins (%v) or leaves, and %v acquire partition %d of %v", seed, changed, joined, taken,
						p, before[p])
				}
			}
			before = now
		}
	}
}

// TestLoadOfZones checks the number of partitions per node in zones of equal and of different sizes.
func TestLoadOfZones(t *testing.T) {
	testkit.Sequential(t)
	const partitions = 16384
	for _, c := range []struct {
		sizes []int     // of zones
		share []float64 // of a node of each zone, relative to an equal share
	}{
		{[]int{8, 8, 8, 8, 8, 8, 8, 8}, []float64{1, 1, 1, 1, 1, 1, 1, 1}},
		{[]int{2, 2, 2}, []float64{1, 1, 1}},
		{[]int{4, 2, 2}, []float64{0.83, 1.17, 1.17}},
		{[]int{6, 2}, []float64{0.67, 2}}, // all zones have all
		{[]int{3, 1, 1, 1}, []float64{0.8, 1.2, 1.2, 1.2}},
	} {
		var nodes []string
		zones := map[string]string{}
		for z, n := range c.sizes {
			for i := range n {
				name := fmt.Sprintf("indexer-%d-%d", z, i)
				nodes, zones[name] = append(nodes, name), fmt.Sprint(z)
			}
		}
		load := map[string]float64{}
		for p := range events.Partition(partitions) {
			for _, name := range Order(nodes, zones, p)[:2] {
				load[name] += float64(len(nodes)) / 2 / partitions
			}
		}
		for _, name := range slices.Sorted(maps.Keys(load)) {
			var z, i int
			if _, err := fmt.Sscanf(name, "indexer-%d-%d", &z, &i); err != nil {
				t.Fatal(err)
			}
			if got, want := load[name], c.share[z]; got < want*0.85 || got > want*1.15 {
				t.Errorf("zones of %v nodes: %s has %.2f of an equal share, want %.2f", c.sizes, name, got, want)
			}
		}
	}
}

// TestZonesWaitForTheOldest: while a live node does not support zones, leaving or not, all nodes ignore zones.
func TestZonesWaitForTheOldest(t *testing.T) {
	const partitions = 64
	m := New(Config{Node: "a", Session: "1", Zone: "x", Partitions: partitions, Replication: 2, Heartbeat: time.Second,
		DeadAfter: 3 * time.Second})
	beat := uint64(0)
	others := []Record{{Node: "b", Zone: "x"}, {Node: "c", Zone: "y"}, {Node: "d"}}
	nodes := []string{"a", "b", "c", "d"}
	zones := map[string]string{"a": "x", "b": "x", "c": "y"}
	for i := range others {
		others[i].Version, others[i].Partitions, others[i].Placement = RecordVersion, partitions, placementZones
	}
	check := func(when string, nodes []string, zones map[string]string) {
		t.Helper()
		beat++
		look := &Look{}
		for _, r := range others {
			if r.Heartbeat == 0 {
				r.Heartbeat = 100 + beat
			}
			look.Records = append(look.Records, Seen{r, beat})
		}
		m.Announce(Advertisement{}, false)
		m.Step(time.Duration(beat)*time.Second, beat, look)
		for p := range events.Partition(partitions) {
			if want := Order(nodes, zones, p)[:2]; !slices.Equal(m.owners[p], want) {
				t.Fatalf("%s: partition %d is of %v, want %v", when, p, m.owners[p], want)
			}
		}
	}
	check("all know zones", nodes, zones)
	others[2].Placement = 0
	check("d is of an earlier version", nodes, nil)
	others[2].Leaving = true
	check("d leaves", nodes[:3], nil)
	others[2].Leaving, others[2].Heartbeat = false, 5
	for range 3 {
		check("d is silent", nodes, nil)
	}
	m.Announce(Advertisement{}, false)
	beat++
	check("d is dead", nodes[:3], zones)
	others[2].Heartbeat, others[2].Placement, others[2].Zone = 0, placementZones, "y"
	zones["d"] = "y"
	check("d is replaced", nodes, zones)
	others[1].Zone, zones["c"] = "x", "x"
	check("c has moved", nodes, zones)
	if got := m.Announce(Advertisement{}, false); got.Zone != "x" || got.Placement != placementZones {
		t.Errorf("it announces %+v", got)
	}
}

func TestZoneNames(t *testing.T) {
	for _, good := range []string{"", "a", "eu-west-1a", "rack_7.b", "R2", strings.Repeat("z", 63)} {
		if err := CheckZone(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{" ", "-a", "a.", "a b", "rack/7", "zoné", "a\n", strings.Repeat("z", 64)} {
		if err := CheckZone(bad); err == nil || !strings.Contains(err.Error(), "63 letters") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
