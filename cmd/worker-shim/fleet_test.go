package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestNamesThatNobodyCanHave: events of a worker whose name cannot become part of a subject are counted and passed
// over, and the other ranks go on.
func TestNamesThatNobodyCanHave(t *testing.T) {
	all, ctx := errgroup.WithContext(t.Context())
	var said bytes.Buffer
	good := events.RankKey{Instance: "w"}
	feed := make(chan shim.Frame, 1)
	f := &fleet{cfg: &running{shared: &shared{}}, log: slog.New(slog.NewTextHandler(&said, nil)), ctx: ctx, all: all,
		feeds: map[events.RankKey]chan shim.Frame{good: feed}, watch: &sourceWatch{}}
	f.unnamed.every = time.Hour
	say := func(worker string) {
		e := events.RouterEvent{Key: events.RankKey{Instance: events.WorkerID(worker)}, ID: 1,
			Event: events.Event{Kind: events.Cleared, Tier: events.AllTiers}}
		f.deliver(e, 1)
	}
	long := strings.Repeat("x", 256)
	for _, worker := range []string{long, "", long, "w"} {
		say(worker)
	}
	f.deliver(events.RouterEvent{Key: events.RankKey{Instance: "w", Rank: events.MaxRanks}, ID: 1}, 1)
	if err := f.hearPublisher(ctx, dynamo.Publisher{Known: true,
		Key: events.RankKey{Instance: "w", Rank: events.MaxRanks}}); err != nil {
		t.Error(err)
	}
	if err := all.Wait(); err != nil || len(f.feeds) != 1 || len(feed) != 1 || (<-feed).Seq != 1 {
		t.Errorf("%d ranks, %v", len(f.feeds), err)
	}
	if strings.Count(said.String(), "bad name") != 1 || f.unnamed.count.Load() != 4 {
		t.Errorf("%d more, said:\n%s", f.unnamed.count.Load(), said.String())
	}
}
