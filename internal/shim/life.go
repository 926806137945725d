package shim

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// life is where the incarnation that is published now began in the log, as far as that is known.
type life struct {
	incarnation events.Incarnation
	lastSeq     events.StreamSeq // of the last message that was seen to be in the log
	first       events.StreamSeq // the incarnation's first message is there or later; 0: not known
}

// recovered tells what the log held when the shim began, and with which incarnation it goes on.
func (l *life) recovered(p Published, incarnation events.Incarnation) {
	l.lastSeq = p.Seq
	l.begun(incarnation)
	if p.Found && p.Incarnation == incarnation {
		l.first = 0
	}
}

// begun tells which incarnation is published now.
func (l *life) begun(incarnation events.Incarnation) {
	if incarnation != l.incarnation {
		l.incarnation, l.first = incarnation, l.lastSeq+1
	}
}

// sayAgain begins a new incarnation for those who have asked for one because the log has lost something, unless the log
// has all of the present one, or will have.
func (r *runner) sayAgain(present Published) {
	if len(r.asked) == 0 {
		return
	}
	acked := r.machine.Acked()
	switch {
	case acked.Incarnation != r.machine.Incarnation(): // nothing of it was published yet
	case !present.Found || present.Incarnation != acked.Incarnation || present.LastID != acked.LastID:
		r.logLost(present)
	case r.life.first == 0 || present.LogFirst == 0 || present.LogFirst > r.life.first:
		r.machine.Resync(millis(time.Now()))
	}
}

// logLost tells the machine that the log has this instead of what it had acknowledged. Numbers of messages seen before
// mean nothing then.
func (r *runner) logLost(present Published) {
	r.machine.LogLost(present, millis(time.Now()))
	r.life = life{lastSeq: present.Seq}
}

// answerAsked tells those who have asked which incarnation they will see.
func (r *runner) answerAsked() {
	for _, a := range r.asked {
		a.begun <- r.machine.Incarnation()
	}
	r.asked = nil
}
