package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

func authCommand() *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "auth",
		Short: "Who may do what on a NATS server",
	}, authExampleCommand())
}

func authExampleCommand() *cobra.Command {
	var namespaces, shims, stores []string
	var keys string
	var partitions uint32
	cmd := &cobra.Command{
		Use:   "example [--namespace NS]... [--shim WORKER]... [--store HOST:PORT]... --keys DIR",
		Short: "Make keys, and print the accounts part of a nats-server configuration that goes with them",
		Long: `Print accounts for a nats-server configuration: one for each namespace, so that two namespaces see nothing of each
other. In each there is a user for indexer nodes (all of the namespace), one for readers (queries only), one for routers
(queries, choices and bookings), one for operators (queries, and changes of workers), and one for each --shim, which may
publish that worker's events and nothing else, and for each --store, which may pass on what that store's master
publishes; without --shim, one user for all shims. New nkeys go into --keys, one file each, readable by their owner
alone; files that are there are not touched.`,
		Example: `  indexer auth example --namespace prod --shim worker-1 --keys keys > accounts.conf
  indexer serve --nats nats://nats-1 --namespace prod --nats-nkey keys/prod-node.nk --nats-inbox-prefix _INBOX_node`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&namespaces, "namespace", []string{"default"}, "namespace; may be given again")
	f.StringSliceVar(&shims, "shim", nil, "worker that has a shim of its own; may be given again")
	f.StringSliceVar(&stores, "store", nil,
		"HTTP address of a shared store's master that has a shim of its own; may be given again")
	f.StringVar(&keys, "keys", "", "folder for the keys (required)")
	f.Uint32Var(&partitions, "partitions", jetstream.DefaultPartitions, "how many partitions the namespaces have")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var wrong cli.Complaints
		for _, ns := range namespaces {
			wrong.About("--namespace", jetstream.CheckNamespace(ns))
		}
		wrong.When(keys == "", "--keys is missing")
		wrong.When(partitions == 0 || partitions > jetstream.MaxPartitions, "--partitions %d is not from 1 to %d", partitions,
			jetstream.MaxPartitions)
		if err := wrong.Usage(); err != nil {
			return err
		}
		return authExample(namespaces, shims, stores, partitions, keys)
	}
	return cmd
}

// authExample makes the keys and prints the configuration.
func authExample(namespaces, shims, stores []string, partitions uint32, keys string) error {
	if err := os.MkdirAll(keys, 0o700); err != nil {
		return err
	}
	var accounts []jetstream.Account
	for _, ns := range namespaces {
		grants := []jetstream.Grant{jetstream.NodeGrant(ns), jetstream.ReaderGrant(ns), jetstream.RouterGrant(ns),
			jetstream.OperatorGrant(ns)}
		for _, instance := range shims {
			g, err := jetstream.ShimGrant(ns, partitions, events.WorkerID(instance))
			if err != nil {
				return fmt.Errorf("--shim: %w", err)
			}
			grants = append(grants, g)
		}
		for _, store := range stores {
			g, err := jetstream.StoreGrant(ns, store)
			if err != nil {
				return fmt.Errorf("--store: %w", err)
			}
			grants = append(grants, g)
		}
		if len(shims) == 0 {
			grants = append(grants, jetstream.AnyShimGrant(ns, partitions))
		}
		account := jetstream.Account{Name: "KVATLAS_" + strings.ReplaceAll(ns, "-", "_")}
		for _, g := range grants {
			path := filepath.Join(keys, ns+"-"+g.User+".nk")
			seed, public, err := jetstream.NewUserKey()
			if err != nil {
				return err
			}
			if err := writeNew(path, seed); err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "%s: --nats-nkey %s --nats-inbox-prefix %s\n", g.User, path, g.Inbox)
			account.Users = append(account.Users, jetstream.User{Grant: g, Key: public})
		}
		accounts = append(accounts, account)
	}
	_, err := fmt.Print(jetstream.AccountsConfig(accounts))
	return err
}

// writeNew writes a secret to a file that is not there yet.
func writeNew(path string, secret []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(secret, '\n'))
	return errors.Join(err, f.Close())
}
