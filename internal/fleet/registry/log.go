package registry

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// logExpired logs that this node has marked a lease as expired.
func (r *Registry) logExpired(of Record) {
	args := []any{"worker", of.Key(), "lease", of.Lease(), "host", of.Holder.Host, "pid", of.Holder.PID}
	if of.Shim != nil && of.Shim.Engine == api.EngineGone {
		r.cfg.Log.Warn("a worker's engine is gone; its lease is ended", append(args, "why", of.Shim.Why)...)
		return
	}
	r.cfg.Log.Warn("a worker's lease has expired", args...)
}

// logEndFailed logs that the end of a lease failed. The node retries.
func (r *Registry) logEndFailed(key events.RankKey, err error) {
	r.cfg.Log.Warn("a worker that is gone is not cleared yet", "worker", key, "error", err, "what_to_do",
		"check that NATS answers and has room; the node tries again")
}

// logUnreadable logs an unreadable record. Nothing is cleared.
func (r *Registry) logUnreadable(key string, err error) {
	r.cfg.Log.Warn("a worker's registration cannot be read", "key", key, "error", err, "what_to_do",
		"give indexers the release that the shims have, or a later one; check that no other program writes to the bucket")
}

// logSkipped logs a skipped registration, once for each cause.
func (r *Registry) logSkipped(key events.RankKey, err error) {
	r.cfg.Log.Warn("a registration is skipped", "worker", key, "error", err, "what_to_do",
		"restart the shim with the registered --block-size and a rank below the limit, or revoke its key")
}

// logUnclaimed logs that a lease is ignored: the model of the worker is not claimed.
func (r *Registry) logUnclaimed(of Record) {
	r.cfg.Log.Warn("a worker's lease is ignored: the worker has not claimed the model that the lease names", "worker",
		of.Key(), "model", of.Model, "host", of.Holder.Host, "pid", of.Holder.PID, "what_to_do", ClaimRemedy)
}

// logUnused logs an unused part of a record, such as an address.
func (r *Registry) logUnused(key events.RankKey, why error) {
	r.cfg.Log.Warn("a part of a worker's registration is not used", "worker", key, "error", why, "what_to_do",
		"register another address, or permit it with --dial-allow or --l3-folder if you trust the worker")
}

// logWatch logs that the bucket cannot be watched, or, with nil, that the watch has resumed.
func (r *Registry) logWatch(err error) {
	if err != nil {
		r.cfg.Log.Warn("cannot watch worker registrations; no worker is removed until the watch resumes", "error",
			err, "what_to_do", "check that NATS answers and that more than half of its servers are up")
		return
	}
	r.cfg.Log.Info("the registrations of workers are watched again")
}
