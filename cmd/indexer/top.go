package main

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/top"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
)

func topCommand() *cobra.Command {
	var interval time.Duration
	var once bool
	var sorted, filter string
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the fleet in the terminal: what workers hold and have to do, and how far behind the index is",
		Long: `Watch the fleet in the terminal: for each rank the blocks that it holds in each tier, blocks stored and removed a
second, what it has to do, how many messages of its partition's log are not applied yet, and whether it may be chosen.
The current row is explained below the table. What there is no room for in columns is left out, from the right; a wider
terminal has more.

Keys: arrows move, < and > sort by another column, / filters by names, models, roles, states, hosts and addresses, ?
explains all columns and the key that sorts by each, q quits. While NATS or the indexers do not answer, the top says so,
what was known stays, and it is tried again.

--once prints a single frame as text, with all ranks, all columns and whole numbers; "-" is what is not known. It looks
twice, --interval apart, for the rates.`,
		Example: `  indexer top
  indexer top --sort prefill --filter decode
  indexer top --once`,
	}
	a := remote.TextFlags(cmd)
	f := cmd.Flags()
	f.DurationVar(&interval, "interval", 2*time.Second, "how long to wait between two looks")
	f.BoolVar(&once, "once", false, "print one frame as text, and end")
	f.StringVar(&sorted, "sort", "worker", "column to sort by: "+strings.Join(top.Columns(), ", "))
	f.StringVar(&filter, "filter", "", "show only ranks that have all of these words")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if interval <= 0 {
			return cli.UsageErrorf("--interval %v is not positive", interval)
		}
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
		ctx := cmd.Context()
		connecting, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		c, err := a.Open(connecting)
		if err != nil {
			return err
		}
		defer c.Close()
		look := func(ctx context.Context) (*top.Look, error) {
			ctx, cancel := context.WithTimeout(ctx, a.Timeout)
			defer cancel()
			return top.LookAt(ctx, c.Client)
		}
		if c.Conn != nil {
			look = top.WhileConnected(c.Conn, a.NATS.Shown(), look)
		}
		if once {
			return top.Once(ctx, os.Stdout, v, look, interval)
		}
		return top.Run(ctx, screen, v, look, interval)
	}
	return cmd
}
