package selection

import (
	"context"
	"errors"
	"slices"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Book books a request on a named worker, or books the kept choice for the request's id.
func (s *Service) Book(ctx context.Context, r *api.BookRequest) (*api.Booking, error) {
	if r.Worker == "" {
		return s.bookPending(ctx, r)
	}
	s.pending.drop(r.Model, r.RequestID)
	of, err := s.candidates(r.Model, r.BlockSize)
	if err != nil {
		return nil, err
	}
	rank := events.RankKey{Instance: r.Worker, Rank: r.Rank}
	if _, ok := of.at[rank]; !ok {
		return nil, api.Errorf(api.CodeUnknownWorker, "worker %.64q rank %d is not registered for %q", r.Worker, r.Rank,
			r.Model)
	}
	x, isl, err := s.hashed(&r.Prompt, of.blockSize)
	if err != nil {
		return nil, err
	}
	defer s.scratches.Put(x)
	if r.EffectivePrefillTokens > isl {
		return nil, api.Errorf(api.CodeMalformed, "effective_prefill_tokens is %d; the prompt has %d tokens",
			r.EffectivePrefillTokens, isl)
	}
	b := load.Booking{ID: r.RequestID, Rank: rank, Hashes: x.seq, ExpectedOutput: r.ExpectedOutputTokens,
		NoReuse: r.AssumeKVReuse != nil && !*r.AssumeKVReuse}
	if r.TrackPrefillTokens == nil || *r.TrackPrefillTokens {
		b.PrefillTokens = int64(r.EffectivePrefillTokens)
	}
	if err := s.book(ctx, r.Model, &chosen{booking: b, session: r.SessionID}); err != nil {
		return booked(r, b), err
	}
	s.observeBooking(x, r, of, isl)
	return booked(r, b), nil
}

// bookPending books the kept choice for an id. A choice is used once; a failed booking keeps the choice.
func (s *Service) bookPending(ctx context.Context, r *api.BookRequest) (*api.Booking, error) {
	c, ok := s.pending.claim(r.Model, r.RequestID)
	if !ok {
		return nil, api.Errorf(api.CodeUnknownRequest,
			"there is no choice for request %.64q of %q: it has expired, was used, or was never made", r.RequestID, r.Model)
	}
	if err := s.book(ctx, r.Model, &c); err != nil {
		s.pending.add(r.Model, &c)
		return nil, err
	}
	return booked(r, c.booking), nil
}

func booked(r *api.BookRequest, b load.Booking) *api.Booking {
	return &api.Booking{Model: r.Model, RequestID: b.ID, Worker: b.Rank.Instance, Rank: b.Rank.Rank}
}

// PrefillComplete reports the first output token of a request.
func (s *Service) PrefillComplete(ctx context.Context, r *api.RequestRef) error {
	defer s.freePrefill(ctx, r)
	return notBooked(s.cfg.Loads.PrefillComplete(ctx, table(r.Model), r.RequestID))
}

// Progress reports that a request is still running: its expiry starts again.
func (s *Service) Progress(ctx context.Context, r *api.RequestRef) error {
	if id := api.PrefillID(r.RequestID); s.has(r.Model, id) {
		_ = s.cfg.Loads.Progress(ctx, table(r.Model), id)
	}
	return notBooked(s.cfg.Loads.Progress(ctx, table(r.Model), r.RequestID))
}

// OutputBlock reports a further whole block of output of a request.
func (s *Service) OutputBlock(ctx context.Context, r *api.RequestRef) error {
	fraction := -1.0
	if r.DecayFraction != nil {
		fraction = *r.DecayFraction
	}
	return notBooked(s.cfg.Loads.OutputBlock(ctx, table(r.Model), r.RequestID, fraction))
}

// Free reports the end of a request.
func (s *Service) Free(ctx context.Context, r *api.RequestRef) error {
	defer s.freePrefill(ctx, r)
	return notBooked(s.cfg.Loads.Free(ctx, table(r.Model), r.RequestID))
}

// Loads returns the outstanding work of registered ranks, of one model or of all models with requests under way.
func (s *Service) Loads(_ context.Context, r *api.LoadsRequest) (*api.LoadList, error) {
	models := []string{r.Model}
	if r.Model == "" {
		models = models[:0]
		for _, m := range s.cfg.Loads.Models() {
			models = append(models, m.Name)
		}
		slices.Sort(models)
		models = slices.Compact(models)
	}
	list := &api.LoadList{Models: make([]api.ModelLoads, 0, len(models))}
	for _, model := range models {
		of, err := s.candidates(model, 0)
		if err != nil && r.Model != "" {
			return nil, err
		}
		if err != nil {
			continue // without workers now
		}
		m := api.ModelLoads{Model: model, Ranks: []api.RankLoad{}}
		x := s.scratches.Get().(*scratch)
		x.list = append(x.list[:0], of.list...)
		count := func(t *load.Table) { m.Requests += t.Len() }
		s.cfg.Loads.Read(table(model), count)
		s.cfg.Loads.ReadForeign(table(model), count)
		s.weigh(x, of, model, nil, true)
		measured := map[int32]bool{}
		s.cfg.Loads.Read(table(model), func(t *load.Table) {
			for i, at := range of.rowsOf(t, &of.rows) {
				if pace, _ := t.Pace(i, s.cfg.Loads.Now()); at >= 0 && pace.Measured() {
					measured[at] = true
				}
			}
		})
		for i := range x.list {
			c := &x.list[i]
			if measured[int32(i)] {
				m.Paces = append(m.Paces, api.RankPace{Worker: c.Worker.ID, Rank: c.Rank,
					PrefillTokensPerS: 1000 * c.PrefillRate, Busy: c.Busy})
			}
			m.Ranks = append(m.Ranks, api.RankLoad{Worker: c.Worker.ID, Rank: c.Rank,
				ActivePrefillTokens: c.ActivePrefillTokens, ActiveBlocks: c.ActiveBlocks, ActiveRequests: c.ActiveRequests})
		}
		s.scratches.Put(x)
		m.PendingCount, m.PendingISLTokens = s.room.pending(model)
		list.Models = append(list.Models, m)
	}
	return list, nil
}

// PotentialLoads returns the outstanding work of each registered rank with a further prompt, by the estimates of the
// policy dynamo.
func (s *Service) PotentialLoads(ctx context.Context, r *api.PotentialRequest) (*api.PotentialList, error) {
	of, err := s.candidates(r.Model, r.BlockSize)
	if err != nil {
		return nil, err
	}
	x, isl, err := s.hashed(&r.Prompt, of.blockSize)
	if err != nil {
		return nil, err
	}
	defer s.scratches.Put(x)
	q := r.Query()
	q.L3 = api.L3Off
	answer, err := s.match(ctx, &api.SelectRequest{Query: q}, of, x)
	if err != nil {
		return nil, err
	}
	s.guess(x, of)
	selector := s.selectors[routing.DynamoPolicy]
	x.request = routing.Request{ISL: isl, BlockSize: of.blockSize, Blocks: uint64(len(x.seq)), Overrides: r.Overrides}
	tracked := selector.Config().With(&r.Overrides).RouterTrackPrefillTokens
	s.fill(x, of, answer, x.seq)
	s.weigh(x, of, r.Model, x.seq, reuse(selector, &x.request))
	list := &api.PotentialList{Model: r.Model, Ranks: make([]api.PotentialLoad, len(x.list))}
	list.PendingCount, list.PendingISLTokens = s.room.pending(r.Model)
	for i, e := range selector.Estimates(nil, &x.request, x.list, &x.routing) {
		c := &x.list[i]
		if !tracked {
			e.EffectivePrefillTokens = 0
		}
		list.Ranks[i] = api.PotentialLoad{Worker: c.Worker.ID, Rank: c.Rank,
			PotentialPrefillTokens: c.ActivePrefillTokens + e.EffectivePrefillTokens,
			PotentialDecodeBlocks:  c.ActiveBlocks + c.NewBlocks, ActiveRequests: c.ActiveRequests}
	}
	return list, nil
}

// notBooked converts an error of the load table for clients; nil stays nil. A call that waits for a booking may end
// with its context: the code is then unavailable, which a client repeats, or behind after a deadline.
func notBooked(err error) error {
	var code api.Code
	switch {
	case err == nil:
		return nil
	case errors.Is(err, load.ErrConflict):
		code = api.CodeConflict
	case errors.Is(err, load.ErrUnknown):
		code = api.CodeUnknownRequest
	case errors.Is(err, load.ErrFull):
		code = api.CodeBusy
	case errors.Is(err, load.ErrInvalid):
		code = api.CodeMalformed
	default:
		return api.AsError(err)
	}
	return api.Errorf(code, "%v", err)
}

// refused converts a refusal of pkg/routing for clients.
func refused(err error) *api.Error {
	var r *routing.Refusal
	if !errors.As(err, &r) {
		return api.Errorf(api.CodeInternal, "%v", err)
	}
	code := map[routing.Code]api.Code{
		routing.BadRequest: api.CodeMalformed, routing.PinNotAllowed: api.CodeMalformed,
		routing.NoWorkers: api.CodeNoWorkers, routing.Filtered: api.CodeNoWorkers, routing.Overloaded: api.CodeOverloaded,
		routing.AllBusy: api.CodeOverloaded,
	}[r.Code]
	if code == "" {
		code = api.CodeInternal
	}
	return &api.Error{Code: code, Message: r.Message, Explanation: r.Explanation}
}
