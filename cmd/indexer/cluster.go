package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/internal/metrics"
	"github.com/kvatlas/kvatlas/internal/node"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/scatter"
	"github.com/kvatlas/kvatlas/internal/wire"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

// How nodes of a cluster hear of each other.
const (
	memberBeat      = time.Second
	memberDeadAfter = 5 * time.Second
	// a record that is not renewed for so long goes; that tidies up, and decides nothing
	memberRecord = 10 * time.Minute
)

// join makes this node a member of its namespace's cluster, under its name, which no other may have. host says that the
// NATS server is in this process.
func (s *serving) join(ctx context.Context, ns *jetstream.Namespace, keeper cluster.Keeper, host bool,
	log *slog.Logger) (*cluster.Member, error) {
	bucket, err := ns.EnsureNodes(ctx, memberRecord)
	if err != nil {
		return nil, err
	}
	life, dead := rand.Text(), func(string) bool { return false }
	if host {
		if life, dead, err = lifeIn(s.data); err != nil {
			return nil, err
		}
	}
	var member *cluster.Member
	teller := &viewTeller{self: s.id, log: log}
	unheard := false
	member, err = cluster.Join(ctx, cluster.MemberConfig{
		Config: cluster.Config{
			Node: s.id, Session: life, Build: cli.Version(), Partitions: ns.Partitions(), Replication: s.replication,
			Heartbeat: memberBeat, DeadAfter: memberDeadAfter, Host: host,
		},
		Dead: dead,
		// the rest is for what is under way, and for last snapshots
		Namespace: ns, Bucket: bucket, Keeper: keeper, Drain: s.drain * 3 / 4,
		Waiting: func() {
			log.Info("there is a record of a node with this name; it is looked whether that lives", "node", s.id, "for",
				memberDeadAfter)
		},
		Recreate: func(ctx context.Context) error {
			_, err := ns.EnsureNodes(ctx, memberRecord)
			return err
		},
		Recreated: func(err error) {
			if err != nil {
				log.Error("the bucket of nodes is gone and could not be made anew; it is tried again", "error", err,
					"what_to_do",
					"see that NATS has room and quorum, and that this user may make buckets")
			} else {
				log.Warn("the bucket of nodes was gone; it is made anew")
			}
		},
		Trouble: func(err error) {
			switch was := unheard; {
			case err == nil && was:
				unheard = false
				log.Info("the other nodes hear this one again")
			case err != nil && !was && len(member.View().Peers) > 0:
				unheard = true
				log.Warn("the other nodes do not hear this one; it is tried again", "error", err,
					"what_to_do",
					"see that NATS has room and that more than half of its servers are up; queries are answered meanwhile")
			}
		},
		Viewed: teller.tell,
	})
	return member, err
}

// lifeFile is where a data folder has its name.
const lifeFile = "kvatlas.life"

// lifeIn returns a name for the life of a process that has the lock of a data folder, and what knows the lives of
// processes that had it before: they have ended, since the lock was free.
func lifeIn(dir string) (life string, dead func(life string) bool, err error) {
	path := filepath.Join(dir, lifeFile)
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", nil, fmt.Errorf("data folder: %w", err)
	}
	folder := strings.TrimSpace(string(text))
	if folder == "" {
		folder = rand.Text()
		// if the disk is full, the next process waits until this one's record is seen to stand still
		_ = os.WriteFile(path, []byte(folder+"\n"), 0o600)
	}
	life = folder + "." + rand.Text()
	return life, func(other string) bool { return other != life && strings.HasPrefix(other, folder+".") }, nil
}

// askable is whom a partition can be asked of: who is known to serve it, or, while nobody is, who is likely to do so
// before he is heard to. It may have workers of a model if this node or another says so, or if one is registered.
type askable struct {
	*cluster.View
	here       func(p events.Partition, model string) bool
	registered func(model string) []events.Partition
}

func (v askable) MayServe(p events.Partition, model string) bool {
	if v.View.MayServe(p, model) || v.here(p, model) {
		return true
	}
	_, registered := slices.BinarySearch(v.registered(model), p)
	return registered
}

// likelyServing is how many nodes are asked for a partition that nobody is known to serve.
const likelyServing = 3

func (v askable) Serving(p events.Partition) []string {
	if known := v.View.Serving(p); len(known) > 0 {
		return known
	}
	names := []string{v.Self.Node}
	for i := range v.Peers {
		names = append(names, v.Peers[i].Node)
	}
	return cluster.Order(names, p)[:min(len(names), likelyServing)]
}

// scatterOver returns what answers for the whole cluster.
func scatterOver(ns *jetstream.Namespace, self string, host bool, n *node.Node, member *cluster.Member,
	known *registry.Registry, seen *metrics.Queries, others *wire.Nodes) *scatter.Scatter {
	return scatter.New(scatter.Config{
		Self: self, Partitions: ns.Partitions(), PartitionOf: ns.PartitionOf, Local: n,
		View: func() scatter.View {
			v := member.View()
			if host && len(v.Peers) == 0 && v.GraceOver {
				return nil // nobody else can be asked
			}
			return askable{v, n.MayServe, known.Partitions}
		},
		Store:     func(q *api.Query, blockSize uint32) scatter.Question { return n.BeginL3(q, blockSize) },
		Transport: others, Hedges: &others.Hedges,
		Hooks: scatter.Hooks{
			Asked: func(k scatter.Kind) { seen.Asked(k.String()) }, Replied: seen.Replied,
			HedgesDenied: seen.HedgesDenied, Missing: seen.Missing,
		},
	})
}

