package server

import (
	"cmp"
	"context"
	"slices"

	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// router answers what chooses workers and counts their load, once the node is ready.
type router struct{ s *Server }

// admit is nil if choices may be made: what queries need, and the loads and sessions that other nodes know.
func (r router) admit() error {
	if err := r.s.admit(); err != nil {
		return err
	}
	for _, ready := range r.s.shared() {
		select {
		case <-ready:
		default:
			return api.Errorf(api.CodeNotReady, "this node does not know yet which requests are under way, or where "+
				"sessions are; ask again a little later")
		}
	}
	return nil
}

// admitted calls do if choices may be made.
func admitted[Q, A any](
	ctx context.Context, r router, q Q, do func(context.Context, Q) (A, error),
) (answer A, err error) {
	if err := r.admit(); err != nil {
		return answer, err
	}
	return do(ctx, q)
}

// step calls do if choices may be made.
func (r router) step(ctx context.Context, q *api.RequestRef, do func(context.Context, *api.RequestRef) error) error {
	if err := r.s.named(&q.Model); err != nil {
		return err
	}
	if err := r.admit(); err != nil {
		return err
	}
	return do(ctx, q)
}

func (r router) Select(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	named, err := r.s.asNamed(&q.Query)
	if err != nil {
		return nil, err
	}
	if named != &q.Query {
		request := *q
		request.Query = *named
		q = &request
	}
	choose := r.s.selection.Select
	if q.Text != nil {
		choose = r.selectText
	}
	var h holders
	q.Answered = h.take
	out, err := admitted(ctx, r, q, choose)
	r.s.routed(q, &h, out, err)
	policy := cmp.Or(q.Policy, r.s.Policy, selection.DefaultPolicy)
	if err != nil && !slices.Contains(routing.Policies(), policy) {
		policy = api.OpOther
	}
	r.s.queries.Selected(policy, api.OutcomeOf(err))
	traceChoice(ctx, q, policy, out)
	return out, err
}

func (r router) Book(ctx context.Context, q *api.BookRequest) (*api.Booking, error) {
	if err := r.s.promptNamed(&q.Prompt); err != nil {
		return nil, err
	}
	return admitted(ctx, r, q, r.s.selection.Book)
}

func (r router) PrefillComplete(ctx context.Context, q *api.RequestRef) error {
	return r.step(ctx, q, r.s.selection.PrefillComplete)
}

func (r router) OutputBlock(ctx context.Context, q *api.RequestRef) error {
	return r.step(ctx, q, r.s.selection.OutputBlock)
}

func (r router) Free(ctx context.Context, q *api.RequestRef) error {
	return r.step(ctx, q, r.s.selection.Free)
}

func (r router) Loads(ctx context.Context, q *api.LoadsRequest) (*api.LoadList, error) {
	if err := r.s.named(&q.Model); err != nil {
		return nil, err
	}
	return admitted(ctx, r, q, r.s.selection.Loads)
}

func (r router) PotentialLoads(ctx context.Context, q *api.PotentialRequest) (*api.PotentialList, error) {
	if err := r.s.promptNamed(&q.Prompt); err != nil {
		return nil, err
	}
	return admitted(ctx, r, q, r.s.selection.PotentialLoads)
}

func (r router) EngineLoad(_ context.Context, l *api.EngineLoads) error {
	if err := r.s.admit(); err != nil {
		return err
	}
	return r.s.engines.report(l)
}

func (r router) EngineLoads(context.Context) (*api.EngineLoads, error) {
	return r.s.engines.list(), nil
}
