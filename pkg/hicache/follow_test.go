package hicache

import (
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestFollowAgainstAll compares Follow with a lookup of all pages: the loads and the reasons are equal, for stores with
// holes, partly cached answers and any starts. Follow requests only soundings twice. From an empty store, it requests
// only soundings.
func TestFollowAgainstAll(t *testing.T) {
	asked, whole := 0, 0
	for seed := range uint64(testkit.Rounds(1000)) {
		rng := rand.New(rand.NewPCG(seed, 3))
		pages := 1 + rng.IntN([]int{20, 400, 2500}[rng.IntN(3)])
		l := lane(pages)
		m := &memory{objects: map[string]bool{}}
		keys := l.Names(0, pages)
		hole := []float64{0, 0.001, 0.02, 0.3, 1}[rng.IntN(5)]
		for at := 0; at < pages; {
			to := min(pages, at+1+rng.IntN(pages))
			for ; at < to; at++ {
				m.objects[keys.Keys[2*at]] = rng.Float64() >= hole
				m.objects[keys.Keys[2*at+1]] = rng.Float64() >= hole/2
			}
			at += rng.IntN(4) * rng.IntN(pages)
		}
		starts := make([]int, 1+rng.IntN(6))
		for i := range starts {
			starts[i] = rng.IntN(pages + 1)
		}
		cache := NewCache(outOfOrder{m}, CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
		if rng.IntN(2) == 0 {
			cache.Begin(l, 0).Follow(soon(t), []int{rng.IntN(pages)})
		}
		if rng.IntN(2) == 0 {
			q := cache.Begin(l, 0)
			q.Ask(rng.IntN(pages), rng.IntN(pages))
			q.Wait(soon(t))
		}
		before := m.keys.Load()
		q := cache.Begin(l, 0)
		if seed%2 == 0 {
			q.Sound(starts)
		}
		q.Follow(soon(t), starts)
		found := q.Wait(soon(t))
		soundings := 1 + len(starts) // of at most four pages each
		if found.Err != nil || m.keys.Load() > int64(2*(pages+4*soundings)) {
			t.Fatalf("seed %d: %v, %d requested keys", seed, found.Err, m.keys.Load())
		}
		if n := m.keys.Load() - before; hole == 1 && n > int64(2*4*len(starts)) {
			t.Fatalf("seed %d: %d requested keys from an empty store", seed, n)
		}
		asked, whole = asked+found.Known.Count(), whole+pages
		need := shortRun // and the pages requested beyond
		for _, start := range starts {
			need += next(found.Present, found.Known, start, pages, ^uint64(0)) - start + maxAhead + 2*longRun
		}
		if n := m.keys.Load() - before; n > int64(2*need) {
			t.Fatalf("seed %d: %d requested keys, want at most %d", seed, n, 2*need)
		}
		twin := all(NewCache(m, CacheConfig{}), l, 0).Wait(soon(t))
		got, want := NewMap(pages, found.Present, found.Known), NewMap(pages, twin.Present, twin.Known)
		rule := Rule{least: uint32(rng.IntN(20)), most: noBound}
		if rng.IntN(2) == 0 {
			rule.most = uint32(rng.IntN(200))
		}
		for _, start := range starts {
			a, why := got.Load(uint32(start), rule)
			b, because := want.Load(uint32(start), rule)
			if a != b || why != because {
				t.Fatalf("seed %d: from %d of %d, loads %d (%s), want %d (%s)", seed, start, pages, a, why, b, because)
			}
		}
	}
	t.Logf("%d of %d pages were requested", asked, whole)
}

// outOfOrder is a store with replies out of order.
type outOfOrder struct{ *memory }

func (s outOfOrder) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	for range rand.IntN(10) {
		runtime.Gosched()
	}
	return s.memory.Exists(ctx, keys)
}

// ailing is a store with different replies for some keys.
type ailing struct {
	*memory
	keys map[string]bool
	ails func(ctx context.Context) error
}

func (s *ailing) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	for _, key := range keys {
		if s.keys[key] {
			return NewBitmap(len(keys)), NewBitmap(len(keys)), s.ails(ctx)
		}
	}
	return s.memory.Exists(ctx, keys)
}

