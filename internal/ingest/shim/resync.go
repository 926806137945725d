package shim

import (
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// request is a request for a new incarnation, sent to the loop that owns the machine.
type request struct {
	control.ResyncRequest
	begun chan<- events.Incarnation // has room for the reply
}

// knownResyncs is the number of resync ids that a shim keeps.
const knownResyncs = 64

// resyncs are the requests for a new incarnation. The zero value is empty.
type resyncs struct {
	waiting *request // the last one that waits for a read of the log; the callers of earlier ones have given up
	done    map[string]events.Incarnation
	order   []string // the keys of done, oldest first
}

// reply replies to a request, and keeps the reply for repetitions of the request.
func (s *resyncs) reply(a request, incarnation events.Incarnation) {
	a.begun <- incarnation
	if _, ok := s.done[a.ID]; ok {
		return
	}
	if s.done == nil {
		s.done = map[string]events.Incarnation{}
	}
	s.done[a.ID] = incarnation
	if s.order = append(s.order, a.ID); len(s.order) > knownResyncs {
		delete(s.done, s.order[0])
		s.order = s.order[1:]
	}
}

// requested handles a request. If the log may have lost messages, it reads the log first.
func (r *runner) requested(a request) {
	incarnation, repeated := r.resyncs.done[a.ID]
	switch {
	case repeated:
		r.resyncs.reply(a, incarnation)
	case a.Of != 0 && r.machine.Incarnation() > a.Of:
		a.begun <- r.machine.Incarnation()
	case a.Lost:
		r.resyncs.waiting, r.look = &a, true
	default:
		r.machine.Resync(millis(time.Now()))
		r.resyncs.reply(a, r.machine.Incarnation())
	}
}

// answerWaiting replies to the waiting request with the current incarnation. present is the content of the log, read
// after the request.
func (r *runner) answerWaiting(present Published) {
	if r.resyncs.waiting == nil {
		return
	}
	if present.Unreadable == nil && !present.Shutdown { // otherwise a new incarnation has begun already
		r.resyncIfLost(present)
	}
	r.resyncs.reply(*r.resyncs.waiting, r.machine.Incarnation())
	r.resyncs.waiting = nil
}

// resyncIfLost begins a new incarnation after a loss of the log, unless the log has, or will have, all of the present
// incarnation.
func (r *runner) resyncIfLost(present Published) {
	acked := r.machine.Acked()
	switch {
	case acked.Incarnation != r.machine.Incarnation(): // none of the incarnation is published yet
	case !present.Found || present.compare(acked.Reached) != 0:
		r.logLost(present)
	case r.span.first == 0 || present.LogFirst == 0 || present.LogFirst > r.span.first:
		r.machine.Resync(millis(time.Now()))
	}
}
