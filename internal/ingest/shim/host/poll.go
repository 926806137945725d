package host

import (
	"context"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
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
	log   *slog.Logger

	mu    sync.Mutex // guards the fields below
	names enginehttp.Names
	ranks map[*polledRank]bool
}

// polledRank is a rank of the engine with a shim of this process.
type polledRank struct {
	report *shim.Report
	sleep  chan shim.SleepReport // the latest report
}

func newEnginePoll(r *Shim, model string, said enginehttp.Engine, asker *enginehttp.Asker,
	log *slog.Logger) *enginePoll {
	return &enginePoll{cfg: r, model: model, asker: asker, kind: said.Kind, log: log, names: said.Names,
		ranks: map[*polledRank]bool{}}
}

// serve sends answers to a rank until end is called.
func (p *enginePoll) serve(report *shim.Report) (sleep <-chan shim.SleepReport, end func()) {
	rank := &polledRank{report, make(chan shim.SleepReport, 1)}
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
