package main

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func authCommand() *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "auth",
		Short: "Make, add, replace and remove the keys of NATS users",
		Long: `Keep the keys of NATS users in a folder, and write the configuration of NATS servers for the users. Nodes,
readers, routers, operators, shims, pools of shims and stores have separate NATS accounts. An account imports the
subjects of the role from the nodes' account.`,
	}, authCreateCommand(), authAddCommand(), authRotateCommand(), authRemoveCommand(), authPrintCommand(),
		authPushCommand())
}

// userRows returns the flags with names of users.
func userRows(n *upkeep.UserNames) cli.Flags {
	client := func(to *[]string, role natsauth.Role, what string) cli.Flag {
		return cli.Var(to, string(role), nil, what+", with a separate key and inbox; may be given again")
	}
	return cli.Flags{
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
	}
}

func keysRow(k *upkeep.Keys) cli.Flag {
	return cli.Var(&k.Folder, "keys", "", "folder with the keys (required)", cli.Required[string]("is missing"))
}

func resolverRow(k *upkeep.Keys) cli.Flag {
	return cli.Var(&k.Resolver, "resolver-dir", "jwt",
		"folder of the NATS servers for accounts; for keys created with --jwt")
}

func natsRow(k *upkeep.Keys) cli.Flag {
	return cli.Var(&k.NATS, "nats", "", "address of the NATS servers, for the settings files of the users")
}

func namespaceRow(k *upkeep.Keys) cli.Flag {
	return cli.Var(&k.Namespace, "namespace", "", "namespace (default: the only namespace of the folder)")
}

// keysCommand returns a command that reads or changes keys, and prints the result. The configuration of servers goes to
// standard output, and the rest to standard error.
func keysCommand(cmd *cobra.Command, k *upkeep.Keys, flags cli.Flags, check func(*cli.Complaints),
	do func() error) *cobra.Command {
	var asJSON bool
	cmd.Args = cobra.NoArgs
	cli.Output[*upkeep.KeysResult](cmd)
	flags = append(flags, keysRow(k), cli.JSONFlag(&asJSON))
	return cli.Command(cmd, flags, check, func(context.Context, []string) error {
		if err := do(); err != nil {
			return err
		}
		if asJSON {
			return cli.PrintJSON(os.Stdout, &k.Result)
		}
		return tables.Keys(os.Stdout, os.Stderr, &k.Result)
	})
}

// opened returns a function that reads the keys before do.
func opened(k *upkeep.Keys, do func() error) func() error {
	return func() error {
		if err := k.Open(); err != nil {
			return err
		}
		return do()
	}
}

func authCreateCommand() *cobra.Command {
	k, n := &upkeep.Keys{}, &upkeep.NewKeys{}
	return keysCommand(cli.OldCommand(&cobra.Command{
		Use:   "create [--namespace NS]... [--shim WORKER]... [--model M]... [--pool NAME]... --keys DIR",
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
		Example: `  indexer auth create --namespace prod --shim worker-1 --model llama --keys keys > accounts.conf
  indexer serve --nats nats://nats-1 --config keys/prod-node.yaml
  indexer query --nats nats://nats-1 --config keys/prod-reader.yaml --model llama --tokens 1,2,3`,
	}, "example"), k, append(userRows(&n.Users), natsRow(k), resolverRow(k),
		cli.Var(&n.Namespaces, "namespace", []string{"default"}, "namespace; may be given again"),
		cli.Var(&n.Partitions, "partitions", jetstream.DefaultPartitions, "how many partitions the namespaces have",
			cli.Between[uint32](1, jetstream.MaxPartitions)),
		cli.Var(&n.JWT, "jwt", false, "let running servers accept new users: an operator signs the accounts (JWT)"),
		cli.Var(&n.Keep, "keep-keys", false,
			"use the existing users' keys in --keys from a release before 0.5, without --jwt"),
	), n.Check, func() error { return k.Create(n) })
}

func authAddCommand() *cobra.Command {
	k, names := &upkeep.Keys{}, &upkeep.UserNames{}
	return keysCommand(&cobra.Command{
		Use:   "add [--shim WORKER]... [--model M]... [--pool NAME]... [--reader NAME]... --keys DIR",
		Short: "Make keys for further users",
		Long: `Create keys for further shims, pools, stores, readers, routers and operators, and for analysts with access
to recorded requests (docs/recording.md). The command prints the flags for connections to standard error, and the new
accounts part of the servers' configuration to standard output. For keys created with --jwt, run push instead.`,
		Example: `  indexer auth add --shim worker-2 --model llama --keys keys > accounts.conf`,
	}, k, append(userRows(names), namespaceRow(k), natsRow(k), resolverRow(k)), nil,
		opened(k, func() error { return k.Add(names) }))
}

