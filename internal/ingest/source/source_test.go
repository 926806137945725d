package source

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestInvalidNames checks that events of a worker with a name that no subject can contain are counted and skipped, and
// that the other ranks go on.
func TestInvalidNames(t *testing.T) {
	all, ctx := errgroup.WithContext(t.Context())
	var logged bytes.Buffer
	good := events.RankKey{Instance: "w"}
	feed := make(chan shim.Frame, 1)
	f := &Source{Shim: &host.Shim{Shared: &host.Shared{}}, log: slog.New(slog.NewTextHandler(&logged, nil)), ctx: ctx,
		all: all, feeds: map[events.RankKey]chan shim.Frame{good: feed}, watch: &watch{}}
	f.unnamed.Every = time.Hour
	send := func(worker string) {
		e := events.RouterEvent{Key: events.RankKey{Instance: events.WorkerID(worker)}, ID: 1,
			Event: events.Event{Kind: events.Cleared, Tier: events.AllTiers}}
		f.deliver(e, 1)
	}
	long := strings.Repeat("x", 256)
	for _, worker := range []string{long, "", long, "w"} {
		send(worker)
	}
	f.deliver(events.RouterEvent{Key: events.RankKey{Instance: "w", Rank: events.MaxRanks}, ID: 1}, 1)
	if err := f.servePublisher(ctx, dynamo.Publisher{Known: true,
		Key: events.RankKey{Instance: "w", Rank: events.MaxRanks}}); err != nil {
		t.Error(err)
	}
	if err := all.Wait(); err != nil || len(f.feeds) != 1 || len(feed) != 1 || (<-feed).Seq != 1 {
		t.Errorf("%d ranks, %v", len(f.feeds), err)
	}
	if strings.Count(logged.String(), "bad name") != 1 {
		t.Errorf("the log has\n%s", logged.String())
	}
	f.unnamed.Every = 0
	if send(long); !strings.Contains(logged.String(), "times=5") {
		t.Errorf("the log does not have the four skipped events:\n%s", logged.String())
	}
}
