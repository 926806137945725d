package main

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

// enginePoll asks an engine over HTTP what changes while it runs, and is not in its events: whether it sleeps, which
// LoRA adapters it has and which names it accepts.
type enginePoll struct {
	cfg   *running
	model string
	asker *enginehttp.Asker
	kind  string
	log   *slog.Logger

	mu    sync.Mutex // guards the fields below
	names enginehttp.Names
	ranks map[*polledRank]bool
}

// polledRank is a rank of the engine that is shimmed.
type polledRank struct {
	report *shim.Report
	sleep  chan shim.SleepReport // the last one
}

func newEnginePoll(r *running, model string, said enginehttp.Engine, asker *enginehttp.Asker,
	log *slog.Logger) *enginePoll {
	return &enginePoll{cfg: r, model: model, asker: asker, kind: said.Kind, log: log, names: said.Names,
		ranks: map[*polledRank]bool{}}
}

// serve has a rank told of answers until end is called.
func (p *enginePoll) serve(report *shim.Report) (sleep <-chan shim.SleepReport, end func()) {
	rank := &polledRank{report, make(chan shim.SleepReport, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ranks[rank] = true
	report.SetNames(p.cfg.namesOf(p.names, p.model)) // they may have changed since the rank was prepared
	return rank.sleep, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.ranks, rank)
	}
}

// run asks until ctx ends.
func (p *enginePoll) run(ctx context.Context) {
	check := p.asker.NewSleepCheck()
	for i := 1; loop.Wait(ctx, p.cfg.engineCheck); i++ {
		if i%namesEvery == 0 {
			p.checkNames(ctx)
		}
		if p.kind == enginehttp.VLLM {
			asked := time.Now()
			if asleep, known, err := check.Ask(ctx); err == nil && known {
				p.tell(shim.SleepReport{Asked: asked, Asleep: asleep})
			}
		}
	}
}

func (p *enginePoll) tell(s shim.SleepReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank := range p.ranks {
		select {
		case <-rank.sleep: // an older one
		default:
		}
		rank.sleep <- s // there is room: nobody else sends
	}
}

func (p *enginePoll) checkNames(ctx context.Context) {
	now, err := p.asker.Names(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || now.Model == "" || reflect.DeepEqual(now, p.names) {
		return // an engine that does not answer keeps its names
	}
	p.names = now
	names, adapters := p.cfg.namesOf(now, p.model)
	p.log.Info("the engine serves other names now", "model", p.model, "names", names, "lora_adapters", adapters)
	left := 0
	for rank := range p.ranks {
		left = rank.report.SetNames(names, adapters)
	}
	if left > 0 {
		p.log.Warn("names of the engine are left out: they are too long, or too many", "names", left)
	}
}

// namesOf returns the further names and the adapters to register for a model: what flags state, or else what the engine
// lists.
func (r *running) namesOf(n enginehttp.Names, model string) (names, adapters []string) {
	names, adapters = r.spec.ServedNames, r.spec.LoRAAdapters
	if names == nil {
		names = slices.DeleteFunc(append([]string{n.Model}, n.Aliases...),
			func(name string) bool { return name == "" || name == model })
	}
	if adapters == nil {
		adapters = n.Adapters
	}
	return names, adapters
}
