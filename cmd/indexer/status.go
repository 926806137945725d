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
	cmd.Flags().BoolVar(&verify, "verify", false, "show and compare the checksums of all nodes")
	cmd.Flags().StringVar(&node, "node", "", "show this node alone")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if verify && node != "" {
			return cli.UsageErrorf("--verify compares all nodes and does not go with --node")
		}
		if !verify && node == "" {
			r, err := remote.Show(cmd.Context(), a, survey.Nodes, tables.Report)
			if err != nil {
				return err
			}
			return survey.Failure(r.Problems)
		}
		s, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Status, error) {
			if verify {
				return c.Verify(ctx, nil)
			}
			return c.StatusOf(ctx, node)
		}, tables.Status)
		switch {
		case err != nil:
			return err
		case verify:
			return survey.Unequal(s.Replicas)
		}
		return survey.Failure(survey.ProblemsOf(s))
	}
	return cmd
}
