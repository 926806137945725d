package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Keys in the form of a partition's snapshots, which pkg/snapshot defines.
func keyPrefix(p events.Partition) string           { return fmt.Sprintf("p%d.", p) }
func manifestKey(p events.Partition) string         { return keyPrefix(p) + "manifest" }
func chunkKey(p events.Partition, id string) string { return keyPrefix(p) + "c." + id }

func eventsSeq(n uint64) events.StreamSeq { return events.StreamSeq(n) }

// snapshots opens the bucket, with or without atomic batches.
func (w *world) snapshots(atomic bool) *Bucket {
	w.t.Helper()
	b, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{})
	if err != nil {
		w.t.Fatal(err)
	}
	if !b.atomic {
		w.t.Fatal("the server has no atomic batches")
	}
	b.atomic = atomic
	return b
}

func bothWays(t *testing.T, test func(t *testing.T, w *world, b *Bucket)) {
	var ways testkit.Group
	defer ways.Wait()
	for _, atomic := range []bool{true, false} {
		ways.Run(t, fmt.Sprintf("atomic %v", atomic), func(t *testing.T) {
			w := newWorld(t, 1)
			test(t, w, w.snapshots(atomic))
		})
	}
}

func TestBucket(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		if _, err := b.Latest(w.ctx, "p0.manifest"); !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
		if _, err := b.Get(w.ctx, "p0.manifest"); !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
		chunk := bytes.Repeat([]byte("0123456789"), MaxValue/10)
		values := []Value{{chunkKey(0, "aa"), chunk}, {chunkKey(0, "bb"), []byte{}}}
		begun := time.Now()
		rev, err := b.Commit(w.ctx, values, Value{manifestKey(0), []byte("one")}, 0)
		if err != nil || rev != 3 {
			t.Fatal(rev, err)
		}
		entry, err := b.Latest(w.ctx, manifestKey(0))
		if err != nil || string(entry.Value) != "one" || entry.Revision != rev ||
			entry.Written.Before(begun.Truncate(time.Millisecond)) || entry.Written.After(time.Now()) {
			t.Fatal(entry, err)
		}
		for _, v := range values {
			got, err := b.Get(w.ctx, v.Key)
			if err != nil || !bytes.Equal(got, v.Data) {
				t.Fatalf("%s: %d bytes, %v", v.Key, len(got), err)
			}
			if latest, err := b.Latest(w.ctx, v.Key); err != nil || !bytes.Equal(latest.Value, v.Data) {
				t.Fatalf("%s from the leader: %d bytes, %v", v.Key, len(latest.Value), err)
			}
		}
		// A stale writer's values have no effect.
		for _, stale := range []uint64{0, 1, 99} {
			_, err := b.Commit(w.ctx, []Value{{chunkKey(0, "cc"), nil}}, Value{manifestKey(0), []byte("two")}, stale)
			var c *conflictError
			if !errors.Is(err, ErrConflict) || !errors.As(err, &c) || c.Found != rev || c.Expected != stale {
				t.Fatal(err)
			}
		}
		if _, err := b.Get(w.ctx, chunkKey(0, "cc")); b.atomic != errors.Is(err, ErrNotFound) {
			t.Fatalf("a loser's chunk: %v", err)
		}
		two, err := b.Commit(w.ctx, nil, Value{manifestKey(0), []byte("two")}, rev)
		if err != nil || two <= rev {
			t.Fatal(two, err)
		}
		if u, err := b.Usage(w.ctx); err != nil || u.Bytes < MaxValue || u.Limit != -1 || u.Epoch == 0 {
			t.Fatal(u, err)
		}
		for _, bad := range []Value{{"", nil}, {"a b", nil}, {"a.*", nil}, {"a..b", nil}} {
			if _, err := b.Put(w.ctx, bad.Key, nil); !errors.Is(err, ErrBadName) {
				t.Errorf("%q: %v", bad.Key, err)
			}
			if _, err := b.Commit(w.ctx, []Value{bad}, Value{"x", nil}, 0); !errors.Is(err, ErrBadName) {
				t.Errorf("%q: %v", bad.Key, err)
			}
			if _, err := b.Get(w.ctx, bad.Key); !errors.Is(err, ErrBadName) {
				t.Errorf("%q: %v", bad.Key, err)
			}
		}
		large := Value{"p0.c.x", make([]byte, MaxValue+1)}
		if _, err := b.Commit(w.ctx, []Value{large}, Value{"x", nil}, 0); !errors.Is(err, ErrTooLarge) ||
			!strings.Contains(err.Error(), "900001") {
			t.Error(err)
		}
		if _, err := b.Put(w.ctx, large.Key, large.Data); !errors.Is(err, ErrTooLarge) {
			t.Error(err)
		}
	})
}

