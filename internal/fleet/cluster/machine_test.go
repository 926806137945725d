package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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
			t.Errorf("%q is read as %v, %v", text, back.List(), err)
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

// TestMovementIsBounded compares owners before and after a node joins: whoever was there takes nothing new, and loads
// differ little.
func TestMovementIsBounded(t *testing.T) {
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
					t.Fatalf("%s joins and %s takes partition %d", name, o, p)
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

// TestOthersThatDoNotFit has nodes with another number of partitions or another version: they own nothing here, and are
// named.
func TestOthersThatDoNotFit(t *testing.T) {
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
}

// TestSilenceOfNATSAgesNobody lets an hour pass in which nothing is acknowledged.
func TestSilenceOfNATSAgesNobody(t *testing.T) {
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
	step(time.Hour, true) // as after SIGSTOP, or an election without end
	if taken != before || len(m.Peers()) != 1 {
		t.Fatalf("after an hour's silence it takes %d more", taken-before)
	}
	for range 5 {
		step(time.Second, true)
	}
	if taken != 64 || len(m.Peers()) != 0 {
		t.Errorf("of a node that is dead all is to be taken: %d of 64", taken)
	}
}

// TestAStart: a node that finds nobody, or only others that start, waits until nobody new has come for a beat, and not
// for ever; one that comes to others who have been there for long, and one that has settled, takes at once.
func TestAStart(t *testing.T) {
	type step struct {
		beats []uint64 // of the others that there are
		take  int
	}
	var crowd []step // each beat somebody new
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
				t.Errorf("%s: at beat %d it takes %d, want %d; settled: %v", name, i+1, taken, s.take, settled)
			}
			if name == "a crowd" && (taken > 0) != (i == startupGraceMax) {
				t.Errorf("%s: at beat %d it takes %d", name, i+1, taken)
			}
		}
	}
}

// TestWhatNobodyCountsOnIsLetGoAtOnce: an owner that comes while this node still restores takes over; what this node
// serves stays until that one is ready.
func TestWhatNobodyCountsOnIsLetGoAtOnce(t *testing.T) {
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
		t.Fatalf("alone it takes %d", len(a.Acquire))
	}
	ready = SetOf(0, 1, 2, 3, 4, 5, 6, 7)
	step(3)
	look.Records = []Seen{{Record{Version: RecordVersion, Node: "b", Heartbeat: 1, Partitions: 64}, 1}}
	released := step(4).Release
	for p := range events.Partition(64) {
		gone, owned := slices.Contains(released, p), Order([]string{"a", "b"}, nil, p)[0] == "a"
		if want := !owned && !ready.Has(p); gone != want {
			t.Errorf("partition %d: let go: %v; owned: %v, served: %v", p, gone, owned, ready.Has(p))
		}
	}
	if len(released) == 0 {
		t.Error("nothing is let go")
	}
}

// TestTwoThatLetGoForEachOther has a node that leaves while the one that counts on it does not know: with looks from
// before their words were in the bucket, each sees the other ready. Neither may let go on such a look, and with those
// of the leader one of them stays.
func TestTwoThatLetGoForEachOther(t *testing.T) {
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
	for range 2 { // alone, it takes all
		step(1, [2]Seen{{Record: Record{Version: RecordVersion, Node: name[1], Partitions: 1}}, bucket[1]}, 0)
		announce(1, false)
	}
	for range 2 { // each sees the other's beat change
		announce(0, false)
		step(0, bucket, 0)
		announce(1, false)
		if gone := step(1, bucket, 0); gone != nil {
			t.Fatal("let go before it was said")
		}
	}
	stale := bucket
	announce(0, true) // it leaves
	step(0, stale, 0)
	announce(1, false)
	announce(0, true)
	if gone := append(step(0, stale, 0), step(1, stale, 0)...); gone != nil {
		t.Fatalf("%v let go on looks that were not the leader's", gone)
	}
	first, second := step(0, bucket, beats[0]), step(1, bucket, beats[1])
	if len(first)+len(second) > 1 {
		t.Fatal("both have let go")
	}
	for range 4 {
		announce(1, false)
		step(1, bucket, beats[1])
		announce(0, true)
		first = append(first, step(0, bucket, beats[0])...)
	}
	if held := machines[1].Held(); len(first) != 1 || held.Len() != 1 {
		t.Errorf("the one that leaves let %v go, the other holds %v", first, held.List())
	}
}

// TestNews asks what others would pass over, and has a machine hear of it, of what is older, and of what is not for it.
func TestNews(t *testing.T) {
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
		t.Error("nobody knows that it serves anything, and asks whoever might")
	}
	first := Seen{Record: a.Announce(serving(nil), false), Revision: 1}
	b.Announce(Advertisement{}, false)
	if b.Receive(first) {
		t.Error("a node was heard that no look has shown")
	}
	b.Step(0, 1, &Look{Records: []Seen{first}})
	none, some := serving(nil), serving(map[string]Set{"m": SetOf(2)})
	unlisted := none
	unlisted.Unlisted = SetOf(1)
	other := some
	other.Ready = SetOf(1, 2, 3)
	other.Models = map[string]Set{"m": SetOf(3)} // nobody knows that it serves 3
	if a.MustAnnounce(none) || !a.MustAnnounce(some) || !a.MustAnnounce(unlisted) || a.MustAnnounce(other) {
		t.Errorf("%v %v %v %v", a.MustAnnounce(none), a.MustAnnounce(some), a.MustAnnounce(unlisted),
			a.MustAnnounce(other))
	}
	second := Seen{Record: a.Announce(some, false), Revision: 2}
	if a.MustAnnounce(some) || a.MustAnnounce(none) {
		t.Error("what is announced is no news, nor is what goes")
	}
	stranger, late, former, foreign := second, second, second, second
	stranger.Node, late.Revision, former.Session, foreign.Version = "c", 1, "a0", RecordVersion+1
	for _, s := range []Seen{stranger, late, former, foreign, first} {
		if b.Receive(s) || b.View().MayServe(2, "m") {
			t.Errorf("was heard: %+v", s)
		}
	}
	if !b.Receive(second) || !b.View().MayServe(2, "m") || b.View().MayServe(1, "m") {
		t.Errorf("was not heard: %+v", b.View())
	}
	if b.Receive(second) {
		t.Error("twice")
	}
	b.Step(time.Second, 2, &Look{Records: []Seen{first}}) // of a replica that is behind
	if !b.View().MayServe(2, "m") {
		t.Error("an older look made it forget")
	}
}
