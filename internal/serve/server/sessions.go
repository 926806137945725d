package server

import (
	"fmt"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/load"
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
		Conn: s.Conn, Namespace: s.Namespace, Log: s.log,
	})
}

// sessionStatus is how sessions stand, as clients get it; nil if they are not kept on their workers.
func (s *Server) sessionStatus() *api.SessionStatus {
	if s.sessions == nil {
		return nil
	}
	of := s.sessions.Status()
	return &api.SessionStatus{Sessions: of.Sessions, Hash: fmt.Sprintf("%016x", of.Sum), Made: of.Counts.Made,
		Kept: of.Counts.Kept, Moved: of.Counts.Moved, Refused: of.Counts.Elsewhere, Full: of.Counts.Full,
		Expired: of.Counts.Expired, Prompts: of.Prompts, Continued: of.Counts.Continued, Unclear: of.Counts.Unclear}
}

// shared are closed once this node knows what all nodes know of requests and sessions.
func (s *Server) shared() [2]<-chan struct{} {
	ready := [2]<-chan struct{}{s.loads.Ready(), s.loads.Ready()}
	if s.sessions != nil {
		ready[1] = s.sessions.Ready()
	}
	return ready
}
