package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func sessionsCommand() *cobra.Command {
	r := &api.SessionsRequest{}
	cmd := remote.Command(&cobra.Command{
		Use:   "sessions [ID]",
		Short: "List the sessions with their workers; end a session",
		Long: `List the sessions that session affinity keeps on a worker, the last used first: worker, last use and the end
without a further use. With an ID, show that session in all models, and its blocks in each tier of each worker whose
engine announces session ids. docs/sessions.md explains the columns.

The NATS user needs the rights of a router or an operator.`,
		Example: `  indexer sessions
  indexer sessions chat-17
  indexer sessions end chat-17`,
		Args: cobra.MaximumNArgs(1),
	}, remote.Request[*api.SessionList]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "only sessions of this model; empty: all"),
			cli.Var(&r.Limit, "limit", api.UsualSessions, "most sessions to list"),
			cli.Var(&r.Prompts, "prompts", false, "list sessions without an id too, which by_prompt recognises"),
		},
		Check: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				r.SessionID = args[0]
			}
			return r.Check()
		},
		Send: remote.Call((*client.Client).Sessions, r),
		Print: func(w io.Writer, list *api.SessionList) {
			if r.SessionID != "" {
				tables.Session(w, list)
			} else {
				tables.Sessions(w, list)
			}
		},
		Columns: []cli.Columns{tables.SessionsColumns, tables.HeldColumns},
	})
	cmd.AddCommand(endSessionCommand())
	return cmd
}

func endSessionCommand() *cobra.Command {
	var model, session string
	return remote.Command(&cobra.Command{
		Use:   "end ID",
		Short: "End a session on all nodes: its next request is chosen freely; running requests stay",
		Args:  cobra.ExactArgs(1),
	}, remote.Request[*api.SessionList]{
		Flags: cli.Flags{cli.Var(&model, "model", "", "only the session of this model; empty: all")},
		Check: func(_ *cobra.Command, args []string) error {
			session = args[0]
			return nil
		},
		Send: func(ctx context.Context, c *client.Client) (*api.SessionList, error) {
			return c.EndSession(ctx, model, session)
		},
		Print: tables.EndedSessions,
	})
}
