package host

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// namespace starts a server and returns a namespace.
func namespace(t *testing.T) (context.Context, *jetstream.Namespace) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx, natskit.Namespace(t, 1)
}

// world is a rank with a feed, and a record of the calls of its watch.
type world struct {
	*testing.T
	ctx    context.Context
	ns     *jetstream.Namespace
	feed   chan shim.Frame
	leased chan struct{} // closed with the lease
	calls  []string
	result chan error
}

// leaseTaken closes leased when the lease is held.
type leaseTaken struct {
	Unobserved
	leased chan struct{}
}

func (l leaseTaken) LeaseTaken() { close(l.leased) }

func start(t *testing.T, claim func(context.Context) (*shim.ControlServer, error)) *world {
	ctx, ns := namespace(t)
	if _, err := ns.EnsureWorkers(ctx, jetstream.BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, ctx: ctx, ns: ns, feed: make(chan shim.Frame), leased: make(chan struct{}),
		result: make(chan error, 1)}
	go func() {
		w.result <- Run(ctx, w.rank(), Env{Namespace: ns, Claim: claim,
			Observer: leaseTaken{leased: w.leased},
			Prepared: func(_ *shim.Report, cfg *shim.Config) {
				w.calls = append(w.calls, "prepared")
				if cfg.Identity != (shim.Identity{Model: "m", BlockSize: 16}) {
					t.Errorf("the shim is of %+v", cfg.Identity)
				}
			},
			Ended: func(err error) { w.calls = append(w.calls, "ended") },
		})
	}()
	return w
}

func (w *world) rank() Rank {
	return Rank{Record: registry.Record{Instance: "w", Model: "m", BlockSize: 16, Source: "ndjson", LeaseMS: 30_000},
		Config: shim.Config{Feed: w.feed}}
}

// TestRunShimsAClaimedRank starts a shim and a second shim of a rank. The second shim ends with ErrFenced. The log
// has the events of the rank, the shim has a lease meanwhile, and the calls of the watch are in order.
func TestRunShimsAClaimedRank(t *testing.T) {
	w := start(t, nil)
	stored := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
		Locals: []events.LocalHash{1}}
	w.feed <- shim.Frame{Seq: 1, Read: &shim.Read{Events: []events.Event{stored}, Digest: 1}}
	<-w.leased
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

// TestRunEndsWithItsClaim checks that a refused claim ends Run before the shim is prepared.
func TestRunEndsWithItsClaim(t *testing.T) {
	refused := errors.New("refused")
	w := start(t, func(context.Context) (*shim.ControlServer, error) { return nil, refused })
	if err := <-w.result; !errors.Is(err, refused) || len(w.calls) > 0 {
		t.Errorf("the shim ended with %v after %v", err, w.calls)
	}
}
