package selection

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// inSession returns the request with what its session says: that it is to go where the session is. by says so too. It
// is empty if the session is nowhere or the request has a target of its own. A request that will be booked, of a
// session that is nowhere, initialises it. Others of the session wait until it calls end. A session is nowhere if its
// rank is not registered any more.
func (s *Service) inSession(
	ctx context.Context, r *api.SelectRequest,
) (in *api.SelectRequest, by routing.AffinitySource, end func(), err error) {
	key := affinity.Key{Model: r.Model, Session: r.SessionID}
	end = func() {}
	var rank events.RankKey
	var bound bool
	if r.Book {
		if rank, bound, end, err = s.cfg.Sessions.Begin(ctx, key); err != nil {
			return nil, "", nil, api.Errorf(api.CodeBehind,
				"the deadline passed while another request of session %.64q was being given a worker", r.SessionID)
		}
	} else {
		rank, bound = s.cfg.Sessions.Get(key)
	}
	if !bound || s.cfg.Pool(r.Model).Rank(rank) == nil {
		return r, "", end, nil
	}
	target := &routing.Target{Worker: rank.Instance, Rank: &rank.Rank}
	asked := r.Pinned
	if asked == nil {
		asked = r.Affinity
	}
	copied := *r
	switch {
	case s.hard() && asked != nil && (asked.Worker != rank.Instance || asked.Rank != nil && *asked.Rank != rank.Rank):
		end()
		return nil, "", nil, elsewhere(r.SessionID, rank)
	case s.hard():
		copied.Pinned, copied.Affinity, by = target, nil, routing.AffinityBySession
	case asked == nil:
		copied.Affinity, by = target, routing.AffinityBySession
	}
	return &copied, by, end, nil
}

// byPrompt reports whether the session of a request is recognised by its prompt.
func (s *Service) byPrompt(session string) bool {
	return s.cfg.Sessions != nil && session == "" && s.cfg.Routing.SessionAffinity.ByPrompt
}

// follow has a request without a session id go where the session is that its prompt continues. x.request is made.
func (s *Service) follow(r *api.SelectRequest, x *scratch) {
	if !s.byPrompt(r.SessionID) || r.Pinned != nil || r.Affinity != nil || r.Role == routing.Prefill {
		return
	}
	rank, ok := s.cfg.Sessions.Follow(r.Model, x.seq)
	if ok && s.cfg.Pool(r.Model).Rank(rank) != nil {
		x.request.Affinity = &routing.Target{Worker: rank.Instance, Rank: &rank.Rank}
		x.request.AffinityBy = routing.AffinityByPrompt
	}
}

func (s *Service) hard() bool { return s.cfg.Routing.SessionAffinity.Mode == routing.HardAffinity }

func elsewhere(session string, rank events.RankKey) error {
	return api.Errorf(api.CodeConflict, "session %.64q is bound to worker %.64q rank %d, and affinity is hard", session,
		rank.Instance, rank.Rank)
}

// bind binds the session of what was booked to its rank. If that may not be it returns why, and the booking is to be
// ended.
func (s *Service) bind(model string, c *chosen) error {
	key := affinity.Key{Model: model, Session: c.session}
	rank, hard := c.booking.Rank, s.hard()
	from, bound := s.cfg.Sessions.Get(key)
	if bound && s.cfg.Pool(model).Rank(from) == nil {
		hard = false
	}
	how, err := s.cfg.Sessions.Bind(key, rank, c.booking.ID, hard)
	switch {
	case errors.Is(err, affinity.ErrElsewhere):
		return elsewhere(c.session, from)
	case err != nil && s.hard():
		return api.Errorf(api.CodeBusy, "%v; more are not bound, which hard affinity asks for", err)
	case c.out != nil:
		c.out.Session = sessionBinding(key, how, from)
	}
	return nil
}

// bindPrompt binds the session of what was booked without a session id. A session that cannot be bound does not matter.
func (s *Service) bindPrompt(model string, c *chosen) {
	seq := c.booking.Hashes
	if len(seq) == 0 {
		return
	}
	how, from, _ := s.cfg.Sessions.BindPrompt(model, seq, c.booking.Rank, c.booking.ID)
	if c.out != nil {
		c.out.Session = sessionBinding(affinity.PromptKey(model, seq[len(seq)-1]), how, from)
	}
}

// sessionBinding is what became of a binding as clients get it.
func sessionBinding(key affinity.Key, how affinity.How, from events.RankKey) *api.SessionBinding {
	out := &api.SessionBinding{ID: key.String(), Binding: api.SessionNone}
	switch how {
	case affinity.Made:
		out.Binding = api.SessionMade
	case affinity.Kept:
		out.Binding = api.SessionKept
	case affinity.Moved:
		out.Binding = api.SessionMoved
		out.From = &routing.Target{Worker: from.Instance, Rank: &from.Rank}
	}
	return out
}
