package main

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func authCommand() *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "auth",
		Short: "Make, add, replace and remove the keys of NATS users",
		Long: `Keep the keys of NATS users in a folder, and write the configuration of NATS servers for the users. Nodes,
readers, routers, operators, shims, pools of shims and stores have separate NATS accounts. An account imports the
subjects of the role from the nodes' account.`,
	}, authExampleCommand(), authAddCommand(), authRotateCommand(), authRemoveCommand(), authPrintCommand(),
		authPushCommand())
}

// userFlags adds the flags with names of users.
func userFlags(f *pflag.FlagSet, n *upkeep.UserNames) {
	client := func(to *[]string, role natsauth.Role, what string) cli.Flag {
		return cli.Var(to, string(role), nil, what+", with a separate key and inbox; may be given again")
	}
	cli.Flags{
		cli.Var(&n.Shims, "shim", nil,
			"worker with a key for the worker's shim; may be given again"),
		cli.Var(&n.Pools, "pool", nil,
			"name of a pool: shims of any workers with a common key and mutual trust; may be given again"),
		cli.Var(&n.Stores, "store", nil,
			"HTTP address of a shared store's master, for a key of the store's shim; may be given again"),
		cli.Var(&n.Models, "model", nil,
			"permitted model of the workers of --shim and --pool; may be given again (default: any model)"),
		client(&n.Readers, natsauth.RoleReader, "name of a further reader"),
		client(&n.Routers, natsauth.RoleRouter, "name of a further router"),
		client(&n.Operators, natsauth.RoleOperator, "name of a further operator"),
		client(&n.Analysts, natsauth.RoleAnalyst, "name of a reader of recorded requests"),
	}.Add(f)
}

// keysFlag is the folder with the keys.
func keysFlag(f *pflag.FlagSet, keys *string) {
	f.StringVar(keys, "keys", "", "folder with the keys (required)")
}

func resolverFlag(f *pflag.FlagSet, resolver *string) {
	f.StringVar(resolver, "resolver-dir", "jwt",
		"folder of the NATS servers for accounts; for keys created with --jwt")
}

func authExampleCommand() *cobra.Command {
	var namespaces []string
	var names upkeep.UserNames
	var keys, resolver, nats string
	var partitions uint32
	var jwt, keep bool
	cmd := &cobra.Command{
		Use:   "example [--namespace NS]... [--shim WORKER]... [--model M]... [--pool NAME]... --keys DIR",
		Short: "Create keys, and print the matching accounts of a nats-server configuration",
		Long: `Create keys for the NATS users of one or more namespaces, and print the accounts part of a nats-server
configuration. A namespace gets a user for indexer nodes, one for readers (queries), one for routers (queries, choices
and bookings), one for operators (queries and changes of workers), and one per --shim, --pool and --store. Every user
has a separate account. Without --shim and --pool, a single pool serves all shims.

A key of --shim may publish the events of the named worker, for the models of --model. A key of --pool may publish the
events of any worker.

New keys go into --keys, one file per key, readable only by the owner. The command prints the flags for connections of
every user to standard error. Beside a key the command writes a settings file, NAMESPACE-USER.yaml, for the flag
--config in place of the printed flags.

With --jwt the configuration names an operator in place of users. Servers then accept new shims while running, without
a new configuration or a reload: run indexer auth add, then indexer auth push.`,
		Example: `  indexer auth example --namespace prod --shim worker-1 --model llama --keys keys > accounts.conf
  indexer serve --nats nats://nats-1 --config keys/prod-node.yaml
  indexer query --nats nats://nats-1 --config keys/prod-reader.yaml --model llama --tokens 1,2,3`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&namespaces, "namespace", []string{"default"}, "namespace; may be given again")
	userFlags(f, &names)
	keysFlag(f, &keys)
	f.Uint32Var(&partitions, "partitions", jetstream.DefaultPartitions, "how many partitions the namespaces have")
	f.BoolVar(&jwt, "jwt", false, "let running servers accept new users: an operator signs the accounts (JWT)")
	f.BoolVar(&keep, "keep-keys", false, "use the existing users' keys in --keys from a release before 0.5, without --jwt")
	natsFlag(f, &nats)
	resolverFlag(f, &resolver)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var wrong cli.Complaints
		for _, ns := range namespaces {
			wrong.About("--namespace", jetstream.CheckNamespace(ns))
		}
		wrong.When(keys == "", "--keys is missing")
		wrong.When(partitions == 0 || partitions > jetstream.MaxPartitions, "--partitions %d is not from 1 to %d", partitions,
			jetstream.MaxPartitions)
		wrong.When(jwt && keep, "--jwt and --keep-keys exclude each other: users of a JWT need new credentials")
		if err := wrong.Usage(); err != nil {
			return err
		}
		mode := natsauth.Static
		if jwt {
			mode = natsauth.JWT
		}
		ring, err := natsauth.Create(keys, mode)
		if err != nil {
			return err
		}
		if keep {
			ring.KeepKeys()
		}
		return newKeys(ring, resolver, nats).Create(namespaces, partitions, &names)
	}
	return cmd
}

