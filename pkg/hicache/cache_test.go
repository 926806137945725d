package hicache

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// all returns a question about all pages of a lane.
func all(c *Cache, l Lane, from int) *Question {
	q := c.Begin(l, from)
	q.Ask(0, l.Pages)
	return q
}

// clock is a manual clock.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Time          { return time.Unix(0, c.at.Load()) }
func (c *clock) advance(d time.Duration) { c.at.Add(int64(d)) }

func lane(n int) Lane {
	s := &SGLang{Backend: "mooncake", PageSize: 1, TPSize: 1, PPSize: 1}
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return onlyLane(s, tokens, Space{})
}

// TestCacheAgainstStore: while objects come and go, each answer was true within its life.
func TestCacheAgainstStore(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := &clock{}
		c.advance(time.Hour)
		const pages = 400
		l := lane(pages)
		m := &memory{objects: map[string]bool{}}
		cache := NewCache(m, CacheConfig{HitLife: 10 * time.Second, MissLife: 3 * time.Second, Now: c.now})
		keys := l.Names(0, pages)
		type change struct {
			at   time.Time
			what bool
		}
		history := make([][]change, l.Pages)
		page := func(i int) bool { return m.objects[keys.Keys[2*i]] && m.objects[keys.Keys[2*i+1]] }
		for i := range history {
			history[i] = []change{{time.Unix(0, 0), false}}
		}
		for range 300 {
			c.advance(time.Duration(rng.IntN(2000)) * time.Millisecond)
			k := rng.IntN(len(keys.Keys))
			m.objects[keys.Keys[k]] = rng.IntN(3) > 0
			history[k/2] = append(history[k/2], change{c.now(), page(k / 2)})
			from, to := rng.IntN(pages), 1+rng.IntN(pages)
			from = min(from, to)
			found := all(cache, lane(to), from).Wait(soon(t))
			if found.Err != nil {
				t.Fatal(found.Err)
			}
			for i := range to {
				if found.Known.Get(i) != (i >= from) {
					t.Fatalf("seed %d: page %d of %d to %d: known is %v", seed, i, from, to, found.Known.Get(i))
				}
				if i < from {
					continue
				}
				life := 3 * time.Second
				if found.Present.Get(i) {
					life = 10 * time.Second
				}
				ok := false // the answer was true at some moment within its life
				for h := len(history[i]) - 1; h >= 0 && !ok; h-- {
					ok = history[i][h].what == found.Present.Get(i)
					if c.now().Sub(history[i][h].at) > life {
						break
					}
				}
				if !ok {
					t.Fatalf("seed %d: the answer for page %d is %v, which was not true for %v", seed, i, found.Present.Get(i),
						life)
				}
			}
			if found.Age > 10*time.Second {
				t.Fatalf("the age of an answer is %v", found.Age)
			}
		}
	}
}

// TestCacheIsBoundedInBytes: the cache stays within its bytes, and a run uses at most runBytes.
func TestCacheIsBoundedInBytes(t *testing.T) {
	const runs = 20_000
	fill := func(c *Cache, n int) {
		for i := range n {
			f := &flight{done: make(chan struct{}), runs: map[runKey]cachedRun{}}
			todo := []ask{{key: runKey{fingerprint: fingerprint{byte(i), byte(i >> 8), byte(i >> 16)}}, mask: 1,
				names: PageKeys{Keys: []string{"k"}, PerPage: 1}}}
			c.flights++
			c.request(f, todo, c.epoch)
		}
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC() // the second collection frees the content of pools
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	c := NewCache(&memory{}, CacheConfig{Bytes: runs * runBytes})
	fill(c, 3*runs)
	took := int64(heap()) - int64(before)
	if c.Stats().Runs != runs || took > runs*runBytes*5/4 {
		t.Errorf("%d cached runs use %d bytes, want %d in %d", c.Stats().Runs, took, runs, runs*runBytes)
	}
	t.Logf("%d bytes a run", took/runs)
	runtime.KeepAlive(c)
}

func TestCacheAsksOnce(t *testing.T) {
	m := &memory{objects: map[string]bool{}, gate: make(chan struct{})}
	c := NewCache(m, CacheConfig{Flights: 1, Patience: time.Minute, HitLife: time.Hour, MissLife: time.Hour})
	l := lane(40)
	for _, k := range l.Names(0, 40).Keys {
		m.objects[k] = true
	}
	late, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if f := all(c, l, 0).Wait(late); !errors.Is(f.Err, context.DeadlineExceeded) || f.Known.Count() > 0 {
		t.Fatalf("a slow store: %v, %d known", f.Err, f.Known.Count())
	}
	other := l
	other.ID = 1
	if f := all(c, other, 0).Wait(soon(t)); !errors.Is(f.Err, errBusy) {
		t.Fatalf("above the limit of requests: %v", f.Err)
	}
	waiting := []*Question{all(c, l, 0), all(c, l, 0)}
	close(m.gate)
	for _, q := range waiting {
		if f := q.Wait(soon(t)); f.Err != nil || f.Present.Count() != 40 {
			t.Fatalf("%v, %d present", f.Err, f.Present.Count())
		}
	}
	if f := all(c, l, 0).Wait(late); f.Err != nil || f.Present.Count() != 40 {
		t.Fatalf("cached answers: %v, %d present", f.Err, f.Present.Count())
	}
	if m.keys.Load() != 80 || m.calls.Load() != 2 {
		t.Errorf("%d keys in %d calls", m.keys.Load(), m.calls.Load())
	}
	c.Forget()
	m.mu.Lock()
	m.objects = map[string]bool{}
	m.mu.Unlock()
	if f := all(c, l, 0).Wait(soon(t)); f.Present.Count() != 0 || m.keys.Load() != 120 {
		t.Errorf("after Forget: %d present, %d keys, want a single key for a miss", f.Present.Count(), m.keys.Load())
	}
	c.Forget()
	m.err = errors.New("broken")
	if f := all(c, l, 0).Wait(soon(t)); f.Err == nil || c.Stats().Runs != 0 || c.Stats().Failed == 0 {
		t.Errorf("a broken store: %v, %d cached runs", f.Err, c.Stats().Runs)
	}
}

func BenchmarkCachedAnswers(b *testing.B) {
	l := lane(767)
	m := &memory{objects: map[string]bool{}}
	c := NewCache(m, CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
	all(c, l, 0).Wait(context.Background())
	b.ReportAllocs()
	for b.Loop() {
		all(c, l, 0).Wait(context.Background())
	}
}
