package main

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/top"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func topCommand() *cobra.Command {
	var interval time.Duration
	var once bool
	var sorted, filter string
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the fleet in the terminal: blocks and load of workers, and the delay of the index",
		Long: `Watch the fleet in the terminal: for every rank the blocks in each tier, the blocks stored and removed a second,
the load, the unapplied messages of the partition's log, and the state. The lines below the table explain the current
row. Columns without room are omitted, from the right. A wider terminal shows more columns.

Keys: arrows move, < and > change the sorting column, / filters by names, models, roles, states, hosts and addresses, ?
explains all columns and sorting keys, q quits. If NATS or the indexers do not answer, top reports the failure,
keeps the last state, and tries again.

--once prints a single frame as text, with all ranks, all columns and whole numbers. "-" means unknown. The command
measures rates over --interval.`,
		Example: `  indexer top
  indexer top --sort prefill --filter decode
  indexer top --once --json`,
	}
	a := remote.Flags(cmd)
	cli.Output[*api.FleetEvent](cmd)
	cli.Explain(cmd, tables.TopColumns())
	return cli.Command(cmd, cli.Flags{
		cli.Var(&interval, "interval", 2*time.Second, "how long to wait between two looks",
			cli.Positive[time.Duration]()),
		cli.Var(&once, "once", false, "print one frame as text, and end"),
		cli.Var(&sorted, "sort", "worker", "column to sort by: "+strings.Join(top.Columns(), ", ")),
		cli.Var(&filter, "filter", "", "show only ranks with all of these words"),
	}, func(wrong *cli.Complaints) {
		wrong.When(a.JSON && !once, "--json needs --once")
	}, func(ctx context.Context, _ []string) error {
		v, err := top.New(sorted, filter)
		if err != nil {
			return cli.UsageErrorf("--sort: %w", err)
		}
		if err := a.Check(); err != nil {
			return err
		}
		var screen tcell.Screen
		if !once {
			if screen, err = top.Terminal(); err != nil {
				return cli.UsageErrorf("%w; --once prints a frame as text", err)
			}
		}
		connecting, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		c, err := a.Open(connecting)
		if err != nil {
			return err
		}
		defer c.Close()
		look := top.Looks(c.Client, c.Conn, a.NATS.Shown(), a.Timeout)
		if once {
			if err := top.Once(ctx, v, look, interval); err != nil {
				return err
			}
			return a.Print(v.Fleet(), func(w io.Writer) { _, _ = io.WriteString(w, v.Text()) }) // a.Print has the error
		}
		return top.Run(ctx, screen, v, look, interval)
	})
}
