package survey

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestSharedProblemIsListedOnce: a problem of several nodes, such as a full disk, is listed once.
func TestSharedProblemIsListedOnce(t *testing.T) {
	status := func(ready bool, problems ...string) *api.Status { return &api.Status{Ready: ready, Problems: problems} }
	r := Report{Nodes: []Node{
		{Node: "a", Status: status(true, "the disk is full", "a's own")},
		{Node: "b", Status: status(false, "the disk is full")},
		{Node: "c", Error: "node c is gone"},
		{Node: "d", Status: status(true)},
	}}
	want := []string{
		"node c is gone", "nodes a, b: the disk is full", "node a: a's own", "node b: " + NotReady,
	}
	if got := r.problems(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestZones: a node's own status has priority. Another node reports the zone of a silent node. Nodes of earlier
// versions report no zone.
func TestZones(t *testing.T) {
	status := func(of string, nodes ...api.NodeStatus) *api.Status {
		return &api.Status{Node: of, Cluster: &api.ClusterStatus{Nodes: nodes}}
	}
	node := func(name, zone string) api.NodeStatus { return api.NodeStatus{Node: name, Zone: zone} }
	r := Report{Nodes: []Node{
		{Node: "a", Status: status("a", node("a", "rack-1"), node("b", "rack-2"), node("c", "rack-9"), node("e", "rack-5"))},
		{Node: "alone", Status: &api.Status{Node: "alone"}},
		{Node: "b", Error: "node b does not answer"},
		{Node: "c", Status: status("c", node("a", "rack-8"), node("c", "rack-3"))}, // both nodes have changed their zone
		{Node: "d", Status: status("d", node("a", ""), node("b", ""), node("c", ""), node("d", ""), node("e", ""))},
		{Node: "e", Status: status("e", node("e", ""), node("a", "rack-1"))}, // restarted without a zone
		{Node: "f", Error: "node f is gone"},
	}}
	r.addZones()
	for _, n := range r.Nodes {
		if want := map[string]string{"a": "rack-1", "b": "rack-2", "c": "rack-3"}[n.Node]; n.Zone != want {
			t.Errorf("node %s is in zone %q, want %q", n.Node, n.Zone, want)
		}
	}
}

// TestOneProblemForEachCause: a cause in several partitions is one problem, with all partitions and the evidence of the
// first. Problems with different objects stay separate.
func TestOneProblemForEachCause(t *testing.T) {
	var list Problems
	for _, p := range []struct{ node, text string }{
		{"a", "partitions 0-3: the log is gone: 15s old" + RemedyMark + "see NATS"},
		{"b", "partitions 2-5,9: the log is gone: 17s old" + RemedyMark + "see NATS"},
		{"b", "partition 4: the log is gone" + RemedyMark + "wait"},
		{"a", "engines are silent: w1/0"}, {"b", "engines are silent: w2/0"}, {"c", "engines are silent: w1/0"},
		{"a", "partition of the disk: full"},
	} {
		list.Add(p.node, p.text)
	}
	var got []string
	for _, p := range list {
		got = append(got, p.Where()+": "+p.String())
	}
	want := []string{
		"nodes a, b: partitions 0-5,9: the log is gone: 15s old" + RemedyMark + "see NATS",
		"node b: partition 4: the log is gone" + RemedyMark + "wait",
		"nodes a, c: engines are silent: w1/0", "node b: engines are silent: w2/0", "node a: partition of the disk: full",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
