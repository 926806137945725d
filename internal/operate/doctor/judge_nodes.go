package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

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
	quiet := map[string]bool{} // problems and warnings of any node that judgeSource reports
	for _, n := range f.Nodes.Nodes {
		if n.Status == nil {
			list = append(list, judgeSilent(f, n.Node, n.Error))
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
	list = append(list, judgeReported(problems, Error, nodeProblem, "the node reports a problem")...)
	list = append(list, judgeReported(warnings, Warning, nodeWarning, "the node warns")...)
	list = append(list, claims...)
	if unserved.Len() > 0 {
		list = append(list, finding(Error, partitionsUnserved, f.Namespace, "partitions are served by no node",
			unserved.Phrase(), "start more nodes, or restart missing nodes: indexer cluster shows the partitions of each node"))
	}
	if len(versions) > 1 {
		var parts []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			parts = append(parts, v+": "+registry.First(versions[v]))
		}
		list = append(list, finding(Warning, nodeVersions, f.Namespace, "nodes have different versions",
			strings.Join(parts, "; "), "complete the upgrade: restart the nodes of the older version with the newer program"))
	}
	for _, n := range f.Nodes.Nodes {
		if n.Status != nil && n.Status.Cluster != nil {
			return append(list, judgeZones(f.Namespace, n.Status.Cluster)...) // every node lists all other nodes
		}
	}
	return list
}

// judgeSilent reports a node without an answer.
func judgeSilent(f *Facts, node, failure string) Finding {
	evidence, _, _ := strings.Cut(failure, survey.RemedyMark)
	return finding(Error, nodeSilent, "node "+node, "the node does not answer", evidence,
		"start "+f.serve()+namespaceFlag(f.Namespace)+" --node-id "+escape.Shell(node)+
			" again, with the node's other flags; if it was removed for good, wait: "+
			"the record is deleted ten minutes after the end")
}

// judgeReported reports the problems or warnings of nodes, without those that other judges report.
func judgeReported(from survey.Problems, severity Severity, id Fault, what string) (list []Finding) {
	for _, p := range from {
		if judgedElsewhere(p.What) {
			continue
		}
		found := finding(severity, id, p.Where(), what, p.Summary(), cmp.Or(p.Remedy,
			"see indexer status --node "+escape.Shell(p.Nodes[0])))
		found.storage = ofStorage(p.What)
		found.rank = rankIn(p.What)
		list = append(list, found)
	}
	return list
}

// judgeClaims reports workers without a claim for their model. A node ignores such workers. Only one node reports a
// rank.
func judgeClaims(c *api.ClaimStatus) (list []Finding) {
	if c == nil {
		return nil
	}
	for _, u := range c.Unclaimed {
		what := "the worker has no claim for its model: its lease is ignored"
		if !u.Lease {
			what = "the worker has no claim for its model: answers leave out its blocks"
		}
		list = append(list, finding(Error, modelUnclaimed, events.RankKey{Instance: u.Instance, Rank: u.Rank}.String(),
			what, fmt.Sprintf("model %q, and the NATS user of the indexers requires claims for models", u.Model),
			registry.ClaimRemedy).about(events.RankKey{Instance: u.Instance, Rank: u.Rank}, false))
	}
	return list
}

// judgeZones reports partitions with ready replicas in fewer zones than possible, if nodes report zones.
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
		list = append(list, finding(Warning, nodeZone, namespace, "some nodes have no zone",
			registry.First(without), "restart them with --zone: each counts as a separate zone"))
	}
	var shared cluster.Set
	for p, in := range of {
		if replicas[p] >= c.Copies && len(in) < min(c.Copies, len(zones)) {
			shared.Add(p)
		}
	}
	if shared.Len() > 0 {
		list = append(list, finding(Warning, zoneShared, namespace, "partitions have replicas in one zone",
			shared.Phrase(), "wait until they have moved; nodes of earlier versions ignore zones: "+
				"upgrade them"))
	}
	return list
}

// rankIn parses the rank at the beginning of a problem, such as "w1/0". It returns the zero key without a rank.
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

// judgedElsewhere reports whether a node's problem or warning has a separate finding: partitions without a node,
// engines, shims, block sizes and claims.
func judgedElsewhere(what string) bool {
	return slices.ContainsFunc([]string{registry.UnclaimedProblem, registry.QuietWarning, "engines of ",
		"what engines of ", "several engines publish ", "the log takes nothing from the shims of ", "workers of model ",
		node.NobodyServes}, func(begin string) bool { return strings.HasPrefix(what, strings.TrimSuffix(begin, ": ")) })
}

// ofStorage reports whether a node's problem means that NATS does not answer, is full, or rejects writes.
func ofStorage(what string) bool {
	return slices.ContainsFunc(node.StorageProblems, func(part string) bool { return strings.Contains(what, part) })
}

// serve returns the start command of a node of this deployment.
func (f *Facts) serve() string { return "indexer serve --nats " + escape.Shell(f.Shown) }

func namespaceFlag(ns string) string {
	if ns == "default" {
		return ""
	}
	return " --namespace " + escape.Shell(ns)
}

func judgeReplicas(f *Facts) (list []Finding) {
	for i := range f.Replicas {
		r := &f.Replicas[i]
		if r.Equal {
			continue
		}
		var parts []string
		sums := map[string]bool{}
		for _, c := range r.Replicas {
			sums[c.Checksum] = true
			parts = append(parts, fmt.Sprintf("%s has %s at %d", c.Node, c.Checksum, c.Seq))
		}
		found := finding(Error, replicasUnequal, fmt.Sprintf("partition %d", r.Partition), "replicas are not equal",
			strings.Join(parts, ", "),
			"restart the differing node to read the partition again; then run indexer status --verify. "+
				"Please report the bug with indexer dump of both")
		if slices.ContainsFunc(r.Replicas, func(c api.ReplicaSum) bool { return c.Seq != r.Replicas[0].Seq }) {
			found.ID, found.Severity, found.What = replicasApart, Warning, "replicas did not reach the same position in the log"
			found.Remedy = "run indexer doctor again; if the finding stays, see the node's LAG in indexer status"
		}
		list = append(list, found)
	}
	return list
}
