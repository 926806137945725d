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

// The ranks of an engine on several hosts publish their events on the host where they run. The engine's API, on the
// first host, lists all ranks. On this host, the ports of ranks on other hosts refuse connections. Such a rank is
// registered as remote until a shim on its host registers it: it serves requests, and may be chosen. If its port on
// this host accepts connections later, the rank was only slow to start, and is served here.

// probeTime bounds the attempt to connect to a rank's port.
const probeTime = 2 * time.Second

// remoteRanks sets remote in the ranks that run on another host than the engine's API. If no port answers, the engine
// may be about to start, and all ranks stay local.
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
	log.Warn("ranks of the engine publish their events on other hosts; they serve, and their blocks are not known",
		"ranks", fmt.Sprint(list), "nodes", said.Nodes, "what_to_do", registry.RemoteRemedy)
}

// serveRemote keeps a remote rank registered while no shim serves it, and serves it once its port here accepts
// connections. It ends with ctx, or after stop like serve.
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

// remoteLease logs that the lease of a remote rank cannot be renewed.
type remoteLease struct {
	registry.UnobservedLease
	log     *slog.Logger
	trouble *Limiter
}

func (l *remoteLease) LeaseFailed(err error) {
	l.trouble.WarnTo(l.log, "the lease of a remote rank cannot be renewed", "error", err, "what_to_do",
		"see that NATS answers")
}

// keepRemote keeps a remote rank registered while no shim serves it, until ctx ends.
func (s *Shim) keepRemote(ctx context.Context, ns *jetstream.Namespace, log *slog.Logger) error {
	trouble := Limiter{Every: s.LogRepeat}
	for {
		lease, err := registry.NewLease(ns, registry.Record{
			Instance: s.key().Instance, Rank: s.key().Rank, Model: s.Model, BlockSize: s.BlockSize,
			Source: s.Source, LeaseMS: s.Lease.Milliseconds(), Worker: s.spec,
			Shim: &registry.ShimState{Engine: api.EngineRemote, Since: time.Now().UTC().Truncate(time.Millisecond),
				Why: "it publishes its events on another host"},
		}, &remoteLease{log: log, trouble: &trouble})
		if err != nil {
			return fmt.Errorf("register: %w", err)
		}
		lease.Yield()
		err = lease.Keep(ctx, func() {})
		if errors.Is(err, jetstream.ErrDenied) {
			log.Warn("the NATS server does not permit the registration of a remote rank", "error", err, "what_to_do",
				"grant it to this user: indexer auth example prints what each user needs")
			<-ctx.Done()
			return nil
		}
		if !loop.Wait(ctx, s.Lease/3) { // another shim serves the rank: it may end
			return nil
		}
	}
}
