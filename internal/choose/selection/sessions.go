package selection

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// inSession returns the request with the worker of its session as target, and the source of that target. by is empty if
// the session has no worker or the request has a target of its own. A request that will be booked initialises a session
// without a worker. Other requests of the session wait until end is called. A session has no worker if its rank is no
// longer registered.
func (s *Service) inSession(
	ctx context.Context, r *api.SelectRequest,
) (in *api.SelectRequest, by routing.AffinitySource, end func(), err error) {
	key := affinity.Key{Model: r.Model, Session: r.SessionID}
	end = func() {}
	var rank events.RankKey
	var bound bool
	alive := func(rank events.RankKey) bool { return s.registered(r.Model, rank) }
	if r.Book {
		if rank, bound, end, err = s.cfg.Sessions.Begin(ctx, key, alive); err != nil {
			return nil, "", nil, api.Errorf(api.CodeBehind,
				"the deadline passed during the choice for another request of session %.64q", r.SessionID)
		}
	} else {
		rank, bound = s.cfg.Sessions.Get(key)
		bound = bound && alive(rank)
	}
	if !bound {
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

// follow sets the worker of the session that a prompt without a session id continues as affinity of x.request.
func (s *Service) follow(r *api.SelectRequest, x *scratch) {
	if !s.byPrompt(r.SessionID) || r.Pinned != nil || r.Affinity != nil || r.Role == routing.Prefill {
		return
	}
	rank, ok := s.cfg.Sessions.Follow(r.Model, x.seq)
	if ok && s.registered(r.Model, rank) {
		x.request.Affinity = &routing.Target{Worker: rank.Instance, Rank: &rank.Rank}
		x.request.AffinityBy = routing.AffinityByPrompt
	}
}

// registered reports whether a rank of a model is registered.
func (s *Service) registered(model string, rank events.RankKey) bool {
	return s.cfg.Pool(model).Rank(rank) != nil
}

func (s *Service) hard() bool { return s.cfg.Routing.SessionAffinity.Mode == routing.HardAffinity }

func elsewhere(session string, rank events.RankKey) error {
	return api.Errorf(api.CodeConflict, "session %.64q is bound to worker %.64q rank %d, and affinity is hard", session,
		rank.Instance, rank.Rank)
}

// bind binds the session of a booking to its rank. It returns an error if the binding is refused; the booking must then
// end.
func (s *Service) bind(model string, c *chosen) error {
	key := affinity.Key{Model: model, Session: c.session}
	how, from, err := s.cfg.Sessions.Bind(key, c.booking.Rank, c.booking.ID, func(from events.RankKey) bool {
		return !s.hard() || !s.registered(model, from)
	})
	switch {
	case errors.Is(err, affinity.ErrElsewhere):
		return elsewhere(c.session, from)
	case err != nil && s.hard():
		return api.Errorf(api.CodeBusy, "%v; hard affinity requires a binding", err)
	case c.out != nil:
		c.out.Session = sessionBinding(key, how, from)
	}
	return nil
}

// bindPrompt binds the session of a booking without a session id. A failure is ignored.
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

// sessionBinding converts the effect on a binding for clients.
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
