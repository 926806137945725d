package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func judgeNodes(f *Facts) (list []Finding) {
	if f.NodesError != nil {
		return []Finding{finding(Error, nodeNone, f.Namespace, "no indexer node answers", f.NodesError.Error(),
			"start "+f.serve()+namespaceFlag(f.Namespace))}
	}
	versions := map[string][]string{}
	var unserved cluster.Set
	var problems, warnings survey.Problems
	var claims []Finding
	quiet := map[string]bool{} // problems and warnings that judgeSource reports, of any node
	for _, n := range f.Nodes.Nodes {
		if n.Status == nil {
			evidence, _, _ := strings.Cut(n.Error, "; what to do: ")
			list = append(list, finding(Error, nodeSilent, "node "+n.Node, "the node does not answer", evidence,
				"start "+f.serve()+namespaceFlag(f.Namespace)+" --node-id "+escape.Shell(n.Node)+
					" again, with the node's other flags; if it is gone for good, wait: it is forgotten ten minutes after its end"))
			continue
		}
		s := n.Status
		versions[s.Version] = append(versions[s.Version], n.Node)
		if !s.Ready {
			list = append(list, finding(Error, nodeNotReady, "node "+n.Node, "the node is not ready",
				"it restores, or catches up with the log",
				"wait; indexer status --node "+escape.Shell(n.Node)+" shows how far it is"))
		}
		for i := range s.QuietSources {
			q := &s.QuietSources[i]
			if !quiet[q.Line()] {
				quiet[q.Line()] = true
				list = append(list, judgeSource(q))
			}
		}
		add := func(to *survey.Problems, lines []string) {
			for _, p := range lines {
				if !quiet[p] {
					to.Add(n.Node, p)
				}
			}
		}
		add(&problems, s.Problems)
		add(&warnings, s.Warnings)
		claims = append(claims, judgeClaims(s.Claims)...)
		if s.Cluster != nil {
			for _, p := range s.Cluster.Unserved {
				unserved.Add(p)
			}
		}
	}
	reported := func(from survey.Problems, severity Severity, id Fault, what string) {
		for _, p := range from {
			if judgedElsewhere(p.What) {
				continue
			}
			found := finding(severity, id, p.Where(), what, p.Said(), cmp.Or(p.Remedy,
				"see indexer status --node "+escape.Shell(p.Nodes[0])))
			found.storage = ofStorage(p.What)
			found.rank = rankIn(p.What)
			list = append(list, found)
		}
	}
	reported(problems, Error, nodeProblem, "the node reports a problem")
	reported(warnings, Warning, nodeWarning, "the node warns")
	list = append(list, claims...)
	if unserved.Len() > 0 {
		list = append(list, finding(Error, partitionsUnserved, f.Namespace, "partitions are served by no node",
			unserved.Phrase(), "start more nodes, or those that are gone: indexer cluster shows who serves what"))
	}
	if len(versions) > 1 {
		var said []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			said = append(said, v+": "+registry.First(versions[v]))
		}
		list = append(list, finding(Warning, nodeVersions, f.Namespace, "nodes are of different versions",
			strings.Join(said, "; "), "end the upgrade: restart the nodes of the older version with the newer program"))
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
		list = append(list, finding(Error, modelUnclaimed, events.RankKey{Instance: u.Instance, Rank: u.Rank}.String(),
			what, fmt.Sprintf("model %q, and the NATS user of the indexers requires model claims", u.Model),
			registry.ClaimRemedy).about(events.RankKey{Instance: u.Instance, Rank: u.Rank}, false))
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
		list = append(list, finding(Warning, nodeZone, namespace, "nodes say no zone, while others do",
			registry.First(without), "restart them with --zone: each counts as a zone of its own"))
	}
	var shared cluster.Set
	for p, in := range of {
		if replicas[p] >= c.Copies && len(in) < min(c.Copies, len(zones)) {
			shared.Add(p)
		}
	}
	if shared.Len() > 0 {
		list = append(list, finding(Warning, zoneShared, namespace, "partitions have replicas in one zone",
			shared.Phrase(), "wait until they have moved; nodes of earlier versions know no zones: "+
				"upgrade them"))
	}
	return list
}

// rankIn reads the rank that a problem begins with, such as "w1/0"; none if it begins otherwise.
func rankIn(what string) (key events.RankKey) {
	i := strings.LastIndexByte(what, '/')
	if i < 0 {
		return key
	}
	rank, err := strconv.ParseUint(what[i+1:], 10, 32)
	if err != nil {
		return key
	}
	return events.RankKey{Instance: events.WorkerID(what[:i]), Rank: events.Rank(rank)}
}

// judgedElsewhere reports whether a node's problem or warning is of partitions without a node, or of engines, shims,
// sizes or claims, each of which has a finding of its own.
func judgedElsewhere(what string) bool {
	return slices.ContainsFunc([]string{registry.UnclaimedProblem, registry.QuietWarning, "engines of ",
		"what engines of ", "several engines publish ", "the log takes nothing from the shims of ", "workers of model ",
		node.NobodyServes}, func(begin string) bool { return strings.HasPrefix(what, strings.TrimSuffix(begin, ": ")) })
}

// ofStorage reports whether a node's problem is that NATS does not answer, is full, or rejects writes.
func ofStorage(what string) bool {
	return slices.ContainsFunc(node.StorageProblems, func(part string) bool { return strings.Contains(what, part) })
}

// serve is the command that starts a node of this deployment.
func (f *Facts) serve() string { return "indexer serve --nats " + escape.Shell(f.Shown) }

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
		list = append(list, finding(severity, clockOffset, c.Of, "clocks differ",
			fmt.Sprintf("its clock is at least %v %s this host's", off.Round(time.Millisecond), way),
			"run chrony or systemd-timesyncd (timedatectl set-ntp true) on both hosts; ages, leases and times of "+
				"snapshots are shown wrong till then"))
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
		found := finding(Error, replicasUnequal, fmt.Sprintf("partition %d", r.Partition), "replicas are not equal",
			strings.Join(said, ", "),
			"restart the node that differs from the others, which reads the partition anew; then indexer status --verify. "+
				"Please report it with indexer dump of both: it is a bug")
		if slices.ContainsFunc(r.Replicas, func(c api.ReplicaSum) bool { return c.Seq != r.Replicas[0].Seq }) {
			found.ID, found.Severity, found.What = replicasApart, Warning, "replicas did not come to one place in the log"
			found.Remedy = "run indexer doctor again; if it stays, see the node's LAG in indexer status"
		}
		list = append(list, found)
	}
	return list
}
