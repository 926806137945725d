package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// trees caches recent trees of prefixes. The construction of a tree reads the whole index, so its share of a core is
// limited, as in internal/operate/watch.
type trees struct {
	turn chan struct{}   // semaphore of capacity one for the lookup and the construction of a tree
	made map[string]tree // by request; guarded by turn
}

func newTrees() trees { return trees{turn: make(chan struct{}, 1)} }

type tree struct {
	until time.Time
	tree  *api.PrefixTree
}

const (
	keptTrees = 16
	treeAge   = 2 * time.Second // and 40 times as long as the work took, up to half a minute
)

// get returns a recent tree, or calls make, which also returns its working time. Requests wait for each other until
// their contexts end.
func (t *trees) get(ctx context.Context, q *api.PrefixesRequest,
	make func(*api.PrefixesRequest) (*api.PrefixTree, time.Duration, error)) (*api.PrefixTree, error) {
	key := fmt.Sprintf("%+v", *q)
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if kept := t.made[key]; time.Now().Before(kept.until) {
		return kept.tree, nil
	}
	made, took, err := make(q)
	if err != nil {
		return nil, err
	}
	if t.made == nil || len(t.made) >= keptTrees {
		t.made = map[string]tree{}
	}
	t.made[key] = tree{time.Now().Add(min(30*time.Second, max(treeAge, 40*took))), made}
	return made, nil
}

// Prefixes returns the tree of prefixes of a model, from a single node or from all nodes.
func (s *Server) Prefixes(ctx context.Context, q *api.PrefixesRequest) (*api.PrefixTree, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	if q.Node != "" {
		return s.prefixesOf(ctx, q)
	}
	return s.forests.get(ctx, q, func(q *api.PrefixesRequest) (*api.PrefixTree, time.Duration, error) {
		// other requests wait for the tree too
		return s.allPrefixes(context.WithoutCancel(ctx), q, s.patience(ctx)/prefixRounds)
	})
}

// prefixesOf returns the tree of a single node.
func (s *Server) prefixesOf(ctx context.Context, q *api.PrefixesRequest) (*api.PrefixTree, error) {
	if q.Node == s.ID {
		return s.trees.get(ctx, q, func(q *api.PrefixesRequest) (*api.PrefixTree, time.Duration, error) {
			begun := time.Now()
			trees, err := s.node.Prefixes(q)
			if err != nil {
				return nil, 0, err
			}
			return s.oneTree(trees, q), time.Since(begun), nil
		})
	}
	other, err := s.peer(q.Node)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "%v", err)
	}
	return other.Prefixes(ctx, q)
}

// oneTree joins this node's trees. For another node, which joins trees itself, it puts the trees into a single tree.
func (s *Server) oneTree(trees []*api.PrefixTree, q *api.PrefixesRequest) *api.PrefixTree {
	first := trees[0]
	switch {
	case len(trees) == 1:
		return first
	case len(q.Partitions) > 0:
		first.Shards = trees[1:]
		return first
	}
	tree := joinTrees(trees, cmp.Or(int(q.Limit), api.UsualPrefixes))
	tree.Node, tree.Model, tree.BlockSize, tree.Complete = s.ID, q.Model, first.BlockSize, first.Complete
	return tree
}

// prefixRounds is the number of nodes to try for a partition.
const prefixRounds = 3

// allPrefixes joins the nodes' trees, with every partition from a serving node.
func (s *Server) allPrefixes(ctx context.Context, q *api.PrefixesRequest, patience time.Duration) (*api.PrefixTree,
	time.Duration, error) {
	view := s.view()
	g := gathering{model: q.Model, size: q.BlockSize, asked: make([][]string, s.ns.Partitions()),
		serving: func(p events.Partition) []string {
			if view == nil {
				return []string{s.ID}
			}
			list := view.Serving(p)
			if i := slices.Index(list, s.ID); i > 0 && i < view.Fit(p) { // as good as any, and here
				list = append([]string{s.ID}, list...)
			}
			return list
		},
		ask: func(name string, share []events.Partition) (*api.PrefixTree, error) {
			asking, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			part := *q
			part.Node, part.Partitions = name, share
			return s.prefixesOf(asking, &part)
		}}
	if err := g.gather(); err != nil {
		return nil, 0, err
	}
	if g.size == 0 && len(g.open) == 0 {
		_, err := s.node.Prefixes(q) // the error for an unknown model
		if err == nil {
			err = api.Errorf(api.CodeUnavailable, "workers of %q are starting or leaving; retry", q.Model)
		}
		return nil, 0, err
	}
	begun := time.Now()
	tree := joinTrees(g.parts, cmp.Or(int(q.Limit), api.UsualPrefixes))
	tree.Model, tree.BlockSize = q.Model, g.size
	tree.Complete, tree.Missing, tree.Unheard = len(g.open) == 0, g.open, g.unheard()
	return tree, time.Since(begun), nil
}

// gathering collects the parts of a tree from nodes.
type gathering struct {
	model   string
	serving func(events.Partition) []string // possible nodes of a partition, best first
	ask     func(name string, share []events.Partition) (*api.PrefixTree, error)

	size   uint32     // of blocks; 0: unknown
	asked  [][]string // queried nodes by partition
	parts  []*api.PrefixTree
	open   []events.Partition // partitions without a part
	failed []string           // nodes without an answer
}

// gather queries nodes until every partition has a part or no node remains.
func (g *gathering) gather() error {
	for p := range g.asked {
		g.open = append(g.open, events.Partition(p))
	}
	for range prefixRounds {
		share, names := g.shares()
		replies, missing, err := collectPartial(names, func(name string) (*api.PrefixTree, error) {
			a, err := g.ask(name, share[name])
			if err == nil && !a.Complete && len(a.Missing) == 0 {
				err = api.Errorf(api.CodeUnavailable, "node %s is of a version that does not divide its tree", name)
			}
			return a, err
		})
		if err != nil {
			return err
		}
		for _, name := range missing {
			g.failed = append(g.failed, name)
			g.open = append(g.open, share[name]...)
		}
		for _, r := range replies {
			a := r.answer
			if a.BlockSize != 0 && g.size != 0 && a.BlockSize != g.size {
				return api.Errorf(api.CodeBlockSizeMismatch,
					"workers serve %q with different block sizes, %d and %d among them; the request must name one", g.model,
					g.size, a.BlockSize)
			}
			g.size = cmp.Or(g.size, a.BlockSize)
			g.open = append(g.open, a.Missing...)
			g.parts = append(append(g.parts, a), a.Shards...)
		}
	}
	slices.Sort(g.open)
	return nil
}

// shares assigns the open partitions to the next nodes, and records the assignment.
func (g *gathering) shares() (share map[string][]events.Partition, names []string) {
	share = map[string][]events.Partition{}
	g.open = slices.DeleteFunc(g.open, func(p events.Partition) bool {
		list := g.serving(p)
		i := slices.IndexFunc(list, func(name string) bool { return !slices.Contains(g.asked[p], name) })
		if i < 0 {
			return false
		}
		name := list[i]
		g.asked[p] = append(g.asked[p], name)
		if share[name] == nil {
			names = append(names, name)
		}
		share[name] = append(share[name], p)
		return true
	})
	return share, names
}

// unheard lists the nodes without an answer for open partitions.
func (g *gathering) unheard() (list []string) {
	for _, name := range g.failed {
		if slices.ContainsFunc(g.open, func(p events.Partition) bool { return slices.Contains(g.asked[p], name) }) {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}
