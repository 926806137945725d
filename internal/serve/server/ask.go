package server

import (
	"context"
	"sync"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// oneNode answers from the data of a single node: [local] for this node, and [peer] for another node. Its methods
// return parts, which the caller merges.
type oneNode interface {
	Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error)
	Snapshot(ctx context.Context) (*api.SnapshotList, error)
	Funnel(ctx context.Context, r *api.FunnelRequest) (*api.Funnel, error)
	Recorded(ctx context.Context, q *api.RecordedRequest) (*api.RecordedList, error)
	Report(ctx context.Context, r *api.Report) error
	peerapi.Node
	Scaling(ctx context.Context, q *api.ScalingRequest) (*api.Scaling, error)
}

// peer is another node.
type peer struct{ peerapi.Client }

// Scaling returns the requests that wait on the node.
func (p peer) Scaling(ctx context.Context, q *api.ScalingRequest) (*api.Scaling, error) {
	return p.Client.Client.Scaling(ctx, q.Model)
}

// onNode calls ask with a node: this node, or another node by name.
func onNode[T any](s *Server, name string, ask func(oneNode) (T, error)) (answer T, err error) {
	if name == s.ID {
		return ask(local{s})
	}
	other, err := s.peer(name)
	if err != nil {
		return answer, err
	}
	return ask(peer{peerapi.Client{Client: other}})
}

// reply is one node's answer.
type reply[T any] struct {
	node   string
	answer T
}

// fromNodes sends a request to nodes concurrently, and waits for at most s.patience. See [collectPartial] for the
// results.
func fromNodes[T any](ctx context.Context, s *Server, names []string,
	ask func(ctx context.Context, n oneNode, name string) (T, error)) (replies []reply[T], missing []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience(ctx))
	defer cancel()
	return collectPartial(names, func(name string) (T, error) {
		return onNode(s, name, func(n oneNode) (T, error) { return ask(ctx, n, name) })
	})
}

// collectPartial calls ask for all nodes concurrently. It returns the replies, and the nodes without a reply, both in
// the order of names. It returns an error only for different block sizes, because the request is then ambiguous on all
// nodes.
func collectPartial[T any](names []string, ask func(name string) (T, error)) (
	replies []reply[T], missing []string, err error) {
	answers, failed := onAll(names, ask)
	for i, name := range names {
		if failed[i] == nil {
			replies = append(replies, reply[T]{name, answers[i]})
			continue
		}
		if e := api.AsError(failed[i]); e.Code == api.CodeBlockSizeMismatch {
			return nil, nil, e
		}
		missing = append(missing, name)
	}
	return replies, missing, nil
}

// collectAll calls ask for all nodes concurrently. The failure of a node is an error with the name of the node,
// followed by what.
func collectAll[T any](names []string, what string, ask func(name string) (T, error)) (replies []reply[T], err error) {
	answers, failed := onAll(names, ask)
	for i, name := range names {
		if failed[i] != nil {
			e := api.AsError(failed[i])
			return nil, api.Errorf(e.Code, "node %s%s: %s", name, what, e.Message)
		}
		replies = append(replies, reply[T]{name, answers[i]})
	}
	return replies, nil
}

// onAll calls do for all nodes concurrently.
func onAll[T any](names []string, do func(name string) (T, error)) (results []T, failed []error) {
	results, failed = make([]T, len(names)), make([]error, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		all.Go(func() { results[i], failed[i] = do(name) })
	}
	all.Wait()
	return results, failed
}
