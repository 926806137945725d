package selection

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/affinity"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// inSession returns the request with what its session says: that it is to go where the session is. A request that will
// be booked, of a session that is nowhere, initialises it; others of the session wait until it calls end. A session
// whose rank is not registered any more is nowhere.
func (s *Service) inSession(
	ctx context.Context, r *api.SelectRequest,
) (in *api.SelectRequest, end func(), err error) {
	key := affinity.Key{Model: r.Model, Session: r.SessionID}
	end = func() {}
	var rank events.RankKey
	var bound bool
	if r.Book {
		if rank, bound, end, err = s.cfg.Sessions.Begin(ctx, key); err != nil {
			return nil, nil, api.Errorf(api.CodeBehind,
				"the deadline passed while another request of session %.64q was being given a worker", r.SessionID)
		}
	} else {
		rank, bound = s.cfg.Sessions.Get(key)
	}
	if !bound || s.cfg.Pool(r.Model).Rank(rank) == nil {
		return r, end, nil
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
		return nil, nil, elsewhere(r.SessionID, rank)
	case s.hard():
		copied.Pinned, copied.Affinity = target, nil
	case asked == nil:
		copied.Affinity = target
	}
	return &copied, end, nil
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
	case c.out == nil:
		return nil
	}
	c.out.Session = &api.SessionBinding{ID: c.session}
	switch how {
	case affinity.Made:
		c.out.Session.Binding = api.SessionMade
	case affinity.Kept:
		c.out.Session.Binding = api.SessionKept
	case affinity.Moved:
		c.out.Session.Binding = api.SessionMoved
		c.out.Session.From = &routing.Target{Worker: from.Instance, Rank: &from.Rank}
	default:
		c.out.Session.Binding = api.SessionNone
	}
	return nil
}
