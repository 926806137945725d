package main

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
)

func namespaceCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "namespace", Short: "Manage the streams and buckets of a namespace on the " +
		"NATS servers"},
		namespaceDeleteCommand())
}

func namespaceDeleteCommand() *cobra.Command {
	var yes, dry, force bool
	cmd := &cobra.Command{
		Use:   "delete [--namespace NS] [--yes]",
		Short: "Delete all streams and buckets of a namespace on the NATS servers, to uninstall",
		Long: `List the streams and buckets of a namespace: the log, snapshots, registrations, and the namespace's record. With
--yes the command deletes the streams and buckets, with all state of indexers. Without --yes the command changes
nothing.

Stop all indexers and shims first, since running programs create the streams again. While a program answers, the
command deletes nothing unless --force is set. Further namespaces, keys of NATS users and folders of --data stay. The
NATS user needs the rights of an indexer node.`,
		Example: `  indexer namespace delete --namespace prod
  indexer namespace delete --namespace prod --yes`,
	}
	a := remote.StoreFlags(cmd)
	f := cmd.Flags()
	f.BoolVar(&yes, "yes", false, "delete; without --yes the command only lists")
	f.BoolVar(&dry, "dry-run", false, "only list, as without --yes")
	f.BoolVar(&force, "force", false, "delete although an indexer or a shim answers")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if yes && dry {
			return cli.UsageErrorf("--yes and --dry-run exclude each other")
		}
		if err := a.Check(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), max(a.Timeout, time.Minute))
		defer cancel()
		conn, err := a.Connect(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		d, err := upkeep.ListNamespace(ctx, conn, a.Namespace)
		if err != nil {
			return remote.Denied(err)
		}
		if yes && !force {
			if err := upkeep.InUse(ctx, conn, a.Namespace, a.Timeout); err != nil {
				return err
			}
		}
		if yes {
			if err := d.Delete(ctx, conn); err != nil {
				return remote.Denied(err)
			}
		}
		err = a.Print(d, func(w io.Writer) { tables.Deletion(w, d) })
		if err == nil && !a.JSON {
			tables.DeletionNote(os.Stderr, d)
		}
		return err
	}
	return cmd
}
