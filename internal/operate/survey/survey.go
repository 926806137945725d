// Package survey collects the status of all nodes of a namespace, through any node that answers. Nodes without an
// answer are listed too.
package survey

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// Report is the status of all nodes, in the form of the JSON output.
type Report struct {
	Namespace string   `json:"namespace"`
	Nodes     []Node   `json:"nodes"`    // sorted by name
	Problems  []string `json:"problems"` // problems of all nodes, with the names of the nodes
}

// Node is the status of one node, or the reason for a missing status.
type Node struct {
	Node   string      `json:"node"`
	Zone   string      `json:"zone,omitempty"` // see [Zones]
	Status *api.Status `json:"status,omitempty"`
	Error  string      `json:"error,omitempty"`
}

// Nodes requests the status of any node. Answering nodes relay the requests to the nodes in their lists. A request may
// use half of the remaining time.
func Nodes(ctx context.Context, c *client.Client) (*Report, error) {
	first, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	r := &Report{Namespace: first.Namespace, Nodes: []Node{{Node: first.Node, Status: first}},
		Problems: []string{}}
	for {
		unasked := r.unasked()
		if len(unasked) == 0 {
			break
		}
		reports := make([]Node, len(unasked))
		var all sync.WaitGroup
		for i, name := range unasked {
			all.Go(func() {
				reports[i].Node = name
				s, err := c.StatusOf(ctx, name)
				switch refused, is := errors.AsType[*api.Error](err); {
				case err == nil:
					reports[i].Status = s
				case is:
					reports[i].Error = refused.Message
				default:
					reports[i].Error = err.Error()
				}
			})
		}
		all.Wait()
		r.Nodes = append(r.Nodes, reports...)
	}
	r.addGone()
	r.addZones()
	slices.SortFunc(r.Nodes, func(a, b Node) int { return strings.Compare(a.Node, b.Node) })
	r.Problems = r.problems()
	return r, nil
}

// problems returns the problems of all nodes, with the names of the nodes.
func (r *Report) problems() []string {
	list := []string{}
	var shared Problems
	for _, n := range r.Nodes {
		if n.Status == nil {
			list = append(list, n.Error)
			continue
		}
		for _, p := range ProblemsOf(n.Status) {
			shared.Add(n.Node, p)
		}
	}
	for _, p := range shared {
		list = append(list, p.Where()+": "+p.String())
	}
	return list
}

// unasked returns the live nodes of all statuses without a request so far.
func (r *Report) unasked() (names []string) {
	for _, n := range r.Nodes {
		if n.Status == nil || n.Status.Cluster == nil {
			continue
		}
		for _, other := range n.Status.Cluster.Nodes {
			if !r.has(other.Node) && !slices.Contains(names, other.Node) {
				names = append(names, other.Node)
			}
		}
	}
	return names
}

func (r *Report) has(node string) bool {
	return slices.ContainsFunc(r.Nodes, func(n Node) bool { return n.Node == node })
}

// addGone adds the dead nodes of all statuses, unless a request has reached the node.
func (r *Report) addGone() {
	for _, n := range r.Nodes {
		if n.Status == nil || n.Status.Cluster == nil {
			continue
		}
		for _, name := range n.Status.Cluster.Gone {
			if !r.has(name) {
				r.Nodes = append(r.Nodes, Node{Node: name, Error: "node " + name +
					" is gone: it was killed, or is disconnected from NATS" + RemedyMark + "restart the node, or wait: " +
					"its record is deleted ten minutes after its " +
					"end"})
			}
		}
	}
}

// addZones sets the zones of the nodes. A silent node gets its zone from another node's status.
func (r *Report) addZones() {
	statuses := make([]*api.Status, len(r.Nodes))
	for i := range r.Nodes {
		statuses[i] = r.Nodes[i].Status
	}
	zones := Zones(statuses)
	for i := range r.Nodes {
		r.Nodes[i].Zone = zones[r.Nodes[i].Node]
	}
}

// Zones returns the zones of nodes by name, from statuses; nil statuses are skipped. A node's own status has priority
// over other statuses. The map contains only nodes with a zone. Nodes up to v0.4.0 report no zones.
func Zones(statuses []*api.Status) map[string]string {
	zones, own := map[string]string{}, map[string]bool{}
	for _, s := range statuses {
		if s == nil || s.Cluster == nil {
			continue
		}
		for _, n := range s.Cluster.Nodes {
			switch {
			case n.Node == s.Node:
				zones[n.Node], own[n.Node] = n.Zone, true
			case n.Zone != "" && !own[n.Node]:
				zones[n.Node] = n.Zone
			}
		}
	}
	maps.DeleteFunc(zones, func(_, zone string) bool { return zone == "" })
	return zones
}

// NotReady is the problem of a node that is not ready.
const NotReady = "the node is not ready: it restores, or catches up with the log" + RemedyMark +
	"wait while LAG falls in indexer status"

// ProblemsOf returns the problems in a node's status.
func ProblemsOf(s *api.Status) (list []string) {
	if !s.Ready {
		list = append(list, NotReady)
	}
	return append(list, s.Problems...)
}
