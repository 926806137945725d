package guess

import (
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestEventsPassAGuess has a rank with events and one without. A guess about the first rank holds until one second
// after the first output token; then only confirmed blocks count. A changed registration changes the guesses.
func TestEventsPassAGuess(t *testing.T) {
	rank := func(name, events_ string) registry.PoolRank {
		record := &api.WorkerRecord{}
		record.Events = events_
		return registry.PoolRank{RankKey: events.RankKey{Instance: events.WorkerID(name)}, Record: record}
	}
	pool := &registry.Pool{Model: "m", Ranks: []registry.PoolRank{rank("a", api.EventsShim), rank("b", api.EventsNone)}}
	s, err := New(Config{Settings: Settings{PredictTTL: 5 * time.Second},
		Pool: func(string) *registry.Pool { return pool }})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Minute
	s.now = func() time.Duration { return now }
	seq := []events.SeqHash{1, 2, 3, 4, 5, 6}
	of := load.Model{Name: "m"}
	tell := func(rank int, n int, r load.Request) {
		r.Key, r.Rank, r.Hashes = load.Key{Owner: 1, Seq: uint64(rank + 1)}, pool.Ranks[rank].RankKey, seq[:n]
		s.Observe(of, &r)
	}
	age := time.Duration(0) // of the lookup in the index
	check := func(what string, confirmed []uint32, want ...uint32) {
		t.Helper()
		got := make([]uint32, len(pool.Ranks))
		s.Depths("m", pool.Ranks, seq, got)
		s.Refute("m", pool.Ranks, seq, age, confirmed, got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	none := []uint32{0, 0}
	check("nothing was sent", none, 0, 0)
	tell(0, 4, load.Request{New: true})
	tell(1, 5, load.Request{New: true})
	now += 3 * time.Second
	check("it waits", none, 4, 5)
	tell(0, 4, load.Request{PrefillDone: true})
	tell(1, 5, load.Request{Ended: true})
	now += settle - time.Millisecond
	check("its events are on their way", none, 4, 5)
	now += time.Millisecond
	age = time.Millisecond
	check("the lookup was before its events", none, 4, 5)
	age = 0
	check("events confirm two blocks", []uint32{2, 0}, 0, 5)
	check("the two confirmed ones are guessed still", []uint32{2, 0}, 2, 5)
	now += time.Second
	s.expire()
	check("its TTL is over", []uint32{2, 0}, 0, 5)
	now += 120 * time.Second
	s.expire()
	check("both TTLs are over", none, 0, 0)
	tell(1, 6, load.Request{New: true})
	check("sent again", none, 0, 6)
	pool = &registry.Pool{Model: "m", Ranks: pool.Ranks[:1]}
	s.expire()
	pool = &registry.Pool{Model: "m", Ranks: append(slices.Clone(pool.Ranks), rank("b", api.EventsNone))}
	check("it was away", none, 0, 0)
	st := s.Status()
	if len(st) != 1 || st[0].Blocks != 0 || st[0].Dropped["refuted"] != 2 || st[0].Dropped["expired"] != 7 ||
		st[0].Dropped["removed"] != 6 {
		t.Errorf("%+v", st)
	}
}

// TestAnEarlierPool: a call that reads the pool before a change does not drop the guesses of a rank that the change has
// added.
func TestAnEarlierPool(t *testing.T) {
	key := events.RankKey{Instance: "a"}
	pool := &registry.Pool{Model: "m", Ranks: []registry.PoolRank{{RankKey: key, Record: &api.WorkerRecord{}}}}
	reads := []*registry.Pool{pool, {Model: "m"}, pool} // of Observe, then of Depths: the earlier pool comes first
	s, err := New(Config{Settings: Settings{PredictTTL: time.Minute}, Pool: func(string) *registry.Pool {
		next := reads[0]
		reads = reads[1:]
		return next
	}})
	if err != nil {
		t.Fatal(err)
	}
	seq := []events.SeqHash{1, 2, 3}
	s.Observe(load.Model{Name: "m"}, &load.Request{Key: load.Key{Owner: 1, Seq: 1}, Rank: key, Hashes: seq, New: true})
	got := make([]uint32, 1)
	if s.Depths("m", pool.Ranks, seq, got); got[0] != 3 {
		t.Errorf("%d blocks are guessed, want 3", got[0])
	}
}

// TestEnginesThatEnd: an engine that ended holds nothing. A new engine in its place holds no blocks of requests to the
// old one. A silent engine is still the same process.
func TestEnginesThatEnd(t *testing.T) {
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	key := events.RankKey{Instance: "a"}
	var pool *registry.Pool
	s, err := New(Config{Settings: Settings{PredictTTL: time.Minute}, Pool: func(string) *registry.Pool { return pool }})
	if err != nil {
		t.Fatal(err)
	}
	stands := func(state api.EngineState, since time.Duration) {
		record := &api.WorkerRecord{}
		record.Events = api.EventsShim
		pool = &registry.Pool{Model: "m", Ranks: []registry.PoolRank{{RankKey: key, Record: record, Engine: state,
			EngineSince: began.Add(since)}}}
	}
	requests := uint64(0)
	seq := []events.SeqHash{1, 2, 3}
	send := func() {
		requests++
		s.Observe(load.Model{Name: "m"}, &load.Request{Key: load.Key{Owner: 1, Seq: requests}, Rank: key, Hashes: seq,
			New: true})
	}
	check := func(what string, want uint32) {
		t.Helper()
		got := make([]uint32, 1)
		if s.Depths("m", pool.Ranks, seq, got); got[0] != want {
			t.Errorf("%s: %d, want %d", what, got[0], want)
		}
	}
	stands("", 0)
	send()
	check("the shim has not reported the state of the engine", 3)
	stands(api.EngineConnected, time.Second)
	check("it is connected", 3)
	stands(api.EngineSilent, 0)
	check("it is silent", 3)
	stands(api.EngineConnected, time.Second)
	check("it speaks again", 3)
	stands(api.EngineConnected, 2*time.Second)
	check("it is another", 0)
	send()
	check("sent to the other", 3)
	stands(api.EngineGone, 3*time.Second)
	check("it has ended", 0)
	send()
	check("sent to one that has ended", 0)
	stands(api.EngineConnected, 4*time.Second)
	check("there is another", 0)
	send()
	check("sent to that", 3)
}
