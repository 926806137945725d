package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// leaseAge and leaseLeft say how long ago a lease was renewed, and in what time it expires if it is not again.
func leaseAge(l *api.Lease, now time.Time) string {
	if l == nil {
		return "-"
	}
	return max(now.Sub(l.Renewed), 0).Round(time.Second).String()
}

func leaseLeft(l *api.Lease, now time.Time) string {
	switch {
	case l == nil:
		return "never"
	case l.State == string(registry.Expired):
		return "expired"
	}
	return max(l.Expires.Sub(now), 0).Round(time.Second).String()
}

// engineStands says how it stands with a rank's engine, and since when.
func engineStands(w *api.WorkerInfo, now time.Time) string {
	said := string(w.Engine)
	switch {
	case w.Engine == "":
		said = "-"
	case w.Engine != api.EngineConnected && w.EngineSince != nil:
		said += " " + max(now.Sub(*w.EngineSince), 0).Round(time.Second).String()
	}
	if w.CatchingUp {
		said += ", catching up"
	}
	return said
}

// newRegistry returns the node's registry of workers, which closes in the log what expired in the partitions that are
// its own to end.
func newRegistry(ns *jetstream.Namespace, bucket *jetstream.Bucket, mend func(context.Context) error,
	mine func(events.Partition) bool, began time.Time, log *slog.Logger) *registry.Registry {
	return registry.New(registry.Config{
		Namespace: ns, Bucket: bucket, Mend: mend, Mine: mine, Began: began,
		Clear: func(ctx context.Context, r registry.Record, still func(context.Context) (bool, error)) error {
			return shim.Clear(ctx, ns, r.Key(), shim.Identity{Model: r.Model, BlockSize: r.BlockSize},
				events.ReasonLeaseExpiry, still)
		},
		Hooks: registry.Hooks{
			Expired: func(r registry.Record) {
				log.Warn("a worker's lease has expired", "worker", r.Key(), "lease", r.Lease(), "host", r.Holder.Host,
					"pid", r.Holder.PID)
			},
			Cleared: func(r registry.Record) {
				log.Info("a worker is gone; what it held is cleared", "worker",
					r.Key())
			},
			Failed: func(key events.RankKey, err error) {
				log.Warn("a worker that is gone is not cleared yet", "worker", key, "error", err, "what_to_do",
					"see that NATS answers and has room; it is tried again")
			},
			Bad: func(key string, err error) {
				log.Warn("a worker's registration cannot be read", "key", key, "error", err)
			},
			Mended: func(err error) {
				if err != nil {
					log.Error(
						"the bucket of workers' registrations is gone and could not be made anew; it is tried again",
						"error", err, "what_to_do",
						"see that NATS has room and quorum, and that this user may make buckets")
				} else {
					log.Warn("the bucket of workers' registrations was gone; it is made anew")
				}
			},
			Refilled: func(n int) {
				log.Info("registrations of the bucket that was gone are written again", "workers",
					n)
			},
			Watch: func(err error) {
				if err != nil {
					log.Warn("the registrations of workers cannot be watched; nobody is cleared meanwhile", "error",
						err, "what_to_do",
						"see that NATS answers and that more than half of its servers are up")
				} else {
					log.Info("the registrations of workers are watched again")
				}
			},
		},
	})
}
