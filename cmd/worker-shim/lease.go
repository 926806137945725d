package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// linger returns a context that goes on for --stop-wait after stop has ended, so that the end of the engine is seen.
// Nothing is waited for if stop ended with errPodGone. end ends it.
func (r *running) linger(stop context.Context, log *slog.Logger) (ctx context.Context, end context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stop))
	forget := context.AfterFunc(stop, func() {
		if errors.Is(context.Cause(stop), errPodGone) {
			cancel()
			return
		}
		if r.stopWait > 0 {
			log.Info("stopping; waiting for the engine's end", "at_most", r.stopWait)
		}
		loop.Wait(ctx, r.stopWait)
		cancel()
	})
	return ctx, func() {
		forget()
		cancel()
	}
}

// leaveTime bounds the last write of a lease at the end of the process.
const leaveTime = 2 * time.Second

// leave writes into the lease how the shim has ended: with its engine or its pod, or, if ctx is done, before it.
func (r *running) leave(ctx, stop context.Context, report *shim.Report, log *slog.Logger) {
	podGone, within := errors.Is(context.Cause(stop), errPodGone), leaveTime
	if podGone {
		within = max(leaveTime, r.lease) // the process goes on, and hundreds of pods may be gone at once
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	if podGone {
		defer context.AfterFunc(r.whole, func() { time.AfterFunc(leaveTime, cancel) })()
	}
	err, what := error(nil), "the engine is gone; its lease is ended"
	if ctx.Err() == nil || podGone {
		err = report.End(last, stop.Err() != nil)
	} else {
		err = report.Leave(last)
		what = "the engine runs on; its registration stays for the next shim until the lease expires"
	}
	if err != nil {
		log.Warn("the end of this shim cannot be written into the lease", "error", err, "what_to_do",
			"see whether NATS runs; until the lease expires indexers may name this worker")
		return
	}
	log.Info(what)
}

// record returns what is registered of a rank.
func (r *running) record(key events.RankKey, log *slog.Logger) registry.Record {
	l3 := r.l3
	switch {
	case l3 == nil:
	case l3.Open():
		l3 = nil
		log.Info("the shared store is registered when the engine has announced its KV-cache groups")
	default:
		if why := r.l3.Usable(r.blockSize); why != "" {
			log.Warn("nothing of the shared store can be credited to this worker", "why", why)
		}
	}
	return registry.Record{
		Instance: key.Instance, Rank: key.Rank, Model: r.model, BlockSize: r.blockSize, Source: r.source,
		LeaseMS: r.lease.Milliseconds(), L3: l3, Worker: r.spec,
	}
}

// leaseHooks log what happens to a rank's lease.
func (r *running) leaseHooks(log *slog.Logger) registry.LeaseHooks {
	trouble := limiter{every: r.logWindow}
	return registry.LeaseHooks{
		Taken: func() { log.Info("registered", "lease", r.lease) },
		Lost:  func() { log.Warn("the lease had expired; it is taken again") },
		Unclaimed: func(name string, err error) {
			what := "the NATS server does not permit the claim of the model; indexers that require claims ignore this worker"
			if name != r.model {
				what = "the NATS server does not permit the claim of a further name of the model; indexers that require " +
					"claims do not know the name"
			}
			log.Warn(what, "model", name, "error", err, "what_to_do", "grant it to this user: indexer auth example "+
				r.keyFlags()+" --model "+escape.Shell(name))
		},
		Failed: func(err error) {
			trouble.warn(log, "the lease cannot be renewed", "error", err, "what_to_do",
				"see that NATS answers and has room; until it is renewed nothing is lost, unless it expires")
		},
	}
}

// keyFlags is the flag that makes a NATS key for this shim.
func (r *running) keyFlags() string {
	if r.messages != nil {
		return "--pool NAME"
	}
	return "--shim " + escape.Shell(r.instance)
}

// readL3Config reads what is registered of a shared store. master is its master unless the file names one.
func (r *running) readL3Config(master hicache.Master) error {
	data, err := os.ReadFile(r.l3Config)
	if err != nil {
		return err
	}
	c, passed, err := hicache.DecodeConfig(data)
	if err == nil {
		c = c.WithMaster(master)
		if whole := c; c.Open() { // all but the groups is checked now
			whole = c.WithGroups([]hicache.Group{{Kind: hicache.Full}}, cmp.Or(r.blockSize, 16))
			err = whole.Check()
		} else {
			err = c.Check()
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", r.l3Config, err)
	}
	r.l3, r.l3Passed = &c, passed
	return nil
}

// readWorker reads the facts that are registered for routers. Without --serving-endpoint, the worker takes requests at
// the address of --engine-http; [running.serveElsewhere] replaces a loopback address.
func (r *running) readWorker() (err error) {
	if r.spec != nil {
		return nil // it was read before the ranks were known
	}
	if r.spec, err = r.worker.Spec(); err != nil {
		return err
	}
	if r.spec.Endpoint == "" && r.engineHTTP != "" {
		asker, err := r.asker()
		if err != nil {
			return nil // checkLearning reports it
		}
		if r.loopbackEngine = isLoopback(asker.Host()); !r.loopbackEngine {
			r.spec.Endpoint = servingAt(r.engineHTTP, asker.Host(), asker.Port())
		}
	}
	return nil
}

func servingAt(engineHTTP, host, port string) string {
	scheme, _, _ := strings.Cut(engineHTTP, "://")
	return scheme + "://" + net.JoinHostPort(host, port)
}

// serveElsewhere registers an engine on loopback with the address from which this host reaches the NATS server. The
// host's name is not used: the name of a pod, for example, has no record in DNS.
func (r *running) serveElsewhere(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) error {
	if !r.loopbackEngine {
		return nil
	}
	asker, err := r.asker()
	if err != nil {
		return err
	}
	for {
		if server := conn.NATS().ConnectedAddr(); server != "" { // it is empty between two connections
			host, err := dial.LocalAddress(server)
			if err != nil {
				return fmt.Errorf("find the address under which other hosts reach the engine (--serving-endpoint gives "+
					"it): %w", err)
			}
			r.spec.Endpoint = servingAt(r.engineHTTP, host, asker.Port())
			log.Info("the engine listens on loopback; it is registered with the address of this host", "endpoint",
				r.spec.Endpoint)
			return nil
		}
		if !loop.Wait(ctx, askEvery) {
			return ctx.Err()
		}
	}
}

// readGroups reads what is known of the engine's KV-cache groups beside its events.
func (r *running) readGroups() (err error) {
	switch {
	case r.kvGroups == "" && r.l3 != nil && !r.l3.Open():
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
