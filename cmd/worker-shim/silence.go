package main

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
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// silenceEvery is the time between two reports of a source that cannot be heard. Nodes forget a report after
// [api.QuietSourceLife].
const silenceEvery = api.QuietSourceLife / 3

// hearState says whether a source of many ranks, or of a shared store, is heard.
type hearState int

const (
	sourceSilent      hearState = iota // it has published no event since the start
	sourceHeard                        // it has published an event, and is reached
	sourceUnreachable                  // a part of it is not reached
)

// sourceWatch reports a source that is silent or unreachable for --silence: in the log once, and to the nodes until
// that ends. No rank's record can say so: the source has no rank yet, or it is a shared store. It is safe for
// concurrent use.
type sourceWatch struct {
	after  time.Duration
	source api.QuietSource             // Advice is for a silent source
	send   func(api.QuietSource) error // to the nodes
	log    *slog.Logger
	unsent limiter

	spoke   atomic.Bool
	changed chan struct{} // woken when the state may have changed
	mu      sync.Mutex    // guards failed
	failed  []sourceFailure
}

// sourceFailure is why a part of a source is not reached.
type sourceFailure struct{ part, err, advice string }

// watchSource makes the watch of a source whose reports are published on subject.
func (r *running) watchSource(conn *jetstream.Conn, subject string, source api.QuietSource,
	log *slog.Logger) *sourceWatch {
	source.Source, source.Engine, source.PID = r.source, jetstream.ShownAddress(r.engine), os.Getpid()
	source.Host, _ = os.Hostname()
	w := &sourceWatch{after: r.silence, source: source, changed: make(chan struct{}, 1),
		log: log.With("source", source.Source, "engine", source.Engine)}
	w.unsent.every = r.logWindow
	w.send = func(source api.QuietSource) error {
		body, err := api.Marshal(api.MsgPack, &api.SourceReport{Sources: []api.QuietSource{source}})
		if err == nil {
			err = conn.Send(subject, api.MsgPack, body)
		}
		return err
	}
	return w
}

// heard notes that the source has published an event.
func (w *sourceWatch) heard() {
	if !w.spoke.Load() && w.spoke.CompareAndSwap(false, true) {
		loop.Wake(w.changed)
	}
}

// unreached notes that a part of the source is not reached.
func (w *sourceWatch) unreached(part string, err error, advice string) {
	w.set(part, &sourceFailure{part, printable(fmt.Sprint(err)), advice})
}

// reached notes that a part of the source is reached.
func (w *sourceWatch) reached(part string) { w.set(part, nil) }

func (w *sourceWatch) set(part string, failure *sourceFailure) {
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

// state returns the state, and the report that it is worth. Of several failures the first counts.
func (w *sourceWatch) state() (hearState, api.QuietSource) {
	w.mu.Lock()
	defer w.mu.Unlock()
	report := w.source
	switch {
	case len(w.failed) > 0:
		report.Failure, report.Advice = w.failed[0].part+": "+w.failed[0].err, w.failed[0].advice
		return sourceUnreachable, report
	case w.spoke.Load():
		return sourceHeard, report
	}
	return sourceSilent, report
}

// run reports until ctx ends.
func (w *sourceWatch) run(ctx context.Context) {
	timer := time.NewTimer(w.after)
	defer timer.Stop()
	state, reported := sourceSilent, false
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
		case now != state:
			if reported {
				w.end(state, report)
			}
			state, reported = now, false
			timer.Reset(w.after)
		case due && state != sourceHeard:
			if !reported {
				w.log.Warn(logOf[state], "for", w.after, "error", report.Failure, "what_to_do", report.Advice)
			}
			reported = true
			w.publish(report)
			timer.Reset(silenceEvery)
		}
	}
}

// logOf is what the log says of a source in a state.
var logOf = map[hearState]string{
	sourceSilent:      "the source has published no event since the start",
	sourceUnreachable: "the source is not reached",
}

// end takes a report back.
func (w *sourceWatch) end(state hearState, report api.QuietSource) {
	if state == sourceSilent && w.spoke.Load() {
		w.log.Info("the source has published its first event")
	} else if state == sourceUnreachable {
		w.log.Info("the source is reached again")
	}
	report.Spoke = true
	w.publish(report)
}

func (w *sourceWatch) publish(report api.QuietSource) {
	if err := w.send(report); err != nil {
		w.unsent.warn(w.log, "the state of the source could not be reported to the nodes", "error", err, "what_to_do",
			"see that NATS answers, and that this user may publish for workers and stores (indexer auth example)")
	}
}

// printable is a text as a report may have it.
func printable(text string) string {
	if text = escape.Text(text); len(text) > api.MaxSourceText/2 {
		text = strings.ToValidUTF8(text[:api.MaxSourceText/2], "")
	}
	return text
}

// silenceAdvice is what may be wrong with a source that has published nothing.
func (r *running) silenceAdvice() string {
	const idle = "or send the fleet a request: workers without requests publish nothing"
	if r.byTopic() {
		return "see that engines connect to --engine and publish KV-cache events there; " + idle
	}
	switch r.source {
	case sourceMooncake:
		return "see that --engine is the master's event endpoint and that the master was started with events; or let a " +
			"worker store something: a master without writes publishes nothing"
	case sourceDynamo:
		return "see that --engine is the subject on which Dynamo's workers publish: " +
			"namespace.N.component.C.endpoint.E.kv-events since 1.0, namespace.N.component.C.kv-events before; that their " +
			"event plane is NATS (DYN_EVENT_PLANE=nats), on the server of --engine-nats; " + idle
	case sourcePlane:
		return "see that --engine is the discovery of Dynamo's workers, that their event plane is ZeroMQ, and that --topic " +
			"begins their NAMESPACE.COMPONENT.ENDPOINT; " + idle
	}
	return "see that a program writes router events, one a line, to --engine; " + idle
}
