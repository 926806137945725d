package host

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/natsserver"
)

// patience is how long a test waits for anything.
const patience = 4 * time.Minute

// namespace returns a log on a server of its own.
func namespace(t *testing.T) (context.Context, *jetstream.Namespace) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir(), SyncInterval: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	if err == nil {
		err = ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 16 << 20})
	}
	if err != nil {
		t.Fatal(err)
	}
	return ctx, ns
}

// world is a rank with a feed, and a record of what its watch was called with.
type world struct {
	*testing.T
	ctx    context.Context
	ns     *jetstream.Namespace
	feed   chan shim.Frame
	taken  chan struct{} // closed when the lease is held
	calls  []string
	result chan error
}

func start(t *testing.T, claim func(context.Context) (*shim.ControlServer, error)) *world {
	ctx, ns := namespace(t)
	if _, err := ns.EnsureWorkers(ctx, jetstream.BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, ctx: ctx, ns: ns, feed: make(chan shim.Frame), taken: make(chan struct{}),
		result: make(chan error, 1)}
	go func() {
		w.result <- Run(ctx, w.rank(), Env{Namespace: ns, Claim: claim,
			Lease: registry.LeaseHooks{Taken: func() { close(w.taken) }},
			Watch: Watch{
				Prepared: func(_ *shim.Report, cfg *shim.Config) {
					w.calls = append(w.calls, "prepared")
					if cfg.Identity != (shim.Identity{Model: "m", BlockSize: 16}) {
						t.Errorf("the shim is of %+v", cfg.Identity)
					}
				},
				Ended: func(err error) { w.calls = append(w.calls, "ended") },
			}})
	}()
	return w
}

func (w *world) rank() Rank {
	return Rank{Record: registry.Record{Instance: "w", Model: "m", BlockSize: 16, Source: "ndjson", LeaseMS: 30_000},
		Config: shim.Config{Feed: w.feed}}
}

// TestRunShimsAClaimedRank checks that a rank's events get into the log under its record, that its lease is held, that
// no second shim can claim it meanwhile, and that the watch is called in order.
func TestRunShimsAClaimedRank(t *testing.T) {
	w := start(t, nil)
	stored := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
		Locals: []events.LocalHash{1}}
	w.feed <- shim.Frame{Seq: 1, Read: &shim.Read{Events: []events.Event{stored}, Digest: 1}}
	<-w.taken
	if err := Run(w.ctx, w.rank(), Env{Namespace: w.ns}); !errors.Is(err, shim.ErrFenced) {
		t.Errorf("a second shim of the rank ended with %v", err)
	}
	close(w.feed)
	if err := <-w.result; err != nil || !slices.Equal(w.calls, []string{"prepared", "ended"}) {
		t.Errorf("the shim ended with %v after %v", err, w.calls)
	}
	last, err := shim.NewStreamLog(w.ns, events.RankKey{Instance: "w"}, nil).Last(w.ctx)
	if err != nil || !last.Found || last.Identity != (shim.Identity{Model: "m", BlockSize: 16}) || last.LastID != 2 {
		t.Errorf("the log has %+v, %v", last, err)
	}
}

// TestRunEndsWithItsClaim checks that nothing is prepared for a rank that cannot be claimed.
func TestRunEndsWithItsClaim(t *testing.T) {
	refused := errors.New("refused")
	w := start(t, func(context.Context) (*shim.ControlServer, error) { return nil, refused })
	if err := <-w.result; !errors.Is(err, refused) || len(w.calls) > 0 {
		t.Errorf("the shim ended with %v after %v", err, w.calls)
	}
}
