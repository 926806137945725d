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
)

// What an engine would load, and why no more, is what it is if all pages are asked for: for stores with holes, some of
// which is cached, from whatever depths. Nothing but a sounding is asked for twice, and of a store that has nothing,
// nothing else is.
func TestFollowAgainstAll(t *testing.T) {
	asked, whole := 0, 0
	for seed := range uint64(1000) {
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
		soundings := 1 + len(starts) // of which each is of four pages at most
		if found.Err != nil || m.keys.Load() > int64(2*(pages+4*soundings)) {
			t.Fatalf("seed %d: %v, %d keys were asked for", seed, found.Err, m.keys.Load())
		}
		if n := m.keys.Load() - before; hole == 1 && n > int64(2*4*len(starts)) {
			t.Fatalf("seed %d: of a store that has nothing %d keys were asked for", seed, n)
		}
		asked, whole = asked+found.Known.Count(), whole+pages
		need := shortRun // and what is asked for beyond
		for _, start := range starts {
			need += next(found.Present, found.Known, start, pages, ^uint64(0)) - start + maxAhead + 2*longRun
		}
		if n := m.keys.Load() - before; n > int64(2*need) {
			t.Fatalf("seed %d: %d keys were asked for, want %d at most", seed, n, 2*need)
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
				t.Fatalf("seed %d: from %d of %d %d are loaded (%s), want %d (%s)", seed, start, pages, a, why, b, because)
			}
		}
	}
	t.Logf("%d of %d pages were asked for", asked, whole)
}

// outOfOrder is a store whose answers overtake each other.
type outOfOrder struct{ *memory }

func (s outOfOrder) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	for range rand.IntN(10) {
		runtime.Gosched()
	}
	return s.memory.Exists(ctx, keys)
}

// ailing is a store that treats requests for some keys otherwise.
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

// Who follows a run needs no answer about what lies behind its end: it may not come, or be an error. An error of what
// is needed is one.
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
			for _, p := range (&Question{lane: l}).soundings(nil, 0) { // which a master answers with the first page
				at := p.first + bits.TrailingZeros64(p.mask)
				m.keys[keys.Keys[at*keys.PerPage]], m.keys[keys.Keys[at*keys.PerPage+1]] = false, false
			}
			c := NewCache(m, CacheConfig{Patience: patience})
			q := c.Begin(l, 0)
			q.Follow(soon(t), []int{0})
			f := q.Wait(soon(t))
			if n := next(f.Present, f.Known, 0, l.Pages, ^uint64(0)); f.Err != nil || n != end || !f.Known.Get(end) {
				t.Errorf("%s: %v, %d pages are there, want %d", name, f.Err, n, end)
			}
			if name == "broken" {
				needed := map[string]bool{keys.Keys[(end/2)*keys.PerPage]: true}
				q = NewCache(&ailing{m.memory, needed, ails}, CacheConfig{}).Begin(l, 0)
				if q.Follow(soon(t), []int{0}); q.Wait(soon(t)).Err == nil {
					t.Errorf("page %d was needed, and there is no error", end/2)
				}
			}
		}
	}
}

// Where pages were there when they were asked for last, the store is asked for 512 at once, though what it said then is
// too old to count.
func TestFollowAsksAheadOfWhatItSaw(t *testing.T) {
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
	together.Add(maxAhead / requestPages) // requests, none of which is answered before all are made
	s.gather.Store(true)
	q = c.Begin(l, 0)
	q.Follow(soon(t), []int{5})
	f := q.Wait(soon(t))
	if f.Err != nil || f.Present.Count() > 0 || !f.Known.Get(5) || m.keys.Load() != maxAhead {
		t.Errorf("%v, %d present, %d keys", f.Err, f.Present.Count(), m.keys.Load())
	}
}

// gathering is a store that answers requests together.
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

// Who follows a run stops when his time is over, and says so, though all that he was told is known: whether the answer
// that he waits for comes at once, or just after he has stopped.
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
		// each window is asked for first keys, then the others; only the first window was
		if f := q.Wait(ctx); !errors.Is(f.Err, context.Canceled) || f.Present.Count() > shortRun || m.calls.Load() > 2 {
			t.Errorf("late %t: %v, %d present, %d requests", late, f.Err, f.Present.Count(), m.calls.Load())
		}
	}
}

// stopAfter ends somebody's patience with a request to a store, and answers it when it may.
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

// However many runs are followed, a question has few requests under way, and knows all of them in the end.
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

// counting is a slow store that knows how many requests were under way at most.
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

// A prompt of which the store has nothing is not named to its end, however long it is.
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

// Who asks for the same waits for the same answer, also where it is not for whole runs.
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
		t.Errorf("%+v, and %d parts are still asked for", s, len(c.asked))
	}
}

// A sounding is not waited for if another request has said what it was to say.
func TestFollowDoesNotWaitForWhatItKnows(t *testing.T) {
	l := lane(1000)
	m := &memory{objects: map[string]bool{}}
	for _, key := range l.Names(0, 600).Keys {
		m.objects[key] = true
	}
	s := &holding{m, make(chan struct{})}
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

// holding is a store that answers requests for a few keys late.
type holding struct {
	*memory
	until chan struct{}
}

func (s *holding) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	if len(keys) < shortRun {
		<-s.until
	}
	return s.memory.Exists(ctx, keys)
}
