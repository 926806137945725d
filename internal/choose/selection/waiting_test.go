package selection

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/queue"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// withQueue is a fleet with ranks that are busy with more than 10 tokens to compute.
func withQueue(t *testing.T, workers int, change func(*routing.Queue)) *fleet {
	f := newFleet(t, workers, 1)
	q := &routing.Queue{ThresholdTokens: ptr(10.0)}
	if change != nil {
		change(q)
	}
	f.service.cfg.Find = func(context.Context, *api.Query) (*api.Answer, error) { // called concurrently
		return &api.Answer{Model: "m", BlockSize: block, Complete: true}, nil
	}
	f.configured(t, func(c *routing.Config) { c.Queue = q })
	return f
}

// fill books a request of 20 tokens on each worker, with the worker's name as id.
func (f *fleet) fill(t *testing.T) {
	t.Helper()
	for _, r := range f.pool.Ranks {
		b := request(string(r.Instance), 20)
		b.Pinned = &routing.Target{Worker: r.Instance}
		if _, err := f.service.Select(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
}

func (f *fleet) free(t *testing.T, id string) {
	t.Helper()
	if err := f.service.Free(t.Context(), &api.RequestRef{Model: "m", RequestID: id}); err != nil {
		t.Fatal(err)
	}
}

// pending waits until n requests wait.
func (f *fleet) pending(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%d requests wait", n), func() (bool, string) {
		list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		return list.Models[0].PendingCount == n, fmt.Sprint(list.Models[0].PendingCount)
	})
}

type outcome struct {
	id  string
	s   *api.Selection
	err error
}

// send sends a request in the background.
func (f *fleet) send(ctx context.Context, r *api.SelectRequest, to chan<- outcome) {
	go func() {
		s, err := f.service.Select(ctx, r)
		to <- outcome{r.RequestID, s, err}
	}()
}

// TestRefusalArrivesInTime: a request that waits in vain is refused before the deadline of the caller, and not at it.
func TestRefusalArrivesInTime(t *testing.T) {
	for _, c := range []struct{ left, margin time.Duration }{
		{5 * time.Second, replyTime}, {100 * time.Millisecond, 10 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := withQueue(t, 2, nil)
			f.fill(t)
			ctx, cancel := context.WithTimeout(t.Context(), c.left)
			defer cancel()
			begun := time.Now()
			_, err := f.service.Select(ctx, request("late", 20))
			if e := api.AsError(err); e.Code != api.CodeOverloaded || e.Queue == nil || e.Queue.Reason != "deadline" ||
				time.Since(begun) != c.left-c.margin {
				t.Errorf("%v before the deadline: %+v", c.left-time.Since(begun), e)
			}
		})
	}
}

// TestRequestWaits: a request waits until a worker is not busy, or until its deadline.
func TestRequestWaits(t *testing.T) {
	f := withQueue(t, 2, nil)
	f.fill(t)
	got := make(chan outcome, 8)
	f.send(t.Context(), request("r", 30), got)
	f.pending(t, 1)
	list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
	if err != nil || list.Models[0].PendingISLTokens != 30 || list.Models[0].Requests != 2 {
		t.Fatalf("%+v %v", list, err)
	}
	advisory := request("", 20)
	advisory.Advisory = true
	if _, err := f.service.Select(t.Context(), advisory); err != nil {
		t.Errorf("an advisory request waits: %v", err)
	}
	if err := f.service.PrefillComplete(t.Context(), &api.RequestRef{Model: "m", RequestID: "w01"}); err != nil {
		t.Fatal(err)
	}
	if o := <-got; o.err != nil || o.s.Worker != "w01" || !o.s.Booked {
		t.Fatalf("%+v", o)
	}
	f.pending(t, 0)
	short, cancel := context.WithCancel(t.Context())
	f.send(short, request("late", 20), got)
	f.pending(t, 1)
	cancel()
	o := <-got
	if e := api.AsError(o.err); e.Code != api.CodeOverloaded || e.Queue == nil || e.Queue.Reason != "deadline" ||
		e.Queue.Class != "default" || o.s != nil {
		t.Fatalf("%+v %+v", o, e)
	}
	f.pending(t, 0)
	f.free(t, "w00")
	f.free(t, "r")
	if _, err := f.service.Select(t.Context(), request("late", 20)); err != nil {
		t.Errorf("a request that stopped waiting is booked: %v", err)
	}
	testkit.Eventually(t, "the goroutine ends without waiting requests", func() bool {
		loop.Wake(f.service.room.changed)
		f.service.room.mu.Lock()
		defer f.service.room.mu.Unlock()
		return !f.service.room.running
	})
}

