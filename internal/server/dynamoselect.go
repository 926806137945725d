package server

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/kvatlas/kvatlas/internal/compat/conductor"
	"github.com/kvatlas/kvatlas/internal/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/internal/web"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// dynamo is what stands behind Dynamo's selection service and slot tracker.
func (s *Server) dynamo() dynamoselect.Config {
	compat := s.compat(nil)
	return dynamoselect.Config{
		Node: s.ID, Namespace: s.ns, Registry: s.registry, Loads: s.loads, Choice: s.selection, Shims: s.shims,
		Find: s.Find, Dump: compat.Holdings, Admit: router{s}.admit,
		Unregister: func(ctx context.Context, instance events.WorkerID) error {
			_, err := s.RemoveWorker(ctx, instance)
			return err
		},
		Ended: s.endedHTTP,
	}
}

// conductor is what stands behind Mooncake's conductor.
func (s *Server) conductor() conductor.Config {
	return conductor.Config{Server: s, Shims: s.shims, Ended: s.endedHTTP}
}

func (s *Server) endedHTTP(op, outcome string) { s.outcomes.Count(api.OverHTTP, op, outcome) }

// guarded keeps a port of Dynamo's, or of Mooncake's conductor, to those who may use the HTTP port, with as much room,
// and its errors to their form. Anybody may ask for /health.
func (s *Server) guarded(h http.Handler, body int64) http.Handler {
	deny := func(w http.ResponseWriter, failure *api.Error) {
		text, _ := json.Marshal(map[string]string{"error": failure.Message}) // text can always be encoded
		_ = web.WriteReply(w, api.JSON, text, failure.Code.HTTPStatus())     // or the caller has gone
	}
	room := s.room(body, deny)
	a := &access{token: s.HTTPToken, open: map[string]bool{"/health": true}, deny: deny}
	return a.guard(room.limit(s.tracedHTTP(h), s.endedHTTP), s.endedHTTP)
}
