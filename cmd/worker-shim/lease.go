package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// keeper returns what registers the rank and holds its lease. Where the NATS server does not permit that, the rank goes without: nobody clears it
// when it is gone.
func (r *running) keeper(ns *jetstream.Namespace, key events.RankKey, log *slog.Logger) (func(context.Context, func()) error, error) {
	trouble := limiter{every: r.logWindow}
	lease, err := registry.NewLease(ns, registry.Record{
		Instance: key.Instance, Rank: key.Rank, Model: r.model, BlockSize: r.blockSize, Source: r.source, LeaseMS: r.lease.Milliseconds(),
	}, registry.LeaseHooks{
		Taken: func() { log.Info("registered", "lease", r.lease) },
		Lost:  func() { log.Warn("the lease had expired; it is taken again") },
		Failed: func(err error) {
			trouble.do(func(n uint64) { log.Warn("the lease cannot be renewed", "error", err, "times", n) })
		},
	})
	if err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	return func(ctx context.Context, lost func()) error {
		err := lease.Keep(ctx, lost)
		switch {
		case errors.Is(err, registry.ErrTaken):
			return fmt.Errorf("%w: %w", shim.ErrFenced, err)
		case errors.Is(err, jetstream.ErrDenied):
			log.Warn("the NATS server does not permit registration; when this worker is gone nobody will know", "error", err)
			return nil
		}
		return err
	}, nil
}
