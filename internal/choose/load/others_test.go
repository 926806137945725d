package load

import (
	"context"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestOthers estimates the load without a booking: the requests and blocks of the engine's report, minus the bookings.
// The smaller of the two latest estimates counts. An expired estimate does not count.
func TestOthers(t *testing.T) {
	key := events.RankKey{Instance: "w", Rank: 1}
	s := New(Config{})
	book := func(id string, hashes int, tokens int64) {
		t.Helper()
		b := Booking{ID: id, Rank: key, PrefillTokens: tokens, Hashes: make([]events.SeqHash, hashes)}
		for i := range b.Hashes {
			b.Hashes[i] = events.SeqHash(i + 1)
		}
		if err := s.Book(context.Background(), Model{Name: id}, b); err != nil { // a separate model per booking
			t.Fatal(err)
		}
	}
	n := func(v uint64) *uint64 { return &v }
	e, now := NewEngines(), time.Duration(0)
	use := func() (u EngineUse) {
		e.Read(now, func(use func(events.RankKey) EngineUse) { u = use(key) })
		return u
	}
	report := func(running, waiting, used, tokens uint64) {
		now += time.Second
		e.Add(now, []events.EngineLoad{{Worker: "w", Rank: 1, Running: &running, Waiting: &waiting, UsedBlocks: &used,
			TotalBlocks: n(1000), WaitingTokens: &tokens, Source: "vllm"}}, s.Booked)
	}
	book("a", 10, 100)
	report(3, 2, 30, 400)
	if u, want := use(), (Others{Requests: 4, Waiting: 1, Blocks: 20, PrefillTokens: 300}); u.Others != want ||
		!u.HasRequests || u.Running != 3 || u.Waiting != 2 || u.Source != "vllm" || u.Age != 0 {
		t.Errorf("%+v, want %+v", u, want)
	}
	s.ReportForeign(Model{Name: "b"}, []events.RouterRequest{{Key: key, ID: "f", Change: events.RequestAdded,
		Blocks: []events.SeqHash{1, 2, 3, 4, 5}, PrefillTokens: 50}})
	report(3, 2, 30, 400)
	if u, want := use(), (Others{Requests: 3, Waiting: 0, Blocks: 15, PrefillTokens: 250}); u.Others != want {
		t.Errorf("with a foreign request: %+v, want %+v", u.Others, want)
	}
	book("c", 100, 1000) // the engine has not counted the request yet
	report(3, 2, 30, 400)
	book("d", 1, 1)
	report(20, 9, 500, 9000)
	if u := use(); u.Others != (Others{Requests: 2}) {
		t.Errorf("of the lower report: %+v", u.Others)
	}
	report(20, 9, 500, 9000)
	if u, want := use(), (Others{Requests: 25, Waiting: 5, Blocks: 384, PrefillTokens: 7849}); u.Others != want {
		t.Errorf("of two equal reports: %+v, want %+v", u.Others, want)
	}
	now += othersLife - time.Millisecond
	if u := use(); u.Others.Requests != 25 || u.Age != othersLife-time.Millisecond {
		t.Errorf("before its end: %+v", u)
	}
	now += time.Millisecond
	if u := use(); u.Others != (Others{}) || !u.HasRequests {
		t.Errorf("after its end: %+v", u)
	}
	report(4, 0, 0, 0) // all requests are booked or foreign
	if u := use(); u.Others != (Others{}) {
		t.Errorf("only own requests: %+v", u.Others)
	}
}
