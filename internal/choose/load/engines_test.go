package load

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// engineTwin keeps every report and searches all reports for each answer.
type engineTwin []struct {
	load events.EngineLoad
	at   time.Duration
}

func (t engineTwin) use(now time.Duration, key events.RankKey) (u EngineUse) {
	newest := func(of func(l *events.EngineLoad) *uint64) (value uint64, known bool) {
		at := time.Duration(-1 << 62)
		for i := range t {
			l := &t[i]
			if v := of(&l.load); v != nil && l.load.Worker == key.Instance && l.load.Rank == key.Rank && l.at >= at {
				value, at = *v, l.at
			}
		}
		return value, now-at < EngineLife
	}
	used, engine := newest(func(l *events.EngineLoad) *uint64 { return l.UsedBlocks })
	decode, router := newest(func(l *events.EngineLoad) *uint64 { return l.DecodeBlocks })
	switch {
	case engine:
		u.HasUsed, u.UsedBlocks = true, used
	case router:
		u.HasUsed, u.UsedBlocks = true, decode
	}
	if v, known := newest(func(l *events.EngineLoad) *uint64 { return l.TotalBlocks }); known {
		u.TotalBlocks = v
	}
	if v, known := newest(func(l *events.EngineLoad) *uint64 { return l.PrefillTokens }); known {
		u.PrefillTokens = v
	}
	running, some := newest(func(l *events.EngineLoad) *uint64 { return l.Running })
	if u.HasRequests = some; some {
		u.Running = running
		if v, known := newest(func(l *events.EngineLoad) *uint64 { return l.Waiting }); known {
			u.Waiting = v
		}
	}
	return u
}

// TestEngines adds reports of random age in random order, and compares the answers with the twin. The test also builds
// a second table from the list, and expects equal answers.
func TestEngines(t *testing.T) {
	t.Logf("seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 5))
	for range testkit.Rounds(200) {
		e, twin, now := NewEngines(), engineTwin{}, time.Duration(0)
		number := func() *uint64 {
			if rng.IntN(2) == 0 {
				return nil
			}
			v := rng.Uint64N(100)
			return &v
		}
		keys := []events.RankKey{{Instance: "a"}, {Instance: "a", Rank: 1}, {Instance: "b"}}
		for range 60 {
			now += time.Duration(rng.Int64N(int64(EngineLife / 4))).Truncate(time.Millisecond)
			key := keys[rng.IntN(len(keys))]
			l := events.EngineLoad{Worker: key.Instance, Rank: key.Rank, UsedBlocks: number(), TotalBlocks: number(),
				DecodeBlocks: number(), PrefillTokens: number(), Running: number(), Waiting: number(), WaitingTokens: number()}
			if rng.IntN(2) == 0 {
				l.AgeMS = rng.Uint64N(uint64(EngineLife / time.Millisecond * 5 / 4))
			}
			e.Add(now, []events.EngineLoad{l}, nil)
			if l.AgeMS < uint64(EngineLife/time.Millisecond) {
				twin = append(twin, struct {
					load events.EngineLoad
					at   time.Duration
				}{l, now - time.Duration(l.AgeMS)*time.Millisecond})
			}
			other := NewEngines()
			list := e.List(now)
			other.Add(now, list, nil)
			if again := other.List(now); !reflect.DeepEqual(again, list) {
				t.Fatalf("%+v, want %+v", again, list)
			}
			for _, x := range []*Engines{e, other} {
				for _, key := range keys {
					var got EngineUse
					x.Read(now, func(use func(events.RankKey) EngineUse) { got = use(key) })
					got.Age, got.known = 0, false // TestOthers checks the age
					if want := twin.use(now, key); got != want {
						t.Fatalf("%v of %+v: %+v, want %+v", now, key, got, want)
					}
				}
			}
		}
	}
}

// TestEnginesAreBounded adds reports of too many ranks. The table refuses reports beyond the limit until earlier
// reports have expired.
func TestEnginesAreBounded(t *testing.T) {
	e, used := NewEngines(), uint64(1)
	loads := make([]events.EngineLoad, maxEngines+2)
	for i := range loads {
		loads[i] = events.EngineLoad{Worker: events.WorkerID(fmt.Sprint(i)), UsedBlocks: &used}
	}
	e.Add(0, loads, nil)
	late := []events.EngineLoad{{Worker: "late", UsedBlocks: &used, AgeMS: uint64(EngineLife / time.Millisecond)}}
	e.Add(0, late, nil)
	if want := (EngineCounts{Taken: maxEngines, Late: 1, Refused: 2}); e.Counts() != want {
		t.Fatalf("%+v, want %+v", e.Counts(), want)
	}
	e.Add(EngineLife, loads[maxEngines:], nil)
	if want := (EngineCounts{Taken: maxEngines + 2, Late: 1, Refused: 2}); e.Counts() != want ||
		len(e.List(EngineLife)) != 2 {
		t.Fatalf("%+v, want %+v", e.Counts(), want)
	}
}
