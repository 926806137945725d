package shim

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// span is the known start of the current incarnation in the log.
type span struct {
	incarnation events.Incarnation
	lastSeq     events.StreamSeq // of the last message that was seen in the log
	first       events.StreamSeq // position of the incarnation's first message, or an earlier position; 0: unknown
}

// recovered records the state of the log at the shim's start, and the incarnation that continues.
func (s *span) recovered(p Published, incarnation events.Incarnation) {
	s.lastSeq = p.Seq
	s.begun(incarnation)
	if p.Found && p.Incarnation == incarnation {
		s.first = 0
	}
}

// begun records the current incarnation.
func (s *span) begun(incarnation events.Incarnation) {
	if incarnation != s.incarnation {
		s.incarnation, s.first = incarnation, s.lastSeq+1
	}
}

// resyncIfLost begins a new incarnation for waiting requests after a loss of the log, unless the log has, or will have,
// all of the present incarnation.
func (r *runner) resyncIfLost(present Published) {
	if len(r.waiting) == 0 {
		return
	}
	acked := r.machine.Acked()
	switch {
	case acked.Incarnation != r.machine.Incarnation(): // none of the incarnation is published yet
	case !present.Found || present.compare(acked.Reached) != 0:
		r.logLost(present)
	case r.span.first == 0 || present.LogFirst == 0 || present.LogFirst > r.span.first:
		r.machine.Resync(millis(time.Now()))
	}
}

// logLost passes the present state of the log after a loss to the machine. Earlier message numbers are invalid then.
func (r *runner) logLost(present Published) {
	r.machine.LogLost(present, millis(time.Now()))
	r.span = span{lastSeq: present.Seq}
}

// logUnreadable reports the rank's unreadable last message in the log to the machine.
func (r *runner) logUnreadable(present Published) {
	if r.machine.LogUnreadable(present, millis(time.Now())) {
		r.span = span{lastSeq: present.Seq}
		r.cfg.Observer.LogUnreadable(present.Unreadable)
	}
}

// answerRequests replies to the waiting requests with the current incarnation.
func (r *runner) answerRequests() {
	for _, a := range r.waiting {
		a.begun <- r.machine.Incarnation()
	}
	r.waiting = nil
}
