package shim

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestANodeReadsTheSnapshot trims the log beyond a rank's last message. A node returns the rank's state in the
// snapshot, equal to the rank's own result. A subject without a rank is refused.
func TestANodeReadsTheSnapshot(t *testing.T) {
	w := newLogWorld(t)
	w.last()
	w.publish(3)
	info := w.info()
	w.snapshot(time.Unix(0, int64(info.Epoch)).UTC())
	if err := w.ns.Purge(w.ctx, 0, info.Epoch, info.Last+1); err != nil {
		t.Fatal(err)
	}
	own := w.last()
	if !own.Found || own.LastID != 3 {
		t.Fatalf("without a node: %+v", own)
	}
	stop, err := ServeRecall(w.ns)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(key events.RankKey) (Published, error) {
		t.Helper()
		subject, err := jetstream.Names(w.ns.Name()).Recall(0, key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.ns.Conn().Request(w.ctx, subject, "", nil); err != nil {
			return Published{}, err
		}
		return NewStreamLog(w.ns, key, nil).recall(w.ctx, 0)
	}
	if told, err := ask(w.key); err != nil || told != own {
		t.Fatalf("a node returns %+v, %v, the rank reads %+v", told, err, own)
	}
	if told, err := ask(events.RankKey{Instance: "w", Rank: 1}); err != nil || told.Found {
		t.Fatalf("for an unknown rank a node returns %+v, %v", told, err)
	}
	var refused *jetstream.ServiceError
	for _, name := range []string{"1.w.0", "0.w.00", "x.w.0", "0.w.-1"} {
		_, err := w.ns.Conn().Request(w.ctx, jetstream.Names(w.ns.Name()).RecallPrefix()+name, "", nil)
		if !errors.As(err, &refused) || refused.Code != 400 {
			t.Errorf("%s: %v", name, err)
		}
	}
	stop(context.Background())
	if _, err := ask(w.key); !errors.Is(err, jetstream.ErrNoResponder) {
		t.Fatalf("without a server: %v", err)
	}
}