// TestFollowNeedsNoMore: Follow needs no answer about pages after the end of a run, which may be late or an error. An
// error about a needed page is returned.
func TestFollowNeedsNoMore(t *testing.T) {
	l := lane(1000)
	keys := l.Names(0, l.Pages)
	for _, end := range []int{0, 15, 16, 100, 300, 600} {
		for name, ails := range map[string]func(context.Context) error{
			"silent": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			"broken": func(context.Context) error { return errors.New("broken") },
		} {
			m := &ailing{&memory{objects: map[string]bool{}}, map[string]bool{}, ails}
			for i, key := range keys.Keys {
				m.objects[key] = i < end*keys.PerPage
				m.keys[key] = i >= (end+requestPages+shortRun)*keys.PerPage
			}
			for _, p := range (&Question{lane: l}).soundings(nil, 0) { // a master replies to these together with the first page
				at := p.first + bits.TrailingZeros64(p.mask)
				m.keys[keys.Keys[at*keys.PerPage]], m.keys[keys.Keys[at*keys.PerPage+1]] = false, false
			}
			c := NewCache(m, CacheConfig{Patience: patience})
			q := c.Begin(l, 0)
			q.Follow(soon(t), []int{0})
			f := q.Wait(soon(t))
			if n := next(f.Present, f.Known, 0, l.Pages, ^uint64(0)); f.Err != nil || n != end || !f.Known.Get(end) {
				t.Errorf("%s: %v, %d present pages, want %d", name, f.Err, n, end)
			}
			if name == "broken" {
				needed := map[string]bool{keys.Keys[(end/2)*keys.PerPage]: true}
				q = NewCache(&ailing{m.memory, needed, ails}, CacheConfig{}).Begin(l, 0)
				if q.Follow(soon(t), []int{0}); q.Wait(soon(t)).Err == nil {
					t.Errorf("no error for page %d, which is needed", end/2)
				}
			}
		}
	}
}

// TestFollowUsesExpiredAnswers: if earlier answers had the pages, Follow requests 512 pages at once, although the
// answers are expired.
func TestFollowUsesExpiredAnswers(t *testing.T) {
	l := lane(700)
	m := &memory{objects: map[string]bool{}}
	keys := l.Names(0, l.Pages)
	for _, key := range keys.Keys {
		m.objects[key] = true
	}
	now := time.Unix(1, 0)
	var together sync.WaitGroup
	s := &gathering{memory: m, all: &together}
	c := NewCache(s, CacheConfig{Now: func() time.Time { return now }})
	q := c.Begin(l, 0)
	if q.Follow(soon(t), []int{5}); q.Wait(soon(t)).Err != nil {
		t.Fatal(q.err)
	}
	now = now.Add(time.Minute)
	clear(m.objects)
	m.keys.Store(0)
	together.Add(maxAhead / requestPages) // requests, all sent before the first reply
	s.gather.Store(true)
	q = c.Begin(l, 0)
	q.Follow(soon(t), []int{5})
	f := q.Wait(soon(t))
	if f.Err != nil || f.Present.Count() > 0 || !f.Known.Get(5) || m.keys.Load() != maxAhead {
		t.Errorf("%v, %d present, %d keys", f.Err, f.Present.Count(), m.keys.Load())
	}
}

// gathering is a store that replies to requests together.
type gathering struct {
	*memory
	gather atomic.Bool
	all    *sync.WaitGroup
}

func (s *gathering) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	present, known, err = s.memory.Exists(ctx, keys)
	if s.gather.Load() {
		s.all.Done()
		s.all.Wait()
	}
	return present, known, err
}

// TestFollowStopsInTime: Follow stops when ctx is done and returns the error, although it has all received answers.
// The pending answer arrives at once, or just after the end.
func TestFollowStopsInTime(t *testing.T) {
	l := lane(400)
	for _, late := range []bool{false, true} {
		m := &memory{objects: map[string]bool{}}
		for _, key := range l.Names(0, l.Pages).Keys {
			m.objects[key] = true
		}
		ctx, cancel := context.WithCancel(soon(t))
		stop := stopAfter{memory: m, calls: 2, cancel: cancel, answer: make(chan struct{})}
		if !late {
			close(stop.answer)
		}
		q := NewCache(&stop, CacheConfig{Patience: patience}).Begin(l, 0)
		q.Follow(ctx, []int{0})
		if late {
			close(stop.answer)
		}
		for _, w := range q.waiting {
			<-w.on.done
		}
		// each window first requests the first keys, then the others; only the first window was requested
		if f := q.Wait(ctx); !errors.Is(f.Err, context.Canceled) || f.Present.Count() > shortRun || m.calls.Load() > 2 {
			t.Errorf("late %t: %v, %d present, %d requests", late, f.Err, f.Present.Count(), m.calls.Load())
		}
	}
}

