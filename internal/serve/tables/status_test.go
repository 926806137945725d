package tables

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestOldNames: counts of an older node under the name parked are printed. Counts under both names are printed once, as
// pending.
func TestOldNames(t *testing.T) {
	var text strings.Builder
	Workers(&text, &api.WorkerList{Complete: true, Workers: []api.WorkerInfo{
		{Instance: "before", Parked: 701}, {Instance: "now", Pending: 702, Parked: 702, LastEvent: 9},
	}})
	for _, events := range []map[string]uint64{
		{"blocks_parked": 3, "parked_expired": 4}, // of an older node
		{"blocks_parked": 5, "blocks_pending": 5, "parked_expired": 6, "pending_expired": 6},
	} {
		Status(&text, &api.Status{Events: events})
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

// TestStale: an answer and a status show partitions that lag behind the log.
func TestStale(t *testing.T) {
	parts := []api.PartitionStatus{{Partition: 0}, {Partition: 1, StaleMS: 12_400}, {Partition: 2, ResyncNeeded: true},
		{Partition: 3, StaleMS: 3_600_000, ResyncNeeded: true}}
	if said := lacks(parts[:1]); said != "" {
		t.Errorf("a complete answer lacks %q", said)
	}
	var out strings.Builder
	Answer(&out, &api.Answer{Model: "m", Complete: true, Partitions: parts, Reason: api.ReasonNotCached},
		&api.Query{})
	want := "OLD: without recent events of partitions 1 (12s), 3 (1h0m0s); " +
		"RESYNC NEEDED: workers in partitions [2 3] may hold further blocks; see indexer status\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("the answer is\n%s", out.String())
	}
	out.Reset()
	Status(&out, &api.Status{Partitions: []api.PartitionDetail{{PartitionStatus: parts[0]},
		{PartitionStatus: parts[1]}}})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	heading, last := strings.Fields(lines[len(lines)-3]), strings.Fields(lines[len(lines)-1])
	for i, h := range heading {
		if h == "STALE" && last[i-1] == "12s" { // the state is empty
			return
		}
	}
	t.Errorf("the status is\n%s", out.String())
}

// TestStatusShowsZones: the table of nodes has a column of zones if any node has a zone. The status of a single node
// contains the zone.
func TestStatusShowsZones(t *testing.T) {
	status := func(node string, zones ...string) *api.Status {
		s := &api.Status{Node: node, Version: "v0.5.0", Namespace: "default", Ready: true, Since: time.Now(),
			Cluster: &api.ClusterStatus{}}
		for i, zone := range zones {
			s.Cluster.Nodes = append(s.Cluster.Nodes, api.NodeStatus{Node: string(rune('a' + i)), Zone: zone})
		}
		return s
	}
	r := &survey.Report{Namespace: "default", Nodes: []survey.Node{{Node: "a", Zone: "rack-1", Status: status("a")},
		{Node: "b", Status: status("b")}, {Node: "c", Zone: "rack-2", Error: "node c does not answer"}}}
	shown := func() string {
		var w bytes.Buffer
		Report(&w, r)
		return w.String()
	}
	const with = `namespace default: 3 nodes

NODE  ZONE    VERSION  STATE      UP  PARTITIONS  LAG  BLOCKS HELD  INDEX  PROBLEMS
a     rack-1  v0.5.0   ready      0s  0           0    0            0 B    0
b     -       v0.5.0   ready      0s  0           0    0            0 B    0
c     rack-2           NO ANSWER                                           
`
	if got := shown(); !strings.HasPrefix(got, with) {
		t.Errorf("%s\nwant\n%s", got, with)
	}
	for i := range r.Nodes {
		r.Nodes[i].Zone = ""
	}
	if got := shown(); !strings.Contains(got, "\nNODE  VERSION  STATE ") ||
		!strings.Contains(got, "\na     v0.5.0   ready ") {
		t.Errorf("no node has a zone:\n%s", got)
	}
	for want, zones := range map[string][]string{
		"node b (v0.5.0), zone rack-2, namespace default: ready": {"rack-1", "rack-2"},
		"node b (v0.5.0), namespace default: ready":              {"rack-1", ""},
	} {
		var w bytes.Buffer
		Status(&w, status("b", zones...))
		if !strings.HasPrefix(w.String(), want) {
			t.Errorf("%s\nwant %s", w.String(), want)
		}
	}
}

// TestSnapshotOf: a node without a record of the writer's snapshot prints dashes.
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

// TestRequestsLine: one part for each operation and transport.
func TestRequestsLine(t *testing.T) {
	line := requestsLine([]api.RequestCount{
		{Transport: api.OverHTTP, Operation: "find", Outcome: "malformed", Count: 1},
		{Transport: api.OverNATS, Operation: "find", Outcome: "busy", Count: 3},
		{Transport: api.OverNATS, Operation: "find", Outcome: "ok", Count: 1},
		{Transport: api.FromNodes, Operation: "find", Outcome: "busy", Count: 3},
	})
	want := "find over http malformed 1, find over nats busy 3 ok 1, find over node busy 3"
	if line != want {
		t.Errorf("%q, want %q", line, want)
	}
}

// TestReplicas: a replica with another checksum than the first is marked.
func TestReplicas(t *testing.T) {
	for _, lost := range []bool{false, true} {
		list := []api.PartitionReplicas{{Partition: 3, Equal: !lost,
			Replicas: []api.ReplicaSum{{Node: "a", Seq: 7, Checksum: "x"}, {Node: "b", Seq: 7, Checksum: "x"}}}}
		if lost {
			list[0].Replicas[1].Checksum = "y"
		}
		var b strings.Builder
		if replicas(&b, list); strings.Contains(b.String(), "DIFFERS") != lost {
			t.Errorf("lost: %v:\n%s", lost, &b)
		}
	}
}