// TestDetailsOfTheLastDecision: the details are of the last decision alone. A request that would overtake another is
// decided again in its turn.
func TestDetailsOfTheLastDecision(t *testing.T) {
	f := withQueue(t, 1, nil)
	var d Details
	for range 2 {
		r := request("r", 30)
		r.Book = false
		if _, err := f.service.SelectDetailed(t.Context(), r, &d); err != nil {
			t.Fatal(err)
		}
		if len(d.Ranks) != 1 || d.Ranks[0].Worker.ID != "w00" || d.Chosen.Worker.ID != "w00" {
			t.Errorf("%d ranks: %+v", len(d.Ranks), d)
		}
	}
}

// TestQueueRefuses: a request that may not wait gets the reason.
func TestQueueRefuses(t *testing.T) {
	for _, c := range []struct {
		change func(*routing.Queue)
		reason string
		class  string
		limit  float64
		says   string
	}{
		{func(q *routing.Queue) { q.MaxRequests = ptr(0.0) }, "requests", "default", 0, "never wait"},
		{func(q *routing.Queue) { q.MaxRequests = ptr(1.0) }, "requests", "default", 2, "class default is full"},
		{func(q *routing.Queue) { q.MaxRawTokens = ptr(29.0) }, "raw_tokens", "default", 58,
			"60 raw_tokens with this request"},
		{func(q *routing.Queue) { q.MaxCachedTokens = ptr(0.0) }, "cached_tokens", "default", 0, "cached_tokens is 0"},
		{func(q *routing.Queue) { q.MaxWaiting = ptr(2) }, "full", "default", 2, "2 requests are waiting already"},
		{func(q *routing.Queue) {
			q.Classes = []routing.QueueClass{{Name: "batch", QueueLimits: routing.QueueLimits{MaxRequests: ptr(1.0)}}}
		}, "requests", "batch", 2, "class batch"},
	} {
		f := withQueue(t, 2, c.change)
		f.fill(t)
		got := make(chan outcome, 3)
		for i := range 3 {
			f.send(t.Context(), request(fmt.Sprint("r", i), 20), got)
			if c.limit > 0 && i < 2 {
				f.pending(t, i+1)
			}
		}
		o := <-got
		e := api.AsError(o.err)
		if e == nil || e.Code != api.CodeOverloaded || e.Queue == nil || e.Queue.Reason != c.reason ||
			e.Queue.Class != c.class || e.Queue.Limit != c.limit || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %+v, %+v", c.says, o, e)
		}
		for range 2 {
			f.service.room.mu.Lock()
			waits := f.service.room.waiting.Load()
			f.service.room.mu.Unlock()
			if waits > 0 {
				f.free(t, map[int64]string{2: "w00", 1: "w01"}[waits])
			}
			<-got
		}
	}
}

// TestLimitsCountRanksThatMayBeChosen: a request that could go now, behind a waiting request for the same worker, waits
// only within the limit for the worker; else the request goes.
func TestLimitsCountRanksThatMayBeChosen(t *testing.T) {
	f := withQueue(t, 4, func(q *routing.Queue) { q.MaxRequests = ptr(1.0) })
	r := request("r", 20)
	r.Pinned = &routing.Target{Worker: "w00"}
	w := f.service.room
	m := &modelQueue{queue.New(w.classes), map[uint64]*waiter{}}
	id, err := m.Add(queue.Entry{Group: group(r)}, 1)
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	m.waiters[id] = &waiter{ctx: gone} // its context has ended, and it has not left yet
	w.models["m"] = m
	w.waiting.Add(1)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if s, err := f.service.Select(ctx, r); err != nil || s.Worker != "w00" {
		t.Errorf("%+v %v", s, err)
	}
}

