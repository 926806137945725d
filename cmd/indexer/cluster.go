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
		Short: "Show which nodes there are, and which partitions each serves",
		Long: `Show which nodes there are, and which partitions each serves, as the node knows that answers: those that are READY,
those that it serves far BEHIND the log, and those that it is RELEASING, because others have them. Exit status 1 if
there is a partition that nobody serves.`,
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
