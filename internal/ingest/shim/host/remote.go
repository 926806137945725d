package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// The ranks of an engine on several hosts publish events on their own hosts. The engine's API, on the first host, lists
// all ranks. On this host, the ports of ranks on other hosts refuse connections. Such a rank is registered as remote
// until a shim on the rank's host takes over: the rank serves requests, and may be chosen. A port on this host that
// accepts connections later means a slow start, and the rank is served here.

// probeTime bounds the attempt to connect to a rank's port.
const probeTime = 2 * time.Second

// remoteRanks sets remote in the ranks on hosts without the engine's API. If no port answers, the engine may be about
// to start, and all ranks stay local.
func remoteRanks(ctx context.Context, ranks []*Shim, said enginehttp.Engine, log *slog.Logger) {
	if said.Nodes < 2 {
		return
	}
	refuses := make([]bool, len(ranks))
	var probes sync.WaitGroup
	for i, one := range ranks {
		if one.Listen {
			continue
		}
		probes.Go(func() {
			err := zmtp.Probe(ctx, one.Engine, probeTime, nil)
			refuses[i] = err != nil && zmtp.Refuses(err)
		})
	}
	probes.Wait()
	var list []uint32
	for i, one := range ranks {
		if refuses[i] {
			list = append(list, one.Rank)
		}
	}
	if len(list) == 0 || len(list) == len(ranks) || ctx.Err() != nil {
		return
	}
	for i, one := range ranks {
		one.remote = refuses[i]
	}
	log.Warn("ranks of the engine publish events on other hosts; such ranks serve requests, and the blocks are unknown",
		"ranks", fmt.Sprint(list), "nodes", said.Nodes, "what_to_do", registry.RemoteRemedy)
}

// serveRemote keeps a remote rank registered while no shim serves it, and serves the rank once the port here accepts
// connections. serveRemote ends with ctx, or after stop like serve.
func (s *Shim) serveRemote(ctx, stop context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	remote, here := context.WithCancel(ctx)
	defer here()
	defer context.AfterFunc(stop, here)()
	var probes sync.WaitGroup
	probes.Go(func() {
		for loop.Wait(remote, s.Lease/3) {
			if zmtp.Probe(remote, s.Engine, probeTime, nil) == nil {
				here()
			}
		}
	})
	err := s.keepRemote(remote, ns, log)
	probes.Wait()
	if err != nil || ctx.Err() != nil || stop.Err() != nil {
		return err
	}
	log.Info("a remote rank publishes its events here after all", "engine", s.Engine)
	s.remote = false
	return s.serve(ctx, stop, ns, log)
}

// remoteLease logs failed renewals of a remote rank's lease.
type remoteLease struct {
	registry.UnobservedLease
	log     *slog.Logger
	trouble *Limiter
}

func (l *remoteLease) LeaseFailed(err error) {
	l.trouble.WarnTo(l.log, "the lease of a remote rank cannot be renewed", "error", err, "what_to_do",
		"check that NATS answers")
}

// keepRemote keeps a remote rank registered while no shim serves it, until ctx ends.
func (s *Shim) keepRemote(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	trouble := Limiter{Every: s.LogRepeat}
	for {
		lease, err := registry.NewLease(ns, registry.Record{
			Instance: s.key().Instance, Rank: s.key().Rank, Model: s.Model, BlockSize: s.BlockSize,
			Source: s.Source, LeaseMS: s.Lease.Milliseconds(), Worker: s.spec,
			Shim: &registry.ShimState{Engine: api.EngineRemote, Since: time.Now().UTC().Truncate(time.Millisecond),
				Why: "the rank publishes events on another host"},
		}, &remoteLease{log: log, trouble: &trouble})
		if err != nil {
			return fmt.Errorf("register: %w", err)
		}
		lease.Yield()
		err = lease.Keep(ctx, func() {})
		if errors.Is(err, jetstream.ErrDenied) {
			log.Warn("the NATS server does not permit the registration of a remote rank", "error", err, "what_to_do",
				"grant the permission to this user: indexer auth create prints the permissions of all users")
			<-ctx.Done()
			return nil
		}
		if !loop.Wait(ctx, s.Lease/3) { // a second shim serves the rank, and may end
			return nil
		}
	}
}
