package server

import (
	"context"
	"sync"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// oneNode answers from the data of a single node: [local] for this node, and [peer] for another node.
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

// reply is the answer of a node to a request that several nodes get.
type reply[T any] struct {
	node   string
	answer T
}

// fromNodes asks nodes concurrently, and waits for at most s.patience. See [partly] for the results.
func fromNodes[T any](ctx context.Context, s *Server, names []string,
	ask func(ctx context.Context, n oneNode, name string) (T, error)) (replies []reply[T], missing []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience(ctx))
	defer cancel()
	return partly(names, func(name string) (T, error) {
		return onNode(s, name, func(n oneNode) (T, error) { return ask(ctx, n, name) })
	})
}

// partly calls ask for all nodes concurrently. It returns the replies, and the nodes without an answer, which the whole
// answer lists as missing, both in the order of names. Different block sizes are the only error of the whole answer:
// they make the request ambiguous for all nodes.
func partly[T any](names []string, ask func(name string) (T, error)) (replies []reply[T], missing []string, err error) {
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

// wholly calls ask for all nodes concurrently. The failure of a node is an error with the name of the node and the text
// what.
func wholly[T any](names []string, what string, ask func(name string) (T, error)) (replies []reply[T], err error) {
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
