package server

import (
	"fmt"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// newSessions returns the service of session affinity, or nil if disabled.
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
		Conn: s.Conn, Namespace: s.Namespace, Log: s.log,
	})
}

// bindSession returns the function that binds sessions of a gateway; nil without sessions.
func (s *Server) bindSession() func(model, session string, rank events.RankKey, requestID string) {
	if s.sessions == nil {
		return nil
	}
	return func(model, session string, rank events.RankKey, requestID string) {
		// A failure means that too many sessions are bound. The next request is then routed by load.
		_, _ = s.sessions.Bind(affinity.Key{Model: model, Session: session}, rank, requestID, false)
	}
}

// sessionStatus converts the status of sessions for clients; nil without session affinity.
func (s *Server) sessionStatus() *api.SessionStatus {
	if s.sessions == nil {
		return nil
	}
	of := s.sessions.Status()
	return &api.SessionStatus{Sessions: of.Sessions, Hash: fmt.Sprintf("%016x", of.Sum), Made: of.Counts.Made,
		Kept: of.Counts.Kept, Moved: of.Counts.Moved, Refused: of.Counts.Elsewhere, Full: of.Counts.Full,
		Expired: of.Counts.Expired, Prompts: of.Prompts, Continued: of.Counts.Continued, Unclear: of.Counts.Unclear}
}

// shared returns channels that are closed after this node has all nodes' requests and sessions.
func (s *Server) shared() [2]<-chan struct{} {
	ready := [2]<-chan struct{}{s.loads.Ready(), s.loads.Ready()}
	if s.sessions != nil {
		ready[1] = s.sessions.Ready()
	}
	return ready
}
