package main

import (
	"log/slog"

	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// watcher makes log lines, at a bounded rate, of what happens to a shim, and looks at what its decoder passes over.
type watcher struct {
	log     *slog.Logger
	cfg     *running
	decoder *events.Decoder

	skipped   events.SkipCounts // already told
	diagnosed bool
	otherRank bool
	counts    shim.Counts // already told

	failed, stray, undecodable, skips, replayFailed, logTrouble limiter
}

// Decode decodes and looks at what was passed over.
func (w *watcher) Decode(payload []byte) (events.Message, error) {
	msg, err := w.decoder.Decode(payload)
	if now := w.decoder.Counts(); now != w.skipped {
		w.skips.do(func(uint64) {
			for s := range now {
				if n := now[s] - w.skipped[s]; n > 0 {
					w.log.Warn("events passed over", "reason", events.Skip(s).String(), "times", n)
				}
			}
			w.skipped = now
		})
	}
	if d := w.decoder.Diagnosis(); d != nil && !w.diagnosed {
		w.diagnosed = true
		w.log.Error("the engine's blocks are not of --block-size", "error", d)
	}
	if msg.HasRank && msg.Rank != events.Rank(w.cfg.rank) && !w.otherRank {
		w.otherRank = true
		w.log.Error("the engine says that it is another data-parallel rank; see --rank", "engine_rank", msg.Rank)
	}
	return msg, err
}

// Reset forgets what was learned of an engine process.
func (w *watcher) Reset() { w.decoder.Reset() }

func (w *watcher) logFailed(err error) {
	w.logTrouble.do(func(n uint64) { w.log.Warn("the log does not take events; they wait", "error", err, "times", n) })
}

func (w *watcher) hooks() shim.Hooks {
	for _, l := range []*limiter{&w.failed, &w.stray, &w.undecodable, &w.skips, &w.replayFailed, &w.logTrouble} {
		l.every = w.cfg.logWindow
	}
	log := w.log
	return shim.Hooks{
		Connected: func(endpoint string) { log.Info("connected to the engine", "endpoint", endpoint) },
		Disconnected: func(endpoint string, err error) {
			log.Warn("the engine's connection has ended", "endpoint", endpoint, "error", err)
		},
		Failed: func(endpoint string, err error) {
			w.failed.do(func(n uint64) {
				log.Warn("cannot connect to the engine", "endpoint", endpoint, "error", err, "times", n)
			})
		},
		Stray: func(frames int) {
			w.stray.do(func(n uint64) {
				log.Warn("a message that is no engine's event message; is this the right port?", "frames", frames, "times", n)
			})
		},
		Undecodable: func(seq events.EngineSeq, err error) {
			w.undecodable.do(func(n uint64) {
				log.Warn("engine message cannot be decoded; passed over", "seq", seq, "error", err, "times", n)
			})
		},
		ReplayFailed: func(from events.EngineSeq, err error) {
			w.replayFailed.do(func(n uint64) { log.Warn("replay failed", "from", from, "error", err, "times", n) })
		},
		LogFailed: w.logFailed,
		Stepped:   w.stepped,
	}
}

// stepped tells of losses and new lives when their counts grow.
func (w *watcher) stepped(c shim.Counts, _ int) {
	if c.Gaps > w.counts.Gaps {
		w.log.Warn("engine messages are missing and could not be replayed; what the rank held is cleared", "times", c.Gaps)
	}
	if c.Resyncs > w.counts.Resyncs {
		w.log.Warn("asked to say again what the engine holds", "times", c.Resyncs)
	}
	if c.Restarts > w.counts.Restarts {
		w.log.Info("a new incarnation of the engine begins", "incarnations", c.Restarts)
	}
	if c.JoinedLate > w.counts.JoinedLate {
		w.log.Warn("the engine has spoken before and cannot say it again; what it holds from then is not known", "times", c.JoinedLate)
	}
	w.counts = c
}
