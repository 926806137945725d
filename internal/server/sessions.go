package server

import (
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/internal/affinity"
	"github.com/kvatlas/kvatlas/internal/load"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// newSessions is what keeps sessions on their workers; nil if nothing is to.
func (s *Server) newSessions() *affinity.Service {
	set := s.Routing.SessionAffinity
	if set == nil {
		return nil
	}
	return affinity.New(affinity.ServiceConfig{
		Config: affinity.Config{TTL: set.TTL(), Alive: func(model, request string) (alive bool) {
			s.loads.Read(load.Model{Name: model}, func(t *load.Table) { alive = t.Has(request) })
			return alive
		}},
		Conn: s.Conn, Namespace: s.Namespace, Hooks: sessionHooks(s.log),
	})
}

// sessionStatus is how sessions stand, as clients get it; nil if they are not kept on their workers.
func (s *Server) sessionStatus() *api.SessionStatus {
	if s.sessions == nil {
		return nil
	}
	of := s.sessions.Status()
	return &api.SessionStatus{Sessions: of.Sessions, Made: of.Counts.Made, Kept: of.Counts.Kept, Moved: of.Counts.Moved,
		Refused: of.Counts.Elsewhere, Full: of.Counts.Full, Expired: of.Counts.Expired}
}

// sessionHooks makes log lines of what happens to sessions.
func sessionHooks(log *slog.Logger) affinity.Hooks {
	var told time.Time
	return affinity.Hooks{
		Ready: func(peers, sessions int) {
			log.Debug("sessions are known", "nodes", peers, "sessions", sessions)
		},
		Listen: func(err error) {
			log.Warn("other nodes' sessions cannot be heard; it is tried again", "error", err, "what_to_do",
				"grant it to this user: indexer auth example prints what each user needs")
		},
		Send: func(err error) {
			if time.Since(told) > time.Minute {
				told = time.Now()
				log.Warn("other nodes are not told of sessions", "error", err, "what_to_do",
					"see that NATS answers; they catch up when it does")
			}
		},
	}
}

// shared are closed once this node knows what all nodes know of requests and sessions.
func (s *Server) shared() [2]<-chan struct{} {
	ready := [2]<-chan struct{}{s.loads.Ready(), s.loads.Ready()}
	if s.sessions != nil {
		ready[1] = s.sessions.Ready()
	}
	return ready
}
