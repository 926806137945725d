package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestView has nodes of each kind: ready, releasing, behind, unsupported.
func TestView(t *testing.T) {
	m := New(Config{Node: "self", Session: "1", Partitions: 4, Replication: 3, Heartbeat: time.Second,
		DeadAfter: 5 * time.Second})
	if v := m.View(); v.GraceOver || v.Serving(0) != nil || !v.MayServe(0, "m") || !v.Writes(0) {
		t.Errorf("before the first step: %+v", v)
	}
	record := func(node string, s Advertisement, change func(*Record)) Seen {
		r := Record{Version: RecordVersion, Node: node, Session: "1", Heartbeat: 1, Partitions: 4, Advertisement: s}
		if change != nil {
			change(&r)
		}
		return Seen{r, 1}
	}
	m.Announce(Advertisement{Ready: SetOf(0, 1), Models: map[string]Set{"mine": SetOf(1)}}, false)
	m.Step(time.Second, 1, &Look{Records: []Seen{
		record("ready", Advertisement{Ready: SetOf(0, 1), Models: map[string]Set{"m": SetOf(0, 2)}}, nil),
		record("releasing", Advertisement{Ready: SetOf(0)}, func(r *Record) { r.Releasing = SetOf(0) }),
		record("leaving", Advertisement{Ready: SetOf(0)}, func(r *Record) { r.Leaving = true }),
		record("behind", Advertisement{Behind: SetOf(0, 2), Unlisted: SetOf(2)}, nil),
		record("odd", Advertisement{Ready: SetOf(0, 1, 2, 3)}, func(r *Record) { r.Partitions = 8 }),
	}})
	v := m.View()
	fit := Order([]string{"self", "ready"}, nil, 0)
	going := Order([]string{"releasing", "leaving"}, nil, 0)
	if want := append(append(slices.Clone(fit), going...), "behind"); !slices.Equal(v.Serving(0), want) ||
		v.Fit(0) != 2 {
		t.Errorf("partition 0: %v, want %v; %d are fit", v.Serving(0), want, v.Fit(0))
	}
	if !slices.Equal(v.Serving(2), []string{"behind"}) || v.Fit(2) != 0 || v.Serving(3) != nil || v.Serving(4) != nil {
		t.Errorf("partitions 2, 3 and 4: %v, %v, %v", v.Serving(2), v.Serving(3), v.Serving(4))
	}
	for _, c := range []struct {
		p     events.Partition
		model string
		want  bool
	}{
		{0, "m", true}, {1, "m", false}, {1, "mine", true}, {0, "mine", false},
		{2, "m", true}, // the serving node cannot list all models
		{3, "m", true}, // no node serves the partition
	} {
		if got := v.MayServe(c.p, c.model); got != c.want {
			t.Errorf("partition %d may have workers of %s: %v", c.p, c.model, got)
		}
	}
	if v.Writer[2] != "" || !v.Writes(2) || v.Writes(0) != (v.Writer[0] == "self") || len(v.Problems) != 1 {
		t.Errorf("writers %v, problems %v", v.Writer, v.Problems)
	}
}

// TestModelsOfARecordAreBounded has far more models than fit into a record: the record stays small and true.
func TestModelsOfARecordAreBounded(t *testing.T) {
	models := map[string]Set{"everywhere": SetOf(0, 1, 2, 3, 4, 5, 6, 7)}
	for i := range 2000 {
		models[fmt.Sprintf("organisation/adapter-%d", i)] = SetOf(events.Partition(i % 3))
	}
	var s Advertisement
	s.SetModels(models)
	data, err := json.Marshal(s)
	if err != nil || len(data) > 3*maxModelBytes {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	var back Advertisement
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	for model, set := range models {
		for p := range events.Partition(8) {
			if set.Has(p) && !back.mayServe(p, model) {
				t.Fatalf("%s has workers in partition %d, but not by the record", model, p)
			}
		}
	}
	if back.mayServe(5, "another") || !back.mayServe(5, "everywhere") || !back.mayServe(2, "another") {
		t.Errorf("unlisted are %v, models %d", back.Unlisted, len(back.Models))
	}
}

// TestFailingNodeDoesNotWrite: the writer is the first ready node that can write snapshots, or if none can, the first
// ready node.
func TestFailingNodeDoesNotWrite(t *testing.T) {
	names := Order([]string{"a", "b", "c"}, nil, 0)
	m := New(Config{Node: "a", Session: "1", Partitions: 1, Replication: 3, Heartbeat: time.Second,
		DeadAfter: time.Hour})
	beat := uint64(0)
	writer := func(failing, unready map[string]bool) string {
		beat++
		look := &Look{}
		for _, name := range names {
			s := Advertisement{Ready: SetOf(0)}
			if failing[name] {
				s.Failing = SetOf(0)
			}
			if unready[name] {
				s.Ready = nil
			}
			if name == "a" {
				m.Announce(s, false)
			} else {
				look.Records = append(look.Records,
					Seen{Record{Version: RecordVersion, Node: name, Session: name, Heartbeat: beat, Partitions: 1,
						Advertisement: s},
						beat})
			}
		}
		m.Step(time.Duration(beat)*time.Second, beat, look)
		return m.View().Writer[0]
	}
	type set = map[string]bool
	for i, c := range []struct {
		failing, unready set
		want             string
	}{
		{set{}, set{}, names[0]},
		{set{names[0]: true}, set{}, names[1]},
		{set{names[0]: true, names[1]: true}, set{}, names[2]},
		{set{names[0]: true}, set{names[1]: true}, names[2]},
		{set{names[0]: true, names[1]: true, names[2]: true}, set{}, names[0]},
		{set{names[1]: true, names[2]: true}, set{names[0]: true}, names[1]},
		{set{}, set{}, names[0]},
	} {
		if got := writer(c.failing, c.unready); got != c.want {
			t.Errorf("case %d: %s writes, want %s", i, got, c.want)
		}
	}
}
