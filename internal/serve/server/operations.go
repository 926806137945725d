package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// admit returns nil after every partition of this node has been restored and has caught up. Later failures of
// partitions are named in answers.
func (s *Server) admit() error {
	select {
	case <-s.ready:
		return nil
	default:
	}
	if err := s.node.Ready(); err != nil {
		return api.Errorf(api.CodeNotReady, "%v", err)
	}
	return nil
}

// Find answers a query from all nodes, adds the state of engines and shims to the ranks, and adds guessed blocks.
func (s *Server) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	q, err := s.asNamed(q)
	if err != nil {
		return nil, err
	}
	if q.Text != nil {
		return s.findText(ctx, q)
	}
	if q.Regions {
		return s.findRegions(ctx, q)
	}
	return s.addressed(ctx, q, func(ctx context.Context, q *api.Query) (*api.Answer, error) {
		looked := time.Now()
		a, err := s.find(ctx, q)
		if err == nil {
			s.countBest(q, a)
		}
		if a, err = s.withGuesses(q, looked, a, err); err == nil {
			s.recordAnswered(ctx, q, a)
			traceAnswer(ctx, q, a)
		}
		return a, err
	})
}

// account counts another node's answer to a query of this node, by the summary.
func (s *Server) account(ctx context.Context, q *api.Query, a *api.Answer) {
	s.countBest(q, a)
	s.recordAnswered(ctx, q, a)
}

// countBest counts the blocks of the worker with the longest prefix.
func (s *Server) countBest(q *api.Query, a *api.Answer) {
	if a.Blocks == 0 || q.Raw {
		return
	}
	best := uint32(0)
	if len(a.Workers) > 0 {
		best = a.Workers[0].Total()
	}
	s.queries.Best(a.Model, float64(best)/float64(a.Blocks))
}

// addressed restricts a query to the given serving addresses, and adds the addresses of ranks to the answer, if
// requested. Every node has the addresses, so queries between nodes name only ranks.
func (s *Server) addressed(
	ctx context.Context, q *api.Query, find func(context.Context, *api.Query) (*api.Answer, error),
) (*api.Answer, error) {
	if q.Endpoints == nil && !q.WithEndpoint && !q.ByEndpoint {
		return find(ctx, q)
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	pool, asked := s.registry.Pool(q.Model), *q
	asked.Endpoints, asked.WithEndpoint, asked.ByEndpoint = nil, false, false
	var unknown []string
	if q.Endpoints != nil {
		asked.Ranks, unknown = pool.At(q.Endpoints)
	}
	a, err := find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	a.UnknownEndpoints = unknown
	for i := range a.Workers {
		o := &a.Workers[i]
		if r := pool.Rank(events.RankKey{Instance: o.Instance, Rank: o.Rank}); r != nil {
			o.Endpoint = r.Record.Endpoint
		}
	}
	if q.ByEndpoint {
		a.ByEndpoint = map[string][]api.Overlap{}
		a.Workers = slices.DeleteFunc(a.Workers, func(o api.Overlap) bool {
			if o.Endpoint != "" {
				a.ByEndpoint[o.Endpoint] = append(a.ByEndpoint[o.Endpoint], o)
			}
			return o.Endpoint != ""
		})
	}
	return a, nil
}

// find is Find without guesses.
func (s *Server) find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	a, err := findRanks(ctx, q, s.scatter.Find)
	if err == nil && q.Answered != nil {
		q.Answered(a)
	}
	if err == nil && !q.Raw {
		s.registry.MarkAnswer(a)
	}
	return a, err
}

// findRanks restricts an answer to the ranks in the query, if any. The query between nodes names the workers of the
// ranks and includes idle workers, to distinguish an idle rank from an unknown rank. So nodes of any version can
// answer.
func findRanks(
	ctx context.Context, q *api.Query, find func(context.Context, *api.Query) (*api.Answer, error),
) (*api.Answer, error) {
	if q.Ranks == nil {
		return find(ctx, q)
	}
	asked, wanted := *q, map[api.RankPlace]bool{}
	asked.Ranks, asked.Idle, asked.Workers = nil, true, nil
	for _, r := range q.Ranks {
		wanted[r] = true
		asked.Workers = append(asked.Workers, r.Instance)
	}
	slices.Sort(asked.Workers)
	if asked.Workers = slices.Compact(asked.Workers); len(asked.Workers) == 0 {
		asked.Workers = []events.WorkerID{""} // no worker, because nil means all workers
	}
	a, err := find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	a.Workers = slices.DeleteFunc(a.Workers, func(o api.Overlap) bool {
		return !wanted[api.RankPlace{Instance: o.Instance, Rank: o.Rank}]
	})
	why := a.Reason
	switch {
	case len(a.Workers) == 0:
		why = api.ReasonNotAllowed
	case why == "": // of workers with blocks on other ranks
		why = api.ReasonNotCached
	}
	a.Finish(q.Idle, why)
	return a, nil
}