// TestQueueOrder frees a worker once for each waiting request: requests go by strict priority, then in order of
// arrival. Requests pinned to a busy worker stay and block nothing. Later requests overtake none.
func TestQueueOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(20, 1))
	f := withQueue(t, 2, nil)
	f.fill(t)
	got := make(chan outcome, 100)
	type waiting struct {
		id     string
		strict uint32
		jump   float64
	}
	var want []waiting
	const n = 40
	for i := range n {
		r := request(fmt.Sprint("r", i), 20)
		r.StrictPriority = rng.Uint32N(3)
		if rng.IntN(4) == 0 {
			r.PriorityJump = 3600 * float64(1+rng.IntN(5))
		}
		if rng.IntN(4) == 0 {
			r.Pinned = &routing.Target{Worker: "w00"}
		} else {
			want = append(want, waiting{r.RequestID, r.StrictPriority, r.PriorityJump})
		}
		f.send(t.Context(), r, got)
		f.pending(t, i+1)
	}
	slices.SortStableFunc(want, func(a, b waiting) int {
		switch {
		case a.strict != b.strict:
			return int(b.strict) - int(a.strict)
		case a.jump > b.jump:
			return -1
		case a.jump < b.jump:
			return 1
		}
		return 0
	})
	last := "w01"
	for i, w := range want {
		f.free(t, last)
		o := <-got
		if o.err != nil || o.id != w.id || o.s.Worker != "w01" {
			t.Fatalf("%d: %+v, want %+v", i, o, w)
		}
		last = o.id
	}
	f.pending(t, n-len(want))
	last = "w00"
	for range n - len(want) {
		f.free(t, last)
		o := <-got
		if o.err != nil || o.s.Worker != "w00" {
			t.Fatalf("%+v", o)
		}
		last = o.id
	}
	f.pending(t, 0)
}

// TestQueueOfPools: a disaggregated request waits for a prefill worker, and is then booked on both.
func TestQueueOfPools(t *testing.T) {
	f := withQueue(t, 2, nil)
	f.record(0, func(r *api.WorkerRecord) { r.Role = api.RoleDecode })
	f.record(1, func(r *api.WorkerRecord) { r.Role = api.RolePrefill })
	got := make(chan outcome, 1)
	for i := range 2 {
		r := request(fmt.Sprint("r", i), 42)
		r.Disaggregated = true
		f.send(t.Context(), r, got)
		if i == 1 {
			f.pending(t, 1)
			if err := f.service.PrefillComplete(t.Context(), &api.RequestRef{Model: "m", RequestID: "r0"}); err != nil {
				t.Fatal(err)
			}
		}
		if o := <-got; o.err != nil || o.s.Worker != "w00" || o.s.Prefill == nil || o.s.Prefill.Worker != "w01" ||
			o.s.Blocks != 10 {
			t.Fatalf("%+v", o)
		}
	}
	list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
	want := []api.RankLoad{{Worker: "w00", ActiveBlocks: 20, ActiveRequests: 2},
		{Worker: "w01", ActivePrefillTokens: 42, ActiveRequests: 1}}
	if err != nil || !slices.Equal(list.Models[0].Ranks, want) {
		t.Fatalf("%+v %v", list, err)
	}
}

