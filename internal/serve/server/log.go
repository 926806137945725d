package server

import (
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// shimsHooks make log lines of what happens to the shims in this process.
func shimsHooks(log *slog.Logger) compat.ShimsHooks {
	return compat.ShimsHooks{
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
		Rejected: func(key events.RankKey, err error) {
			log.Warn("a registration is not acted on", "worker", key, "error", err, "what_to_do",
				"unregister the worker and register it with another address, or permit it with --dial-allow or --l3-folder")
		},
		Quiet: func(key events.RankKey, quiet bool) {
			if !quiet {
				log.Info("a registered engine has published its first event", "worker", key)
				return
			}
			log.Warn("a registered engine has published no event since its shim began", "worker", key, "for",
				shim.DefaultQuietAfter, "what_to_do", registry.QuietAdvice)
		},
		Unusable: func(key events.RankKey, err error, do string) {
			log.Error("a registered engine's blocks are not of the block_size that was registered", "worker", key,
				"error", err, "what_to_do", do)
		},
		OtherRank: func(key events.RankKey, rank events.Rank, skipped bool) {
			if skipped {
				return // reported once for each process of the engine
			}
			log.Error("a registered engine names another data-parallel rank; its blocks are credited to the registered one",
				"worker", key, "engine_rank", rank, "what_to_do", "register the engine's rank with the endpoint of that rank")
		},
		Unreadable: func(key events.RankKey, err error) {
			log.Warn("a rank's last message in the log cannot be read; a new incarnation begins", "worker", key, "error",
				err, "what_to_do", "see that only this worker's shim has a key that may write its events")
		},
		Passed: func(key events.RankKey, fields hicache.Passed) {
			log.Warn("a registration's l3 has unknown fields, which are passed over", "worker", key, "fields", fields,
				"what_to_do", hicache.PassedRemedy)
		},
		Refused: func(key events.RankKey, err error) {
			if err == nil {
				log.Info("the log takes events of a registered engine again", "worker", key)
				return
			}
			log.Warn("the log does not take events of a registered engine; they wait", "worker", key, "error", err,
				"what_to_do", shim.LogAdvice(err))
		},
		StateChanged: func(key events.RankKey, s shim.State) {
			switch s.Engine {
			case api.EngineSilent:
				log.Warn("a registered engine is silent", "worker", key, "since", s.Since.UTC().Format(time.RFC3339),
					"why", s.Why, "what_to_do",
					"see whether its process hangs or is stopped, and whether its host can be reached; restart it if it does not go on")
			case api.EngineGone:
				log.Warn("a registered engine is gone; what it had in device and host memory is cleared", "worker", key,
					"why", s.Why)
			}
		},
	}
}
