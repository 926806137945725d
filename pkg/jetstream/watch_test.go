package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// watching is the state of a watch so far.
type watching struct {
	mu     sync.Mutex
	there  map[string]string
	fresh  map[string]string // since the last Anew, until Current
	anews  int
	errs   int
	change chan struct{}
}

func (w *watching) take(u Watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if u.Err != nil {
		w.errs++
	}
	if u.Anew {
		w.anews++
		w.fresh = map[string]string{}
	}
	into := w.there
	if w.fresh != nil {
		into = w.fresh
	}
	for _, e := range u.Entries {
		if delete(into, e.Key); !e.Deleted {
			into[e.Key] = string(e.Value)
		}
	}
	if u.Current {
		w.there, w.fresh = w.fresh, nil
	}
	close(w.change)
	w.change = make(chan struct{})
}

func startWatch(t testing.TB, b *Bucket) *watching {
	w := &watching{there: map[string]string{}, change: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Watch(ctx, w.take)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return w
}

func (w *watching) wait(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.After(patience); ; {
		w.mu.Lock()
		good, change := ok(), w.change
		w.mu.Unlock()
		if good {
			return
		}
		select {
		case <-change:
		case <-deadline:
			t.Fatalf("%s: the watch has %v after %d restarts", what, w.there, w.anews)
		}
	}
}

// TestWatch watches a bucket through writes, deletions, a restart of the server, and a deletion and recreation of the
// bucket.
func TestWatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b, err := w.ns.EnsureWorkers(w.ctx, BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	revisions := map[string]uint64{}
	put := func(key, value string) {
		t.Helper()
		rev, err := b.Put(w.ctx, key, []byte(value))
		if err != nil {
			t.Fatal(err)
		}
		want[key], revisions[key] = value, rev
	}
	for i := range 50 {
		put(fmt.Sprintf("k.%d", i), "first")
	}
	watch := startWatch(t, b)
	same := func() bool { return watch.fresh == nil && maps.Equal(watch.there, want) }
	watch.wait(t, "what was there", same)
	rng := rand.New(rand.NewPCG(1, 2))
	marks := map[string]uint64{}
	for i := range 300 {
		key := fmt.Sprintf("k.%d", rng.IntN(60))
		if rev, there := revisions[key]; there && rng.IntN(3) == 0 {
			if _, err := b.Delete(w.ctx, key, rev+1000); !errors.Is(err, ErrConflict) {
				t.Fatalf("deleted at a missing revision: %v", err)
			}
			mark, err := b.Delete(w.ctx, key, rev)
			if err != nil {
				t.Fatal(err)
			}
			delete(want, key)
			delete(revisions, key)
			marks[key] = mark
		} else {
			put(key, fmt.Sprint(i))
		}
	}
	watch.wait(t, "after changes", same)
	for key, mark := range marks { // also of recreated keys
		if err := b.Erase(w.ctx, key, mark); err != nil {
			t.Fatal(err)
		}
	}
	put("k.0", "after the marks were erased")
	watch.wait(t, "after the marks were erased", same)
	if _, err := b.Latest(w.ctx, "k.nowhere"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}

	// Values written after the erased revision stay.
	put("k.1", "stays")
	if err := b.Erase(w.ctx, "k.1", revisions["k.1"]-1); err != nil {
		t.Fatal(err)
	}
	if e, err := b.Latest(w.ctx, "k.1"); err != nil || string(e.Value) != "stays" {
		t.Fatalf("%+v, %v", e, err)
	}

	w.restart()
	put("k.2", "after the restart")
	watch.wait(t, "after a restart", same)

	// A recreated bucket has fewer keys: Anew reports the missing ones.
	if err := w.c.call(w.ctx, "delete", "STREAM.DELETE."+b.stream, nil, nil); err != nil {
		t.Fatal(err)
	}
	if b, err = w.ns.EnsureWorkers(w.ctx, BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	clear(want)
	put("k.3", "in the new one")
	watch.wait(t, "made again", same)
	if watch.anews < 3 {
		t.Errorf("told anew %d times", watch.anews)
	}
}

// TestBucketTTL: keys are deleted after their time, and another TTL is refused.
func TestBucketTTL(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b, err := ensureBucket(w.ctx, w.c, "short", BucketConfig{TTL: time.Second}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(w.ctx, "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	for {
		_, err := b.Latest(w.ctx, "k")
		if errors.Is(err, ErrNotFound) {
			break
		}
		if err != nil || !loop.Wait(w.ctx, 50*time.Millisecond) {
			t.Fatalf("the key stays: %v", err)
		}
	}
	if _, err := ensureBucket(w.ctx, w.c, "short", BucketConfig{}, 1); !errors.Is(err, ErrMismatch) {
		t.Errorf("another life per key: %v", err)
	}
	if _, err := ensureBucket(w.ctx, w.c, "short", BucketConfig{TTL: time.Second}, 1); err != nil {
		t.Error(err)
	}
}

func TestWorkerKey(t *testing.T) {
	for _, name := range []events.WorkerID{"w1", "", "a.b c", "7"} {
		want := events.RankKey{Instance: name, Rank: 3}
		text, err := WorkerKey(5, want)
		if err != nil || !validKey(text) {
			t.Fatalf("%q: %q, %v", name, text, err)
		}
		if p, got, ok := ParseWorkerKey(text); !ok || p != 5 || got != want {
			t.Errorf("%q became %v of partition %d, %v", text, got, p, ok)
		}
	}
	for _, text := range []string{ProbeKey, "", "1.2", "x.w1.0", "1.w1.x", "1.w1.0.0", "01.w1.0", "1.=zz.0"} {
		if _, _, ok := ParseWorkerKey(text); ok {
			t.Errorf("%q is no key of a worker", text)
		}
	}
}
