package node

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// lives counts the incarnations in the log.
func (w *site) lives() int {
	w.Helper()
	info, err := w.ns.StreamInfo(w.ctx, 0)
	w.must(err)
	out := make(chan jetstream.Update, 1)
	r, err := w.ns.StartReader(jetstream.ReaderConfig{After: jetstream.Position{Seq: info.First - 1},
		Deliver: func(ctx context.Context, u jetstream.Update) {
			select {
			case out <- u:
			case <-ctx.Done():
			}
		}})
	w.must(err)
	defer r.Stop()
	seen := map[events.Incarnation]bool{}
	for {
		select {
		case u := <-out:
			for _, m := range u.Messages {
				var b events.Batch
				w.must(events.DecodeBatch(m.Data, &b))
				seen[b.Incarnation] = true
			}
			if _, all := u.Notice.(jetstream.CaughtUp); all {
				return len(seen)
			}
		case <-w.ctx.Done():
			w.Fatal("the log cannot be read")
		}
	}
}

// TestALossCostsOneIncarnation: a loss of the log costs a worker one new incarnation, for any number of nodes and
// requests, and whether the request or the shim's own detection comes first.
func TestALossCostsOneIncarnation(t *testing.T) {
	t.Parallel() // otherwise its cases delay all other tests
	for name, talks := range map[string]bool{"asked first": false, "found out first": true} {
		t.Run(name, func(t *testing.T) {
			w := newSite(t)
			w.start()
			w.startShim()
			w.grow(3)
			w.awaitAll()
			w.must(w.js.DeleteStream(w.ctx, jetstream.Names("test").Stream(0)))
			w.must(w.ns.EnsureStreams(w.ctx, jetstream.LogConfig{MaxBytes: 16 << 20}))
			if talks {
				w.grow(1)
			}
			var all sync.WaitGroup
			for i := range 3 { // other nodes
				all.Go(func() {
					ask := control.ResyncRequest{ID: fmt.Sprint("node ", i), Lost: true}
					var shims []control.Shim
					var err error
					for err == nil && len(shims) == 0 { // a busy shim may respond too late
						shims, err = control.ResyncAll(w.ctx, w.ns, 0, "", ask)
					}
					if err != nil || len(shims) != 1 {
						t.Errorf("requested a resync: %v, %v", shims, err)
					}
				})
			}
			all.Wait()
			w.awaitAfter("resynced")
			w.grow(2)
			w.awaitAll()
			if n := w.lives(); n != 1 {
				t.Errorf("the recreated log has %d incarnations", n)
			}
			// An unconditional request begins a new incarnation, and so does a request for missing events of the
			// present one.
			resync := func(ask control.ResyncRequest) *control.Shim {
				for { // a shim responds late on a busy machine; a repeated request with the same id has no second effect
					shim, err := control.Resync(w.ctx, w.ns, events.RankKey{Instance: "w1"}, ask)
					if w.must(err); shim != nil {
						return shim
					}
				}
			}
			shim := resync(control.ResyncRequest{ID: "an operator"})
			for _, ask := range []control.ResyncRequest{{ID: "late", Of: shim.Incarnation - 1}, {ID: "lost again", Lost: true}} {
				if again := resync(ask); again.Incarnation != shim.Incarnation {
					t.Errorf("%+v: incarnation %d follows %d", ask, again.Incarnation, shim.Incarnation)
				}
			}
			later := resync(control.ResyncRequest{ID: "missing", Of: shim.Incarnation})
			if later.Incarnation <= shim.Incarnation {
				t.Errorf("incarnation %d, with missing events, was followed by %d", shim.Incarnation,
					later.Incarnation)
			}
			w.awaitAll()
			if n := w.lives(); n < 2 || n > 3 { // an incarnation without published events may be absent
				t.Errorf("%d incarnations are in the log", n)
			}
		})
	}
}
