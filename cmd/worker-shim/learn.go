package main

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
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func (r *running) checkLearning() error {
	if r.engineHTTP == "" {
		if r.engineHTTPToken != "" {
			return errors.New("--engine-http-token-file says nothing without --engine-http")
		}
		return nil
	}
	if r.fleet() {
		return fmt.Errorf("--engine-http is not for --source %s", r.source)
	}
	if _, err := r.asker(); err != nil {
		return err
	}
	if r.engine == "" && (r.replay != "" || r.rank != 0 || r.ranks != 1) {
		return errors.New(
			"--replay, --rank and --ranks go with --engine: without it they are learned from --engine-http")
	}
	return nil
}

// asker is who asks the engine.
func (r *running) asker() (*enginehttp.Asker, error) {
	token, err := cli.TokenFile("engine-http-token-file", r.engineHTTPToken)
	if err != nil {
		return nil, err
	}
	a, err := enginehttp.New(r.engineHTTP, token, nil)
	if err != nil {
		return nil, fmt.Errorf("--engine-http: %w", err)
	}
	return a, nil
}

// askEvery is the pause between two questions to an engine that is not there or not ready.
const askEvery = time.Second

// ranksToServe lists what is to be shimmed, one for each rank: by flags, and by what the engine says, for which it
// waits.
func (r *running) ranksToServe(ctx context.Context, log *slog.Logger) (list []*running, said enginehttp.Engine,
	err error) {
	if r.engineHTTP == "" {
		list, err = r.byFlags()
		return list, said, err
	}
	asker, err := r.asker()
	if err != nil {
		return nil, said, err
	}
	waiting := limiter{every: r.logWindow}
	for {
		said, err = asker.Ask(ctx)
		if !errors.Is(err, enginehttp.ErrNotReady) || ctx.Err() != nil {
			break
		}
		waiting.warn(log, "waiting for the engine to say how it publishes", "engine_http", r.engineHTTP, "error", err,
			"what_to_do", "see that the engine runs, and that this is where it serves its API")
		loop.Wait(ctx, askEvery)
	}
	if err != nil {
		return nil, said, fmt.Errorf("--engine-http %s: %w", r.engineHTTP, err)
	}
	log.Info("the engine says how it publishes", "engine", said.Kind, "version", said.Version,
		"model", said.Model, "block_size", said.BlockSize, "ranks", len(said.Ranks),
		"total_kv_blocks", said.TotalKVBlocks, "max_num_batched_tokens", said.MaxBatchedTokens)
	if said.UnnamedAdapters {
		log.Error("the engine's events do not name adapters: its blocks are skipped, and nothing of it is found",
			"engine", said.Kind, "version", said.Version, "what_to_do", enginehttp.NameAdapters)
	}
	list, err = r.filledIn(ctx, said, asker, log)
	return list, said, err
}

func (r *running) byFlags() (list []*running, err error) {
	for i := range r.ranks {
		one, err := r.ofRank(i)
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// filledIn lists the ranks that the engine has, with all that flags do not say.
func (r *running) filledIn(ctx context.Context, said enginehttp.Engine, asker *enginehttp.Asker, log *slog.Logger) (
	list []*running, err error) {
	all := *r
	all.engineHTTP, all.engineHTTPToken = "", ""
	if all.source == "auto" {
		all.source = said.Kind
	}
	all.instance = cmp.Or(all.instance, instanceName(asker))
	all.model = cmp.Or(all.model, said.Model)
	all.blockSize = cmp.Or(all.blockSize, r.engineSize)
	if all.blockSize == 0 && said.Nominal {
		all.proof = newSizeProof()
	}
	all.blockSize = cmp.Or(all.blockSize, said.BlockSize)
	all.unnamedAdapters = said.UnnamedAdapters
	spec := *r.spec
	spec.TotalKVBlocks = cmp.Or(spec.TotalKVBlocks, said.TotalKVBlocks)
	spec.MaxBatchedTokens = cmp.Or(spec.MaxBatchedTokens, said.MaxBatchedTokens)
	spec.SetNames(r.namesOf(said.Names, all.model))
	all.spec = &spec
	learned := learnStore(all.l3, said, log)
	name := strings.TrimSpace(said.Kind + " " + said.Version)
	switch {
	case all.engine == "" && said.Ranks == nil:
		return nil,
			cli.UsageErrorf("%s does not say over HTTP where it publishes events (vLLM 0.32 is the first that does): "+
				"give --engine, and --replay if it has a replay_endpoint", name)
	case all.model == "":
		return nil, cli.UsageErrorf("%s does not say over HTTP which model it serves: give --model", name)
	case all.blockSize == 0:
		return nil, cli.UsageErrorf("%s does not say over HTTP how many tokens are in a block "+
			"(vLLM does in /metrics, unless that is switched off): give --block-size", name)
	case all.engine != "":
		list, err = all.byFlags()
	default:
		for _, rank := range said.Ranks {
			one := all.at(ctx, rank)
			if one.engineSnapshot != "" && err == nil {
				one.engineSnapshot, err = zmtp.PortsAfter(all.engineSnapshot, rank.Rank)
			}
			list = append(list, one)
		}
	}
	for _, one := range list {
		if err == nil {
			one.ranks = 1
			err = one.check() // it reads --l3-config again
			one.l3 = learned
		}
	}
	return list, err
}

// at is what to do for a rank that publishes there.
func (r *running) at(ctx context.Context, rank enginehttp.Rank) *running {
	one := *r
	one.rank, one.engine, one.replay = rank.Rank, rank.Endpoint, rank.Replay
	one.topic = cmp.Or(one.topic, rank.Topic)
	one.listen = r.listen || rank.Listen
	if rank.Unclear && !one.listen { // the engine runs: where it does not listen it dials out
		err := zmtp.Probe(ctx, rank.Endpoint, 2*time.Second, nil)
		one.listen = err != nil && zmtp.Refuses(err)
	}
	return &one
}

// instanceName returns the default name of a worker: HOST:PORT of its API, with this host's name in place of loopback.
func instanceName(asker *enginehttp.Asker) string {
	host := asker.Host()
	if isLoopback(host) {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return net.JoinHostPort(host, asker.Port())
}

// isLoopback reports whether other hosts cannot connect to host: localhost, a loopback address, or an unspecified one.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") ||
		ip != nil && (ip.IsLoopback() || ip.IsUnspecified())
}

// errOtherSettings: the engine that came back has other settings than the one before.
var errOtherSettings = errors.New("the engine has other settings now")

// engineWatch notices when an engine came back, since it may have other settings then.
type engineWatch struct {
	away  atomic.Int32  // ranks that are not connected to their engine
	again chan struct{} // a rank's engine is in another state
}

func newEngineWatch() *engineWatch { return &engineWatch{again: make(chan struct{}, 1)} }

// changed takes that a rank's engine was in one state and is in another.
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

// run asks the engine after each change, and for as long as it is away, whether its settings are what they were. It
// returns errOtherSettings if they are not.
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
