package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// holding is a rank's lease, as shim.Run keeps it.
type holding struct {
	lease *registry.Lease
	log   *slog.Logger

	mu  sync.Mutex
	has registry.Standing // told last
}

// Keep holds the lease. Where the NATS server does not permit that, the rank goes without: nobody clears it when it is
// gone.
func (h *holding) Keep(ctx context.Context, lost func()) error {
	err := h.lease.Keep(ctx, lost)
	switch {
	case errors.Is(err, registry.ErrTaken):
		return fmt.Errorf("%w: %w", shim.ErrFenced, err)
	case errors.Is(err, jetstream.ErrDenied):
		h.log.Warn("the NATS server does not permit registration; when this worker is gone nobody will know", "error",
			err, "what_to_do",
			"grant it to this user: indexer auth example prints what each user needs")
		return nil
	}
	return err
}

// Tell has the lease's record say how it stands.
func (h *holding) Tell(s shim.Standing) {
	h.change(func(has *registry.Standing) {
		has.Engine, has.Since, has.Why, has.CatchingUp = s.Engine, s.Since, s.Why, s.CatchingUp
	})
}

// Unusable has it say why what the engine announces is passed over.
func (h *holding) Unusable(why string) {
	h.change(func(has *registry.Standing) { has.Unusable = why })
}

// Refused has it say why the log takes nothing.
func (h *holding) Refused(why string) {
	h.change(func(has *registry.Standing) { has.Refused = why })
}

func (h *holding) change(f func(*registry.Standing)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(&h.has)
	h.lease.Tell(h.has)
}

// holding returns what registers the rank and holds its lease.
func (r *running) holding(ns *jetstream.Namespace, key events.RankKey, log *slog.Logger) (*holding, error) {
	if r.l3 != nil {
		if why := r.l3.Usable(r.blockSize); why != "" {
			log.Warn("nothing of the shared store can be credited to this worker", "why", why)
		}
	}
	trouble := limiter{every: r.logWindow}
	lease, err := registry.NewLease(ns, registry.Record{
		Instance: key.Instance, Rank: key.Rank, Model: r.model, BlockSize: r.blockSize, Source: r.source,
		LeaseMS: r.lease.Milliseconds(), L3: r.l3,
		Standing: &registry.Standing{CatchingUp: true}, // what the engine said before is not known yet
	}, registry.LeaseHooks{
		Taken: func() { log.Info("registered", "lease", r.lease) },
		Lost:  func() { log.Warn("the lease had expired; it is taken again") },
		Failed: func(err error) {
			trouble.do(func(n uint64) {
				log.Warn("the lease cannot be renewed", "error", err, "times", n, "what_to_do",
					"see that NATS answers and has room; until it is renewed nothing is lost, unless it expires")
			})
		},
	})
	if err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	r.reconnects.notify(lease.Renew)
	return &holding{lease: lease, log: log, has: registry.Standing{CatchingUp: true}}, nil
}

// reconnects tells the ranks of a process that its connection to NATS is back.
type reconnects struct {
	mu  sync.Mutex
	all []func()
}

func (n *reconnects) notify(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, f)
}

func (n *reconnects) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range n.all {
		f()
	}
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

// readGroups reads what is known of the engine's KV-cache groups beside its events.
func (r *running) readGroups() (err error) {
	switch {
	case r.kvGroups == "" && r.l3 != nil:
		r.groups = r.l3.GroupSpecs(r.blockSize)
	case r.kvGroups != "" && r.fleet():
		return fmt.Errorf("--kv-groups is for one engine, not for --source %s", r.source)
	case r.kvGroups != "":
		if r.groups, err = events.ParseGroups(r.kvGroups); err != nil {
			return fmt.Errorf("--kv-groups: %w", err)
		}
	}
	return nil
}
