package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/escape"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// whatToDo parts a problem, as a status has it, from its remedy.
func whatToDo(problem, otherwise string) (what, remedy string) {
	if what, remedy, ok := strings.Cut(problem, "; what to do: "); ok {
		return what, remedy
	}
	return problem, otherwise
}

func judgeNodes(f *Facts) (list []Finding) {
	if f.NodesError != nil {
		return []Finding{{Error, "", nodeNone, f.Namespace, "no indexer node answers", f.NodesError.Error(),
			"start indexer serve" + namespaceFlag(f.Namespace) + " with the same --nats"}}
	}
	versions := map[string][]string{}
	unserved := map[events.Partition]bool{}
	for _, n := range f.Nodes.Nodes {
		where := "node " + n.Node
		if n.Status == nil {
			list = append(list, Finding{Error, "", nodeSilent, where, "the node does not answer", n.Error,
				"start indexer serve --node-id " + escape.Shell(n.Node) + " again, with its --data; a node that is gone for " +
					"good is forgotten ten minutes after its end"})
			continue
		}
		s := n.Status
		versions[s.Version] = append(versions[s.Version], n.Node)
		if !s.Ready {
			list = append(list, Finding{Error, "", nodeNotReady, where, "the node is not ready",
				"it restores, or catches up with the log",
				"wait; indexer status --node " + escape.Shell(n.Node) + " shows how far it is"})
		}
		for _, p := range s.Problems {
			if saidElsewhere(p) {
				continue
			}
			what, remedy := whatToDo(p, "see indexer status --node "+escape.Shell(n.Node))
			list = append(list, Finding{Error, "", nodeProblem, where, "the node reports a problem", what, remedy})
		}
		for _, p := range s.Warnings {
			if strings.HasPrefix(p, registry.QuietWarning) {
				continue // judgeWorkers reports each engine
			}
			what, remedy := whatToDo(p, "see indexer status --node "+n.Node)
			list = append(list, Finding{Warning, "", nodeWarning, where, "the node warns", what, remedy})
		}
		list = append(list, judgeClaims(s.Claims)...)
		if s.Cluster != nil {
			for _, p := range s.Cluster.Unserved {
				unserved[p] = true
			}
		}
	}
	if len(unserved) > 0 {
		parts := slices.Sorted(maps.Keys(unserved))
		list = append(list, Finding{Error, "", partitionsUnserved, f.Namespace, "partitions are served by no node",
			fmt.Sprint("partitions ", parts), "start more nodes, or those that are gone: indexer cluster shows who serves what"})
	}
	if len(versions) > 1 {
		var said []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			said = append(said, v+": "+registry.First(versions[v]))
		}
		list = append(list, Finding{Warning, "", nodeVersions, f.Namespace, "nodes are of different versions",
			strings.Join(said, "; "), "end the upgrade: restart the nodes of the older version with the newer program"})
	}
	for _, n := range f.Nodes.Nodes {
		if n.Status != nil && n.Status.Cluster != nil {
			return append(list, judgeZones(f.Namespace, n.Status.Cluster)...) // any node knows all others
		}
	}
	return list
}

// judgeClaims finds workers that a node ignores under a model that they have not claimed. One node reports a rank.
func judgeClaims(c *api.ClaimStatus) (list []Finding) {
	if c == nil {
		return nil
	}
	for _, u := range c.Unclaimed {
		what := "the worker has not claimed the model that it names: its lease is ignored"
		if !u.Lease {
			what = "the worker has not claimed the model that it names: answers leave out the blocks that it announces"
		}
		list = append(list, Finding{Error, "", modelUnclaimed, events.RankKey{Instance: u.Instance, Rank: u.Rank}.String(),
			what, fmt.Sprintf("model %q, and the NATS user of the indexers requires model claims", u.Model),
			registry.ClaimRemedy})
	}
	return list
}

// judgeZones finds partitions whose ready replicas could be in more zones, if nodes say zones.
func judgeZones(namespace string, c *api.ClusterStatus) (list []Finding) {
	zones, without := map[string]bool{}, []string(nil)
	replicas, of := map[events.Partition]int{}, map[events.Partition]map[string]bool{}
	for _, n := range c.Nodes {
		zone := n.Zone
		if zone == "" {
			without, zone = append(without, n.Node), "node "+n.Node
		}
		zones[zone] = true
		for _, p := range n.Ready {
			if replicas[p]++; of[p] == nil {
				of[p] = map[string]bool{}
			}
			of[p][zone] = true
		}
	}
	if len(without) == len(c.Nodes) {
		return nil
	}
	if len(without) > 0 {
		list = append(list, Finding{Warning, "", nodeZone, namespace, "nodes say no zone, while others do",
			registry.First(without), "restart them with --zone: each counts as a zone of its own"})
	}
	var shared []events.Partition
	for p, in := range of {
		if replicas[p] >= c.Copies && len(in) < min(c.Copies, len(zones)) {
			shared = append(shared, p)
		}
	}
	if len(shared) > 0 {
		slices.Sort(shared)
		list = append(list, Finding{Warning, "", zoneShared, namespace, "partitions have replicas in one zone",
			fmt.Sprint("partitions ", shared), "wait until they have moved; nodes of earlier versions know no zones: " +
				"upgrade them"})
	}
	return list
}

// saidElsewhere reports whether a node's problem is of engines or claims: those are judged one by one.
func saidElsewhere(problem string) bool {
	return strings.HasPrefix(problem, registry.UnclaimedProblem) ||
		strings.HasPrefix(problem, "engines of ") || strings.HasPrefix(problem, "what engines of ") ||
		strings.HasPrefix(problem, "the log takes nothing from the shims of ")
}

func namespaceFlag(ns string) string {
	if ns == "default" {
		return ""
	}
	return " --namespace " + escape.Shell(ns)
}

func judgeClocks(f *Facts) (list []Finding) {
	for _, c := range f.Clocks {
		off, way := c.Ahead, "ahead of"
		if off < 0 {
			off, way = -off, "behind"
		}
		if off < clockOff {
			continue
		}
		severity := Warning
		if off >= clockBad {
			severity = Error
		}
		list = append(list, Finding{severity, "", clockOffset, c.Of, "clocks differ",
			fmt.Sprintf("its clock is at least %v %s this host's", off.Round(time.Millisecond), way),
			"run chrony or systemd-timesyncd (timedatectl set-ntp true) on both hosts; ages, leases and times of " +
				"snapshots are shown wrong till then"})
	}
	return list
}

func judgeReplicas(f *Facts) (list []Finding) {
	for i := range f.Replicas {
		r := &f.Replicas[i]
		if r.Equal {
			continue
		}
		var said []string
		sums := map[string]bool{}
		for _, c := range r.Replicas {
			sums[c.Checksum] = true
			said = append(said, fmt.Sprintf("%s has %s at %d", c.Node, c.Checksum, c.Seq))
		}
		found := Finding{Error, "", replicasUnequal, fmt.Sprintf("partition %d", r.Partition), "replicas are not equal",
			strings.Join(said, ", "),
			"restart the node that differs from the others, which reads the partition anew; then indexer status --verify. " +
				"Please report it with indexer dump of both: it is a bug"}
		if slices.ContainsFunc(r.Replicas, func(c api.ReplicaSum) bool { return c.Seq != r.Replicas[0].Seq }) {
			found.ID, found.Severity, found.What = replicasApart, Warning, "replicas did not come to one place in the log"
			found.Remedy = "run indexer doctor again; if it stays, see the node's LAG in indexer status"
		}
		list = append(list, found)
	}
	return list
}
