package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// paced returns a commit that goes value by value, with pauses: 20 values, together more than a batch.
func paced(name string) (values []Value) {
	for i := range 20 {
		values = append(values, Value{chunkKey(0, fmt.Sprint(name, i)), bytes.Repeat([]byte{byte(i)}, pacedBytes)})
	}
	return values
}

const pacedBytes = 200_000

// awaitKey waits until a running commit has stored a value.
func (w *world) awaitKey(b *Bucket, key string) {
	w.t.Helper()
	testkit.Eventually(w.t, key+" is stored", func() bool {
		_, err := b.Latest(w.ctx, key)
		if err != nil && !errors.Is(err, ErrNotFound) {
			w.t.Fatal(err)
		}
		return err == nil
	})
}

// keysBut returns the keys of the bucket without the keys of some values.
func (w *world) keysBut(b *Bucket, values []Value) (rest []string) {
	w.t.Helper()
	keys, err := b.Keys(w.ctx, "")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, k := range keys {
		if !slices.ContainsFunc(values, func(v Value) bool { return v.Key == k }) {
			rest = append(rest, k)
		}
	}
	return rest
}

// TestCommitResumes cuts the connection repeatedly during a commit. The commit continues at its position, and stores at
// most the value twice that was on its way at a cut.
func TestCommitResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := w.snapshots(true)
	px := newProxy(t, w.addr)
	through := openBucket(w.through(px, patience).c, b.name)
	through.atomic = true
	values := paced("x")
	const cuts = 3
	const midst = pacedBytes * 9 / 2 // in the middle of every fifth value
	underway := make(chan struct{}, cuts)
	px.spent = func() { // the value is stored without an acknowledgement
		px.deaf.Store(true)
		underway <- struct{}{}
	}
	px.budget.Store(midst)
	done := make(chan error, 1)
	var rev uint64
	go func() {
		var err error
		rev, err = through.Commit(w.ctx, values, Value{manifestKey(0), []byte("m")}, 0)
		done <- err
	}()
	for i := range cuts {
		<-underway
		w.awaitKey(b, values[4*(i+1)].Key)
		if i < cuts-1 {
			px.budget.Store(midst)
		}
		px.deaf.Store(false)
		px.cut()
	}
	if err := <-done; err != nil || rev < 21 || rev > 21+cuts {
		t.Fatalf("the guard is the bucket's message %d of 21: %v", rev, err)
	}
	for _, v := range values {
		if got, err := b.Get(w.ctx, v.Key); err != nil || !bytes.Equal(got, v.Data) {
			t.Fatalf("%s: %d bytes, %v", v.Key, len(got), err)
		}
	}
}