// everywhere returns what has all nodes of a cluster do what each can do for itself alone; for the rest it is whole.
func everywhere(ns *jetstream.Namespace, self string, whole *scatter.Scatter, n *node.Node,
	member *cluster.Member, others *wire.Nodes) api.Indexer {
	return &wire.Everywhere{
		Indexer: n, Whole: whole, Self: self, Partitions: ns.Partitions(), Others: others,
		Nodes: func() []string {
			names := []string{self}
			for _, r := range member.View().Peers {
				names = append(names, r.Node)
			}
			slices.Sort(names)
			return names
		},
	}
}

// viewTeller makes log lines of what changes from view to view.
type viewTeller struct {
	self  string
	log   *slog.Logger
	peers []string
	owned string
	said  []string
}

func (t *viewTeller) tell(v *cluster.View) {
	var peers []string
	for i := range v.Peers {
		peers = append(peers, v.Peers[i].Node)
	}
	for _, name := range peers {
		if !slices.Contains(t.peers, name) {
			t.log.Info("a node is there", "node", name)
		}
	}
	for _, name := range t.peers {
		if !slices.Contains(peers, name) {
			t.log.Info("a node is gone", "node", name)
		}
	}
	for _, problem := range v.Problems {
		if !slices.Contains(t.said, problem) {
			t.log.Warn(problem, "what_to_do",
				"give all nodes of the namespace one version and one --partitions")
		}
	}
	if owned := v.Owned.String(); owned != t.owned {
		if t.owned == "" {
			t.log.Info("this node keeps partitions", "partitions", owned)
		} else {
			t.log.Info("this node keeps other partitions", "partitions", owned, "before", t.owned)
		}
		t.owned = owned
	}
	t.peers, t.said = peers, v.Problems
}

func clusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Show which nodes there are, and which partitions each serves",
		Long: `Show which nodes there are, and which partitions each serves, as the node knows that answers: those that are READY, those that it serves far
BEHIND the log, and those that it is RELEASING, because others have them. Exit status 1 if there is a partition that nobody serves.`,
	}
	a := askingFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var view *api.ClusterStatus
		err := a.run(cmd.Context(), func(ctx context.Context, c *client.Client) (any, func(io.Writer) error, error) {
			status, err := c.Status(ctx)
			if err != nil {
				return nil, nil, err
			}
			if view = status.Cluster; view == nil { // of an earlier version, on a NATS server of its own
				view = aloneCluster(status)
			}
			return view, func(w io.Writer) error { return printCluster(w, view) }, nil
		})
		if err == nil && len(view.Unserved) > 0 {
			return fmt.Errorf("no node serves partitions %s", ranges(view.Unserved))
		}
		return err
	}
	return cmd
}

// aloneCluster is the cluster of a node of an earlier version that runs a NATS server for itself.
func aloneCluster(s *api.Status) *api.ClusterStatus {
	n := api.NodeStatus{Node: s.Node, Build: s.Version, Answers: true, Ready: []events.Partition{},
		Behind: []events.Partition{}, Releasing: []events.Partition{}}
	c := &api.ClusterStatus{Copies: 1}
	for _, p := range s.Partitions {
		if p.State.Serves() {
			n.Ready = append(n.Ready, p.Partition)
		} else {
			c.Short, c.Unserved = append(c.Short, p.Partition), append(c.Unserved, p.Partition)
		}
	}
	c.Nodes = []api.NodeStatus{n}
	return c
}

func printCluster(w io.Writer, c *api.ClusterStatus) error {
	rows := make([][]any, len(c.Nodes))
	for i, n := range c.Nodes {
		var state []string
		if n.Answers {
			state = append(state, "answers")
		}
		if n.Leaving {
			state = append(state, "leaving")
		}
		rows[i] = []any{n.Node, n.Build, len(n.Ready), ranges(n.Ready), ranges(n.Behind), ranges(n.Releasing),
			strings.Join(state, ", ")}
	}
	for _, name := range c.Gone {
		rows = append(rows, []any{name, "", "", "", "", "", "gone"})
	}
	if err := cli.Table(w, []string{"NODE", "VERSION", "PARTITIONS", "READY", "BEHIND", "RELEASING", ""},
		rows); err != nil {
		return err
	}
	fmt.Fprintf(w, "\neach partition is to be kept by %d\n", c.Copies)
	if len(c.Short) > 0 {
		fmt.Fprintf(w, "fewer are ready for %s\n", ranges(c.Short))
	}
	return nil
}

// ranges writes partitions as "0-5,9".
func ranges(list []events.Partition) string { return cluster.SetOf(list...).String() }
