package jetstream

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// endProof tells until when a reader is known to have read its stream to the end. Two witnesses speak: the stream's
// leader, when it is looked at, which is seldom; and the consumer, which says each second that it has nothing more to
// send. The consumer may be on a server that has fallen behind the leader: it is believed only where it does not
// contradict the last look, and that succeeded.
type endProof struct {
	asked      time.Time        // when a look was sent whose end was not yet reached; zero: none
	askedEnd   events.StreamSeq // what that look said
	last       events.StreamSeq // what the last look said
	unverified bool             // the last look failed
	returned   time.Time        // by known, the last time
}

// looked notes what the leader answered to a look that was sent at a time. If an earlier look waits for its end to be
// reached, that one stays.
func (p *endProof) looked(at time.Time, last events.StreamSeq) {
	p.last, p.unverified = last, false
	if p.asked.IsZero() {
		p.asked, p.askedEnd = at, last
	}
}

// lookFailed notes that the leader could not be asked.
func (p *endProof) lookFailed() { p.unverified = true }

// known returns the latest time at which everything was sent that the stream had, when all up to seq has been sent and
// the consumer had nothing more at emptied (zero: it does not say). It returns zero if that is not known to be later,
// by least or more, than what it returned last; never if least is 0.
func (p *endProof) known(seq events.StreamSeq, emptied time.Time, least time.Duration) (at time.Time) {
	if !p.asked.IsZero() && seq >= p.askedEnd {
		at, p.asked = p.asked, time.Time{}
	}
	if !p.unverified && seq >= p.last && emptied.After(at) {
		at = emptied
	}
	if least <= 0 || at.IsZero() || at.Sub(p.returned) < least {
		return time.Time{}
	}
	p.returned = at
	return at
}