// TestCommitOvertaken: another writer commits while a commit has stored some of its values. The slower commit returns a
// conflict, its values have no effect, and the other writer's next sweep removes them.
func TestCommitOvertaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := w.snapshots(true)
	first, err := b.Commit(w.ctx, nil, Value{manifestKey(0), []byte("first")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	px := newProxy(t, w.addr)
	slow := openBucket(w.through(px, 300*time.Millisecond).c, b.name)
	slow.atomic = true
	vain := paced("x")
	halfway := make(chan struct{})
	px.spent = func() { // it stays here
		px.deaf.Store(true)
		close(halfway)
	}
	px.budget.Store(pacedBytes * 7 / 2)
	done := make(chan error, 1)
	go func() {
		_, err := slow.Commit(w.ctx, vain, Value{manifestKey(0), []byte("slow")}, first)
		done <- err
	}()
	<-halfway
	winner := []Value{{chunkKey(0, "y"), []byte("y")}}
	second, err := b.Commit(w.ctx, winner, Value{manifestKey(0), []byte("second")}, first)
	if err != nil {
		t.Fatal(err)
	}
	px.deaf.Store(false)
	px.cut()
	var conflict *conflictError
	if err := <-done; !errors.Is(err, ErrConflict) || !errors.As(err, &conflict) || conflict.Expected != first ||
		conflict.Found != second {
		t.Fatal(err)
	}
	if m, err := b.Latest(w.ctx, manifestKey(0)); err != nil || string(m.Value) != "second" {
		t.Fatal(m, err)
	}
	keep := func(key string) bool { return key == manifestKey(0) || key == winner[0].Key }
	if _, err := b.Sweep(w.ctx, keyPrefix(0), keep, second); err != nil {
		t.Fatal(err)
	}
	if keys := w.keysBut(b, vain); !slices.Equal(keys, []string{winner[0].Key, manifestKey(0)}) {
		t.Fatalf("left: %q", keys)
	}
	third, err := b.Commit(w.ctx, nil, Value{manifestKey(0), []byte("third")}, second)
	if err != nil {
		t.Fatal(err)
	}
	if removed, err := b.Sweep(w.ctx, keyPrefix(0), keep, third); err != nil || removed == 0 {
		t.Fatal(removed, err)
	}
	if keys := w.keysBut(b, nil); !slices.Equal(keys, []string{winner[0].Key, manifestKey(0)}) {
		t.Fatalf("left: %q", keys)
	}
}

// TestCommitCancelled cancels a commit in progress. It returns soon, the guard is unchanged, and the next sweep after a
// commit removes the stored values.
func TestCommitCancelled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := w.snapshots(true)
	first, err := b.Commit(w.ctx, nil, Value{manifestKey(0), []byte("first")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	vain := paced("x")
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	px := newProxy(t, w.addr)
	through := openBucket(w.through(px, patience).c, b.name)
	through.atomic = true
	px.spent = func() { cancel(); px.cut() }
	px.budget.Store(pacedBytes * 7 / 2)
	if _, err := through.Commit(ctx, vain, Value{manifestKey(0), []byte("cancelled")}, first); !errors.Is(err,
		ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := b.Latest(w.ctx, vain[19].Key); !errors.Is(err, ErrNotFound) {
		t.Fatalf("it went on: %v", err)
	}
	// The next commit contains some of the same values, which are no obstacle.
	values := append(vain[:1:1], Value{chunkKey(0, "y"), []byte("y")})
	second, err := b.Commit(w.ctx, values, Value{manifestKey(0), []byte("second")}, first)
	if err != nil {
		t.Fatal(err)
	}
	keep := func(key string) bool {
		return key == manifestKey(0) || slices.ContainsFunc(values, func(v Value) bool { return v.Key == key })
	}
	if removed, err := b.Sweep(w.ctx, keyPrefix(0), keep, second); err != nil || removed < 2 {
		t.Fatal(removed, err)
	}
	if keys := w.keysBut(b, values); !slices.Equal(keys, []string{manifestKey(0)}) {
		t.Fatalf("left: %q", keys)
	}
	if got, err := b.Get(w.ctx, vain[0].Key); err != nil || !bytes.Equal(got, vain[0].Data) {
		t.Fatal(err)
	}
}

// TestCommitWhileAnotherIsUnderWay: a leader that still processes another client's first value of a key refuses a
// second value, although there is none yet. This is no conflict yet: the value is stored if the other write fails.
func TestCommitWhileAnotherIsUnderWay(t *testing.T) {
	t.Parallel()
	srv := configServer(t, "") // without JetStream: the test answers
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := Connect(ctx, ConnOptions{URLs: []string{srv.ClientURL()}, Core: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	leader, err := nats.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer leader.Close()
	for _, comes := range []bool{false, true} {
		var asked int
		answer := func(subject string, what func() string) *nats.Subscription {
			sub, err := leader.Subscribe(subject, func(m *nats.Msg) {
				if err := m.Respond([]byte(what())); err != nil {
					t.Error(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			return sub
		}
		storing := answer(KeySubject("b", "k"), func() string {
			if asked++; asked < 4 || comes {
				return `{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}`
			}
			return `{"stream":"KV_b","seq":7}`
		})
		looks := 0
		reading := answer("$JS.API.STREAM.MSG.GET.KV_b", func() string {
			if looks++; looks > 2 && comes {
				return `{"message":{"subject":"$KV.b.k","seq":5,"data":"dg=="}}`
			}
			return `{"error":{"code":404,"err_code":10037,"description":"no message found"}}`
		})
		if err := leader.Flush(); err != nil {
			t.Fatal(err)
		}
		revision, err := openBucket(c, "b").Commit(ctx, nil, Value{"k", []byte("w")}, 0)
		if comes && !errors.Is(err, ErrConflict) || !comes && (err != nil || revision != 7) {
			t.Errorf("the other write succeeds: %v: revision %d, %v", comes, revision, err)
		}
		for _, sub := range []*nats.Subscription{storing, reading} {
			if err := sub.Unsubscribe(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
