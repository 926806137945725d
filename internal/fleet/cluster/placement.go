package cluster

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/zeebo/xxh3"
)

// placementZones is the version of the placement rule with zones. Version 0 uses only the hash of names. A record has
// the latest version that its node supports. If a live node does not support zones, all nodes ignore them. Otherwise a
// partition would wait for an owner that does not consider itself an owner.
const placementZones = 1

// zoneName is the permitted form of the value of a Kubernetes label.
var zoneName = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)

// CheckZone returns an error if the name of a zone is invalid. An empty name means no zone.
func CheckZone(name string) error {
	if name != "" && !zoneName.MatchString(name) {
		return fmt.Errorf("zone %.80q is not 1 to 63 letters, digits, and -, _ or . between them", name)
	}
	return nil
}

// Replication returns the number of owners of a partition among n nodes. asked is the greatest requested number, or 0
// without a request.
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
// and so on. Nodes of the same rank are in the order of a hash of node and partition. A node without a zone is a zone
// of its own.
func Order(nodes []string, zones map[string]string, p events.Partition) []string {
	type scored struct {
		name  string
		rank  int // in the zone
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
