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