// Workers lists the ranks of all nodes with their leases.
func (s *Server) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	list, err := s.scatter.Workers(ctx, asked)
	if err == nil {
		s.registry.MarkWorkers(list, asked)
		s.engines.mark(list)
	}
	return list, err
}

// Status returns the status of this node.
func (s *Server) Status(ctx context.Context) (*api.Status, error) {
	status, err := s.node.Status(ctx)
	if err != nil {
		return nil, err
	}
	s.complete(status)
	s.addRecording(ctx, status)
	return status, nil
}

// complete adds the parts of a node's status that the state machines do not have.
func (s *Server) complete(status *api.Status) *api.Status {
	status.Requests = s.outcomes.Counts()
	status.Problems = append(status.Problems, s.outcomes.Problems(time.Now())...)
	status.Problems = append(status.Problems, s.tokenizers.Problems(time.Now())...)
	status.Problems = append(status.Problems, s.announced.Problems()...)
	if problem := s.HTTPTokens.Problem(); problem != "" {
		status.Problems = append(status.Problems, problem)
	}
	if len(s.ClearText) > 0 && s.HTTPTokens != nil {
		status.Warnings = append(status.Warnings, "bearer tokens cross the network in clear text: "+
			strings.Join(s.ClearText, ", ")+"; what to do: "+rights.ClearTextRemedy)
	}
	if problem := s.Screen.Rule.Problem(time.Now()); problem != "" {
		status.Problems = append(status.Problems, problem)
	}
	status.DialsDenied = s.Screen.Rule.Denied()
	s.registry.MarkStatus(status)
	s.addQuietSources(status)
	loads := s.loads.Status()
	status.Load, status.RouterRequests = loadStatus(loads), routerRequests(loads.Foreign)
	for _, g := range s.guesses.Status() {
		status.Guesses = append(status.Guesses, api.GuessStatus{Model: g.Name, Blocks: g.Blocks, Dropped: g.Dropped})
	}
	status.Waiting, status.Sessions = s.selection.Waiting(), s.sessionStatus()
	status.EngineReports, status.Recording, status.HotPrefixes = s.engines.counts(), s.recordingStatus(), s.hotStatus()
	regional, warnings := s.regionsStatus()
	status.Regions, status.Warnings = regional, append(status.Warnings, warnings...)
	if r := status.Recording; r != nil && r.Failing != "" {
		status.Problems = append(status.Problems, fmt.Sprintf("recorded requests cannot be stored: %s; %d were dropped; "+
			"what to do: check that JetStream answers and has room; indexer record status shows the state", r.Failing, r.Dropped))
	}
	return status
}

// statusPatience is the longest wait for another node's status.
const statusPatience = 3 * time.Second

// patience returns the wait for another node: at most half of the remaining time.
func (s *Server) patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(statusPatience, time.Until(deadline)/2)
	}
	return statusPatience
}

// StatusOf returns the status of a node. It waits for at most half of the remaining time, so that the client gets an
// error if the node does not answer.
func (s *Server) StatusOf(ctx context.Context, name string) (*api.Status, error) {
	if name == s.ID {
		return s.Status(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience(ctx))
	defer cancel()
	other, err := s.peer(name)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "%v", err)
	}
	status, err := other.Status(ctx)
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "node %s does not answer: %s", name, api.AsError(err).Message)
	}
	return status, nil
}

// Verify is Status with a checksum of every partition, and with the checksums of all other nodes. An error of another
// node names the node.
func (s *Server) Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	status, err := s.node.Verify(ctx, at)
	if err != nil {
		return nil, err
	}
	s.complete(status)
	if nodes := s.nodes(); len(nodes) > 1 {
		status.Replicas, err = verifyReplicas(ctx, nodes, s.verifyOf)
	}
	return status, err
}

// verifyOf requests the checksums of a node.
func (s *Server) verifyOf(ctx context.Context, name string, at []api.PartitionSeq) (*api.Status, error) {
	return onNode(s, name, func(n oneNode) (*api.Status, error) { return n.Verify(ctx, at) })
}

// Snapshot writes the snapshots of all partitions, on the writing node of every partition. An error of another node
// names the node.
func (s *Server) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	return snapshotAll(ctx, s.ns.Partitions(), s.nodes, s.snapshotOf)
}

// snapshotOf writes a node's own snapshots.
func (s *Server) snapshotOf(ctx context.Context, name string) (*api.SnapshotList, error) {
	return onNode(s, name, func(n oneNode) (*api.SnapshotList, error) { return n.Snapshot(ctx) })
}
