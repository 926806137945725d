package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/spf13/cobra"
)

func clusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Show which nodes there are, and which partitions each serves",
		Long: `Show which nodes there are, and which partitions each serves, as the node knows that answers: those that are READY,
those that it serves far BEHIND the log, and those that it is RELEASING, because others have them. Exit status 1 if
there is a partition that nobody serves.`,
	}
	a := askingFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		view, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.ClusterStatus, error) {
			status, err := c.Status(ctx)
			switch {
			case err != nil:
				return nil, err
			case status.Cluster == nil: // of an earlier version, on a NATS server of its own
				return aloneCluster(status), nil
			}
			return status.Cluster, nil
		}, printCluster)
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

func printCluster(w io.Writer, c *api.ClusterStatus) {
	rows := make([][]any, len(c.Nodes))
	for i, n := range c.Nodes {
		var state []string
		if n.Answers {
			state = append(state, "answers")
		}
		if n.Leaving {
			state = append(state, "leaving")
		}
		rows[i] = []any{n.Node, n.Zone, n.Build, len(n.Ready), ranges(n.Ready), ranges(n.Behind), ranges(n.Releasing),
			strings.Join(state, ", ")}
	}
	for _, name := range c.Gone {
		rows = append(rows, []any{name, "", "", "", "", "", "", "gone"})
	}
	cli.Table(w, []string{"NODE", "ZONE", "VERSION", "PARTITIONS", "READY", "BEHIND", "RELEASING", ""}, rows)
	cli.Fprintf(w, "\neach partition is to be kept by %d\n", c.Copies)
	if len(c.Short) > 0 {
		cli.Fprintf(w, "fewer are ready for %s\n", ranges(c.Short))
	}
}

// ranges writes partitions as "0-5,9".
func ranges(list []events.Partition) string { return cluster.SetOf(list...).String() }
