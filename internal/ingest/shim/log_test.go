package shim

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// logWorld is a namespace with a single partition on a separate server, with the log of a rank.
type logWorld struct {
	*testing.T
	ctx    context.Context
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	key    events.RankKey
	log    *StreamLog
	id     events.EventID
}

func newLogWorld(t *testing.T) *logWorld {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	w := &logWorld{T: t, ctx: ctx, ns: natskit.Namespace(t, 1), key: events.RankKey{Instance: "w"}}
	var err error
	if w.bucket, err = w.ns.EnsureSnapshots(ctx, jetstream.BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	w.log = NewStreamLog(w.ns, w.key, nil)
	return w
}

func (w *logWorld) info() jetstream.StreamInfo {
	w.Helper()
	info, err := w.ns.StreamInfo(w.ctx, 0)
	if err != nil {
		w.Fatal(err)
	}
	return info
}

// publish publishes n batches of a single event.
func (w *logWorld) publish(n int) {
	w.Helper()
	for range n {
		w.id++
		data, err := events.AppendBatch(nil, &events.Batch{
			Incarnation: 5, FirstID: w.id, Model: "m", BlockSize: 16, Cursor: events.Cursor{Known: true,
				Seq: events.EngineSeq(w.id)},
			Events: []events.Event{{Kind: events.Cleared, Reason: events.ReasonEngine}},
		})
		if err != nil {
			w.Fatal(err)
		}
		if _, err := w.log.Publish(w.ctx, [][]byte{data}); err != nil {
			w.Fatal(err)
		}
	}
}

// snapshot stores a snapshot of all published events. The time of the last event matches no message.
func (w *logWorld) snapshot(epoch time.Time) { w.snapshotAt(epoch, 1) }

func (w *logWorld) snapshotAt(epoch time.Time, seqTime events.Millis) {
	w.Helper()
	info := w.info()
	log := snapshot.Log{Namespace: w.ns.Name(), Stream: info.Name, Epoch: epoch, First: info.First, Last: info.Last}
	plan, err := snapshot.PlanWrite(snapshot.Bucket{Keys: []string{}}, log, info.Last)
	if err != nil {
		w.Fatal(err)
	}
	writer, err := snapshot.NewWriter(snapshot.Config{
		Namespace: log.Namespace, Stream: log.Stream, Epoch: epoch, Seq: info.Last, SeqTime: seqTime,
		Created: time.Now().UTC(), Writer: "test",
		Ranks: []snapshot.RankState{{Instance: "w", Model: "m", BlockSize: 16, Incarnation: 5, LastID: w.id,
			Cursor: snapshot.CursorOf(events.Cursor{Known: true, Seq: events.EngineSeq(w.id)})}},
		Spaces: []snapshot.Space{{Space: 1, Model: "m", BlockSize: 16}},
	}, plan, nil, func(string, []byte) error { return fmt.Errorf("there is nothing to put into chunks") })
	if err != nil {
		w.Fatal(err)
	}
	manifest, _, err := writer.Close()
	if err != nil {
		w.Fatal(err)
	}
	text, err := manifest.Encode()
	if err != nil {
		w.Fatal(err)
	}
	if _, err := w.bucket.Put(w.ctx, snapshot.ManifestKey(0), text); err != nil {
		w.Fatal(err)
	}
}

func (w *logWorld) last() Published {
	w.Helper()
	p, err := w.log.Last(w.ctx)
	if err != nil {
		w.Fatal(err)
	}
	return p
}

// TestSnapshotThatTheLogFollowsHasTheCursor trims the log beyond the rank's last message. The snapshot counts while the
// log continues at the snapshot's end. It does not count if messages in between may be missing, or if the snapshot
// belongs to another log: otherwise ids would be reused, or missing messages would not be requested from the engine.
func TestSnapshotThatTheLogFollowsHasTheCursor(t *testing.T) {
	w := newLogWorld(t)
	if p := w.last(); p.Found {
		t.Fatalf("in an empty log there is %+v", p)
	}
	w.publish(3)
	info := w.info()
	epoch := time.Unix(0, int64(info.Epoch)).UTC()
	w.snapshot(epoch)
	purge := func() {
		t.Helper()
		if err := w.ns.Purge(w.ctx, 0, info.Epoch, w.info().Last+1); err != nil {
			t.Fatal(err)
		}
	}
	purge()
	if p := w.last(); !p.Found || p.LastID != 3 || p.Incarnation != 5 || p.Cursor.Seq != 3 || p.Seq != 3 {
		t.Fatalf("the snapshot has the cursor, but Last returns %+v", p)
	}
	w.snapshot(epoch.Add(-time.Hour))
	if p := w.last(); p.Found {
		t.Fatalf("of a snapshot of another stream: %+v", p)
	}
	w.snapshot(epoch)
	w.publish(2)
	if p := w.last(); !p.Found || p.LastID != 5 {
		t.Fatalf("the log has the last message, but Last returns %+v", p)
	}
	purge() // past the snapshot
	if p := w.last(); p.Found {
		t.Fatalf("for a snapshot before a gap: %+v", p)
	}
}

// TestSnapshotOfAnotherHistory has another rank's message at the snapshot's end. If the message differs from the
// message in the snapshot, the log was rolled back and has grown again. Then later messages of the rank are lost, and
// the cursor must not be used.
func TestSnapshotOfAnotherHistory(t *testing.T) {
	w := newLogWorld(t)
	w.last()
	w.publish(2)
	other, err := w.ns.OpenPublisher(w.ctx, events.RankKey{Instance: "v"}, jetstream.PublisherOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Publish(w.ctx, [][]byte{[]byte("whatever")}); err != nil {
		t.Fatal(err)
	}
	info := w.info()
	epoch := time.Unix(0, int64(info.Epoch)).UTC()
	took, err := w.ns.TimeOf(w.ctx, 0, info.Last)
	if err != nil || time.Since(time.UnixMilli(int64(took))).Abs() > time.Hour {
		t.Fatal(took, err)
	}
	if err := w.ns.Purge(w.ctx, 0, info.Epoch, info.Last); err != nil {
		t.Fatal(err)
	}
	w.snapshotAt(epoch, took)
	if p := w.last(); !p.Found || p.LastID != 2 {
		t.Fatalf("the snapshot belongs to the log, but Last returns %+v", p)
	}
	w.snapshotAt(epoch, took-1)
	if p := w.last(); p.Found {
		t.Fatalf("of a snapshot of another history: %+v", p)
	}
	w.snapshotAt(epoch, 0) // the time is unknown
	if p := w.last(); !p.Found {
		t.Fatalf("of a snapshot without a time: %+v", p)
	}
}

// TestCloseUnreadable checks that a rank with an unreadable last message can be closed, by an operator and by the
// expiry of its lease. The closing batch begins an incarnation later than the snapshot's, or the clock's incarnation
// without a snapshot.
func TestCloseUnreadable(t *testing.T) {
	w := newLogWorld(t)
	if _, err := w.log.Last(w.ctx); err != nil {
		t.Fatal(err)
	}
	w.publish(2)
	w.snapshot(w.info().Epoch.Time())
	garble := func() {
		t.Helper()
		if _, err := w.log.Last(w.ctx); err != nil {
			t.Fatal(err)
		}
		if _, err := w.log.Publish(w.ctx, [][]byte{[]byte("no batch")}); err != nil {
			t.Fatal(err)
		}
	}
	began := events.Incarnation(time.Now().UnixMilli())
	for name, end := range map[string]func() error{
		"operator": func() error {
			_, err := Forget(w.ctx, w.ns, w.key, false)
			return err
		},
		"lease": func() error {
			return Clear(w.ctx, w.ns, w.key, Identity{"m", 16}, events.ReasonLeaseExpiry,
				func(context.Context) (bool, error) { return true, nil })
		},
	} {
		garble()
		found, err := w.log.Last(w.ctx)
		if err != nil || found.Unreadable == nil || !found.Found || found.Shutdown || found.Seq == 0 {
			t.Fatalf("%s: %+v, %v", name, found, err)
		}
		if err := end(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		p, err := w.log.Last(w.ctx)
		if err != nil || !p.Shutdown || p.Unreadable != nil || p.Incarnation < began || p.LastID != 1 {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

// TestNextIncarnation checks that the next incarnation is after the last incarnation, and not before now.
func TestNextIncarnation(t *testing.T) {
	for _, c := range []struct{ last, now, want int64 }{{0, 0, 1}, {0, 100, 100}, {100, 50, 101}, {5, 6, 6}} {
		p := Published{Reached: Reached{Incarnation: events.Incarnation(c.last)}}
		if got := p.next(events.Millis(c.now)); got != events.Incarnation(c.want) {
			t.Errorf("after %d at %d: %d, want %d", c.last, c.now, got, c.want)
		}
	}
}
