package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestCollectPartial: nodes without an answer are missing, in order. Different block sizes are an error of the whole,
// even beside other failures.
func TestCollectPartial(t *testing.T) {
	fail := map[string]error{"b": errors.New("away"), "d": api.Errorf(api.CodeNotReady, "not yet")}
	ask := func(name string) (string, error) { return strings.ToUpper(name), fail[name] }
	replies, missing, err := collectPartial([]string{"a", "b", "c", "d"}, ask)
	if got := fmt.Sprint(replies, missing, err); got != "[{a A} {c C}] [b d] <nil>" {
		t.Error(got)
	}
	fail["c"] = api.Errorf(api.CodeBlockSizeMismatch, "16 and 32")
	replies, missing, err = collectPartial([]string{"a", "b", "c", "d"}, ask)
	if replies != nil || missing != nil || !api.HasCode(err, api.CodeBlockSizeMismatch) {
		t.Error(replies, missing, err)
	}
}

// TestCollectAll: the failure of a node is the error, with the name of the first failed node and the code.
func TestCollectAll(t *testing.T) {
	fail := map[string]error{}
	ask := func(name string) (int, error) { return len(name), fail[name] }
	replies, err := collectAll([]string{"a", "bb"}, " fails", ask)
	if err != nil || fmt.Sprint(replies) != "[{a 1} {bb 2}]" {
		t.Error(replies, err)
	}
	fail["bb"], fail["c"] = api.Errorf(api.CodeNotReady, "not yet"), errors.New("away")
	replies, err = collectAll([]string{"a", "bb", "c"}, " fails", ask)
	if replies != nil || !api.HasCode(err, api.CodeNotReady) || !strings.Contains(err.Error(), "node bb fails: not yet") {
		t.Error(replies, err)
	}
}

// silent is a member of the cluster that keeps nothing and answers no request.
type silent struct{}

func (silent) Keep(cluster.Set)                     {}
func (silent) Advertisement() cluster.Advertisement { return cluster.Advertisement{} }
func (silent) ModelsChanged() <-chan struct{}       { return nil }

// silentNode joins a node to the cluster of s that answers no request. The node remains until stop.
func (f *fleet) silentNode(s *Server, name string) (stop func()) {
	f.t.Helper()
	cfg, err := s.clusterConfig(f.ctx)
	if err != nil {
		f.t.Fatal(err)
	}
	cfg.Node, cfg.Session, cfg.Keeper, cfg.Drain = name, rand.Text(), silent{}, 1
	member, err := cluster.Join(f.ctx, cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	running, end := context.WithCancel(f.ctx)
	done := make(chan error, 1)
	go func() { done <- member.Run(running) }()
	return func() { end(); <-done }
}

// partial is an operation that asks several nodes. ask returns the nodes without an answer.
type partial struct {
	name string
	ask  func(context.Context, *Server) (missing []string, err error)
}

// partials lists the operations that answer without silent nodes.
var partials = []partial{
	{"funnel", func(ctx context.Context, s *Server) ([]string, error) {
		f, err := s.Funnel(ctx, &api.FunnelRequest{Model: "m"})
		if err != nil {
			return nil, err
		}
		if len(f.Nodes) != 2 {
			return nil, fmt.Errorf("the funnel is of %+v", f.Nodes)
		}
		return f.Missing, nil
	}},
	{"recorded", func(ctx context.Context, s *Server) ([]string, error) {
		list, err := s.Recorded(ctx, &api.RecordedRequest{Model: "m"})
		if err != nil {
			return nil, err
		}
		return list.Missing, nil
	}},
	{"capacity", func(ctx context.Context, s *Server) ([]string, error) {
		c, err := s.Capacity(ctx, &api.CapacityRequest{Model: "m"})
		if err != nil {
			return nil, err
		}
		if !slices.Equal(c.Nodes, []string{"a", "b"}) || len(c.Disabled) != 2 {
			return nil, fmt.Errorf("the samples are of %q without %q", c.Nodes, c.Disabled)
		}
		return c.Missing, nil
	}},
	{"removal order", func(ctx context.Context, s *Server) ([]string, error) {
		order, err := s.RemovalOrder(ctx, &api.RemovalRequest{Model: "m"})
		if err != nil {
			return nil, err
		}
		if order.Complete != (len(order.Unheard) == 0) || len(order.Missing) > 0 {
			return nil, fmt.Errorf("%+v", order)
		}
		return order.Unheard, nil
	}},
	{"scaling", func(ctx context.Context, s *Server) ([]string, error) {
		out, err := s.Scaling(ctx, &api.ScalingRequest{Model: "m"})
		if err != nil {
			return nil, err
		}
		return out.Missing, nil
	}},
	{"block histories", func(ctx context.Context, s *Server) ([]string, error) {
		histories, unheard := s.blockHistories(ctx, &peerapi.BlockHistoryRequest{})
		if len(histories) != 1 {
			return nil, fmt.Errorf("%d histories", len(histories))
		}
		return slices.Repeat([]string{"silent"}, unheard), nil
	}},
	{"report", func(ctx context.Context, s *Server) ([]string, error) {
		err := s.Report(ctx, &api.Report{RequestID: "r"})
		switch {
		case api.HasCode(err, api.CodeUnknownRequest):
			return nil, nil
		case api.HasCode(err, api.CodeUnavailable) && strings.Contains(err.Error(), `nodes ["silent"] do not answer`):
			return []string{"silent"}, nil
		}
		return nil, fmt.Errorf("the report ends with %w", err)
	}},
	{"verify", func(ctx context.Context, s *Server) ([]string, error) {
		_, err := s.Verify(ctx, nil)
		return failedNode(err, "node silent cannot be compared: ")
	}},
	{"snapshot", func(ctx context.Context, s *Server) ([]string, error) {
		_, err := s.Snapshot(ctx)
		return failedNode(err, "node silent: ")
	}},
}

// failedNode returns the silent node if an error begins with text.
func failedNode(err error, text string) ([]string, error) {
	if err != nil && strings.HasPrefix(api.AsError(err).Message, text) {
		return []string{"silent"}, nil
	}
	return nil, err
}

// TestPartialAnswers asks two nodes for each operation of several nodes. Without a further node nothing is missing. A
// further node that answers no request is missing, and is the only one.
func TestPartialAnswers(t *testing.T) {
	f := newFleet(t)
	a, stopA := f.start("a")
	defer stopA()
	b, stopB := f.start("b")
	defer stopB()
	f.register(a, registry.Record{Version: 1, Instance: "w", Model: "m", BlockSize: 16,
		LeaseMS: time.Hour.Milliseconds(), State: registry.Held})
	for _, s := range []*Server{a, b} {
		f.until("node "+s.ID+" chooses among two nodes", func() bool {
			_, there := s.registry.Worker(events.RankKey{Instance: "w"})
			return there && s.admitChoice() == nil && len(s.nodes()) == 2
		})
	}
	each := func(want ...string) {
		t.Helper()
		var all testkit.Group
		defer all.Wait()
		for _, p := range partials {
			all.Run(t, fmt.Sprint(p.name, len(want)), func(t *testing.T) {
				testkit.Eventually(t, p.name, func() (bool, string) { // young nodes may both write a snapshot
					missing, err := p.ask(f.ctx, a)
					return err == nil && slices.Equal(missing, want), fmt.Sprintf("missing %q, %v; want %q", missing, err, want)
				})
			})
		}
	}
	each()
	defer f.silentNode(b, "silent")()
	f.until("a has three nodes", func() bool { return len(a.nodes()) == 3 })
	each("silent")
}
