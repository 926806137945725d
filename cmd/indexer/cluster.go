package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func clusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Show all nodes with the partitions of every node",
		Long: `Show all nodes with the partitions of every node, in the view of the answering node: READY partitions,
partitions far BEHIND the log, and partitions in RELEASING, with new nodes in charge. Exit status 1 if no node serves
some partition.`,
	}
	a := remote.Flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		view, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.ClusterStatus, error) {
			status, err := c.Status(ctx)
			if err != nil {
				return nil, err
			}
			return survey.ClusterOf(status), nil
		}, tables.Cluster)
		if err != nil {
			return err
		}
		return survey.Unserved(view)
	}
	return cmd
}
