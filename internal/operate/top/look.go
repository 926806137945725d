package top

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Looks returns looks with a client, each with a time limit. With a connection to NATS, a look fails when the
// connection is lost; shown is the address of the servers in the error. conn is nil over HTTP.
func Looks(c *client.Client, conn *jetstream.Conn, shown string, limit time.Duration) LookFunc {
	look := func(ctx context.Context) (*Look, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		return LookAt(ctx, c)
	}
	if conn == nil {
		return look
	}
	return whileConnected(conn, shown, look)
}

// whileConnected returns a look that fails when the connection to NATS is lost, because its answers are lost then.
// shown is the address of the servers in the error.
func whileConnected(conn *jetstream.Conn, shown string,
	look func(context.Context) (*Look, error)) func(context.Context) (*Look, error) {
	changes := conn.NATS().StatusChanged()
	return func(ctx context.Context) (*Look, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		away := fmt.Errorf("NATS at %s does not answer; waiting for NATS", shown)
		if !conn.Connected() {
			return nil, away
		}
		go func() {
			for {
				select {
				case <-changes:
					if !conn.Connected() {
						cancel()
					}
				case <-ctx.Done():
					return
				}
			}
		}()
		l, err := look(ctx)
		if err != nil && !conn.Connected() {
			err = away
		}
		return l, err
	}
}

// Terminal opens the terminal of standard output.
func Terminal() (tcell.Screen, error) {
	if out, err := os.Stdout.Stat(); err != nil || out.Mode()&os.ModeCharDevice == 0 {
		return nil, errors.New("standard output is no terminal")
	}
	s, err := tcell.NewScreen()
	if err != nil {
		return nil, fmt.Errorf("a terminal of type %q (TERM) cannot be used: %w", os.Getenv("TERM"), err)
	}
	return s, nil
}

// LookAt requests all parts of a look at once.
func LookAt(ctx context.Context, c *client.Client) (*Look, error) {
	l := &Look{}
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