// TestWaitsForEnginesAndWorkers: a request waits while the only engine reports the load of other routers. It goes
// seconds after a report of less load, or after the arrival of another worker, without a change of the bookings.
func TestWaitsForEnginesAndWorkers(t *testing.T) {
	for _, arrives := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := withQueue(t, 2, nil)
			var pool atomic.Pointer[registry.Pool]
			pool.Store(&registry.Pool{Model: f.pool.Model, Ranks: f.pool.Ranks[:1]})
			f.service.cfg.Pool = func(string) *registry.Pool { return pool.Load() }
			reports, began := load.NewEngines(), time.Now()
			f.service.cfg.Engines = func(read func(use func(events.RankKey) load.EngineUse)) {
				reports.Read(time.Since(began), read)
			}
			report := func(tokens uint64) {
				reports.Add(time.Since(began), []events.EngineLoad{{Worker: "w00", Running: ptr(uint64(1)),
					Waiting: ptr(uint64(0)), UsedBlocks: ptr(uint64(1)), WaitingTokens: &tokens}},
					func(events.RankKey) load.Load { return load.Load{} })
			}
			report(1000)
			got := make(chan outcome, 1)
			f.send(t.Context(), request("r", 20), got)
			synctest.Wait()
			f.pending(t, 1)
			want := events.WorkerID("w00")
			if arrives {
				pool.Store(f.pool)
				want = "w01"
			} else {
				report(0)
			}
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if len(got) != 1 {
				t.Fatal("the request still waits")
			}
			if o := <-got; o.err != nil || o.s.Worker != want || !o.s.Booked {
				t.Errorf("%+v", o)
			}
		})
	}
}

// TestQueueUnderLoad sends and frees many requests at once, with deadlines: all get an answer, and no request waits at
// the end.
func TestQueueUnderLoad(t *testing.T) {
	f := withQueue(t, 3, func(q *routing.Queue) {
		q.Classes = []routing.QueueClass{{Name: "short", UncachedBelow: ptr(30.0)}, {Name: "batch", Family: "batch",
			Policy: "wspt"}}
	})
	const askers, each = 16, 40
	ended := make(chan int, askers)
	for i := range askers {
		go func() {
			rng := rand.New(rand.NewPCG(21, uint64(i)))
			late := 0
			for k := range each {
				r := request(fmt.Sprint(i, "-", k), 20+rng.IntN(30))
				r.StrictPriority, r.PolicyClass = rng.Uint32N(2), []string{"", "batch"}[rng.IntN(2)]
				if rng.IntN(4) == 0 {
					r.Workers = []events.WorkerID{f.pool.Ranks[rng.IntN(3)].Instance}
				}
				ctx, cancel := t.Context(), func() {}
				if rng.IntN(5) == 0 {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(2000))*time.Microsecond)
				}
				s, err := f.service.Select(ctx, r)
				cancel()
				if err != nil {
					e := api.AsError(err)
					if late++; e.Queue == nil || e.Queue.Reason != "deadline" {
						t.Error(err)
					}
					continue
				}
				if !s.Booked {
					t.Errorf("%+v", s)
				}
				f.free(t, r.RequestID)
			}
			ended <- late
		}()
	}
	late := 0
	for range askers {
		late += <-ended
	}
	t.Log(late, "had too little time")
	f.pending(t, 0)
	list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
	if err != nil || list.Models[0].Requests != 0 {
		t.Errorf("%+v %v", list, err)
	}
}

// TestReleasedAtOnce: as many waiting requests go as there is room for, each booked before the next decision.
func TestReleasedAtOnce(t *testing.T) {
	f := withQueue(t, 2, nil)
	f.fill(t)
	got := make(chan outcome, 8)
	for i := range 5 {
		f.send(t.Context(), request(fmt.Sprint("r", i), 20), got)
		f.pending(t, i+1)
	}
	f.free(t, "w00")
	first := <-got
	f.pending(t, 4)
	f.free(t, "w01")
	second := <-got
	f.pending(t, 3)
	if first.err != nil || second.err != nil || first.s.Worker != "w00" || second.s.Worker != "w01" {
		t.Fatalf("%+v, %+v", first, second)
	}
	select {
	case o := <-got:
		t.Errorf("%+v went although both workers are busy", o)
	default:
	}
	for wait := 2; wait >= 0; wait-- { // the rest goes one by one
		f.free(t, first.id)
		first, second = second, <-got
		f.pending(t, wait)
		if second.err != nil {
			t.Fatal(second.err)
		}
	}
}

