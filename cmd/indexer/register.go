package main

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/compat"
	"github.com/kvatlas/kvatlas/internal/dump"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// newShims returns the shims that this process runs for engines that were registered over HTTP.
func newShims(ns *jetstream.Namespace, bucket *jetstream.Bucket, node string, engines compat.Engines,
	log *slog.Logger) *compat.Shims {
	return compat.NewShims(ns, bucket, node, engines, compat.ShimsHooks{
		Started: func(r registry.Record) {
			log.Info("a shim runs in this process", "worker", r.Key(), "engine", r.Engine.Endpoint, "replay",
				r.Engine.Replay)
		},
		EngineFound: func(key events.RankKey, engine events.Engine, why string) {
			log.Info("a registered engine speaks as "+engine.String()+" does", "worker", key, "because", why)
		},
		Ended: func(key events.RankKey, err error) {
			log.Warn("a shim in this process has ended; it is started again", "worker", key, "error", err, "what_to_do",
				"see the error; unregister the worker if its engine is gone")
		},
		Unusable: func(key events.RankKey, err error, do string) {
			log.Error("a registered engine's blocks are not of the block_size that was registered", "worker", key,
				"error", err, "what_to_do", do)
		},
		Refused: func(key events.RankKey, err error) {
			if err == nil {
				log.Info("the log takes events of a registered engine again", "worker", key)
				return
			}
			log.Warn("the log does not take events of a registered engine; they wait", "worker", key, "error", err,
				"what_to_do", shim.LogAdvice(err))
		},
		Standing: func(key events.RankKey, s shim.Standing) {
			switch s.Engine {
			case api.EngineSilent:
				log.Warn("a registered engine is silent", "worker", key, "since", s.Since.UTC().Format(time.RFC3339),
					"why", s.Why,
					"what_to_do",
					"see whether its process hangs or is stopped, and whether its host can be reached; restart it if it does not go on")
			case api.EngineGone:
				log.Warn("a registered engine is gone; what it had in device and host memory is cleared", "worker", key,
					"why", s.Why)
			}
		},
	})
}

// withCompat adds the paths of Dynamo's indexer to ours.
func withCompat(ours http.Handler, indexer api.Indexer, shims *compat.Shims, ns *jetstream.Namespace,
	ended func(op, outcome string)) http.Handler {
	theirs := compat.NewHandler(compat.Config{
		Indexer: indexer, Shims: shims, Ended: ended,
		Dump: func(ctx context.Context, out io.Writer) error {
			return dump.Write(ctx, ns, "", out, func(dump.Dumped) {})
		},
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains(compat.Patterns, r.URL.Path) {
			theirs.ServeHTTP(w, r)
			return
		}
		ours.ServeHTTP(w, r)
	})
}
