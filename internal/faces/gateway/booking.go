package gateway

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// booking is a request with a counted load. The zero value is no booking.
type booking struct {
	ref    api.RequestRef
	prompt api.Prompt // kept until the answering worker is known
	rank   events.RankKey

	chosen string // id of the choice; ref has another id after a move
	report string // id for the report of reused tokens; empty: reported
	alone  bool   // the decode worker computes the prompt, because the prefill worker did not

	prefill uint64 // tokens that the chosen worker computes, if another worker answers: without its reuse

	estimated uint64        // tokens of all prompts; 0: unknown, or the estimate covers only a part
	length    fields.Length // of all prompts, with estimated

	alive *renewal
}

// renewal reports progress of a request until stop is called. nil reports nothing.
type renewal struct {
	report func() error
	period time.Duration

	mu    sync.Mutex
	timer *time.Timer // nil after stop
}

// renew starts the reports of a request's progress.
func (s *Service) renew(ctx context.Context, ref api.RequestRef) *renewal {
	r := &renewal{period: s.cfg.Expiry / 4, report: func() error { return s.cfg.Bookings.Progress(ctx, &ref) }}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = time.AfterFunc(r.period, r.run)
	return r
}

func (r *renewal) run() {
	_ = r.report() // the booking may have ended with its worker
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Reset(r.period)
	}
}

func (r *renewal) stop() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
}

// load reports progress of a booking. A booking may be missing because of its age or because its worker is gone. This
// is not an error.
func (s *Service) load(ctx context.Context, b *booking, e Effects) {
	if b.ref.RequestID == "" {
		return
	}
	if len(e.Failed) > 0 {
		s.failed(ctx, b.ref.Model, e.Failed)
	}
	if e.Served != "" {
		s.move(ctx, b, e.Served)
	}
	if e.PrefillComplete {
		_ = s.cfg.Bookings.PrefillComplete(ctx, &b.ref)
	}
	if e.Reported && b.report != "" {
		s.cfg.Metrics.ReportReused(b.report, e.CachedTokens, b.alone)
	}
	if e.ResponseID != "" && s.cfg.Bind != nil {
		s.cfg.Bind(b.ref.Model, e.ResponseID, b.rank, b.ref.RequestID)
	}
	if e.PromptTokens > 0 {
		s.cfg.Metrics.ReportAnswer(b.chosen, e.CompletionTokens)
	}
	if e.PromptTokens > 0 && b.estimated > 0 {
		s.cfg.Metrics.PromptCompared(b.ref.Model, b.estimated, e.PromptTokens, e.CompletionTokens)
		s.cfg.Estimates.Learn(b.ref.Model, &b.length, e.PromptTokens)
	}
	if e.Free {
		b.alive.stop()
		b.ref.Result = e.Result
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		b.ref.RequestID = ""
	}
}

// failed reports failures of the workers at some addresses.
func (s *Service) failed(ctx context.Context, model string, addresses []string) {
	var l api.EngineLoads
	ranks := s.cfg.Pool(model).Ranks
	for i := range ranks {
		r := &ranks[i]
		if slices.Contains(addresses, address(r.Record.Endpoint)) &&
			!slices.ContainsFunc(l.Results, func(f api.WorkerResult) bool { return f.Worker == r.Instance }) {
			l.Results = append(l.Results, api.WorkerResult{Worker: r.Instance, Result: api.ResultRefused})
		}
	}
	_ = s.cfg.Bookings.EngineLoad(ctx, &l)
}

// move books a request on the answering worker instead of the chosen one.
func (s *Service) move(ctx context.Context, b *booking, to string) {
	s.cfg.Metrics.Moved(b.ref.Model)
	ranks := s.cfg.Pool(b.ref.Model).Ranks
	at := slices.IndexFunc(ranks, func(r registry.PoolRank) bool { return address(r.Record.Endpoint) == to })
	if at < 0 { // not a worker of the registry
		b.alive.stop()
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		b.ref.RequestID = ""
		return
	}
	s.rebook(ctx, b, ranks[at].RankKey, b.prefill)
	b.report = b.ref.RequestID
}

// rebook ends a booking and books the request at a rank, under another id.
func (s *Service) rebook(ctx context.Context, b *booking, at events.RankKey, prefill uint64) {
	b.alive.stop()
	_ = s.cfg.Bookings.Free(ctx, &b.ref)
	b.ref.RequestID, b.rank = rand.Text(), at
	_, _ = s.cfg.Bookings.Book(ctx, &api.BookRequest{Prompt: b.prompt, RequestID: b.ref.RequestID,
		Worker: at.Instance, Rank: at.Rank, EffectivePrefillTokens: prefill})
	b.alive = s.renew(ctx, b.ref)
}