func authRotateCommand() *cobra.Command {
	k := &upkeep.Keys{}
	var users []string
	var finish bool
	return keysCommand(&cobra.Command{
		Use:   "rotate [--user NAME]... [--finish] --keys DIR",
		Short: "Replace the keys of users, without downtime",
		Long: `Replace the keys of users: of all users of the namespace, or of the users of --user. Both keys are valid until
--finish, so programs can be restarted in turn:

1. indexer auth rotate creates new keys. Give the printed configuration to the servers, or run indexer auth push.
2. Restart every program with the new key. The new key has the old file's name. The old key's file ends in .old.
3. indexer auth rotate --finish makes the old keys invalid. Give the configuration to the servers again, or push.`,
		Example: `  indexer auth rotate --user reader --keys keys > accounts.conf
  indexer auth rotate --user reader --finish --keys keys > accounts.conf`,
	}, k, cli.Flags{namespaceRow(k), resolverRow(k),
		cli.Var(&users, "user", nil, "user, as printed by the auth commands; may be given again (default: all)"),
		cli.Var(&finish, "finish", false, "make the old keys invalid"),
	}, nil, opened(k, func() error { return k.Rotate(users, finish) }))
}

func authRemoveCommand() *cobra.Command {
	k := &upkeep.Keys{}
	var users []string
	return keysCommand(&cobra.Command{
		Use:   "remove --user NAME... --keys DIR",
		Short: "Remove added users and the users' keys",
		Long: `Remove users of shims, pools and stores, and named readers, routers, operators and analysts. The command deletes the
keys from the folder. The keys are invalid once the servers have the printed configuration, or after indexer auth push.`,
		Example: `  indexer auth remove --user shim-worker-2 --keys keys > accounts.conf`,
	}, k, cli.Flags{namespaceRow(k), resolverRow(k),
		cli.Var(&users, "user", nil, "user, as printed by the auth commands; may be given again (required)"),
	}, nil, opened(k, func() error { return k.Remove(users) }))
}

func authPrintCommand() *cobra.Command {
	k := &upkeep.Keys{}
	var transition bool
	return keysCommand(&cobra.Command{
		Use:   "print --keys DIR",
		Short: "Print the accounts part of a nats-server configuration again",
		Long: `Print the accounts part of a nats-server configuration for the keys in a folder, and print the flags for
connections of every user to standard error.`,
		Example: `  indexer auth print --keys keys > accounts.conf`,
	}, k, cli.Flags{resolverRow(k),
		cli.Var(&transition, "transition", false,
			"leave all users in the nodes' account: the first step from a release before 0.5 (docs/upgrade.md)"),
	}, nil, opened(k, func() error { return k.Print(transition) }))
}

func authPushCommand() *cobra.Command {
	k := &upkeep.Keys{}
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "push --nats URL --keys DIR",
		Short: "Send the accounts of keys created with --jwt to running NATS servers",
		Long: `Send the accounts of keys created with --jwt to running NATS servers, and delete the accounts of removed users
there. A server passes the accounts on to the cluster. The command may be repeated. The command connects with
system.creds of the folder unless a flag names different credentials.`,
		Example: `  indexer auth push --nats nats://nats-1:4222 --keys keys`,
	}
	nats := cli.NATSFlags(cmd.Flags(), false)
	cmd.Args = cobra.NoArgs
	cli.Output[pushed](cmd)
	var asJSON bool
	return cli.Command(cmd, cli.Flags{
		cli.Var(&timeout, "timeout", time.Minute, "how long to wait for the servers"), keysRow(k), cli.JSONFlag(&asJSON),
	}, nil, func(ctx context.Context, _ []string) error {
		if err := k.Open(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		conn, err := nats.ConnectCoreAs(ctx, "kvatlas indexer", k.SystemCreds())
		if err != nil {
			return err
		}
		defer conn.Close()
		accounts, err := k.Push(ctx, conn)
		switch {
		case err != nil:
			return err
		case asJSON:
			return cli.PrintJSON(os.Stdout, pushed{accounts})
		}
		_, err = cli.Fprintf(os.Stdout, "%s accepted by %s\n", cli.Count(uint64(accounts), "account"),
			strings.TrimSpace(nats.Shown()))
		return err
	})
}

// pushed is the JSON output of auth push.
type pushed struct {
	Accounts int `json:"accounts"` // accepted by the servers
}
