package selection

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Observed is a request with its outcome. It is valid during the call of [Config.Observe].
type Observed struct {
	At        time.Time // of the request's arrival, or of the booking
	Request   *api.SelectRequest
	BlockSize uint32
	Tokens    uint64           // of the prompt
	Sequence  []events.SeqHash // of the prompt's whole blocks; engine hashes if the request has engine hashes only

	Out     *api.Selection     // nil: no worker was chosen
	Chosen  *routing.Candidate // the rank of Out with its load before the booking; nil: unknown
	Prefill *routing.Candidate // the rank of Out.Prefill

	// Routed and Ranks are the inputs of the choice, and Locals the hashes of the same blocks as Sequence, if the request
	// has tokens or local hashes. Of a disaggregated request they belong to the pool that was chosen last. They are empty
	// for a booking.
	Routed *routing.Request
	Ranks  []routing.Candidate
	Locals []events.LocalHash
}

// ChosenAt returns the index of Chosen in Ranks.
func (o *Observed) ChosenAt() (at int, ok bool) {
	for i := range o.Ranks {
		if &o.Ranks[i] == o.Chosen {
			return i, true
		}
	}
	return 0, false
}

// observe passes on a request at its end. out is the outcome.
func (s *Service) observe(x *scratch, r *api.SelectRequest, of *candidates, isl uint64, at time.Time,
	out **api.Selection) {
	o := &Observed{At: at, Request: r, BlockSize: of.blockSize, Tokens: isl, Sequence: x.seq, Out: *out,
		Routed: &x.request, Ranks: x.list, Locals: x.locals}
	find := func(out *api.Selection) *routing.Candidate {
		i, ok := of.at[events.RankKey{Instance: out.Worker, Rank: out.Rank}]
		if !ok || i >= len(x.list) {
			return nil
		}
		return &x.list[i]
	}
	if o.Out != nil {
		o.Chosen = find(o.Out)
		if o.Out.Prefill != nil {
			o.Prefill = find(o.Out.Prefill)
		}
	}
	s.cfg.Observe(o)
}

// observeBooking passes on a request that its router has booked on a worker of its choice.
func (s *Service) observeBooking(x *scratch, r *api.BookRequest, of *candidates, isl uint64) {
	if s.cfg.Observe == nil {
		return
	}
	q := &api.SelectRequest{Query: r.Query(), RequestID: r.RequestID, Book: true, SessionID: r.SessionID,
		ExpectedOutputTokens: r.ExpectedOutputTokens}
	out := &api.Selection{Model: r.Model, BlockSize: of.blockSize, Blocks: len(x.seq), ISLTokens: isl, Booked: true,
		RequestID: r.RequestID, Worker: r.Worker, Rank: r.Rank, Complete: true,
		CachedTokens: isl - r.EffectivePrefillTokens, EffectivePrefillTokens: r.EffectivePrefillTokens}
	s.cfg.Observe(&Observed{At: time.Now(), Request: q, BlockSize: of.blockSize, Tokens: isl, Sequence: x.seq, Out: out})
}
