package radix

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestBoundsEnd: depths are upper bounds while a group has unknown needs. An event with the needs ends that, and so
// does a clear of all tiers. A conflict about the kind of a group ends in the same ways.
func TestBoundsEnd(t *testing.T) {
	x := New(Config{})
	id := x.AddRank(0, 16)
	full := waiting(0, 3, 2)
	full.HasParent, full.Attention = false, events.AttentionFull
	other := func(group events.GroupIndex, kind events.Attention, window uint32) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Device, Group: group, Attention: kind, Window: window,
			Blocks: []events.BlockHash{4}}
	}
	unseen := full // a main group with a companion that is missing from the index, as a decoder announces it
	unseen.Window = 1
	clear := events.Event{Kind: events.Cleared, Reason: events.ReasonEngine}
	for i, c := range []struct {
		event     events.Event
		bounded   bool
		conflicts uint64
	}{
		{full, false, 0},
		{other(1, events.AttentionChunkedLocal, 0), true, 0},
		{other(1, events.AttentionChunkedLocal, 64), false, 0},
		{other(1, events.AttentionFull, 0), false, 1}, // the group is not a main group
		{other(1, events.AttentionChunkedLocal, 64), false, 0},
		{unseen, true, 0},
		{full, true, 0},
		{clear, false, 0},
		{full, false, 0},
		{other(1, events.AttentionFull, 0), false, 0},
	} {
		counts := x.Apply(id, events.Millis(i), []events.Event{c.event})
		if got := x.Bounded(id); got != c.bounded || counts.KindConflicts != c.conflicts {
			t.Errorf("event %d: bounded %t, %+v", i, got, counts)
		}
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}
