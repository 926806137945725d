package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// asker returns a client of the engine's API.
func (s *Shim) asker() (*enginehttp.Asker, error) {
	token, err := s.EngineHTTPToken()
	if err != nil {
		return nil, err
	}
	a, err := enginehttp.New(s.EngineHTTP, token, nil)
	if err != nil {
		return nil, fmt.Errorf("--engine-http: %w", err)
	}
	return a, nil
}

// askEvery is the pause between two requests to an absent or starting engine.
const askEvery = time.Second

// ranksToServe returns a shim for each rank, from the settings and from the engine's API. ranksToServe waits for the
// API.
func (s *Shim) ranksToServe(ctx context.Context, log *slog.Logger) (list []*Shim, said enginehttp.Engine,
	err error) {
	if s.EngineHTTP == "" {
		list, err = s.bySettings()
		return list, said, err
	}
	asker, err := s.asker()
	if err != nil {
		return nil, said, err
	}
	waiting := Limiter{Every: s.LogRepeat}
	for {
		said, err = asker.Ask(ctx)
		if !errors.Is(err, enginehttp.ErrNotReady) || ctx.Err() != nil {
			break
		}
		waiting.WarnTo(log, "waiting for the engine's settings over HTTP", "engine_http", s.EngineHTTP, "error", err,
			"what_to_do", "check that the engine runs and serves the API at this address")
		loop.Wait(ctx, askEvery)
	}
	if err != nil {
		return nil, said, fmt.Errorf("--engine-http %s: %w", s.EngineHTTP, err)
	}
	log.Info("read the engine's settings over HTTP", "engine", said.Kind, "version", said.Version,
		"model", said.Model, "block_size", said.BlockSize, "ranks", len(said.Ranks),
		"total_kv_blocks", said.TotalKVBlocks, "max_num_batched_tokens", said.MaxBatchedTokens)
	if said.UnnamedAdapters {
		log.Error("the engine's events do not name adapters: all blocks are skipped, and no query finds this engine",
			"engine", said.Kind, "version", said.Version, "what_to_do", enginehttp.NameAdapters)
	}
	list, err = s.filledIn(ctx, said, asker, log)
	return list, said, err
}

