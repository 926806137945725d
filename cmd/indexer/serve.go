package main

import (
	"context"
	"errors"
	"os"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/launch"
	"github.com/spf13/cobra"
)

func serveCommand() *cobra.Command {
	s := &launch.Process{}
	cmd := &cobra.Command{
		Use:   "serve [--data DIR | --nats URL]",
		Short: "Run an indexer, with an embedded or an existing NATS server",
		Long: `Run an indexer. With --data (the default) the program runs a NATS server with JetStream in this process, keeps
all state in the data folder, and serves shims and clients on --nats-listen. With --nats the program joins an existing
NATS server and the nodes of the namespace. The nodes share the partitions: --partition-replicas nodes keep each
partition. A new node of a partition restores the partition before an earlier node releases the partition.

The program restores the last snapshot, applies the following part of the log, and then answers queries over NATS and
HTTP. SIGINT and SIGTERM end the program in good order. After any other end, the next start loses nothing.`,
		Example: `  indexer serve --data /var/lib/kvatlas
  indexer serve --nats nats://nats-1,nats://nats-2 --namespace prod`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	rows := serveRows(s)
	rows.Add(f)
	s.NATS = cli.NATSFlags(f, true)
	s.Security = cli.HTTPSecurityFlags(f, "HTTP and gRPC")
	cli.Exclusive(f, "data", "nats")
	s.L3Master = cli.MasterFlags(f)
	s.Rule = cli.DialFlag(f, "networks of permitted addresses of clients, leases and registrations")
	s.Traces = cli.TraceFlags(f)
	s.Debug = cli.DebugFlag(f)
	logger := cli.LogFlags(f)
	cli.Sections(f, serveSections(s)...)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("data") && s.NATS.URL != "" {
			return cli.UsageErrorf("--data and --nats exclude each other: with --nats the data are on the NATS server")
		}
		if s.NATS.URL != "" {
			for _, name := range []string{"nats-listen", "nats-config", "sync-interval", "store-bytes"} {
				if cmd.Flags().Changed(name) {
					return cli.UsageErrorf("--%s is about a server in this process and does not go with --nats", name)
				}
			}
		}
		var wrong cli.Complaints
		rows.Check(&wrong)
		if err := s.Check(wrong); err != nil {
			return err
		}
		err = s.Run(cmd.Context(), log)
		if cmd.Context().Err() != nil && errors.Is(err, context.Canceled) {
			return nil // a signal ended the start
		}
		return err
	}
	return cmd
}