// newKeys returns the keys of a ring. Configuration goes to standard output, and the rest to standard error.
func newKeys(ring *natsauth.Ring, resolver, nats string) *upkeep.Keys {
	return &upkeep.Keys{Ring: ring, Resolver: resolver, NATS: nats, Servers: os.Stdout, Users: os.Stderr}
}

// natsFlag is the address in settings files.
func natsFlag(f *pflag.FlagSet, nats *string) {
	f.StringVar(nats, "nats", "", "address of the NATS servers, for the settings files of the users")
}

// ringCommand is a command with a change of a ring.
func ringCommand(cmd *cobra.Command, flags func(*pflag.FlagSet), namespaceToo bool,
	change func(ring *natsauth.Ring, namespace string) error) *cobra.Command {
	var keys, namespace string
	cmd.Args = cobra.NoArgs
	keysFlag(cmd.Flags(), &keys)
	if namespaceToo {
		cmd.Flags().StringVar(&namespace, "namespace", "", "namespace (default: the only namespace of the folder)")
	}
	flags(cmd.Flags())
	cmd.RunE = func(*cobra.Command, []string) error {
		if keys == "" {
			return cli.UsageErrorf("--keys is missing")
		}
		ring, err := natsauth.Open(keys)
		if err != nil {
			return err
		}
		if namespaceToo && namespace == "" {
			if len(ring.Namespaces) != 1 {
				return cli.UsageErrorf("--namespace is missing: %s has %d namespaces", keys, len(ring.Namespaces))
			}
			namespace = ring.Namespaces[0].Name
		}
		return change(ring, namespace)
	}
	return cmd
}

func authAddCommand() *cobra.Command {
	var names upkeep.UserNames
	var resolver, nats string
	return ringCommand(&cobra.Command{
		Use:   "add [--shim WORKER]... [--model M]... [--pool NAME]... [--reader NAME]... --keys DIR",
		Short: "Make keys for further users",
		Long: `Create keys for further shims, pools, stores, readers, routers and operators, and for analysts with access
to recorded requests (docs/recording.md). The command prints the flags for connections to standard error, and the new
accounts part of the servers' configuration to standard output. For keys created with --jwt, run push instead.`,
		Example: `  indexer auth add --shim worker-2 --model llama --keys keys > accounts.conf`,
	}, func(f *pflag.FlagSet) { userFlags(f, &names); natsFlag(f, &nats); resolverFlag(f, &resolver) }, true,
		func(ring *natsauth.Ring, namespace string) error {
			return newKeys(ring, resolver, nats).Add(namespace, &names)
		})
}

