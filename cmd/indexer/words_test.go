package main

import (
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestSnapshotOf: that a node knows of no snapshot that another writes does not mean that there is none.
func TestSnapshotOf(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		writer string
		at     time.Time
		want   string
	}{
		{"a", time.Time{}, "7 2.0 KiB never"},
		{"", time.Time{}, "7 2.0 KiB never"},
		{"b", time.Time{}, "- - -"},
		{"b", time.Now().Add(-time.Minute), "7 2.0 KiB 1m0s ago"},
	} {
		seq, size, age := snapshotOf(&api.PartitionDetail{Writer: x.writer, SnapshotSeq: 7, SnapshotSize: 2048,
			SnapshotTime: x.at}, "a")
		if got := seq + " " + size + " " + age; got != x.want {
			t.Errorf("%+v: %q", x, got)
		}
	}
}

// TestFunnelSaysWhatWasForgotten: a node that began within the window has forgotten nothing by that alone.
func TestFunnelSaysWhatWasForgotten(t *testing.T) {
	t.Parallel()
	at := time.Now()
	f := &api.Funnel{Requests: 1, Nodes: []api.FunnelNode{{Node: "a", From: at, HistoryFrom: at.Add(2 * time.Second)}}}
	var b strings.Builder
	printFunnel(&b, f)
	if got := b.String(); !strings.HasPrefix(got, "1 request, 0 routed") || strings.Contains(got, "remembers") {
		t.Error(got)
	}
	f.Nodes[0].HistoryLost = 1
	b.Reset()
	printFunnel(&b, f)
	if got := b.String(); !strings.Contains(got, "node a remembers blocks since ") {
		t.Error(got)
	}
}