// TestBucketLargeCommit commits more than the server queues at once, and more than a batch has. TestBucketAll stores
// more values than one batch has, by number or by size, and deletes some, including missing ones.
func TestBucketAll(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		for _, size := range []int{3, 300, batchBytes} {
			var values []Value
			var keys []string
			for i := range min(maxBatch*3/2, 8*batchBytes/size) {
				keys = append(keys, fmt.Sprintf("s%d.%d", size, i))
				values = append(values, Value{keys[i], bytes.Repeat([]byte{byte(i)}, size)})
			}
			if err := b.PutAll(w.ctx, values); err != nil {
				t.Fatal(err)
			}
			gone := append(slices.Clone(keys[1:]), "nothing.there")
			for i, want := range values {
				if i > 2 && i < len(values)-2 {
					continue
				}
				if got, err := b.Latest(w.ctx, want.Key); err != nil || !bytes.Equal(got.Value, want.Data) {
					t.Fatalf("%s has %d bytes, %v", want.Key, len(got.Value), err)
				}
			}
			if err := b.DeleteAll(w.ctx, gone); err != nil {
				t.Fatal(err)
			}
			for i, key := range []string{keys[0], keys[1], keys[len(keys)-1]} {
				if _, err := b.Latest(w.ctx, key); (i > 0) != errors.Is(err, ErrNotFound) {
					t.Errorf("%s after the deletion: %v", key, err)
				}
			}
		}
		if err := b.PutAll(w.ctx, []Value{{"a", nil}, {"b c", nil}}); !errors.Is(err, ErrBadName) {
			t.Errorf("a bad key: %v", err)
		}
		if err := errors.Join(b.PutAll(w.ctx, nil), b.DeleteAll(w.ctx, nil)); err != nil {
			t.Errorf("nothing to do: %v", err)
		}
	})
}

func TestBucketLargeCommit(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		n := 70 // 63 MB
		if testing.Short() {
			n = 30
		}
		var values []Value
		for i := range n {
			values = append(values, Value{chunkKey(0, fmt.Sprint(i)), make([]byte, MaxValue)})
		}
		rev, err := b.Commit(w.ctx, values, Value{manifestKey(0), []byte("m")}, 0)
		if err != nil {
			t.Fatal(err)
		}
		values = values[:0]
		for i := range 1500 {
			values = append(values, Value{chunkKey(0, fmt.Sprint(i)), fmt.Append(nil, i)})
		}
		if _, err = b.Commit(w.ctx, values, Value{manifestKey(0), []byte("n")}, rev); err != nil {
			t.Fatal(err)
		}
		keys, err := b.Keys(w.ctx, keyPrefix(0))
		if err != nil || len(keys) != 1501 || !slices.IsSorted(keys) {
			t.Fatal(len(keys), err)
		}
	})
}

