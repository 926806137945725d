package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func sessionsCommand() *cobra.Command {
	r := &api.SessionsRequest{}
	cmd := &cobra.Command{
		Use:   "sessions [ID]",
		Short: "List the sessions with their workers; end a session",
		Long: `List the sessions that session affinity keeps on a worker, the last used first: worker, last use and the end
without a further use. With an ID, show that session in all models. docs/sessions.md explains the columns.

The NATS user needs the rights of a router or an operator.`,
		Example: `  indexer sessions
  indexer sessions chat-17
  indexer sessions end chat-17`,
	}
	cmd.AddCommand(endSessionCommand())
	a := remote.Flags(cmd)
	f := cmd.Flags()
	f.StringVar(&r.Model, "model", "", "only sessions of this model; empty: all")
	f.Uint32Var(&r.Limit, "limit", api.UsualSessions, "most sessions to list")
	f.BoolVar(&r.Prompts, "prompts", false, "list sessions without an id too, which by_prompt recognises")
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			r.SessionID = args[0]
		}
		if err := r.Check(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.SessionList, error) {
			return c.Sessions(ctx, r)
		}, tables.Sessions)
		return err
	}
	return cmd
}

func endSessionCommand() *cobra.Command {
	var model string
	cmd := &cobra.Command{
		Use:   "end ID",
		Short: "End a session on all nodes: its next request is chosen freely; running requests stay",
	}
	a := remote.Flags(cmd)
	cmd.Flags().StringVar(&model, "model", "", "only the session of this model; empty: all")
	cmd.Args = cobra.ExactArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.SessionList, error) {
			return c.EndSession(ctx, model, args[0])
		}, tables.EndedSessions)
		return err
	}
	return cmd
}
