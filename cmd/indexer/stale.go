package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// lacks says in a line what an answer lacks though it is complete: which partitions are old news, and of which a resync
// is needed.
func lacks(parts []api.PartitionStatus) string {
	var old []string
	var resync []events.Partition
	for _, p := range parts {
		if p.StaleMS > 0 {
			old = append(old, fmt.Sprintf("%d (%s)", p.Partition, staleAge(p.StaleMS)))
		}
		if p.ResyncNeeded {
			resync = append(resync, p.Partition)
		}
	}
	var say []string
	if len(old) > 0 {
		say = append(say, "OLD: what is known of partitions "+strings.Join(old, ", ")+" is of so long ago")
	}
	if len(resync) > 0 {
		say = append(say, fmt.Sprintf("RESYNC NEEDED: workers in partitions %v may hold more than is known", resync))
	}
	if len(say) == 0 {
		return ""
	}
	return strings.Join(say, "; ") + "; see indexer status"
}

// staleAge is a partition's age in a table; "-" is none.
func staleAge(staleMS uint64) string {
	if staleMS == 0 {
		return "-"
	}
	return (time.Duration(staleMS) * time.Millisecond).Round(time.Second).String()
}
