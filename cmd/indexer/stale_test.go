package main

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestTablesSayWhatIsOld(t *testing.T) {
	parts := []api.PartitionStatus{{Partition: 0}, {Partition: 1, StaleMS: 12_400}, {Partition: 2, ResyncNeeded: true},
		{Partition: 3, StaleMS: 3_600_000, ResyncNeeded: true}}
	if said := lacks(parts[:1]); said != "" {
		t.Errorf("of what is whole and of now: %q", said)
	}
	var out strings.Builder
	printAnswer(&out, &api.Answer{Model: "m", Complete: true, Partitions: parts, Reason: api.ReasonNotCached},
		&api.Query{})
	want := "OLD: what is known of partitions 1 (12s), 3 (1h0m0s) is of so long ago; " +
		"RESYNC NEEDED: workers in partitions [2 3] may hold more than is known; see indexer status\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("an answer is shown as\n%s", out.String())
	}
	out.Reset()
	printStatus(&out, &api.Status{Partitions: []api.PartitionDetail{{PartitionStatus: parts[0]},
		{PartitionStatus: parts[1]}}})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	heading, last := strings.Fields(lines[len(lines)-3]), strings.Fields(lines[len(lines)-1])
	for i, h := range heading {
		if h == "STALE" && last[i-1] == "12s" { // the state is empty
			return
		}
	}
	t.Errorf("a status is shown as\n%s", out.String())
}
