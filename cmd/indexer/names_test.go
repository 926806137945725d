package main

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestOldFlagsOfServe: the flags' old names set what the new names say.
func TestOldFlagsOfServe(t *testing.T) {
	f := serveCommand().Flags()
	if err := f.Parse(strings.Fields("--max-parked 1 --park-for 2s --max-remembered 3 --remember-for 4s")); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"max-pending": "1", "pending-for": "2s", "max-tombstones": "3", "tombstone-for": "4s",
	} {
		if got := f.Lookup(name); !got.Changed || got.Value.String() != want {
			t.Errorf("--%s is %s, want %s", name, got.Value, want)
		}
	}
}

// TestOldNamesAreReadAndNotPrinted: of a node that says pending blocks under the old name alone they are shown, and of
// one that says both names once.
func TestOldNamesAreReadAndNotPrinted(t *testing.T) {
	var text strings.Builder
	printWorkers(&text, &api.WorkerList{Complete: true, Workers: []api.WorkerInfo{
		{Instance: "before", Parked: 701}, {Instance: "now", Pending: 702, Parked: 702, LastEvent: 9},
	}})
	for _, events := range []map[string]uint64{
		{"blocks_parked": 3, "parked_expired": 4}, // of a node that is older
		{"blocks_parked": 5, "blocks_pending": 5, "parked_expired": 6, "pending_expired": 6},
	} {
		printStatus(&text, &api.Status{Events: events})
	}
	heading, rest, _ := strings.Cut(text.String(), "\n")
	if got := strings.Join(strings.Fields(heading), " "); got != "WORKER RANK MODEL BLOCK SIZE PARTITION DEVICE HOST "+
		"DISK EXTERNAL PENDING LAST EVENT LAST SEEN LEASE AGE EXPIRES ENGINE STATE" {
		t.Errorf("the heading is %s", got)
	}
	for _, want := range []string{
		" 701 ", " 702 ", "since start: blocks_parked 3, parked_expired 4\n",
		"since start: blocks_pending 5, pending_expired 6\n", "SNAPSHOT SEQ",
	} {
		if !strings.Contains(rest, want) {
			t.Errorf("there is no %q in:\n%s", want, rest)
		}
	}
}
