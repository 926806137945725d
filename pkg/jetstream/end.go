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
	asked    time.Time        // when a look was sent whose end was not yet reached; zero: none
	askedEnd events.StreamSeq // what that look said
	last     events.StreamSeq // what the last look said
	doubted  bool             // the last look failed
	told     time.Time        // the time that was last returned by known
}

// looked tells what the leader said, when it was asked at a time. If an earlier look waits for its end to be reached,
// that one stays.
func (p *endProof) looked(at time.Time, last events.StreamSeq) {
	p.last, p.doubted = last, false
	if p.asked.IsZero() {
		p.asked, p.askedEnd = at, last
	}
}

// doubt tells that the leader could not be asked.
func (p *endProof) doubt() { p.doubted = true }

// known returns the latest time at which everything was sent that the stream had, when all up to seq has been sent and
// the consumer had nothing more at emptied (zero: it does not say). It returns zero if that is not known to be later,
// by least or more, than what it returned last; never if least is 0.
func (p *endProof) known(seq events.StreamSeq, emptied time.Time, least time.Duration) (at time.Time) {
	if !p.asked.IsZero() && seq >= p.askedEnd {
		at, p.asked = p.asked, time.Time{}
	}
	if !p.doubted && seq >= p.last && emptied.After(at) {
		at = emptied
	}
	if least <= 0 || at.IsZero() || at.Sub(p.told) < least {
		return time.Time{}
	}
	p.told = at
	return at
}
