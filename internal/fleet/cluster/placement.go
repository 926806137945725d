package cluster

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/zeebo/xxh3"
)

// placementZones is the version of the placement rule in which zones count; before it there was the hash of names
// alone. Records say the latest version that their node knows. While a node that is alive knows none, nobody looks at
// zones: otherwise a partition would wait for an owner that does not know that it is one.
const placementZones = 1

// zoneName is what Kubernetes allows as the value of a label.
var zoneName = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)

// CheckZone says what is wrong with the name of a zone. An empty one is none.
func CheckZone(name string) error {
	if name != "" && !zoneName.MatchString(name) {
		return fmt.Errorf("zone %.80q is not 1 to 63 letters, digits, and -, _ or . between them", name)
	}
	return nil
}

// Replication is how many owners a partition has among n nodes; asked is the most that any of them asks for, 0 if none
// does.
func Replication(n, asked int) int {
	switch {
	case asked > 0:
		return min(n, asked)
	case n <= 3:
		return n
	}
	return 2
}

// Order returns nodes in a partition's order of preference: the best node of each zone, then the second of each zone,
// and so on; among those by a hash of node and partition. A node that is not in zones, or has an empty one, is a zone
// of its own.
func Order(nodes []string, zones map[string]string, p events.Partition) []string {
	type scored struct {
		name  string
		rank  int // in its zone
		score uint64
	}
	list := make([]scored, len(nodes))
	for i, name := range nodes {
		list[i] = scored{name, 0, xxh3.HashStringSeed(name, (uint64(p)+1)*0x9E3779B97F4A7C15)}
	}
	slices.SortFunc(list, func(a, b scored) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.name, b.name))
	})
	seen := map[string]int{}
	for i := range list {
		if zone := zones[list[i].name]; zone != "" {
			list[i].rank = seen[zone]
			seen[zone]++
		}
	}
	slices.SortStableFunc(list, func(a, b scored) int { return cmp.Compare(a.rank, b.rank) })
	out := make([]string, len(nodes))
	for i := range list {
		out[i] = list[i].name
	}
	return out
}
