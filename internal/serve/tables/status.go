package tables

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Report prints a line per node, and the problems. It prints the whole status of a single node.
func Report(w io.Writer, r *survey.Report) {
	if len(r.Nodes) == 1 && r.Nodes[0].Status != nil {
		Status(w, r.Nodes[0].Status)
		return
	}
	cli.Fprintf(w, "namespace %s: %d nodes\n\n", r.Namespace, len(r.Nodes))
	rows := make([][]any, len(r.Nodes))
	zoned := false // some node has a zone
	for i, n := range r.Nodes {
		zoned = zoned || n.Zone != ""
		s := n.Status
		if s == nil {
			rows[i] = []any{n.Node, "", "NO ANSWER", "", "", "", "", "", ""}
			continue
		}
		state, lag, held := "ready", uint64(0), uint64(0)
		if !s.Ready {
			state = "NOT READY"
		}
		for _, p := range s.Partitions {
			lag += p.Lag
		}
		b := s.Index.Blocks
		held = b.Device + b.Host + b.Disk + b.External
		rows[i] = []any{n.Node, s.Version, state, time.Since(s.Since).Round(time.Second), len(s.Partitions), lag, held,
			cli.Bytes(s.Index.Bytes), len(survey.ProblemsOf(s))}
	}
	table := ReportColumns
	if zoned {
		for i := range rows {
			rows[i] = slices.Insert(rows[i], 1, any(cmp.Or(r.Nodes[i].Zone, "-")))
		}
	} else {
		table.List = slices.Delete(slices.Clone(table.List), 1, 2)
	}
	table.Table(w, rows)
	if len(r.Problems) > 0 {
		cli.Fprintln(w)
	}
	for _, p := range r.Problems {
		cli.Fprintln(w, "problem:", p)
	}
	cli.Fprintf(w, "\nindexer status --node NAME shows a node with all partitions\n")
}

// Status prints the status of a node, with a line for each partition.
func Status(w io.Writer, s *api.Status) {
	ready := "ready"
	if !s.Ready {
		ready = "NOT READY"
	}
	zone := ""
	if name := survey.Zones([]*api.Status{s})[s.Node]; name != "" {
		zone = ", zone " + name
	}
	cli.Fprintf(w, "node %s (%s)%s, namespace %s: %s, up %s\n", s.Node, s.Version, zone, s.Namespace, ready,
		time.Since(s.Since).Round(time.Second))
	for _, p := range s.Problems {
		cli.Fprintln(w, "problem:", p)
	}
	for _, warning := range s.Warnings {
		cli.Fprintln(w, "warning:", warning)
	}
	b := s.Index.Blocks
	cli.Fprintf(w, "index: %d blocks held on device, %d host, %d disk, %d external; %d distinct; %s\n",
		b.Device, b.Host, b.Disk, b.External, s.Index.Distinct, cli.Bytes(s.Index.Bytes))
	counts(w, s)
	stores(w, s)
	partitions(w, s)
	if len(s.Replicas) > 0 {
		replicas(w, s.Replicas)
	}
}

// counts prints the models, and the totals since the start: events, requests and snapshots.
func counts(w io.Writer, s *api.Status) {
	for _, m := range s.Models {
		cli.Fprintf(w, "model %s: blocks of %d tokens, %d ranks\n", m.Model, m.BlockSize, m.Ranks)
	}
	var outcomes []string
	for name, n := range s.Events {
		_, renamed := s.Events[strings.Replace(name, "parked", "pending", 1)]
		if n > 0 && !(renamed && strings.Contains(name, "parked")) {
			outcomes = append(outcomes, fmt.Sprintf("%s %d", name, n))
		}
	}
	slices.Sort(outcomes)
	if len(outcomes) == 0 {
		outcomes = []string{"nothing"}
	}
	cli.Fprintf(w, "since start: %s\n", strings.Join(outcomes, ", "))
	if asked := requestsLine(s.Requests); asked != "" {
		cli.Fprintf(w, "requests since start: %s\n", asked)
	}
	if k := s.Snapshots; k.Written+k.Failed > 0 || len(k.Rejected) > 0 {
		cli.Fprintf(w, "snapshots since start: %d written, %d failed", k.Written, k.Failed)
		for _, reason := range slices.Sorted(maps.Keys(k.Rejected)) {
			cli.Fprintf(w, ", %d rejected (%s)", k.Rejected[reason], reason)
		}
		cli.Fprintln(w)
	}
}

