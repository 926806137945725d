package selection

import (
	"context"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Prospect has all registered ranks of a model for a prompt, as a choice would see them. It is valid during the call of
// the function that receives it.
type Prospect struct {
	Request  *routing.Request
	Ranks    []routing.Candidate
	Sequence []events.SeqHash // of the prompt's whole blocks
}

// Prospect calls read with the ranks for a prompt. Nothing is chosen, booked or recorded.
func (s *Service) Prospect(ctx context.Context, r *api.SelectRequest, read func(*Prospect)) error {
	of, err := s.candidates(r.Model, r.BlockSize)
	if err != nil {
		return err
	}
	prompt := r.Prompt()
	x, isl, err := s.hashed(&prompt, of.blockSize)
	if err != nil {
		return err
	}
	defer s.scratches.Put(x)
	answer, err := s.match(ctx, r, of, x)
	if err != nil {
		return err
	}
	s.guess(x, of)
	x.setRequest(r, of, answer, isl)
	x.request.Blocks = uint64(len(x.seq))
	s.fill(x, of, answer, x.seq)
	s.weigh(x, of, r.Model, x.seq, true)
	s.reported(x, of)
	s.penalise(x, of)
	read(&Prospect{Request: &x.request, Ranks: x.list, Sequence: x.seq})
	return nil
}
