package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// keeper returns what registers the rank and holds its lease. Where the NATS server does not permit that, the rank goes without: nobody clears it
// when it is gone.
func (r *running) keeper(ns *jetstream.Namespace, key events.RankKey, log *slog.Logger) (func(context.Context, func()) error, error) {
	if r.l3 != nil {
		if why := r.l3.Usable(r.blockSize); why != "" {
			log.Warn("nothing of the shared store can be credited to this worker", "why", why)
		}
	}
	trouble := limiter{every: r.logWindow}
	lease, err := registry.NewLease(ns, registry.Record{
		Instance: key.Instance, Rank: key.Rank, Model: r.model, BlockSize: r.blockSize, Source: r.source, LeaseMS: r.lease.Milliseconds(), L3: r.l3,
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

// readL3Config reads what is registered of a shared store.
func (r *running) readL3Config() error {
	data, err := os.ReadFile(r.l3Config)
	if err != nil {
		return err
	}
	c, err := hicache.ParseConfig(data)
	if err != nil {
		return fmt.Errorf("%s: %w", r.l3Config, err)
	}
	r.l3 = &c
	return nil
}
