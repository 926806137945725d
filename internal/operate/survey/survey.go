// Package survey answers one question: how are all nodes of a namespace doing? Each is asked by way of whichever
// answers, and one that is known and does not answer is named.
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

// Report is the status of all nodes, as it is printed in JSON.
type Report struct {
	Namespace string   `json:"namespace"`
	Nodes     []Node   `json:"nodes"`    // by name
	Problems  []string `json:"problems"` // of all nodes, each with the names of those that have it
}

// Node is the status of one node, or why there is none.
type Node struct {
	Node   string      `json:"node"`
	Zone   string      `json:"zone,omitempty"` // as [Zones] has it
	Status *api.Status `json:"status,omitempty"`
	Error  string      `json:"error,omitempty"`
}

// Nodes asks whichever node answers, and by way of such nodes all others that any of them knows. Each request
// has half of the time that is left.
func Nodes(ctx context.Context, c *client.Client) (*Report, error) {
	first, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	r := &Report{Namespace: first.Namespace, Nodes: []Node{{Node: first.Node, Status: first}},
		Problems: []string{}}
	for {
		unheard := r.unheard()
		if len(unheard) == 0 {
			break
		}
		reports := make([]Node, len(unheard))
		var all sync.WaitGroup
		for i, name := range unheard {
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

// problems lists the problems of all nodes, each with the names of the nodes that have it.
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

// unheard lists the nodes that some node knows to live and that have not been asked.
func (r *Report) unheard() (names []string) {
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

// addGone adds the nodes that some node believes dead and that nobody has heard.
func (r *Report) addGone() {
	for _, n := range r.Nodes {
		if n.Status == nil || n.Status.Cluster == nil {
			continue
		}
		for _, name := range n.Status.Cluster.Gone {
			if !r.has(name) {
				r.Nodes = append(r.Nodes, Node{Node: name, Error: "node " + name +
					" is gone: it was killed, or is cut off from NATS; what to do: start it again, or wait: it is forgotten ten minutes after its " +
					"end"})
			}
		}
	}
}

// addZones says of each node its zone, also of one that does not answer and that others know.
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

// Zones returns the zones of nodes by their names, as statuses tell them; statuses that are nil tell none. What a node
// says of itself wins over what others say of it. Nodes that have no zone are not in the map. Nodes up to v0.4.0 tell
// the zone of nobody.
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
const NotReady = "it is not ready: it restores, or catches up with the log; what to do: wait while LAG falls in " +
	"indexer status"

// ProblemsOf lists the problems in a node's status.
func ProblemsOf(s *api.Status) (list []string) {
	if !s.Ready {
		list = append(list, NotReady)
	}
	return append(list, s.Problems...)
}