// stores prints the requests under way, the claims, the sizes of streams and buckets, and the shared stores.
func stores(w io.Writer, s *api.Status) {
	if s.Load != nil {
		for _, m := range s.Load.Models {
			cli.Fprintf(w, "requests under way of %s: %d, digest %s; since start %d booked, %d expired, %d refused, "+
				"%d booked twice\n", m.Model, m.Requests, m.Hash, m.Booked, m.Expired, m.Conflicts+m.Full, m.Rivals)
		}
	}
	if c := s.Claims; c != nil && c.Required {
		cli.Fprintf(w, "model claims: required; %d claimed, %d leases and %d ranks ignored without a claim, "+
			"%d claims refused\n", c.Claims, c.Leases, c.Ranks, c.Ignored)
	}
	cli.Fprintf(w, "storage: %s; snapshots: %s\n", used(s.Store), used(s.SnapshotBucket))
	for _, x := range s.L3 {
		how := "asked"
		if x.Down != "" {
			how = "not asked (" + x.Down + ")"
		}
		if x.Set != nil && x.Set.Whole {
			how += fmt.Sprintf(", %d objects known from events", x.Set.Objects)
		}
		if e := x.Election; e != nil {
			how += fmt.Sprintf(", led by %s, the %d. leader", cmp.Or(e.Leader, "nobody"), e.Changes)
		}
		cli.Fprintf(w, "shared store %s: %s; since start %d questions, %d failed, %d answers partial\n", x.Store, how,
			x.Questions, x.Failed, x.Partial)
	}
}

// partitions prints a line for each partition.
func partitions(w io.Writer, s *api.Status) {
	cli.Fprintln(w)
	table := partitionsBase
	rows := make([][]any, len(s.Partitions))
	for i, p := range s.Partitions {
		seq, size, age := snapshotOf(&p, s.Node)
		rows[i] = []any{p.Partition, p.State, p.Ranks, p.Seq, p.Lag, staleAge(p.StaleMS), used(p.Log), seq, size, age,
			p.Writer}
		if p.Checksum != "" {
			rows[i] = append(rows[i], p.Checksum)
		}
	}
	if len(s.Partitions) > 0 && s.Partitions[0].Checksum != "" {
		table = PartitionsColumns
	}
	table.Table(w, rows)
}

// snapshotOf describes a partition's snapshot as written or restored by a node. A node may have no record of a second
// node's snapshot.
func snapshotOf(p *api.PartitionDetail, node string) (seq, size, age string) {
	switch {
	case !p.SnapshotTime.IsZero():
		age = time.Since(p.SnapshotTime).Round(time.Second).String() + " ago"
	case p.Writer == node || p.Writer == "":
		age = "never"
	default:
		return "-", "-", "-"
	}
	return fmt.Sprint(p.SnapshotSeq), cli.Bytes(p.SnapshotSize), age
}

// used formats a size and its limit.
func used(u api.Usage) string {
	if u.Limit <= 0 {
		return cli.Bytes(u.Bytes)
	}
	return fmt.Sprintf("%s of %s", cli.Bytes(u.Bytes), cli.Bytes(u.Limit))
}

// requestsLine describes the outcomes of requests to a node; empty without requests.
func requestsLine(counts []api.RequestCount) string {
	var parts []string
	last := ""
	for _, c := range counts {
		if by := fmt.Sprintf("%s over %s", c.Operation, c.Transport); by != last {
			parts, last = append(parts, by), by
		}
		parts[len(parts)-1] += fmt.Sprintf(" %s %d", c.Outcome, c.Count)
	}
	return strings.Join(parts, ", ")
}

// replicas prints the checksum of each replica of the partitions.
func replicas(w io.Writer, list []api.PartitionReplicas) {
	var rows [][]any
	for i := range list {
		for _, r := range list[i].Replicas {
			verdict := "equal"
			switch first := list[i].Replicas[0]; {
			case len(list[i].Replicas) == 1:
				verdict = "the only one"
			case list[i].Equal:
			case r.Seq != first.Seq:
				verdict = "AT ANOTHER PLACE"
			case r.Checksum != first.Checksum:
				verdict = "DIFFERS"
			default:
				verdict = "others differ"
			}
			rows = append(rows, []any{list[i].Partition, r.Node, r.Seq, r.Checksum, verdict})
		}
	}
	cli.Fprintln(w)
	ReplicasColumns.Table(w, rows)
}
