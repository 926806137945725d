package server

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// admit is nil if queries may be answered: once every partition that this node keeps has been restored and caught up.
// One that ceases to serve later is named in answers.
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

// Find answers a query from all nodes, says of its ranks how it stands with their engines and shims, and puts guesses
// beside what they hold.
func (s *Server) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	q, err := s.asNamed(q)
	if err != nil {
		return nil, err
	}
	if q.Text != nil {
		return s.findText(ctx, q)
	}
	return s.addressed(ctx, q, func(ctx context.Context, q *api.Query) (*api.Answer, error) {
		a, err := s.find(ctx, q)
		if err == nil {
			s.countBest(q, a)
		}
		if a, err = s.withGuesses(q, a, err); err == nil {
			s.asked(q, a)
			traceAnswer(ctx, q, a)
		}
		return a, err
	})
}

// account counts an answer that another node has given to a query of this one, by its summary.
func (s *Server) account(q *api.Query, a *api.Answer) {
	s.countBest(q, a)
	s.asked(q, a)
}

// countBest counts how much of a prompt the worker holds that holds most.
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

// addressed restricts a query to the serving addresses that it names, and writes those of the ranks into its answer, if
// it asks for either. Which they are, every node knows; so nodes ask each other for ranks only.
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

// findRanks restricts an answer to the ranks that the query names, if it names any. What is asked are their workers,
// and idle ones too, to tell a rank that holds nothing from one that is not there; so nodes of any version can share
// it.
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
		asked.Workers = []events.WorkerID{""} // nobody: nil would be all
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
	case why == "": // of workers whose other ranks hold something
		why = api.ReasonNotCached
	}
	a.Finish(q.Idle, why)
	return a, nil
}

// Workers lists the ranks that any node knows, with their leases.
func (s *Server) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	list, err := s.scatter.Workers(ctx, asked)
	if err == nil {
		s.registry.MarkWorkers(list, asked)
	}
	return list, err
}

// Status says how this node is doing.
func (s *Server) Status(ctx context.Context) (*api.Status, error) {
	status, err := s.node.Status(ctx)
	if err != nil {
		return nil, err
	}
	return s.complete(status), nil
}

// complete adds to a node's status what its machines do not know.
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
	status.EngineReports = s.engines.counts()
	return status
}

// statusPatience is how long another node may take to say how it is.
const statusPatience = 3 * time.Second

// patience is how long another node is waited for: half of the time that is left at most.
func (s *Server) patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(statusPatience, time.Until(deadline)/2)
	}
	return statusPatience
}

// StatusOf asks a node for its status. It waits for half of the time that is left at most, so that whoever asks hears
// that the node does not answer.
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

// Verify is Status with a checksum of each partition, and if there are other nodes with those of all. An error of
// another node names it.
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

// verifyOf asks a node for its checksums.
func (s *Server) verifyOf(ctx context.Context, name string, at []api.PartitionSeq) (*api.Status, error) {
	if name == s.ID {
		return s.node.Verify(ctx, at)
	}
	other, err := s.peer(name)
	if err != nil {
		return nil, err
	}
	return other.Verify(ctx, at)
}

// Snapshot has every partition's snapshot written, each by the node whose it is to write. An error of another node
// names it.
func (s *Server) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	return snapshotAll(ctx, s.ns.Partitions(), s.nodes, s.snapshotOf)
}

// snapshotOf has a node write the snapshots that are its own to write.
func (s *Server) snapshotOf(ctx context.Context, name string) (*api.SnapshotList, error) {
	if name == s.ID {
		return s.node.Snapshot(ctx)
	}
	other, err := s.peer(name)
	if err != nil {
		return nil, err
	}
	return other.Snapshot(ctx)
}
