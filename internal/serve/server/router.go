package server

import (
	"cmp"
	"context"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// admitChoice returns an error until the node can choose workers: until the node answers queries, and has the loads and
// sessions of the other nodes.
func (s *Server) admitChoice() error {
	if err := s.admit(); err != nil {
		return err
	}
	for _, ready := range s.shared() {
		select {
		case <-ready:
		default:
			return api.Errorf(api.CodeNotReady, "this node is still loading the running requests and "+
				"sessions; retry later")
		}
	}
	return nil
}

// admitted calls do if the node can choose workers.
func admitted[Q, A any](
	ctx context.Context, s *Server, q Q, do func(context.Context, Q) (A, error),
) (answer A, err error) {
	if err := s.admitChoice(); err != nil {
		return answer, err
	}
	return do(ctx, q)
}

// progress calls do, which records the progress of a booked request, if the node can choose workers.
func (s *Server) progress(
	ctx context.Context, q *api.RequestRef, do func(context.Context, *api.RequestRef) error,
) error {
	if err := s.named(&q.Model); err != nil {
		return err
	}
	if err := s.admitChoice(); err != nil {
		return err
	}
	return do(ctx, q)
}

// Select chooses a worker for a prompt.
func (s *Server) Select(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	named, err := s.asNamed(&q.Query)
	if err != nil {
		return nil, err
	}
	if named != &q.Query {
		request := *q
		request.Query = *named
		q = &request
	}
	choose := s.choose
	if q.Text != nil {
		choose = s.selectText
	}
	var h holders
	q.Answered = h.readAnswer
	out, err := admitted(ctx, s, q, choose)
	s.routed(ctx, q, &h, out, err)
	policy := cmp.Or(q.Policy, s.Policy, selection.DefaultPolicy)
	if err != nil && !slices.Contains(routing.Policies(), policy) {
		policy = ops.Other
	}
	s.queries.Selected(policy, api.OutcomeOf(err))
	if out != nil && out.Disaggregation != nil && !q.Advisory {
		s.queries.Disaggregated(out.Model, out.Disaggregation.Outcome)
	}
	traceChoice(ctx, q, policy, out)
	return out, err
}

// Book books a request on a worker.
func (s *Server) Book(ctx context.Context, q *api.BookRequest) (*api.Booking, error) {
	if err := s.promptNamed(&q.Prompt); err != nil {
		return nil, err
	}
	return admitted(ctx, s, q, s.selection.Book)
}

// Progress restarts the expiry of a booked request.
func (s *Server) Progress(ctx context.Context, q *api.RequestRef) error {
	return s.progress(ctx, q, s.selection.Progress)
}

// PrefillComplete records the end of the prefill of a booked request.
func (s *Server) PrefillComplete(ctx context.Context, q *api.RequestRef) error {
	return s.progress(ctx, q, func(ctx context.Context, q *api.RequestRef) error {
		err := s.selection.PrefillComplete(ctx, q)
		if err == nil && s.engines.fails.Any() {
			s.engines.ended(q.Model, q.RequestID, api.ResultOK)
		}
		return err
	})
}

// OutputBlock records that a booked request has filled another block with output.
func (s *Server) OutputBlock(ctx context.Context, q *api.RequestRef) error {
	return s.progress(ctx, q, s.selection.OutputBlock)
}

// Free ends a booked request. A failed request penalises its worker.
func (s *Server) Free(ctx context.Context, q *api.RequestRef) error {
	return s.progress(ctx, q, func(ctx context.Context, q *api.RequestRef) error {
		if q.Result != "" {
			s.engines.ended(q.Model, q.RequestID, q.Result)
		}
		return s.selection.Free(ctx, q)
	})
}

// Loads returns the loads of the workers.
func (s *Server) Loads(ctx context.Context, q *api.LoadsRequest) (*api.LoadList, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	return admitted(ctx, s, q, s.selection.Loads)
}

// PotentialLoads returns the load that every worker would have with a prompt.
func (s *Server) PotentialLoads(ctx context.Context, q *api.PotentialRequest) (*api.PotentialList, error) {
	if err := s.promptNamed(&q.Prompt); err != nil {
		return nil, err
	}
	return admitted(ctx, s, q, s.selection.PotentialLoads)
}

// EngineLoad stores reports of engines.
func (s *Server) EngineLoad(_ context.Context, l *api.EngineLoads) error {
	if err := s.admit(); err != nil {
		return err
	}
	return s.engines.report(l)
}

// EngineLoads returns the stored reports of engines.
func (s *Server) EngineLoads(context.Context) (*api.EngineLoads, error) {
	return s.engines.list(), nil
}
