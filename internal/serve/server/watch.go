package server

import (
	"context"
	"net/http"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// watched is the data source of the live page.
type watched struct{ *Server }

func (w watched) Loads(ctx context.Context) (*api.LoadList, error) {
	return w.selection.Loads(ctx, &api.LoadsRequest{})
}

func (w watched) EngineLoads(context.Context) (*api.EngineLoads, error) { return w.engines.list(), nil }

func (w watched) Nodes() []string { return w.nodes() }

// watch sends server-sent events until the client disconnects or stops reading.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	begun := false
	err := s.hub.Watch(r.Context(), func(event []byte) error {
		if !begun {
			begun = true
			_ = control.SetReadDeadline(time.Time{}) // no further reads; only a writer outside of this program lacks the method
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Cache-Control", "no-store")
		}
		if _, err := w.Write(event); err != nil {
			return err
		}
		return control.Flush()
	})
	if err != nil && !begun {
		denyAsAPI(w, api.AsError(err))
	}
}
