package compat

import (
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// observer logs the events of a shim in this process.
type observer struct {
	host.Unobserved
	log    *slog.Logger
	run    *running
	record registry.Record
	key    events.RankKey
	begun  func()
	quiet  bool
}

func (o *observer) prepared(*shim.Report, *shim.Config) {
	o.log.Info("a shim runs in this process", "worker", o.key, "engine", o.record.Engine.Endpoint, "replay",
		o.record.Engine.Replay)
}

func (o *observer) LeaseTaken() { o.begun() }

func (o *observer) Connected(string)           { o.run.connected.Store(true) }
func (o *observer) Disconnected(string, error) { o.run.connected.Store(false) }

func (o *observer) Found(e events.Engine, why string) {
	o.log.Info("a registered engine speaks as "+e.String()+" does", "worker", o.key, "because", why)
}

func (o *observer) Unusable(err error, size uint32) (remedy string, skip bool) {
	if remedy = otherBlockSize(size, o.record.Model); err != nil {
		o.log.Error("a registered engine's blocks are not of the block_size that was registered", "worker", o.key,
			"error", err, "what_to_do", remedy)
	}
	return remedy, false
}

func (o *observer) OtherRank(rank events.Rank, skipped bool) {
	if skipped {
		return // reported once for each process of the engine
	}
	o.log.Error("a registered engine names another data-parallel rank; its blocks are credited to the registered one",
		"worker", o.key, "engine_rank", rank, "what_to_do", "register the engine's rank with the endpoint of that rank")
}

func (o *observer) LogUnreadable(err error) {
	o.log.Warn("a rank's last message in the log cannot be read; a new incarnation begins", "worker", o.key, "error",
		err, "what_to_do", "check that only this worker's shim has a key that may write its events")
}

func (o *observer) Refused(err error, first bool) {
	if first {
		o.log.Warn("the log does not accept events of a registered engine; the events wait", "worker", o.key, "error",
			err, "what_to_do", shim.LogAdvice(err))
	}
}

func (o *observer) LogResumed() {
	o.log.Info("the log accepts events of a registered engine again", "worker", o.key)
}

func (o *observer) StateChanged(s shim.State) {
	if s.Quiet != o.quiet {
		if o.quiet = s.Quiet; s.Quiet {
			o.log.Warn("a registered engine has published no event since its shim began", "worker", o.key, "for",
				shim.DefaultQuietAfter, "what_to_do", registry.QuietAdvice)
		} else {
			o.log.Info("a registered engine has published its first event", "worker", o.key)
		}
	}
	switch s.Engine {
	case api.EngineSilent:
		o.log.Warn("a registered engine is silent", "worker", o.key, "since", s.Since.UTC().Format(time.RFC3339),
			"why", s.Why, "what_to_do",
			"check whether the engine's process hangs or is stopped, and whether the host is reachable; restart the "+
				"engine if it does not go on")
	case api.EngineGone:
		o.log.Warn("a registered engine is gone; the blocks in device and host memory are cleared", "worker", o.key,
			"why", s.Why)
	}
}
