package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// ranks is which data-parallel rank an engine process has named. The zero value is none.
type ranks struct {
	named   bool
	credits events.Rank // the rank whose events are credited
}

// ofRank returns the events of a message that names a rank, as far as they are credited to the rank that is shimmed.
//
// An engine that always names the same rank is credited, whatever its number: the operator has pointed the shim at it.
// Where several ranks publish through one socket, only the shimmed one counts. The events of the others are skipped,
// which includes their clears. If another rank was credited before the shimmed one spoke, its blocks are cleared.
func (x *Examiner) ofRank(msg events.Message, more bool) ([]events.Event, bool) {
	r := &x.ranks
	switch {
	case !r.named:
		r.named, r.credits = true, msg.Rank
		if msg.Rank != x.Rank {
			x.OtherRank(msg.Rank, false)
		}
	case msg.Rank == r.credits:
	case msg.Rank == x.Rank:
		r.credits = msg.Rank
		clear := events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonGap}
		return append([]events.Event{clear}, msg.Events...), more
	default:
		for more {
			_, more = x.Decoder.Continue()
		}
		x.OtherRank(msg.Rank, true)
		return nil, false
	}
	return msg.Events, more
}
