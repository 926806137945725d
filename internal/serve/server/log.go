package server

import (
	"log/slog"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/natsserver"
)

// superviseHooks make log lines of what happens to the NATS server in this process.
func superviseHooks(log *slog.Logger) natsserver.SuperviseHooks {
	return natsserver.SuperviseHooks{
		Unhealthy: func(why error, room bool) {
			if room {
				log.Error("the NATS server in this process is unhealthy; it is started anew", "error", why, "what_to_do",
					"see the error; if it comes again, look at the disk of --data")
			} else {
				log.Error("the NATS server in this process is unhealthy; it is started anew when its disk has room",
					"error", why, "what_to_do", "make room on the disk of --data, or give --store-bytes more")
			}
		},
		Recovered: func() { log.Info("the NATS server in this process has recovered") },
		Failed: func(err error) {
			log.Error("the NATS server could not be started anew; it is tried again", "error", err, "what_to_do",
				"see the error; look at the disk of --data and at --nats-listen's port")
		},
		Grown: func(bytes int64) {
			log.Info("the disk has more room; the NATS server may take more of it", "bytes", bytes)
		},
	}
}

// viewLog makes log lines of what changes from view to view.
type viewLog struct {
	log   *slog.Logger
	peers []string
	owned string
	said  []string

	unheard bool
}

// bucketRecreated tells that a bucket was gone.
func bucketRecreated(log *slog.Logger, bucket string, err error) {
	if err != nil {
		log.Error("the bucket of "+bucket+" is gone and could not be made anew; it is tried again", "error", err,
			"what_to_do", "see that NATS has room and quorum, and that this user may make buckets")
	} else {
		log.Warn("the bucket of " + bucket + " was gone; it is made anew")
	}
}

// trouble tells what keeps the others from hearing this node, or that they hear it again.
func (t *viewLog) trouble(err error) {
	switch {
	case err == nil && t.unheard:
		t.unheard = false
		t.log.Info("the other nodes hear this one again")
	case err != nil && !t.unheard && len(t.peers) > 0:
		t.unheard = true
		t.log.Warn("the other nodes do not hear this one; it is tried again", "error", err, "what_to_do",
			"see that NATS has room and that more than half of its servers are up; queries are answered meanwhile")
	}
}

func (t *viewLog) viewed(v *cluster.View) {
	var peers []string
	for i := range v.Peers {
		peers = append(peers, v.Peers[i].Node)
	}
	for _, name := range peers {
		if !slices.Contains(t.peers, name) {
			t.log.Info("a node is there", "node", name)
		}
	}
	for _, name := range t.peers {
		if !slices.Contains(peers, name) {
			t.log.Info("a node is gone", "node", name)
		}
	}
	for _, problem := range v.Problems {
		if !slices.Contains(t.said, problem) {
			t.log.Warn(problem, "what_to_do", "give all nodes of the namespace one version and one --partitions")
		}
	}
	if owned := v.Owned.String(); owned != t.owned {
		if t.owned == "" {
			t.log.Info("this node keeps partitions", "partitions", owned)
		} else {
			t.log.Info("this node keeps other partitions", "partitions", owned, "before", t.owned)
		}
		t.owned = owned
	}
	t.peers, t.said = peers, v.Problems
}

// modelHooks make log lines of what happens to the records of models and of the namespace.
func modelHooks(log *slog.Logger, changed func()) jetstream.ModelHooks {
	return jetstream.ModelHooks{
		Changed: changed,
		Bad: func(key string, err error) {
			log.Warn("a model's record cannot be read; what was known of the model stays", "key", key, "error", err,
				"what_to_do", "restart a shim of the model, which writes it again, or indexer forget --model")
		},
		Restored: func(err error) {
			log.Warn("the namespace's record was lost; it is written again", "error", err, "what_to_do",
				"see who but nodes may write to the bucket: indexer auth example prints what each user needs")
		},
		Failed: func(err error) {
			log.Warn("the namespace's record is lost and cannot be written yet; it is tried again", "error", err,
				"what_to_do", "see that NATS answers and has room; until then no node can start")
		},
	}
}

