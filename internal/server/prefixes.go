package server

import (
	"context"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// trees are the trees of prefixes that were made a moment ago: making one looks at the whole index, so that a share of
// one core bounds it, as with what internal/watch looks at.
type trees struct {
	mu   sync.Mutex
	made map[api.PrefixesRequest]tree
}

type tree struct {
	until time.Time
	tree  *api.PrefixTree
}

const (
	keptTrees = 16
	treeAge   = 2 * time.Second // and 40 times as long as making it took, up to half a minute
)

// get returns a tree that was made a moment ago, or makes one. Requests wait for each other.
func (t *trees) get(q api.PrefixesRequest, make func(*api.PrefixesRequest) (*api.PrefixTree, error)) (
	*api.PrefixTree, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	begun := time.Now()
	if kept := t.made[q]; begun.Before(kept.until) {
		return kept.tree, nil
	}
	made, err := make(&q)
	if err != nil {
		return nil, err
	}
	if t.made == nil || len(t.made) >= keptTrees {
		t.made = map[api.PrefixesRequest]tree{}
	}
	t.made[q] = tree{time.Now().Add(min(30*time.Second, max(treeAge, 40*time.Since(begun)))), made}
	return made, nil
}

// Prefixes returns the tree of prefixes of a model as this node has it, or another.
func (s *Server) Prefixes(ctx context.Context, q *api.PrefixesRequest) (*api.PrefixTree, error) {
	if q.Node == "" || q.Node == s.ID {
		if err := s.admit(); err != nil {
			return nil, err
		}
		own := *q
		own.Node = ""
		return s.trees.get(own, s.node.Prefixes)
	}
	other, err := s.peer(q.Node)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "%v", err)
	}
	return other.Prefixes(ctx, q)
}

// Prefixes is asked of the node itself.
func (o own) Prefixes(ctx context.Context, q *api.PrefixesRequest) (*api.PrefixTree, error) {
	if q.Node != "" && q.Node != o.ID {
		return nil, api.Errorf(api.CodeUnavailable, "this is node %s, which was asked by its name for node %s", o.ID, q.Node)
	}
	return o.Server.Prefixes(ctx, q)
}
