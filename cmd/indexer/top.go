package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/operate/top"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
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
	a := connectFlags(cmd)
	a.http.add(cmd.Flags())
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
		if err := a.check(); err != nil {
			return err
		}
		var screen tcell.Screen
		if !once {
			if screen, err = terminal(); err != nil {
				return cli.UsageErrorf("%w; --once prints a frame as text", err)
			}
		}
		ctx := cmd.Context()
		connecting, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		c, err := a.open(connecting)
		if err != nil {
			return err
		}
		defer c.Close()
		look := func(ctx context.Context) (*top.Look, error) {
			ctx, cancel := context.WithTimeout(ctx, a.timeout)
			defer cancel()
			return lookAt(ctx, c.Client)
		}
		if c.conn != nil {
			look = a.lookOverNATS(c, look)
		}
		if once {
			return top.Once(ctx, os.Stdout, v, look, interval)
		}
		return top.Run(ctx, screen, v, look, interval)
	}
	return cmd
}

// lookOverNATS returns a look that ends with the connection, since its answers are lost then.
func (a *asking) lookOverNATS(c *asked, look func(context.Context) (*top.Look, error)) func(context.Context) (*top.Look,
	error) {
	changes := c.conn.NATS().StatusChanged()
	return func(ctx context.Context) (*top.Look, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		away := fmt.Errorf("NATS at %s does not answer; it is waited for", a.nats.Shown())
		if !c.conn.Connected() {
			return nil, away
		}
		go func() {
			for {
				select {
				case <-changes:
					if !c.conn.Connected() {
						cancel()
					}
				case <-ctx.Done():
					return
				}
			}
		}()
		l, err := look(ctx)
		if err != nil && !c.conn.Connected() {
			err = away
		}
		return l, err
	}
}

// terminal is the one that standard output goes to.
func terminal() (tcell.Screen, error) {
	if out, err := os.Stdout.Stat(); err != nil || out.Mode()&os.ModeCharDevice == 0 {
		return nil, errors.New("standard output is no terminal")
	}
	s, err := tcell.NewScreen()
	if err != nil {
		return nil, fmt.Errorf("a terminal of type %q (TERM) cannot be used: %w", os.Getenv("TERM"), err)
	}
	return s, nil
}

// lookAt requests all parts at once.
func lookAt(ctx context.Context, c *client.Client) (*top.Look, error) {
	l := &top.Look{}
	var report *survey.Report
	var noStatus, noWorkers error
	var all sync.WaitGroup
	all.Go(func() { report, noStatus = survey.Nodes(ctx, c) })
	all.Go(func() {
		l.Workers, noWorkers = c.Workers(ctx)
		l.At = time.Now()
	})
	all.Go(func() {
		if l.Loads, l.NoLoads = c.Loads(ctx, ""); l.NoLoads != nil {
			l.Loads = nil
		}
	})
	all.Go(func() {
		if engines, err := c.EngineLoads(ctx); err == nil {
			l.Engines = engines
		}
	})
	all.Wait()
	if err := errors.Join(noWorkers, noStatus); err != nil {
		return nil, err
	}
	l.Namespace, l.Problems = report.Namespace, report.Problems
	for _, n := range report.Nodes {
		state := api.NodeState{Node: n.Node, Zone: n.Zone, Status: n.Status}
		if n.Error != "" {
			state.Error = api.Errorf(api.CodeUnavailable, "%s", n.Error)
		}
		l.Nodes = append(l.Nodes, state)
	}
	return l, nil
}