func authRotateCommand() *cobra.Command {
	var users []string
	var finish bool
	var resolver string
	return ringCommand(&cobra.Command{
		Use:   "rotate [--user NAME]... [--finish] --keys DIR",
		Short: "Replace the keys of users, without downtime",
		Long: `Replace the keys of users: of all users of the namespace, or of the users of --user. Both keys are valid until
--finish, so programs can be restarted in turn:

1. indexer auth rotate creates new keys. Give the printed configuration to the servers, or run indexer auth push.
2. Restart every program with the new key. The new key has the old file's name. The old key's file ends in .old.
3. indexer auth rotate --finish makes the old keys invalid. Give the configuration to the servers again, or push.`,
		Example: `  indexer auth rotate --user reader --keys keys > accounts.conf
  indexer auth rotate --user reader --finish --keys keys > accounts.conf`,
	}, func(f *pflag.FlagSet) {
		f.StringSliceVar(&users, "user", nil, "user, as printed by the auth commands; may be given again (default: all)")
		f.BoolVar(&finish, "finish", false, "make the old keys invalid")
		resolverFlag(f, &resolver)
	}, true, func(ring *natsauth.Ring, namespace string) error {
		return newKeys(ring, resolver, "").Rotate(namespace, users, finish)
	})
}

func authRemoveCommand() *cobra.Command {
	var users []string
	var resolver string
	return ringCommand(&cobra.Command{
		Use:   "remove --user NAME... --keys DIR",
		Short: "Remove added users and the users' keys",
		Long: `Remove users of shims, pools and stores, and named readers, routers, operators and analysts. The command deletes the
keys from the folder. The keys are invalid once the servers have the printed configuration, or after indexer auth push.`,
		Example: `  indexer auth remove --user shim-worker-2 --keys keys > accounts.conf`,
	}, func(f *pflag.FlagSet) {
		f.StringSliceVar(&users, "user", nil, "user, as printed by the auth commands; may be given again (required)")
		resolverFlag(f, &resolver)
	}, true, func(ring *natsauth.Ring, namespace string) error {
		return newKeys(ring, resolver, "").Remove(namespace, users)
	})
}

func authPrintCommand() *cobra.Command {
	var resolver string
	var transition bool
	return ringCommand(&cobra.Command{
		Use:   "print --keys DIR",
		Short: "Print the accounts part of a nats-server configuration again",
		Long: `Print the accounts part of a nats-server configuration for the keys in a folder, and print the flags for
connections of every user to standard error.`,
		Example: `  indexer auth print --keys keys > accounts.conf`,
	}, func(f *pflag.FlagSet) {
		resolverFlag(f, &resolver)
		f.BoolVar(&transition, "transition", false,
			"leave all users in the nodes' account: the first step from a release before 0.5 (docs/upgrade.md)")
	}, false, func(ring *natsauth.Ring, _ string) error {
		return newKeys(ring, resolver, "").Print(transition)
	})
}

func authPushCommand() *cobra.Command {
	var nats *cli.NATS
	var timeout time.Duration
	return ringCommand(&cobra.Command{
		Use:   "push --nats URL --keys DIR",
		Short: "Send the accounts of keys created with --jwt to running NATS servers",
		Long: `Send the accounts of keys created with --jwt to running NATS servers, and delete the accounts of removed users
there. A server passes the accounts on to the cluster. The command may be repeated. The command connects with
system.creds of the folder unless a flag names different credentials.`,
		Example: `  indexer auth push --nats nats://nats-1:4222 --keys keys`,
	}, func(f *pflag.FlagSet) {
		nats = cli.NATSFlags(f, false)
		f.DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the servers")
	}, false, func(ring *natsauth.Ring, _ string) error {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		conn, err := nats.ConnectCoreAs(ctx, "kvatlas indexer", ring.SystemCreds())
		if err != nil {
			return err
		}
		defer conn.Close()
		taken, err := ring.Push(ctx, conn)
		if err == nil {
			cli.Fprintf(os.Stdout, "%s accepted by %s\n", cli.Count(uint64(taken), "account"), strings.TrimSpace(nats.Shown()))
		}
		return err
	})
}