// registryHooks make log lines of what happens to workers' registrations. claimsChanged is called when model claims
// have changed.
func registryHooks(log *slog.Logger, claimsChanged func()) registry.Hooks {
	return registry.Hooks{
		ClaimsChanged: claimsChanged,
		Unclaimed: func(r registry.Record) {
			log.Warn("a worker's lease is ignored: the worker has not claimed the model that the lease names", "worker",
				r.Key(), "model", r.Model, "host", r.Holder.Host, "pid", r.Holder.PID, "what_to_do", registry.ClaimRemedy)
		},
		Expired: func(r registry.Record) {
			args := []any{"worker", r.Key(), "lease", r.Lease(), "host", r.Holder.Host, "pid", r.Holder.PID}
			if r.Shim != nil && r.Shim.Engine == api.EngineGone {
				log.Warn("a worker's engine is gone; its lease is ended", append(args, "why", r.Shim.Why)...)
				return
			}
			log.Warn("a worker's lease has expired", args...)
		},
		Cleared: func(r registry.Record) {
			log.Info("a worker is gone; what it held is cleared", "worker", r.Key())
		},
		Failed: func(key events.RankKey, err error) {
			log.Warn("a worker that is gone is not cleared yet", "worker", key, "error", err, "what_to_do",
				"see that NATS answers and has room; it is tried again")
		},
		Bad: func(key string, err error) {
			log.Warn("a worker's registration cannot be read", "key", key, "error", err, "what_to_do",
				"give indexers the release that the shims have, or a later one; see that nobody else writes to the bucket")
		},
		Unused: func(key events.RankKey, why error) {
			log.Warn("a part of a worker's registration is not used", "worker", key, "error", why, "what_to_do",
				"register another address, or permit it with --dial-allow or --l3-folder if you trust the worker")
		},
		Skipped: func(key events.RankKey, err error) {
			log.Warn("a registration is skipped", "worker", key, "error", err, "what_to_do",
				"restart the shim with the registered --block-size and a rank below the limit, or revoke its key")
		},
		Replaced: func(old, by events.WorkerID) {
			log.Info("a worker is registered at the serving address of another, which is removed", "worker", by, "removed",
				old)
		},
		Recreated: func(err error) { bucketRecreated(log, "workers' registrations", err) },
		Refilled: func(n int) {
			log.Info("registrations of the bucket that was gone are written again", "workers", n)
		},
		Watch: func(err error) {
			if err != nil {
				log.Warn("the registrations of workers cannot be watched; nobody is cleared meanwhile", "error",
					err, "what_to_do", "see that NATS answers and that more than half of its servers are up")
			} else {
				log.Info("the registrations of workers are watched again")
			}
		},
	}
}

// shimsHooks make log lines of what happens to the shims in this process.
func shimsHooks(log *slog.Logger) compat.ShimsHooks {
	return compat.ShimsHooks{
		Started: func(r registry.Record) {
			log.Info("a shim runs in this process", "worker", r.Key(), "engine", r.Engine.Endpoint, "replay",
				r.Engine.Replay)
		},
		EngineFound: func(key events.RankKey, engine events.Engine, why string) {
			log.Info("a registered engine speaks as "+engine.String()+" does", "worker", key, "because", why)
		},
		Ended: func(key events.RankKey, err error) {
			log.Warn("a shim in this process has ended; it is started again", "worker", key, "error", err, "what_to_do",
				"see the error; unregister the worker if its engine is gone")
		},
		Rejected: func(key events.RankKey, err error) {
			log.Warn("a registration is not acted on", "worker", key, "error", err, "what_to_do",
				"unregister the worker and register it with another address, or permit it with --dial-allow or --l3-folder")
		},
		Quiet: func(key events.RankKey, quiet bool) {
			if !quiet {
				log.Info("a registered engine has published its first event", "worker", key)
				return
			}
			log.Warn("a registered engine has published no event since its shim began", "worker", key, "for",
				shim.DefaultQuietAfter, "what_to_do", registry.QuietAdvice)
		},
		Unusable: func(key events.RankKey, err error, do string) {
			log.Error("a registered engine's blocks are not of the block_size that was registered", "worker", key,
				"error", err, "what_to_do", do)
		},
		OtherRank: func(key events.RankKey, rank events.Rank, skipped bool) {
			if skipped {
				return // reported once for each process of the engine
			}
			log.Error("a registered engine names another data-parallel rank; its blocks are credited to the registered one",
				"worker", key, "engine_rank", rank, "what_to_do", "register the engine's rank with the endpoint of that rank")
		},
		Unreadable: func(key events.RankKey, err error) {
			log.Warn("a rank's last message in the log cannot be read; a new incarnation begins", "worker", key, "error",
				err, "what_to_do", "see that only this worker's shim has a key that may write its events")
		},
		Passed: func(key events.RankKey, fields hicache.Passed) {
			log.Warn("a registration's l3 has unknown fields, which are passed over", "worker", key, "fields", fields,
				"what_to_do", hicache.PassedRemedy)
		},
		Refused: func(key events.RankKey, err error) {
			if err == nil {
				log.Info("the log takes events of a registered engine again", "worker", key)
				return
			}
			log.Warn("the log does not take events of a registered engine; they wait", "worker", key, "error", err,
				"what_to_do", shim.LogAdvice(err))
		},
		StateChanged: func(key events.RankKey, s shim.State) {
			switch s.Engine {
			case api.EngineSilent:
				log.Warn("a registered engine is silent", "worker", key, "since", s.Since.UTC().Format(time.RFC3339),
					"why", s.Why, "what_to_do",
					"see whether its process hangs or is stopped, and whether its host can be reached; restart it if it does not go on")
			case api.EngineGone:
				log.Warn("a registered engine is gone; what it had in device and host memory is cleared", "worker", key,
					"why", s.Why)
			}
		},
	}
}
