package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func namespaceCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "namespace", Short: "Work with what a namespace has on the NATS servers"},
		namespaceDeleteCommand())
}

// deletedNamespace lists the streams and buckets of a namespace, and whether they were deleted, in JSON.
type deletedNamespace struct {
	Namespace string                `json:"namespace"`
	Deleted   bool                  `json:"deleted"`
	Streams   []jetstream.StreamUse `json:"streams"`
}

func namespaceDeleteCommand() *cobra.Command {
	var yes, dry, force bool
	cmd := &cobra.Command{
		Use:   "delete [--namespace NS] [--yes]",
		Short: "Delete all that a namespace has on the NATS servers, to uninstall",
		Long: `List the streams and buckets of a namespace: the log, snapshots, registrations, and its record. With --yes they are
deleted, and with them all that indexers knew. Without --yes this is a dry run, and nothing is changed.

Stop all indexers and shims first: they would create the streams again. While one of them answers, nothing is deleted
unless it is forced. Other namespaces, keys of NATS users and folders of --data stay. The NATS user needs the rights of an
indexer node.`,
		Example: `  indexer namespace delete --namespace prod
  indexer namespace delete --namespace prod --yes`,
	}
	a := storeFlags(cmd)
	f := cmd.Flags()
	f.BoolVar(&yes, "yes", false, "delete; without it the command only lists")
	f.BoolVar(&dry, "dry-run", false, "only list, as without --yes")
	f.BoolVar(&force, "force", false, "delete although an indexer or a shim answers")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if yes && dry {
			return cli.UsageErrorf("--yes and --dry-run exclude each other")
		}
		if err := a.check(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), max(a.timeout, time.Minute))
		defer cancel()
		conn, err := a.nats.Connect(ctx, "kvatlas indexer", a.timeout)
		if err != nil {
			return denied(err)
		}
		defer conn.Close()
		d := deletedNamespace{Namespace: a.namespace}
		if d.Streams, err = conn.NamespaceStreams(ctx, a.namespace); err != nil {
			return denied(err)
		}
		if len(d.Streams) == 0 {
			return fmt.Errorf("namespace %q has no stream or bucket on this NATS server: it was deleted, or --namespace or "+
				"--nats names another", a.namespace)
		}
		if yes {
			if !force {
				if err := a.inUse(ctx, conn); err != nil {
					return err
				}
			}
			for _, s := range d.Streams { // the record is the last: an interrupted command can be repeated
				if err := conn.DeleteStream(ctx, s.Name); err != nil {
					return denied(err)
				}
			}
			d.Deleted = true
		}
		if a.json {
			return cli.PrintJSON(os.Stdout, d)
		}
		rows := make([][]any, len(d.Streams))
		for i, s := range d.Streams {
			kind := "log"
			if s.Bucket != "" {
				kind = "bucket " + s.Bucket
			}
			rows[i] = []any{s.Name, kind, s.Messages, cli.Bytes(s.Bytes)}
		}
		cli.Table(os.Stdout, []string{"STREAM", "KIND", "MESSAGES", "SIZE"}, rows)
		if yes {
			cli.Fprintf(os.Stderr, "%s deleted\n", cli.Count(uint64(len(rows)), "stream"))
		} else {
			cli.Fprintln(os.Stderr, "nothing is deleted; stop the indexers and shims of the namespace, and repeat with --yes")
		}
		return nil
	}
	return cmd
}

// inUse returns an error if an indexer or a shim of the namespace answers.
func (a *asking) inUse(ctx context.Context, conn *jetstream.Conn) error {
	c, err := client.NATS(conn.NATS(), a.namespace, client.Options{Absent: time.Millisecond})
	if err != nil {
		return err
	}
	defer c.Close()
	asking, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	if s, err := c.Status(asking); err == nil {
		return fmt.Errorf("indexer %s serves namespace %q; stop all indexers and shims first, or give --force", s.Node,
			a.namespace)
	}
	ns, err := jetstream.OpenNamespace(ctx, conn, a.namespace)
	if err != nil {
		return nil // without a record no shim runs
	}
	shims := make([]error, ns.Partitions())
	var all sync.WaitGroup
	for p := range shims {
		all.Go(func() {
			list, err := control.WhoAll(ctx, ns, events.Partition(p))
			if shims[p] = err; len(list) > 0 {
				shims[p] = fmt.Errorf("%s run in partition %d, the first for %s; stop them, or give --force",
					cli.Count(uint64(len(list)), "shim"), p, list[0].Key())
			}
		})
	}
	all.Wait()
	return errors.Join(shims...)
}
