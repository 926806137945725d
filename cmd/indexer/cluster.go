package main

import (
	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func clusterCommand() *cobra.Command {
	return remote.Command(&cobra.Command{
		Use:   "cluster",
		Short: "Show all nodes with the partitions of every node",
		Long: `Show all nodes with the partitions of every node, in the view of the answering node: READY partitions,
partitions far BEHIND the log, and partitions in RELEASING, with new nodes in charge. Exit status 1 if no node serves
some partition.`,
	}, remote.Request[*api.ClusterStatus]{Send: survey.Cluster, Print: tables.Cluster, Judge: survey.Unserved})
}
