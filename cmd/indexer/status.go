package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func statusCommand() *cobra.Command {
	var verify bool
	var node string
	cmd := &cobra.Command{
		Use:   "status [--node NAME]",
		Short: "Show how the indexers are doing",
		Long: `Show the state of all nodes of the namespace. Any answering node relays the requests. A silent node is listed
by name. Exit status 1 if a node does not answer, is not ready, or has a problem. With --node, and for a single node,
the command shows the whole state of the node.

With --verify the state has a checksum of the ranks' blocks for every partition, at the position of the log in column
APPLIED: two indexers at the same position have equal checksums, and so has an indexer before and after a restart. The
command compares the checksums of a partition's replicas on all nodes at a common position. Exit status 1 if any
differ.`,
		Example: `  indexer status
  indexer status --node indexer-1 --json
  indexer status --verify`,
	}
	a := remote.Flags(cmd)
	cli.Output[*survey.Report](cmd)
	cli.Explain(cmd, tables.ReportColumns, tables.PartitionsColumns, tables.ReplicasColumns)
	return cli.Command(cmd, cli.Flags{
		cli.Var(&verify, "verify", false, "show and compare the checksums of all nodes"),
		cli.Var(&node, "node", "", "show this node alone"),
	}, func(wrong *cli.Complaints) {
		wrong.When(verify && node != "", "--verify compares all nodes and does not go with --node")
	}, func(ctx context.Context, _ []string) error {
		switch {
		case verify:
			s, err := remote.Show(ctx, a, remote.Call((*client.Client).Verify, nil), tables.Status)
			if err != nil {
				return err
			}
			return survey.Unequal(s.Replicas)
		case node != "":
			s, err := remote.Show(ctx, a, remote.Call((*client.Client).StatusOf, node), tables.Status)
			if err != nil {
				return err
			}
			return survey.Failure(survey.ProblemsOf(s))
		}
		r, err := remote.Show(ctx, a, survey.Nodes, tables.Report)
		if err != nil {
			return err
		}
		return survey.Failure(r.Problems)
	})
}

func clusterCommand() *cobra.Command {
	return remote.Command(&cobra.Command{
		Use:   "cluster",
		Short: "Show all nodes with the partitions of every node",
		Long: `Show all nodes with the partitions of every node, in the view of the answering node: READY partitions,
partitions far BEHIND the log, and partitions in RELEASING, with new nodes in charge. Exit status 1 if no node serves
some partition.`,
	}, remote.Request[*api.ClusterStatus]{
		Send: survey.Cluster, Print: tables.Cluster, Judge: survey.Unserved,
		Columns: []cli.Columns{tables.ClusterColumns},
	})
}
