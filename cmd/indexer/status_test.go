package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestStatusShowsZones: the table of nodes has a column of zones if any node has one, and one node's status names its.
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
		printReport(&w, r)
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
		printStatus(&w, status("b", zones...))
		if !strings.HasPrefix(w.String(), want) {
			t.Errorf("%s\nwant %s", w.String(), want)
		}
	}
}
