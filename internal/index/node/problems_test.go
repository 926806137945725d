package node

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestOneProblemForEachCause: partitions with the same cause are one problem with a range, and so are places that are
// full for the same reason.
func TestOneProblemForEachCause(t *testing.T) {
	var found problems
	for p := range events.Partition(8) {
		found.add(p, "the log is gone", "15s old", "see NATS")
	}
	found.add(3, "resync needed", "w1/0", "wait")
	want := []string{
		"partitions 0-7: the log is gone: 15s old (of partition 0); what to do: see NATS",
		"partition 3: resync needed: w1/0; what to do: wait",
	}
	if got := found.lines(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	var full fullness
	no := func(file string) usage { return usage{refused: errors.New("no room: write " + file + ": disk full")} }
	full.add("the bucket", no("bucket"))
	for p := range events.Partition(3) {
		full.addLog(p, no("log"))
	}
	full.addLog(5, usage{refused: errors.New("no room: quota")})
	full.add("the store", usage{used: 99, limit: 100})
	want = []string{
		"the store is 99 % full (99 of 100 bytes); what to do: " + seeRoom,
		"the bucket and the logs of partitions 0-2 take nothing: no room: write bucket: disk full; what to do: " + seeRoom,
		"the log of partition 5 takes nothing: no room: quota; what to do: " + seeRoom,
	}
	if got := full.lines(""); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