// TestAdmittedOneByOne: of two simultaneous requests for one worker, the second decision includes the first booking.
func TestAdmittedOneByOne(t *testing.T) {
	f := withQueue(t, 1, nil)
	second := make(chan struct{}, 1)
	chosen := 0
	var mu sync.Mutex
	f.service.cfg.Stage = func(_ context.Context, stage string, _ time.Duration) {
		if stage != stageChoose {
			return
		}
		mu.Lock()
		chosen++
		first := chosen == 1
		mu.Unlock()
		if !first {
			loop.Wake(second)
			return
		}
		select { // before the booking; without a lock, the second request arrives here
		case <-second:
		case <-time.After(50 * time.Millisecond):
		}
	}
	got := make(chan outcome, 2)
	for i := range 2 {
		f.send(t.Context(), request(fmt.Sprint("r", i), 20), got)
	}
	first := <-got
	f.pending(t, 1)
	f.free(t, first.id)
	if other := <-got; first.err != nil || other.err != nil || other.id == first.id {
		t.Errorf("%+v, %+v", first, other)
	}
}

// TestWaitsForLong: during the wait of 11 s, another worker stores the prompt. The request goes there.
func TestWaitsForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withQueue(t, 3, nil)
		f.fill(t)
		var asked atomic.Int32
		f.service.cfg.Find = func(context.Context, *api.Query) (*api.Answer, error) {
			a := &api.Answer{Model: "m", BlockSize: block, Complete: true}
			if asked.Add(1) > 1 {
				a.Workers = []api.Overlap{{Instance: "w01", Device: 2}}
			}
			return a, nil
		}
		got := make(chan outcome, 1)
		f.send(t.Context(), request("r", 20), got)
		time.Sleep(overlaps - time.Second)
		synctest.Wait()
		if n := asked.Load(); n != 1 {
			t.Errorf("%d lookups", n)
		}
		time.Sleep(2 * time.Second)
		f.service.room.mu.Lock() // both are free at the next examination
		for _, id := range []string{"w00", "w01"} {
			f.free(t, id)
		}
		f.service.room.mu.Unlock()
		if o := <-got; o.err != nil || o.s.Worker != "w01" || o.s.Device != 2 || asked.Load() != 2 {
			t.Errorf("%+v, looked up %d times", o, asked.Load())
		}
	})
}

// TestWaitsForExpiry: a request waits for workers that are busy with unreported ends. The old requests expire.
func TestWaitsForExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withQueue(t, 2, nil)
		f.loads = load.New(load.Config{Limits: load.Limits{Expiry: time.Minute}})
		f.service.cfg.Loads = f.loads
		f.loads.Watch(f.service.room.changed)
		f.fill(t)
		got := make(chan outcome, 1)
		f.send(t.Context(), request("r", 20), got)
		expire := func() { // as the service does twice a second
			_ = f.loads.Change(func(r *load.Replica, now time.Duration) error {
				r.Step(now)
				return nil
			})
			synctest.Wait()
		}
		time.Sleep(59 * time.Second)
		if expire(); len(got) > 0 {
			t.Errorf("the request did not wait: %+v", <-got)
		}
		time.Sleep(2 * time.Second)
		expire()
		if o := <-got; o.err != nil || !o.s.Booked {
			t.Errorf("%+v", o)
		}
	})
}

// TestRanksChangeMeanwhile removes a worker during the wait of a request with guesses for all ranks.
func TestRanksChangeMeanwhile(t *testing.T) {
	f := withQueue(t, 3, nil)
	f.fill(t)
	f.service.cfg.Guesses = allGuessed{}
	got := make(chan outcome, 1)
	f.send(t.Context(), request("r", 20), got)
	f.pending(t, 1)
	f.service.room.mu.Lock()
	f.pool = &registry.Pool{Model: "m", Ranks: f.pool.Ranks[:1]}
	f.free(t, "w00")
	f.service.room.mu.Unlock()
	if o := <-got; o.err != nil || o.s.Worker != "w00" || o.s.Guessed != 1 {
		t.Errorf("%+v", o)
	}
}

// allGuessed guesses that each rank holds a block.
type allGuessed struct{}

func (allGuessed) Depths(_ string, _ []registry.PoolRank, _ []events.SeqHash, depths []uint32) bool {
	for i := range depths {
		depths[i] = 1
	}
	return true
}

func (allGuessed) Refute(string, []registry.PoolRank, []events.SeqHash, time.Duration, []uint32, []uint32) {
}
