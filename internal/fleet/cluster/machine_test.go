package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestSetAsText(t *testing.T) {
	for text, list := range map[string][]events.Partition{"": nil, "0": {0}, "0-2,5,63-64": {0, 1, 2, 5, 63, 64},
		"511": {511}} {
		s := SetOf(list...)
		if b, _ := s.MarshalText(); string(b) != text {
			t.Errorf("%v is written %q, want %q", list, b, text)
		}
		var back Set
		if err := back.UnmarshalText([]byte(text)); err != nil || !slices.Equal(back.List(), list) ||
			back.Len() != len(list) {
			t.Errorf("%q is parsed as %v, %v", text, back.List(), err)
		}
	}
	for _, bad := range []string{",", "a", "2-1", "1-", "-", "0-4294967295", "99999"} {
		if err := new(Set).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
	var r Record
	if b, err := json.Marshal(Record{Node: "a", Advertisement: Advertisement{Ready: SetOf(1, 2)}}); err != nil ||
		json.Unmarshal(b, &r) != nil || r.Ready.Len() != 2 {
		t.Errorf("%s, %v, %+v", b, err, r)
	}
}

// TestMovementIsBounded compares owners before and after a node joins. The older nodes acquire nothing new, and the
// loads differ little.
func TestMovementIsBounded(t *testing.T) {
	testkit.Sequential(t)
	const partitions = 4096
	var nodes []string
	for n := 1; n <= 32; n++ {
		before, name := slices.Clone(nodes), fmt.Sprint("node-", n)
		nodes = append(nodes, name)
		copies := Replication(n, 2)
		moved, load := 0, map[string]int{}
		for p := range events.Partition(partitions) {
			now := Order(nodes, nil, p)[:copies]
			for _, o := range now {
				load[o]++
			}
			if n <= 2 {
				continue
			}
			for _, o := range now {
				if o == name {
					moved++
				} else if !slices.Contains(Order(before, nil, p)[:2], o) {
					t.Fatalf("%s joins and %s acquires partition %d", name, o, p)
				}
			}
		}
		want := copies * partitions / n
		for o, k := range load {
			if k < want*3/4 || k > want*5/4 {
				t.Errorf("%d nodes: %s has %d, an equal share is %d", n, o, k, want)
			}
		}
		if n > 2 && moved > want*5/4 {
			t.Errorf("%s joins %d nodes and %d partitions move, an equal share is %d", name, n-1, moved, want)
		}
	}
	for n, want := range map[int]int{0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 64: 2} {
		if got := Replication(n, 0); got != want {
			t.Errorf("%d nodes: %d owners, want %d", n, got, want)
		}
	}
}

// TestUnsupportedNodes: nodes with another number of partitions or another version own nothing here, and are reported.
func TestUnsupportedNodes(t *testing.T) {
	m := New(Config{Node: "a", Session: "1", Partitions: 4, Heartbeat: time.Second, DeadAfter: 5 * time.Second})
	var a Actions
	for beat := range uint64(2) {
		m.Announce(Advertisement{}, false)
		a = m.Step(time.Duration(beat)*time.Second, beat+1, &Look{Records: []Seen{
			{Record{Version: 1, Node: "b", Heartbeat: 1, Partitions: 8},
				1}, {Record{Version: 2, Node: "c", Heartbeat: 1,
				Partitions: 4}, 2},
		}})
	}
	if len(a.Acquire) != 4 || len(m.Peers()) != 0 {
		t.Errorf("%+v, peers %+v", a, m.Peers())
	}
	if said := strings.Join(m.Problems(), "\n"); len(m.Problems()) != 2 ||
		!strings.Contains(said, "node b writes records of version 1 for 8 partitions") ||
		!strings.Contains(said, "node c writes records of version 2") {
		t.Errorf("it says %q", said)
	}
	m.Announce(Advertisement{}, false)
	m.Step(2*time.Second, 3, &Look{Records: []Seen{{Record{Version: 1, Node: "b", Heartbeat: 2, Partitions: 4}, 3},
		{Record{Version: 1, Node: "c", Heartbeat: 2, Partitions: 4}, 4}}})
	if len(m.Peers()) != 2 || len(m.Problems()) != 0 {
		t.Errorf("after the restart of both with this node's settings: peers %+v, problems %q", m.Peers(), m.Problems())
	}
}

// TestSilenceOfNATSAgesNoNode lets an hour pass without an acknowledgement.
func TestSilenceOfNATSAgesNoNode(t *testing.T) {
	m := New(Config{Node: "a", Session: "1", Partitions: 64, Replication: 1, Heartbeat: time.Second,
		DeadAfter: 5 * time.Second})
	now, beat := time.Duration(0), uint64(0)
	other := Seen{Record{Version: RecordVersion, Node: "b", Heartbeat: 100, Partitions: 64}, 1}
	taken := 0
	step := func(d time.Duration, heard bool) {
		now += d
		m.Announce(Advertisement{}, false)
		if beat++; heard {
			taken += len(m.Step(now, beat, &Look{Records: []Seen{other}}).Acquire)
		} else {
			m.Step(now, beat-1, nil)
		}
	}
	step(0, true)
	before := taken
	step(time.Hour, true) // as after SIGSTOP, or during an endless election
	if taken != before || len(m.Peers()) != 1 {
		t.Fatalf("after an hour of silence: %d more acquired partitions", taken-before)
	}
	for range 5 {
		step(time.Second, true)
	}
	if taken != 64 || len(m.Peers()) != 0 {
		t.Errorf("acquired %d of 64 partitions after the death of a node", taken)
	}
}

// TestStartupGrace: a node without others, or with only starting nodes, waits until no new node has appeared for a
// heartbeat, within a limit. A node that joins older nodes, and a node after its grace, acquires at once.
func TestStartupGrace(t *testing.T) {
	type step struct {
		beats []uint64 // heartbeats of the other nodes
		take  int
	}
	var crowd []step // a new node at each heartbeat
	for i := range 12 {
		crowd = append(crowd, step{slices.Repeat([]uint64{1}, i), 0})
	}
	for name, steps := range map[string][]step{
		"alone":             {{nil, 0}, {nil, 64}},
		"with one other":    {{[]uint64{1}, 0}, {[]uint64{2}, 64}},
		"one after another": {{nil, 0}, {[]uint64{1}, 0}, {[]uint64{2, 1}, 0}, {[]uint64{3, 2}, 64}},
		"to others":         {{[]uint64{100, 200, 1}, 64}},
		"a crowd":           crowd,
	} {
		m, taken := New(Config{Node: "a", Session: "1", Partitions: 64, Replication: 100, Heartbeat: time.Second,
			DeadAfter: time.Hour}), 0
		for i, s := range steps {
			look := &Look{}
			for k, beat := range s.beats {
				look.Records = append(look.Records,
					Seen{Record{Version: RecordVersion, Node: fmt.Sprint("b", k), Heartbeat: beat, Partitions: 64},
						uint64(100*i + k + 1)})
			}
			m.Announce(Advertisement{}, false)
			taken = len(m.Step(time.Duration(i)*time.Second, uint64(i+1), look).Acquire)
			if settled := m.View().GraceOver; name != "a crowd" && taken != s.take || settled != (taken > 0) &&
				name != "a crowd" {
				t.Errorf("%s: at heartbeat %d: %d acquired, want %d; settled: %v", name, i+1, taken, s.take, settled)
			}
			if name == "a crowd" && (taken > 0) != (i == startupGraceMax) {
				t.Errorf("%s: at heartbeat %d: %d acquired", name, i+1, taken)
			}
		}
	}
}

// TestUnannouncedIsDroppedAtOnce: a new owner replaces this node at once for a partition that is being restored. A
// served partition stays until the new owner is ready.
func TestUnannouncedIsDroppedAtOnce(t *testing.T) {
	m := New(Config{Node: "a", Session: "1", Partitions: 64, Replication: 1, Heartbeat: time.Second,
		DeadAfter: 5 * time.Second})
	var ready Set
	var look Look
	step := func(beat uint64) Actions {
		m.Announce(Advertisement{Ready: ready}, false)
		return m.Step(time.Duration(beat)*time.Second, beat, &look)
	}
	step(1)
	if a := step(2); len(a.Acquire) != 64 {
		t.Fatalf("alone: %d acquired", len(a.Acquire))
	}
	ready = SetOf(0, 1, 2, 3, 4, 5, 6, 7)
	step(3)
	look.Records = []Seen{{Record{Version: RecordVersion, Node: "b", Heartbeat: 1, Partitions: 64}, 1}}
	released := step(4).Release
	for p := range events.Partition(64) {
		gone, owned := slices.Contains(released, p), Order([]string{"a", "b"}, nil, p)[0] == "a"
		if want := !owned && !ready.Has(p); gone != want {
			t.Errorf("partition %d: released: %v; owned: %v, served: %v", p, gone, owned, ready.Has(p))
		}
	}
	if len(released) == 0 {
		t.Error("nothing is released")
	}
}

// TestConcurrentRelease has a leaving node, and an owner with an outdated view of the node. With looks from before
// the announcements, the nodes see each other ready. Neither node may release by such a look. With looks from
// the leader, one of the nodes stays.
func TestConcurrentRelease(t *testing.T) {
	name := Order([]string{"x", "y"}, nil, 0) // the first owns partition 0
	all := Advertisement{Ready: SetOf(0)}
	var machines [2]*Machine
	bucket, beats, revision := [2]Seen{}, [2]uint64{}, uint64(0)
	now := time.Duration(0)
	announce := func(i int, leave bool) {
		revision++
		bucket[i] = Seen{machines[i].Announce(all, leave), revision}
		beats[i] = bucket[i].Heartbeat
	}
	step := func(i int, records [2]Seen, after uint64) []events.Partition {
		now += time.Second
		return machines[i].Step(now, beats[i], &Look{Records: records[:], After: after}).Release
	}
	for i := range machines {
		machines[i] = New(Config{Node: name[i], Session: "1", Partitions: 1, Replication: 1, Heartbeat: time.Second,
			DeadAfter: 10 * time.Second})
	}
	announce(1, false)
	for range 2 { // alone, the node acquires all
		step(1, [2]Seen{{Record: Record{Version: RecordVersion, Node: name[1], Partitions: 1}}, bucket[1]}, 0)
		announce(1, false)
	}
	for range 2 { // a change of the heartbeats is visible
		announce(0, false)
		step(0, bucket, 0)
		announce(1, false)
		if gone := step(1, bucket, 0); gone != nil {
			t.Fatal("released before the announcement")
		}
	}
	stale := bucket
	announce(0, true) // the leave
	step(0, stale, 0)
	announce(1, false)
	announce(0, true)
	if gone := append(step(0, stale, 0), step(1, stale, 0)...); gone != nil {
		t.Fatalf("%v released by looks that were not the leader's", gone)
	}
	first, second := step(0, bucket, beats[0]), step(1, bucket, beats[1])
	if len(first)+len(second) > 1 {
		t.Fatal("both have released")
	}
	for range 4 {
		announce(1, false)
		step(1, bucket, beats[1])
		announce(0, true)
		first = append(first, step(0, bucket, beats[0])...)
	}
	if held := machines[1].Held(); len(first) != 1 || held.Len() != 1 {
		t.Errorf("the leaving node released %v, the other holds %v", first, held.List())
	}
}

// TestMustAnnounce checks urgent announcements, and newer, older and foreign copies of records.
func TestMustAnnounce(t *testing.T) {
	config := func(name string) Config {
		return Config{Node: name, Session: name + "1", Partitions: 8, Replication: 2, Heartbeat: time.Second,
			DeadAfter: 5 * time.Second}
	}
	serving := func(models map[string]Set) Advertisement {
		s := Advertisement{Ready: SetOf(1, 2)}
		s.SetModels(models)
		return s
	}
	a, b := New(config("a")), New(config("b"))
	if a.MustAnnounce(serving(map[string]Set{"m": SetOf(1)})) {
		t.Error("an announcement is required before anything is served")
	}
	first := Seen{Record: a.Announce(serving(nil), false), Revision: 1}
	b.Announce(Advertisement{}, false)
	if b.Receive(first) {
		t.Error("Receive accepted a node that no look has shown")
	}
	b.Step(0, 1, &Look{Records: []Seen{first}})
	none, some := serving(nil), serving(map[string]Set{"m": SetOf(2)})
	unlisted := none
	unlisted.Unlisted = SetOf(1)
	other := some
	other.Ready = SetOf(1, 2, 3)
	other.Models = map[string]Set{"m": SetOf(3)} // partition 3 is not announced as served
	if a.MustAnnounce(none) || !a.MustAnnounce(some) || !a.MustAnnounce(unlisted) || a.MustAnnounce(other) {
		t.Errorf("%v %v %v %v", a.MustAnnounce(none), a.MustAnnounce(some), a.MustAnnounce(unlisted),
			a.MustAnnounce(other))
	}
	second := Seen{Record: a.Announce(some, false), Revision: 2}
	if a.MustAnnounce(some) || a.MustAnnounce(none) {
		t.Error("an announced model or a removed model requires an announcement")
	}
	stranger, late, former, foreign := second, second, second, second
	stranger.Node, late.Revision, former.Session, foreign.Version = "c", 1, "a0", RecordVersion+1
	for _, s := range []Seen{stranger, late, former, foreign, first} {
		if b.Receive(s) || b.View().MayServe(2, "m") {
			t.Errorf("was heard: %+v", s)
		}
	}
	if !b.Receive(second) || !b.View().MayServe(2, "m") || b.View().MayServe(1, "m") {
		t.Errorf("Receive did not apply: %+v", b.View())
	}
	if b.Receive(second) {
		t.Error("twice")
	}
	b.Step(time.Second, 2, &Look{Records: []Seen{first}}) // from a replica with an older state
	if !b.View().MayServe(2, "m") {
		t.Error("an older look replaced the newer record")
	}
}
