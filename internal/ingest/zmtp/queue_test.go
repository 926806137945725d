package zmtp

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// TestQueueAgainstNaive compares the queue with a list with two bounds, in one goroutine.
func TestQueueAgainstNaive(t *testing.T) {
	type entry struct{ v, size int }
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 3))
		maxLen, maxBytes := 1+rng.IntN(40), 1+rng.IntN(500)
		q := newQueue[int](maxLen, maxBytes)
		var twin []entry
		bytes := 0
		for step := range 3000 {
			if rng.IntN(2) == 0 {
				size := rng.IntN(60)
				want := len(twin) == 0 || len(twin) < maxLen && bytes+size <= maxBytes
				got, err := q.tryPut(step, size)
				if err != nil || got != want {
					t.Fatalf("put: %v %v, want %v", got, err, want)
				}
				if want {
					twin = append(twin, entry{step, size})
					bytes += size
				}
				continue
			}
			v, ok, err := q.tryGet()
			if err != nil || ok != (len(twin) > 0) {
				t.Fatalf("get: %v %v with %d entries", ok, err, len(twin))
			}
			if ok {
				if v != twin[0].v {
					t.Fatalf("got %d, want %d", v, twin[0].v)
				}
				bytes -= twin[0].size
				twin = twin[1:]
			}
			if q.length() != len(twin) || q.bytes != bytes {
				t.Fatalf("%d entries of %d bytes, want %d of %d", q.length(), q.bytes, len(twin), bytes)
			}
		}
	}
}

// TestQueueConcurrently: with many goroutines no entry is lost, duplicated or stuck. A single getter receives the
// entries of each putter in order.
func TestQueueConcurrently(t *testing.T) {
	for _, getters := range []int{1, 4} {
		const putters, each = 4, 3000
		q := newQueue[[2]int](3, 100)
		ctx := Within(t)
		stopped := errors.New("enough")
		var put, got sync.WaitGroup
		for p := range putters {
			put.Go(func() {
				for i := range each {
					if err := q.put(ctx, [2]int{p, i}, i%60); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		var mu sync.Mutex
		next := [putters]int{}
		seen := map[[2]int]int{}
		for range getters {
			got.Go(func() {
				for {
					v, err := q.get(ctx)
					if err != nil {
						if !errors.Is(err, stopped) {
							t.Error(err)
						}
						return
					}
					mu.Lock()
					seen[v]++
					if getters == 1 && v[1] != next[v[0]] {
						t.Errorf("putter %d: got %d, want %d", v[0], v[1], next[v[0]])
					}
					next[v[0]] = v[1] + 1
					mu.Unlock()
				}
			})
		}
		put.Wait()
		q.close(stopped)
		got.Wait()
		if len(seen) != putters*each {
			t.Errorf("%d of %d arrived", len(seen), putters*each)
		}
	}
}

// TestQueueEnds: closing wakes all waiting goroutines, and a context wakes its own.
func TestQueueEnds(t *testing.T) {
	full, empty := newQueue[int](1, 1), newQueue[int](1, 1)
	if _, err := full.tryPut(1, 1); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := full.put(ctx, 2, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("put: %v", err)
	}
	if _, err := empty.get(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("get: %v", err)
	}
	end := errors.New("end")
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if err := full.put(Within(t), 2, 1); !errors.Is(err, end) {
				t.Errorf("put: %v", err)
			}
		})
		wg.Go(func() {
			if _, err := empty.get(Within(t)); !errors.Is(err, end) {
				t.Errorf("get: %v", err)
			}
		})
	}
	full.close(end)
	empty.close(end)
	empty.close(errors.New("a later reason"))
	wg.Wait()
	if v, err := full.get(Within(t)); v != 1 || err != nil {
		t.Errorf("the entry from before the close: %d %v", v, err)
	}
}