// bySettings returns a shim for each rank of the settings.
func (s *Shim) bySettings() (list []*Shim, err error) {
	for i := range s.Ranks {
		one, err := s.OfRank(i)
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// filledIn returns a shim for each rank of the engine. The engine's API supplies missing settings.
func (s *Shim) filledIn(ctx context.Context, said enginehttp.Engine, asker *enginehttp.Asker, log *slog.Logger) (
	list []*Shim, err error) {
	all := *s
	all.EngineHTTP = ""
	if all.Source == "auto" {
		all.Source = said.Kind
	}
	all.Worker = cmp.Or(all.Worker, instanceName(asker))
	all.Model = cmp.Or(all.Model, said.Model)
	all.BlockSize = cmp.Or(all.BlockSize, s.engineSize)
	if all.BlockSize == 0 && said.Nominal {
		all.proof = newSizeProof()
	}
	all.BlockSize = cmp.Or(all.BlockSize, said.BlockSize)
	all.unnamedAdapters = said.UnnamedAdapters
	all = all.WithFacts(&api.WorkerSpec{Role: api.Role(said.Role), BootstrapPort: said.BootstrapPort,
		TotalKVBlocks: said.TotalKVBlocks, MaxBatchedTokens: said.MaxBatchedTokens})
	all.spec.SetNames(s.namesOf(said.Names, all.Model))
	learned := learnStore(all.l3, said, log)
	name := strings.TrimSpace(said.Kind + " " + said.Version)
	switch {
	case all.Engine == "" && said.Ranks == nil:
		return nil,
			usage.Errorf("%s does not report the endpoint of events over HTTP (vLLM reports the endpoint from 0.32 "+
				"on): "+
				"give --engine, and --replay if the engine has a replay_endpoint", name)
	case all.Model == "":
		return nil, usage.Errorf("%s does not report the served model over HTTP: give --model", name)
	case all.BlockSize == 0:
		return nil, usage.Errorf("%s does not report the block size over HTTP "+
			"(vLLM reports the size in /metrics, if enabled): give --block-size", name)
	case all.Engine != "":
		list, err = all.bySettings()
	default:
		for _, rank := range said.Ranks {
			list = append(list, all.forRank(ctx, rank))
		}
	}
	for _, one := range list {
		if err == nil {
			one.Ranks = 1
			err = one.Check() // reads --l3-config again
			one.l3 = learned
		}
	}
	return list, err
}

// WithFacts returns a copy of the shim with the role, the bootstrap port and the capacities of a worker. Flags have
// priority.
func (s *Shim) WithFacts(said *api.WorkerSpec) Shim {
	all, spec := *s, api.WorkerSpec{}
	if s.spec != nil {
		spec = *s.spec
	}
	spec.TotalKVBlocks = cmp.Or(spec.TotalKVBlocks, said.TotalKVBlocks)
	spec.Role = cmp.Or(spec.Role, said.Role)
	spec.BootstrapPort = cmp.Or(spec.BootstrapPort, said.BootstrapPort)
	spec.MaxBatchedTokens = cmp.Or(spec.MaxBatchedTokens, said.MaxBatchedTokens)
	all.spec = &spec
	return all
}

// forRank returns the shim of a rank of the engine's API.
func (s *Shim) forRank(ctx context.Context, rank enginehttp.Rank) *Shim {
	one := *s
	one.Rank, one.Engine, one.Replay = rank.Rank, rank.Endpoint, rank.Replay
	one.Topic = cmp.Or(one.Topic, rank.Topic)
	one.Listen = s.Listen || rank.Listen
	if rank.Unclear && !one.Listen { // the engine runs: if the port refuses, the engine dials out
		err := zmtp.Probe(ctx, rank.Endpoint, 2*time.Second, nil)
		one.Listen = err != nil && zmtp.Refuses(err)
	}
	return &one
}

// instanceName returns the default name of a worker: HOST:PORT of the API, with this host's name in place of loopback.
func instanceName(asker *enginehttp.Asker) string {
	host := asker.Host()
	if isLoopback(host) {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return net.JoinHostPort(host, asker.Port())
}

// isLoopback reports whether other hosts cannot connect to host: localhost, a loopback address, or an unspecified
// address.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") ||
		ip != nil && (ip.IsLoopback() || ip.IsUnspecified())
}

// errOtherSettings ends a run: the engine has restarted with new settings.
var errOtherSettings = errors.New("the engine has new settings")

// engineWatch compares the settings of a restarted engine with the earlier settings.
type engineWatch struct {
	away  atomic.Int32  // ranks without a connection to the engine
	again chan struct{} // the state of a rank's engine has changed
}

func newEngineWatch() *engineWatch { return &engineWatch{again: make(chan struct{}, 1)} }

// changed records a change of the state of a rank's engine.
func (w *engineWatch) changed(before, now api.EngineState) {
	isAway := func(s api.EngineState) int32 {
		if s == api.EngineSilent || s == api.EngineGone {
			return 1
		}
		return 0
	}
	w.away.Add(isAway(now) - isAway(before))
	loop.Wake(w.again)
}

// run reads the engine's settings after each change, and repeatedly while a rank has no connection. run returns
// errOtherSettings if the settings have changed.
func (w *engineWatch) run(ctx context.Context, asker *enginehttp.Asker, was enginehttp.Engine) error {
	was.Version, was.Names = "", enginehttp.Names{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.again:
		}
		for ctx.Err() == nil {
			now, err := asker.Ask(ctx)
			now.Version, now.Names = "", enginehttp.Names{}
			switch {
			case err == nil && !reflect.DeepEqual(now, was):
				return errOtherSettings
			case err == nil && w.away.Load() == 0:
			default:
				loop.Wait(ctx, askEvery)
				continue
			}
			break
		}
	}
}
