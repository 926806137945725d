package dynamoselect

import (
	"context"
	"net/http"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// reservation is the reply to a booking.
type reservation struct {
	ID       string      `json:"selection_id"`
	Model    string      `json:"model_name"`
	Group    string      `json:"routing_group"`
	Worker   id          `json:"worker_id"`
	Rank     events.Rank `json:"dp_rank"`
	Endpoint string      `json:"endpoint"`
}

// unused refuses an id that a running request of any model uses.
func (s *selectService) unused(selectionID string) error {
	if _, taken := s.Loads.Locate(selectionID, mine); taken {
		return fail(http.StatusConflict, "selection %s is already reserved or being reserved", selectionID)
	}
	return nil
}

// reserve books a request. The rank comes from a pending selection or from the request.
func (s *selectService) reserve(r *asked) (int, any, error) {
	var p prompt
	var selectionID string
	var worker *id
	var rank events.Rank
	var expected uint32
	var effective *uint64
	var track *bool
	if err := r.fields.Read(&words, append(p.members(),
		member("selection_id", &selectionID, required, "text"),
		member("worker_id", &worker, optional, "a worker's number"),
		member("dp_rank", &rank, optional, "an unsigned 32-bit number"),
		member("expected_output_tokens", &expected, optional, "an unsigned 32-bit number"),
		member("effective_prefill_tokens", &effective, optional, "a number of tokens"),
		member("track_prefill_tokens", &track, optional, "true or false"))...); err != nil {
		return 0, nil, err
	}
	if err := s.resolve(&p); err != nil {
		return 0, nil, err
	}
	if worker == nil {
		return s.replay(r.ctx, p.key, selectionID)
	}
	s.Choice.DropPending(p.name(), selectionID)
	pool, err := s.pool(p.key)
	if err != nil {
		return 0, nil, err
	}
	body, err := p.forBooking(pool.Ranks[0].BlockSize)
	if err != nil {
		return 0, nil, err
	}
	isl := body.ISLTokens
	if body.Tokens != nil {
		isl = uint64(len(body.Tokens))
	}
	if effective != nil && *effective > isl {
		return 0, nil, fail(http.StatusBadRequest, "effective_prefill_tokens (%d) must not exceed isl_tokens (%d)",
			*effective, isl)
	}
	endpoint, there := "", false
	for _, rank := range pool.Worker(events.WorkerID(*worker)) {
		if schedulable(rank) {
			endpoint, there = rank.Record.Endpoint, true
		}
	}
	if !there {
		return 0, nil, fail(http.StatusNotFound, "schedulable worker %s not found for %s", *worker, p.key)
	}
	if err := s.unused(selectionID); err != nil {
		return 0, nil, err
	}
	at := events.RankKey{Instance: events.WorkerID(*worker), Rank: rank}
	if found := pool.Rank(at); found == nil || !schedulable(*found) {
		return 0, nil, noRank(at)
	}
	b := &api.BookRequest{Prompt: body, RequestID: selectionID, Worker: at.Instance, Rank: rank,
		TrackPrefillTokens: track, AssumeKVReuse: p.overrides.AssumeKVReuse, ExpectedOutputTokens: expected}
	if effective != nil {
		b.EffectivePrefillTokens = *effective
	}
	if _, err := s.Choice.Book(r.ctx, b); err != nil {
		return 0, nil, refused(err, selectionID, p.key)
	}
	return http.StatusCreated, reservation{selectionID, p.model, p.group, *worker, rank, endpoint}, nil
}

// noRank returns the error for an unknown worker or rank.
func noRank(at events.RankKey) error {
	return fail(http.StatusNotFound, "Worker WorkerWithDpRank { worker_id: %s, dp_rank: %d } not found", at.Instance,
		at.Rank)
}

// replay books a request for the rank of a pending selection.
func (s *selectService) replay(ctx context.Context, k key, selectionID string) (int, any, error) {
	at, pending := s.Choice.Pending(k.name(), selectionID)
	if !pending {
		return 0, nil, fail(http.StatusNotFound,
			"no pending selection %s for %s (expired, already used, or never selected)", selectionID, k)
	}
	pool, err := s.pool(k)
	if err != nil {
		return 0, nil, err
	}
	rank := pool.Rank(at)
	if rank == nil || !schedulable(*rank) {
		return 0, nil, fail(http.StatusNotFound, "schedulable worker %s (dp_rank %d) not found for %s", at.Instance,
			at.Rank, k)
	}
	if err := s.unused(selectionID); err != nil {
		return 0, nil, err
	}
	b := &api.BookRequest{Prompt: api.Prompt{Model: k.name()}, RequestID: selectionID}
	if _, err := s.Choice.Book(ctx, b); err != nil {
		return 0, nil, refused(err, selectionID, k)
	}
	return http.StatusCreated, reservation{selectionID, k.model, k.group, id(at.Instance), at.Rank,
		rank.Record.Endpoint}, nil
}

// forBooking converts the prompt for a booking. Without tokens, the sequence hashes identify the shared blocks.
func (p *prompt) forBooking(blockSize uint32) (api.Prompt, error) {
	if p.tokens != nil || p.routing != nil && len(p.routing.Tokens) > 0 {
		return p.convert(blockSize)
	}
	out := api.Prompt{Model: p.name(), BlockSize: blockSize}
	switch {
	case p.seqs == nil:
		return out, fail(http.StatusBadRequest, "sequence_hashes is required without token_ids")
	case p.isl == nil:
		return out, fail(http.StatusBadRequest, "isl_tokens is required without token_ids")
	}
	out.SequenceHashes, out.ISLTokens = p.seqs, *p.isl
	p.overrides.AssumeKVReuse = nil
	return out, p.tooShort(blockSize)
}

// step changes a request that is identified only by an id.
func (s *selectService) step(r *asked, fraction *float64,
	do func(ctx context.Context, ref *api.RequestRef) error) (int, any, error) {
	notFound := fail(http.StatusNotFound, "reservation %s not found", r.id)
	model, found := s.Loads.LocateSoon(r.ctx, r.id, mine)
	if !found {
		return 0, nil, notFound
	}
	err := do(r.ctx, &api.RequestRef{Model: model.Name, RequestID: r.id, DecayFraction: fraction})
	if err == nil {
		return 0, ok, nil
	}
	if failed(err).code == api.CodeUnknownRequest {
		return 0, nil, notFound
	}
	return 0, nil, err
}

func (s *selectService) prefillComplete(r *asked) (int, any, error) {
	return s.step(r, nil, s.Choice.PrefillComplete)
}

func (s *selectService) free(r *asked) (int, any, error) { return s.step(r, nil, s.Choice.Free) }

func (s *selectService) outputBlock(r *asked) (int, any, error) {
	var fraction *float64
	if err := r.fields.Read(&words, member("decay_fraction", &fraction, optional, "a number")); err != nil {
		return 0, nil, err
	}
	if fraction != nil && !(*fraction >= 0 && *fraction <= 1) {
		return 0, nil, fail(http.StatusBadRequest, "decay_fraction must be between 0.0 and 1.0")
	}
	return s.step(r, fraction, s.Choice.OutputBlock)
}
