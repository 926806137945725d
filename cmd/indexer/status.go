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
		Long: `Show how the indexers are doing: all nodes of the namespace, each asked by way of whichever answers. A node that is
known and does not answer is named. Exit status 1 if a node does not answer, is not ready, or has a problem. With
--node, and where there is only one, all is shown of that node.

With --verify each partition has a checksum of all that its ranks hold, as of the place in the log in column APPLIED:
two indexers at the same place have the same, and so has one before and after a restart. The checksums of each
partition's replicas on all nodes are compared at one place; exit status 1 if any differ.`,
		Example: `  indexer status
  indexer status --node indexer-1 --json
  indexer status --verify`,
	}
	a := remote.Flags(cmd)
	cmd.Flags().BoolVar(&verify, "verify", false, "show checksums too, and compare those of all nodes")
	cmd.Flags().StringVar(&node, "node", "", "show this node alone")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if verify && node != "" {
			return cli.UsageErrorf("--verify compares all nodes; it does not go with --node")
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
