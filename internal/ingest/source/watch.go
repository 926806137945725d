package source

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// silenceEvery is the time between two reports of a silent source. Nodes drop a report after [api.QuietSourceLife].
const silenceEvery = api.QuietSourceLife / 3

// state is the state of a source of many ranks, or of a shared store.
type state int

const (
	silent      state = iota // no event since the start
	active                   // events have arrived, and all parts have a connection
	unreachable              // a part of the source has no connection
)

// watch reports a source that is silent or unreachable for --silence: in the log once, and to the nodes until the
// state ends. The record of a rank cannot contain this state: the source has no rank yet, or is a shared store. A watch
// is safe for concurrent use.
type watch struct {
	after  time.Duration
	source api.QuietSource             // Advice is for a silent source
	send   func(api.QuietSource) error // to the nodes
	log    *slog.Logger
	unsent host.Limiter

	spoke   atomic.Bool
	changed chan struct{} // woken when the state may have changed
	mu      sync.Mutex    // guards failed
	failed  []sourceFailure
}

// sourceFailure is the error of a part of a source without a connection.
type sourceFailure struct{ part, err, advice string }

// newWatch returns the watch of a source. The reports are published on subject.
func newWatch(s *host.Shim, conn *jetstream.Conn, subject string, source api.QuietSource, log *slog.Logger) *watch {
	source.Source, source.Engine, source.PID = s.Source, natsurl.Shown(s.Engine), os.Getpid()
	source.Host, _ = os.Hostname()
	w := &watch{after: s.Silence, source: source, changed: make(chan struct{}, 1),
		log: log.With("source", source.Source, "engine", source.Engine)}
	w.unsent.Every = s.LogRepeat
	w.send = func(source api.QuietSource) error {
		body, err := api.Marshal(api.MsgPack, &api.SourceReport{Sources: []api.QuietSource{source}})
		if err == nil {
			err = conn.Send(subject, api.MsgPack, body)
		}
		return err
	}
	return w
}

// received records an event of the source.
func (w *watch) received() {
	if !w.spoke.Load() && w.spoke.CompareAndSwap(false, true) {
		loop.Wake(w.changed)
	}
}

// unreached records a lost or failed connection to a part of the source.
func (w *watch) unreached(part string, err error, advice string) {
	w.set(part, &sourceFailure{part, printable(fmt.Sprint(err)), advice})
}

// reached records a connection to a part of the source.
func (w *watch) reached(part string) { w.set(part, nil) }

func (w *watch) set(part string, failure *sourceFailure) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := len(w.failed)
	for i := range w.failed {
		if w.failed[i].part != part {
			continue
		}
		if failure != nil {
			w.failed[i] = *failure
			return
		}
		w.failed = append(w.failed[:i], w.failed[i+1:]...)
		break
	}
	if failure != nil {
		w.failed = append(w.failed, *failure)
	}
	if (before == 0) != (len(w.failed) == 0) {
		loop.Wake(w.changed)
	}
}

// state returns the state with the report of it. Of several failures, the first counts.
func (w *watch) state() (state, api.QuietSource) {
	w.mu.Lock()
	defer w.mu.Unlock()
	report := w.source
	switch {
	case len(w.failed) > 0:
		report.Failure, report.Advice = w.failed[0].part+": "+w.failed[0].err, w.failed[0].advice
		return unreachable, report
	case w.spoke.Load():
		return active, report
	}
	return silent, report
}

// run sends reports until ctx ends.
func (w *watch) run(ctx context.Context) {
	timer := time.NewTimer(w.after)
	defer timer.Stop()
	last, reported := silent, false
	for {
		due := false
		select {
		case <-timer.C:
			due = true
		case <-w.changed:
		case <-ctx.Done():
			return
		}
		now, report := w.state()
		switch {
		case now != last:
			if reported {
				w.end(last, report)
			}
			last, reported = now, false
			timer.Reset(w.after)
		case due && last != active:
			if !reported {
				w.log.Warn(logOf[last], "for", w.after, "error", report.Failure, "what_to_do", report.Advice)
			}
			reported = true
			w.publish(report)
			timer.Reset(silenceEvery)
		}
	}
}

// logOf contains the log message of each state.
var logOf = map[state]string{
	silent:      "the source has published no event since the start",
	unreachable: "the source is not reached",
}

// end revokes the report of a state.
func (w *watch) end(was state, report api.QuietSource) {
	if was == silent && w.spoke.Load() {
		w.log.Info("the source has published its first event")
	} else if was == unreachable {
		w.log.Info("the source is reached again")
	}
	report.Spoke = true
	w.publish(report)
}

func (w *watch) publish(report api.QuietSource) {
	if err := w.send(report); err != nil {
		w.unsent.WarnTo(w.log, "the state of the source could not be reported to the nodes", "error", err, "what_to_do",
			"check NATS, and the right of this user to publish for workers and stores (indexer auth create)")
	}
}

// printable escapes and shortens a text for a report.
func printable(text string) string {
	if text = escape.Text(text); len(text) > api.MaxSourceText/2 {
		text = strings.ToValidUTF8(text[:api.MaxSourceText/2], "")
	}
	return text
}
