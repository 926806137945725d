package host

import (
	"cmp"
	"context"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// namesEvery is the number of sleep checks per check of the engine's names.
const namesEvery = 5

// enginePoll reads changes of a running engine over HTTP. The engine's events omit such changes: sleep, LoRA adapters
// and accepted names.
type enginePoll struct {
	cfg   *Shim
	model string
	asker *enginehttp.Asker
	kind  string
	size  uint32 // of a block in tokens, as the engine reports it
	only  bool   // the engine has a single rank
	log   *slog.Logger

	mu       sync.Mutex // guards the fields below
	names    enginehttp.Names
	ranks    map[*polledRank]bool
	received map[events.RankKey]time.Time // when the last load came from a load socket
}

// polledRank is a rank of the engine with a shim of this process.
type polledRank struct {
	report *shim.Report
	key    events.RankKey
	wanted func() bool           // a node needs the load
	sleep  chan shim.SleepReport // the latest report
}

func newEnginePoll(r *Shim, model string, said enginehttp.Engine, asker *enginehttp.Asker,
	log *slog.Logger) *enginePoll {
	return &enginePoll{cfg: r, model: model, asker: asker, kind: said.Kind, size: said.BlockSize, log: log,
		only: len(said.Ranks) == 1, names: said.Names, ranks: map[*polledRank]bool{},
		received: map[events.RankKey]time.Time{}}
}

// serve sends answers to a rank until end is called. server receives the requests of nodes; nil: there are none.
func (p *enginePoll) serve(report *shim.Report, s *Shim, server *shim.ControlServer) (
	sleep <-chan shim.SleepReport, end func(),
) {
	rank := &polledRank{report: report, wanted: server.LoadsWanted, sleep: make(chan shim.SleepReport, 1),
		key: events.RankKey{Instance: events.WorkerID(s.Worker), Rank: events.Rank(s.Rank)}}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ranks[rank] = true
	report.SetNames(p.cfg.namesOf(p.names, p.model)) // the names may have changed since the rank was prepared
	return rank.sleep, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.ranks, rank)
	}
}

// run polls the engine until ctx ends.
func (p *enginePoll) run(ctx context.Context) {
	check := p.asker.NewSleepCheck()
	for i := 1; loop.Wait(ctx, p.cfg.EngineCheck); i++ {
		if i%namesEvery == 0 {
			p.checkNames(ctx)
		}
		if p.kind == enginehttp.VLLM {
			asked := time.Now()
			if asleep, known, err := check.Ask(ctx); err == nil && known {
				p.report(shim.SleepReport{Asked: asked, Asleep: asleep})
			}
		}
	}
}

func (p *enginePoll) report(s shim.SleepReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank := range p.ranks {
		select {
		case <-rank.sleep: // an older report
		default:
		}
		rank.sleep <- s // the channel has room: only this goroutine sends, under the lock
	}
}

// loadTimeout is the least time limit of a read. An idle TensorRT-LLM answers after two seconds.
const loadTimeout = 4 * time.Second

// noLoads is the number of intervals between two reads of an engine that does not report its load.
const noLoads = 30

// runLoads reads the engine's load while a node needs it, and publishes it to all nodes, until ctx ends.
func (p *enginePoll) runLoads(ctx context.Context, ns *jetstream.Namespace) {
	failed := Limiter{Every: p.cfg.LogRepeat}
	for skip := 0; loop.Wait(ctx, p.cfg.EngineLoad); skip-- {
		ranks := p.silent(p.wantedRanks())
		if len(ranks) == 0 || skip > 0 {
			continue
		}
		asking, cancel := context.WithTimeout(ctx, max(p.cfg.EngineLoad, loadTimeout))
		loads, err := p.asker.Loads(asking, p.kind, p.size)
		cancel()
		if err == nil && loads == nil {
			skip = noLoads
			continue
		}
		if err == nil {
			err = publishLoads(ns, reportsOf(p.kind, ranks, loads))
		}
		if err != nil && ctx.Err() == nil {
			failed.WarnTo(p.log, "the engine's load cannot be read or published; choices use the bookings alone", "error",
				err, "what_to_do", "check that the engine answers at --engine-http, or set --engine-http-load to 0")
		}
	}
}

// wantedRanks returns the ranks of this process, if a node needs the load of one of them.
func (p *enginePoll) wantedRanks() (list []events.RankKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wanted := false
	for rank := range p.ranks {
		list = append(list, rank.key)
		wanted = wanted || rank.wanted()
	}
	if !wanted {
		return nil
	}
	return list
}

// reportsOf returns the reports of the ranks of this process. An engine with one rank reports the load of that
// rank. The engine's number of the rank has no effect then.
func reportsOf(kind string, ranks []events.RankKey, loads []enginehttp.Load) (list []events.EngineLoad) {
	for _, key := range ranks {
		i := slices.IndexFunc(loads, func(l enginehttp.Load) bool { return l.Rank == uint32(key.Rank) })
		if i < 0 && len(ranks) == 1 && len(loads) == 1 {
			i = 0
		}
		if i < 0 {
			continue
		}
		list = append(list, reportOf(kind, key, &loads[i]))
	}
	return list
}

// reportOf returns the report of a rank.
func reportOf(kind string, key events.RankKey, l *enginehttp.Load) events.EngineLoad {
	report := events.EngineLoad{Worker: key.Instance, Rank: key.Rank, Running: &l.Running, Waiting: &l.Waiting,
		WaitingTokens: l.WaitingTokens, Source: cmp.Or(l.Source, kind)}
	if l.TotalBlocks > 0 {
		report.UsedBlocks, report.TotalBlocks = &l.UsedBlocks, &l.TotalBlocks
	}
	return report
}

// publishLoads publishes the loads of ranks of one worker to all nodes.
func publishLoads(ns *jetstream.Namespace, loads []events.EngineLoad) error {
	if len(loads) == 0 {
		return nil
	}
	subject, err := jetstream.Names(ns.Name()).Engine(loads[0].Worker)
	if err != nil {
		return err
	}
	body, err := api.Marshal(api.MsgPack, &api.EngineLoads{Loads: loads})
	if err != nil {
		return err
	}
	return ns.Conn().Send(subject, api.MsgPack, body)
}

func (p *enginePoll) checkNames(ctx context.Context) {
	now, err := p.asker.Names(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || now.Model == "" || reflect.DeepEqual(now, p.names) {
		return // without an answer, the names stay
	}
	p.names = now
	names, adapters := p.cfg.namesOf(now, p.model)
	p.log.Info("the names of the engine's models have changed", "model", p.model, "names", names, "lora_adapters",
		adapters)
	left := 0
	for rank := range p.ranks {
		left = rank.report.SetNames(names, adapters)
	}
	if left > 0 {
		p.log.Warn("names of the engine are left out: too long, or too many", "names", left)
	}
}

// namesOf returns the further names and the adapters to register for a model. Flags have priority over the engine's
// list.
func (s *Shim) namesOf(n enginehttp.Names, model string) (names, adapters []string) {
	names, adapters = s.spec.ServedNames, s.spec.LoRAAdapters
	if names == nil {
		names = slices.DeleteFunc(append([]string{n.Model}, n.Aliases...),
			func(name string) bool { return name == "" || name == model })
	}
	if adapters == nil {
		adapters = n.Adapters
	}
	return names, adapters
}
