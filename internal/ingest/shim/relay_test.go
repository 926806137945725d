package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// storeWorld is a store's master with the history of its objects, and a stream with faults.
type storeWorld struct {
	rng *rand.Rand

	media                    map[string]map[string]bool
	writing                  map[string]bool // listed, not there, and never announced
	held, lacked             map[string]time.Time
	number, batches, dropped uint64

	relay *Relay
	wire  []sharedstore.Message // in transit to the mirror
	gate  chan struct{}         // lets a list end

	answers, polled int
}

var errPolled = errors.New("a query to the master")

// Exists counts the queries that the set does not answer.
func (w *storeWorld) Exists(_ context.Context, keys []string) (present, known hicache.Bitmap, err error) {
	w.polled += len(keys)
	return hicache.NewBitmap(len(keys)), hicache.NewBitmap(len(keys)), errPolled
}

func (w *storeWorld) Keys(_ context.Context, key func([]byte) bool) error {
	list := slices.Sorted(maps.Keys(w.media))
	list = slices.AppendSeq(list, maps.Keys(w.writing))
	<-w.gate
	for _, k := range list {
		if !key([]byte(k)) {
			break
		}
	}
	return nil
}

// note records for every object the last times of presence and of absence.
func (w *storeWorld) note() {
	now := time.Now()
	for i := range worldKeys {
		key := worldKey(i)
		if len(w.media[key]) > 0 {
			w.held[key] = now
		} else {
			w.lacked[key] = now
		}
	}
}

const worldKeys = 24

func worldKey(i int) string { return fmt.Sprintf("object-%d_0_k", i) }

func (w *storeWorld) publish(list ...map[string]any) {
	w.number++
	w.batches++
	payload, err := msgpack.Marshal([]any{1, list, 0})
	if err != nil {
		panic(err)
	}
	if w.rng.IntN(25) > 0 {
		out, _ := w.relay.Batch([][]byte{nil, binary.BigEndian.AppendUint64(nil, w.number), payload})
		w.wire = append(w.wire, out...)
	}
}

// change is a single change of the store, or several in a batch.
func (w *storeWorld) change() {
	var list []map[string]any
	for range 1 + w.rng.IntN(3) {
		key, medium := worldKey(w.rng.IntN(worldKeys)), []string{"cpu", "cpu", "disk"}[w.rng.IntN(3)]
		event := map[string]any{"object_key": key, "medium": medium, "tenant_id": "default", "token_ids": nil,
			"seq_hashes": []int{}}
		if w.rng.IntN(2) == 0 {
			if w.media[key] == nil {
				w.media[key] = map[string]bool{}
			}
			w.media[key][medium] = true
			delete(w.writing, key)
			event["event_type"] = "stored"
		} else if w.media[key][medium] {
			if delete(w.media[key], medium); len(w.media[key]) == 0 {
				delete(w.media, key)
			}
			event["event_type"] = "removed"
		} else {
			continue
		}
		w.note()
		list = append(list, event)
		if w.rng.IntN(4) == 0 { // of another tenant, without queries for the tenant's objects
			list = append(list, map[string]any{"event_type": "removed", "object_key": key, "medium": medium,
				"tenant_id": "other"})
		}
	}
	if len(list) > 0 {
		w.publish(list...)
	}
}

// TestStoreStream runs a store with lost, dropped and delayed messages in the stream, with restarts of master and shim
// and late lists. An answer from the mirror's set must have been true within the maximum delay of the stream.
func TestStoreStream(t *testing.T) {
	answers, polled, whole := 0, 0, 0
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			w := &storeWorld{rng: rand.New(rand.NewPCG(9, seed)), media: map[string]map[string]bool{},
				writing: map[string]bool{},
				held:    map[string]time.Time{}, lacked: map[string]time.Time{}, gate: make(chan struct{}, 100)}
			w.relay = &Relay{NewSession: w.rng.Uint64}
			const fresh, late = 2 * time.Second, 400 * time.Millisecond
			objects := 1000
			if seed%5 == 0 {
				objects = worldKeys / 2
			}
			mirror := sharedstore.NewMirror(w, sharedstore.MirrorConfig{Objects: objects, Fresh: fresh, Pause: 3 * time.Second})
			defer close(w.gate)
			ctx := t.Context()
			arrive := func(keep int) {
				for ; len(w.wire) > keep; w.wire = w.wire[1:] {
					if w.rng.IntN(120) > 0 {
						mirror.Receive(ctx, sharedstore.AppendMessage(nil, &w.wire[0]))
						synctest.Wait()
					}
				}
			}
			quiet := false
			for step := range 600 {
				if step%200 == 0 {
					quiet = !quiet
				}
				w.note()
				switch n := w.rng.IntN(100); {
				case n < 30:
					w.change()
				case n < 60:
					w.relay.Ask()
					out, _ := w.relay.Checked(w.batches, w.dropped)
					w.wire = append(w.wire, out...)
				case n < 64 && w.rng.IntN(4) == 0: // no room in the master's queue
					w.change()
					w.number, w.dropped = w.number+1, w.dropped+1
					w.change()
				case n < 66 && w.rng.IntN(6) == 0: // the master is another
					clear(w.media)
					clear(w.writing)
					w.number, w.batches, w.dropped = 0, 0, 0
					w.wire = append(w.wire, w.relay.Lost()...)
				case n < 68 && w.rng.IntN(6) == 0: // the shim is another
					w.relay = &Relay{NewSession: w.rng.Uint64}
				case n < 70 && w.rng.IntN(4) == 0:
					clear(w.media)
					w.publish(map[string]any{"event_type": "cleared", "tenant_id": "default", "medium": nil})
				case n < 75:
					if key := worldKey(w.rng.IntN(worldKeys)); len(w.media[key]) == 0 {
						w.writing[key] = !w.writing[key]
						maps.DeleteFunc(w.writing, func(_ string, on bool) bool { return !on })
					}
				case n < 85:
					w.gate <- struct{}{}
				default:
					w.note()
					time.Sleep(time.Duration(1+w.rng.IntN(int(late/time.Millisecond))) * time.Millisecond)
					arrive(0) // no later message exists
				}
				w.note()
				arrive(w.rng.IntN(4))
				synctest.Wait()
				keys := make([]string, worldKeys)
				for i := range keys {
					keys[i] = worldKey(i)
				}
				before := w.polled
				present, known, err := mirror.Exists(ctx, keys)
				if (err != nil) != (w.polled > before) || known.Count() != worldKeys-(w.polled-before) {
					t.Fatalf("seed %d, step %d: %d found, %d polled, %v", seed, step, known.Count(), w.polled-before,
						err)
				}
				w.answers += known.Count()
				for i, key := range keys {
					since, what := w.lacked[key], "not there"
					if present.Get(i) {
						since, what = w.held[key], "there"
					}
					if known.Get(i) && (since.IsZero() || time.Since(since) > fresh+2*late) {
						t.Fatalf("seed %d, step %d: %s is %s in the answer, which was last true %v ago", seed, step, key,
							what, time.Since(since))
					}
				}
				s := mirror.Stats()
				if s.Objects > objects || s.Whole && s.Lists == 0 {
					t.Fatalf("seed %d, step %d: %+v", seed, step, s)
				}
				if s.Whole {
					whole++
				}
			}
			answers, polled = answers+w.answers, polled+w.polled
		})
	}
	if t.Logf("%d answered from sets, %d polled, %d of the steps whole", answers, polled, whole); answers < polled/20 ||
		whole < 1000 {
		t.Errorf("too few answers come from the set")
	}
}