func TestBucketKeysAndSweep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := w.snapshots(true)
	if keys, err := b.Keys(w.ctx, ""); err != nil || len(keys) != 0 {
		t.Fatal(keys, err)
	}
	for _, key := range []string{"p1.c.a", "p1.manifest", "p10.c.a", "p1.c.b", "p1.c.c"} {
		if _, err := b.Put(w.ctx, key, []byte(key)); err != nil {
			t.Fatal(err)
		}
	}
	if keys, err := b.Keys(w.ctx, keyPrefix(1)); err != nil ||
		fmt.Sprint(keys) != "[p1.c.a p1.c.b p1.c.c p1.manifest]" {
		t.Fatal(keys, err)
	}
	if _, err := b.Keys(w.ctx, "p1"); !errors.Is(err, ErrBadName) {
		t.Fatal(err)
	}
	// Sequences are 1 to 5: values stored at 4 or later stay.
	n, err := b.Sweep(w.ctx, keyPrefix(1), func(key string) bool { return key == "p1.manifest" }, 4)
	if err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if keys, err := b.Keys(w.ctx, ""); err != nil || fmt.Sprint(keys) != "[p1.c.b p1.c.c p1.manifest p10.c.a]" {
		t.Fatal(keys, err)
	}
	// A key that was deleted by hand does not exist, and can be created.
	if _, err := b.Delete(w.ctx, "p1.manifest", 2); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Latest(w.ctx, "p1.manifest"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if _, err := b.Get(w.ctx, "p1.manifest"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if err := b.create(w.ctx, "p1.manifest", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if err := b.create(w.ctx, "p1.manifest", []byte("other")); !errors.Is(err, ErrConflict) {
		t.Fatal(err)
	}
}

// TestBucketCrashBetween: chunks without a manifest, as after a crash, are harmless, and the next sweep removes them.
func TestBucketCrashBetween(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		rev, err := b.Commit(w.ctx, []Value{{chunkKey(0, "1"), []byte("1")}}, Value{manifestKey(0), []byte("1")}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if b.atomic {
			// Half of a batch: the connection ends before the commit.
			px := newProxy(t, w.addr)
			ns := w.through(px, patience)
			half := openBucket(ns.c, b.name)
			half.atomic = true
			ctx, cancel := context.WithCancel(w.ctx)
			defer cancel()
			px.spent = func() { cancel(); px.cut() }
			px.budget.Store(3 << 20)
			var values []Value
			for i := range 5 {
				values = append(values, Value{chunkKey(0, fmt.Sprint("x", i)), make([]byte, MaxValue)})
			}
			if _, err := half.Commit(ctx, values, Value{manifestKey(0), []byte("2")}, rev); !errors.Is(err,
				ErrUnavailable) {
				t.Fatal(err)
			}
		} else if _, err := b.Put(w.ctx, chunkKey(0, "x"), []byte("x")); err != nil {
			t.Fatal(err)
		}
		w.restart()
		if m, err := b.Latest(w.ctx, manifestKey(0)); err != nil || string(m.Value) != "1" {
			t.Fatal(m, err)
		}
		rev, err = b.Commit(w.ctx, []Value{{chunkKey(0, "2"), []byte("2")}}, Value{manifestKey(0), []byte("2")}, rev)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Sweep(w.ctx, keyPrefix(0), func(key string) bool {
			return key == manifestKey(0) ||
				key == chunkKey(0, "2")
		}, rev); err != nil {
			t.Fatal(err)
		}
		if keys, err := b.Keys(w.ctx, ""); err != nil || fmt.Sprint(keys) != "[p0.c.2 p0.manifest]" {
			t.Fatal(keys, err)
		}
	})
}

// TestBucketAckLost: a commit with a lost acknowledgement is recognised as our own.
func TestBucketAckLost(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		px := newProxy(t, w.addr)
		deaf := openBucket(w.through(px, 300*time.Millisecond).c, b.name)
		deaf.atomic = b.atomic
		px.deaf.Store(true)
		done := make(chan error, 1)
		var rev uint64
		go func() {
			var err error
			rev, err = deaf.Commit(w.ctx, nil, Value{manifestKey(0), []byte("mine")}, 0)
			done <- err
		}()
		w.awaitKey(b, manifestKey(0))
		px.deaf.Store(false)
		px.cut()
		if err := <-done; err != nil || rev != 1 {
			t.Fatal(rev, err)
		}
	})
}

func TestBucketFull(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		if _, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{MaxBytes: 3 << 20}); err != nil {
			t.Fatal(err)
		}
		rev, err := b.Commit(w.ctx, []Value{{chunkKey(0, "1"), make([]byte, MaxValue)}},
			Value{manifestKey(0), []byte("1")}, 0)
		if err != nil {
			t.Fatal(err)
		}
		var values []Value
		for i := range 4 {
			values = append(values, Value{chunkKey(0, fmt.Sprint("x", i)), make([]byte, MaxValue)})
		}
		if _, err := b.Commit(w.ctx, values, Value{manifestKey(0), []byte("2")}, rev); !errors.Is(err, ErrFull) {
			t.Fatal(err)
		}
		if m, err := b.Latest(w.ctx, manifestKey(0)); err != nil || string(m.Value) != "1" {
			t.Fatal(m, err)
		}
		if _, err := b.Sweep(w.ctx, "", func(key string) bool {
			return key == manifestKey(0) ||
				key == chunkKey(0, "1")
		}, 1<<40); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Commit(w.ctx, values[:1], Value{manifestKey(0), []byte("2")}, rev); err != nil {
			t.Fatal(err)
		}
	})
}

func TestBucketRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	if _, err := w.ns.OpenSnapshots(w.ctx); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	stream := BucketStream(Names("test").SnapshotBucket())
	cfg := map[string]any{"name": stream, "subjects": []string{"$KV." + Names("test").SnapshotBucket() + ".>"},
		"storage": "file", "retention": "limits", "max_msgs_per_subject": 5, "allow_direct": true}
	if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+stream, cfg, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{}); !errors.Is(err, ErrMismatch) {
		t.Fatal(err)
	}
	// A bucket of `nats kv add` is accepted, and its settings are completed.
	if err := w.c.call(w.ctx, "delete", "STREAM.DELETE."+stream, nil, nil); err != nil {
		t.Fatal(err)
	}
	cfg["max_msgs_per_subject"], cfg["discard"] = 1, "new"
	if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+stream, cfg, nil); err != nil {
		t.Fatal(err)
	}
	if b, err := w.ns.OpenSnapshots(w.ctx); err != nil || b.atomic {
		t.Fatal(b, err)
	}
	if _, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	if b, err := w.ns.OpenSnapshots(w.ctx); err != nil || !b.atomic || b.Name() != "kvatlas_test_snap" {
		t.Fatal(b, err)
	}
}

// TestBucketWritersAtRandom: see [world.writersAtRandom].
func TestBucketWritersAtRandom(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, w *world, b *Bucket) {
		rounds := 30
		if testing.Short() {
			rounds = 15
		}
		w.writersAtRandom(b, rounds)
	})
}

// writersAtRandom: several writers store snapshots of random contents, sweep now and then, and crash at random. All
// chunks of the newest manifest exist at every moment.
func (w *world) writersAtRandom(b *Bucket, rounds int) {
	w.t.Helper()
	chunksOf := func(manifest []byte) []string { return strings.Fields(string(manifest)) }
	var wins, conflicts [4]int
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for writer := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(writer)))
			errs[writer] = func() error {
				for range rounds {
					// The rule: read first, then write.
					var has []string
					var rev uint64
					m, err := b.Latest(w.ctx, manifestKey(0))
					if err == nil {
						rev, has = m.Revision, chunksOf(m.Value)
					} else if !errors.Is(err, ErrNotFound) {
						return err
					}
					// Every chunk of this manifest exists, or another manifest has been written.
					for _, id := range has {
						if got, err := b.Get(w.ctx, chunkKey(0, id)); err != nil || string(got) != id {
							if now, lerr := b.Latest(w.ctx, manifestKey(0)); lerr == nil && now.Revision == rev {
								return fmt.Errorf("manifest %d refers to chunk %s: %q, %v", rev, id, got, err)
							}
						}
					}
					// New contents from few possible chunks, so that old chunks return.
					var want []string
					var values []Value
					for id := range 12 {
						if rng.IntN(2) == 0 {
							continue
						}
						name := fmt.Sprint(id)
						want = append(want, name)
						if !slices.Contains(has, name) {
							values = append(values, Value{chunkKey(0, name), []byte(name)})
						}
					}
					if rng.IntN(6) == 0 { // crash between chunks and manifest
						for _, v := range values {
							if _, err := b.Put(w.ctx, v.Key, v.Data); err != nil {
								return err
							}
						}
						continue
					}
					mine, err := b.Commit(w.ctx, values, Value{manifestKey(0), []byte(strings.Join(want, " "))}, rev)
					if errors.Is(err, ErrConflict) {
						conflicts[writer]++
						continue
					}
					if err != nil {
						return err
					}
					wins[writer]++
					time.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond) // other writers continue meanwhile
					keep := func(key string) bool {
						id, ok := strings.CutPrefix(key, chunkKey(0, ""))
						return !ok || slices.Contains(want, id) || slices.Contains(has, id)
					}
					if _, err := b.Sweep(w.ctx, keyPrefix(0), keep, mine); err != nil {
						return err
					}
				}
				return nil
			}()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("commits %v, conflicts %v", wins, conflicts)
}