// stopAfter is a store that cancels a context during a request, and replies on a signal.
type stopAfter struct {
	*memory
	calls  int
	cancel func()
	answer chan struct{}
}

func (s *stopAfter) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	if s.calls--; s.calls == 0 {
		s.cancel()
		<-s.answer
	}
	return s.memory.Exists(ctx, keys)
}

// TestFollowManyRuns: a question that follows many runs has few requests in flight, and finally has all answers.
func TestFollowManyRuns(t *testing.T) {
	l := lane(4096)
	m := &memory{objects: map[string]bool{}}
	for _, key := range l.Names(0, l.Pages).Keys {
		m.objects[key] = true
	}
	s := &counting{memory: m}
	q := NewCache(s, CacheConfig{Patience: patience}).Begin(l, 0)
	var starts []int
	for at := 0; at < l.Pages; at += 16 {
		starts = append(starts, at)
	}
	q.Sound(starts)
	q.Follow(soon(t), starts)
	if f := q.Wait(soon(t)); f.Err != nil || f.Present.Count() != l.Pages || s.most > mostRequests {
		t.Errorf("%v, %d pages of %d, %d requests at once", f.Err, f.Present.Count(), l.Pages, s.most)
	}
}

// counting is a slow store that counts concurrent requests.
type counting struct {
	*memory
	mu        sync.Mutex
	now, most int
}

func (s *counting) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	add := func(n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.now += n
		s.most = max(s.most, s.now)
	}
	add(1)
	defer add(-1)
	time.Sleep(200 * time.Microsecond)
	return s.memory.Exists(ctx, keys)
}

// TestSoundingsAreNear: with an empty store, Follow does not compute the names up to the end of a long prompt.
func TestSoundingsAreNear(t *testing.T) {
	l := lane(1 << 16)
	named, names := 0, l.Names
	l.Names = func(from, to int) PageKeys {
		named = max(named, to)
		return names(from, to)
	}
	q := NewCache(&memory{objects: map[string]bool{}}, CacheConfig{}).Begin(l, 0)
	q.Sound([]int{0})
	q.Follow(soon(t), []int{0})
	if f := q.Wait(soon(t)); f.Err != nil || !f.Known.Get(0) || named > maxAhead {
		t.Errorf("%v, named up to page %d", f.Err, named)
	}
}

// TestSoundingsAreShared: questions about the same pages share a request, also for parts of runs.
func TestSoundingsAreShared(t *testing.T) {
	m := &memory{objects: map[string]bool{}, gate: make(chan struct{})}
	c := NewCache(m, CacheConfig{Flights: 1, Patience: patience})
	l := lane(1000)
	var asking []*Question
	for range 10 {
		q := c.Begin(l, 0)
		q.Sound([]int{0, 3})
		asking = append(asking, q)
	}
	close(m.gate)
	for _, q := range asking {
		q.Follow(soon(t), []int{0, 3})
		if f := q.Wait(soon(t)); f.Err != nil || !f.Known.Get(0) || !f.Known.Get(3) {
			t.Errorf("%v", f.Err)
		}
	}
	if s := c.Stats(); s.Questions != 1 || s.Busy != 0 || len(c.asked) != 0 {
		t.Errorf("%+v, %d parts are still pending", s, len(c.asked))
	}
}

// TestFollowDoesNotWaitForKnownAnswers: Follow does not wait for a sounding if another request has the answer.
func TestFollowDoesNotWaitForKnownAnswers(t *testing.T) {
	l := lane(1000)
	m := &memory{objects: map[string]bool{}}
	for _, key := range l.Names(0, 600).Keys {
		m.objects[key] = true
	}
	s := &delaying{m, make(chan struct{})}
	c := NewCache(s, CacheConfig{HitLife: time.Hour, MissLife: time.Hour, Patience: patience})
	all(c, Lane{ID: l.ID, Pages: shortRun, fingerprints: l.fingerprints, Names: l.Names}, 0).Wait(soon(t))
	q := c.Begin(l, 0)
	q.Sound([]int{0, 100})
	q.Follow(soon(t), []int{0, 100})
	if f := q.Wait(soon(t)); f.Err != nil || f.Present.Count() < 600 {
		t.Errorf("%v, %d pages", f.Err, f.Present.Count())
	}
	close(s.until)
}

// delaying is a store that replies late to requests with few keys.
type delaying struct {
	*memory
	until chan struct{}
}

func (s *delaying) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	if len(keys) < shortRun {
		<-s.until
	}
	return s.memory.Exists(ctx, keys)
}
