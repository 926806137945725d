package shim

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// span is where the incarnation that is published now began in the log, as far as that is known.
type span struct {
	incarnation events.Incarnation
	lastSeq     events.StreamSeq // of the last message that was seen to be in the log
	first       events.StreamSeq // the incarnation's first message is there or later; 0: not known
}

// recovered tells what the log held when the shim began, and with which incarnation it goes on.
func (s *span) recovered(p Published, incarnation events.Incarnation) {
	s.lastSeq = p.Seq
	s.begun(incarnation)
	if p.Found && p.Incarnation == incarnation {
		s.first = 0
	}
}

// begun tells which incarnation is published now.
func (s *span) begun(incarnation events.Incarnation) {
	if incarnation != s.incarnation {
		s.incarnation, s.first = incarnation, s.lastSeq+1
	}
}

// resyncIfLost begins a new incarnation for those who have asked for one because the log has lost something, unless the
// log has all of the present one, or will have.
func (r *runner) resyncIfLost(present Published) {
	if len(r.waiting) == 0 {
		return
	}
	acked := r.machine.Acked()
	switch {
	case acked.Incarnation != r.machine.Incarnation(): // nothing of it was published yet
	case !present.Found || present.compare(acked.Reached) != 0:
		r.logLost(present)
	case r.span.first == 0 || present.LogFirst == 0 || present.LogFirst > r.span.first:
		r.machine.Resync(millis(time.Now()))
	}
}

// logLost tells the machine that the log has this instead of what it had acknowledged. Numbers of messages seen before
// mean nothing then.
func (r *runner) logLost(present Published) {
	r.machine.LogLost(present, millis(time.Now()))
	r.span = span{lastSeq: present.Seq}
}

// logUnreadable tells the machine that the rank's last message in the log cannot be read.
func (r *runner) logUnreadable(present Published) {
	if r.machine.LogUnreadable(present, millis(time.Now())) {
		r.span = span{lastSeq: present.Seq}
		r.cfg.Observer.LogUnreadable(present.Unreadable)
	}
}

// answerRequests tells those who have asked which incarnation they will see.
func (r *runner) answerRequests() {
	for _, a := range r.waiting {
		a.begun <- r.machine.Incarnation()
	}
	r.waiting = nil
}
