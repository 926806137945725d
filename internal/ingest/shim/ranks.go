package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// ranks records the data-parallel ranks that an engine process has named. The zero value is none.
type ranks struct {
	named   bool
	credits events.Rank // the rank with credited events
}

// ofRank returns the events of a message that count for this shim's rank.
//
// If an engine always names the same rank, its events count, whatever the number, because the operator configured the
// shim for this engine. If several ranks publish through a single socket, only this shim's rank counts. The events of
// other ranks, including their clears, are skipped. If another rank was credited before the first message of this
// shim's rank, its blocks are cleared.
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
