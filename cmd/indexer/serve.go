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
		Short: "Run an indexer, with a NATS server of its own or on one that is there",
		Long: `Run an indexer. With --data (the default) it runs a NATS server with JetStream in this process, keeps
everything in that folder, and takes shims and clients on --nats-listen. With --nats it joins a NATS server that is
there, and the other nodes on it, which share the partitions of the namespace: each is kept by so many nodes
as --replication says, and who gets one restores it before another lets it go.

It restores the last snapshot, applies the log that follows it, and then answers queries over NATS and HTTP. SIGINT
and SIGTERM end it in good order; after any other end it comes back with nothing lost.`,
		Example: `  indexer serve --data /var/lib/kvatlas
  indexer serve --nats nats://nats-1,nats://nats-2 --namespace prod`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	rows := serveRows(s)
	rows.Add(f)
	s.NATS = cli.NATSFlags(f, true)
	s.Security = cli.HTTPSecurityFlags(f, "HTTP and gRPC")
	cli.Renamed(f, map[string]string{"max-parked": "max-pending", "park-for": "pending-for",
		"max-remembered": "max-tombstones", "remember-for": "tombstone-for"}) // the old names for one release
	cli.Exclusive(f, "data", "nats")
	s.L3Master = cli.MasterFlags(f)
	s.Rule = cli.DialFlag(f, "networks in which the addresses of clients, leases and registrations are dialled")
	s.Traces = cli.TraceFlags(f)
	s.Debug = cli.DebugFlag(f)
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("data") && s.NATS.URL != "" {
			return cli.UsageErrorf("--data and --nats exclude each other: with --nats the data are on that server")
		}
		if s.NATS.URL != "" {
			for _, name := range []string{"nats-listen", "nats-config", "sync-interval", "store-bytes"} {
				if cmd.Flags().Changed(name) {
					return cli.UsageErrorf("--%s is about a server in this process; it does not go with --nats", name)
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
