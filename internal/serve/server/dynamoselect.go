package server

import (
	"context"

	"github.com/kvatlas/kvatlas/internal/faces/compat/conductor"
	"github.com/kvatlas/kvatlas/internal/faces/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// dynamo returns the configuration of Dynamo's selection service and slot tracker.
func (s *Server) dynamo() dynamoselect.Config {
	compat := s.compat(nil)
	return dynamoselect.Config{
		Node: s.ID, Namespace: s.ns, Registry: s.registry, Loads: s.loads, Choice: s.selection, Shims: s.shims,
		Find: s.Find, Dump: compat.Holdings, Admit: s.admitChoice,
		Unregister: func(ctx context.Context, instance events.WorkerID) error {
			_, err := s.RemoveWorker(ctx, instance)
			return err
		},
		Ended: s.endedHTTP,
	}
}

// conductor returns the configuration of Mooncake's conductor.
func (s *Server) conductor() conductor.Config {
	return conductor.Config{Server: s, Shims: s.shims, Ended: s.endedHTTP}
}

func (s *Server) endedHTTP(op, outcome string) { s.outcomes.Count(api.OverHTTP, op, outcome) }
