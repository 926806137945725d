package hicache

import (
	"reflect"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestObserved(t *testing.T) {
	open := Config{VLLM: &VLLM{ModelName: "m", TPSize: 2, PPSize: 1, NumKVHead: 2}}
	if !open.Open() || open.Check() == nil {
		t.Fatal("a configuration without groups must be open, and usable only with groups")
	}
	var o Observed
	add := func(group events.GroupIndex, kind events.Attention, window uint32) bool {
		return o.Add(&events.Event{Kind: events.Stored, Group: group, Attention: kind, Window: window})
	}
	if _, ok := o.Config(&open, 16); ok {
		t.Error("nothing was announced")
	}
	for i, c := range []struct {
		group  events.GroupIndex
		kind   events.Attention
		window uint32
		more   bool
		usable bool
	}{
		{1, events.AttentionSlidingWindow, 0, false, false}, // without a window
		{1, events.AttentionSlidingWindow, 1024, true, false},
		{0, events.AttentionUnknown, 0, false, false},
		{0, events.AttentionMLA, 0, true, true},
		{0, events.AttentionMLA, 0, false, true},
		{2, events.AttentionMamba, 0, true, true},
		{3, events.AttentionCross, 0, false, true},
		{300, events.AttentionFull, 0, false, true},
	} {
		more := add(c.group, c.kind, c.window)
		if _, usable := o.Config(&open, 16); more != c.more || usable != c.usable {
			t.Errorf("step %d: more %v, usable %v", i, more, usable)
		}
	}
	if o.Add(&events.Event{Kind: events.Removed, Group: 4, Attention: events.AttentionFull}) {
		t.Error("a removal must not change the groups")
	}
	got, _ := o.Config(&open, 16)
	want := []Group{{Kind: Full, BlockSize: 16, MLA: true}, {Kind: Sliding, BlockSize: 16, Window: 1024},
		{Kind: Mamba, BlockSize: 16}}
	if v := got.VLLM; !reflect.DeepEqual(v.Groups, want) || v.HashBlockSize != 16 || v.SchedulerBlockSize != 16 {
		t.Errorf("%+v", v)
	}
	if len(open.VLLM.Groups) != 0 {
		t.Error("the open configuration was changed")
	}
}
