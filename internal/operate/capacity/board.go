package capacity

import (
	"context"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// BoardConfig configures a Board.
type BoardConfig struct {
	Models  func() []string // models of a round; the board has no others
	Compute func(ctx context.Context, model string) (*api.Capacity, error)
}

const (
	boardEvery = time.Minute // between the starts of two rounds, at least
	boardPause = 99          // times the duration of a computation: at most 1 % of a core
	boardAge   = 10 * time.Minute
)

// Board has the tiers of each model's latest report, for metrics. A call of Tiers starts a round of computations in the
// goroutine of Run, unless a round began within the last minute. So nothing is computed without a reader. It is safe
// for concurrent use.
type Board struct {
	cfg  BoardConfig
	wake chan struct{} // capacity 1

	mu sync.Mutex
	of map[string]posted // by model
}

// posted has the tiers of a report.
type posted struct {
	at    time.Time
	tiers []api.CapacityTier
}

// NewBoard returns a board without reports.
func NewBoard(cfg BoardConfig) *Board {
	return &Board{cfg: cfg, wake: make(chan struct{}, 1), of: map[string]posted{}}
}

// Tiers returns the tiers by model. It omits reports older than ten minutes. A nil board has none.
func (b *Board) Tiers() map[string][]api.CapacityTier {
	if b == nil {
		return nil
	}
	loop.Wake(b.wake)
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make(map[string][]api.CapacityTier, len(b.of))
	for model, p := range b.of {
		if time.Since(p.at) <= boardAge {
			list[model] = p.tiers
		}
	}
	return list
}

// Run computes reports until ctx ends.
func (b *Board) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.wake:
		}
		next := time.Now().Add(boardEvery)
		if !b.round(ctx) || !loop.Wait(ctx, time.Until(next)) {
			return
		}
	}
}

// round computes the report of each model. It returns false if ctx ends.
func (b *Board) round(ctx context.Context) bool {
	models := b.cfg.Models()
	models = models[:min(len(models), maxModels)]
	b.keep(models)
	for _, model := range models {
		begun := time.Now()
		report, err := b.cfg.Compute(ctx, model)
		b.post(model, report, err)
		if !loop.Wait(ctx, boardPause*time.Since(begun)) {
			return false
		}
	}
	return true
}

// keep removes the reports of all other models.
func (b *Board) keep(models []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := make(map[string]posted, len(models))
	for _, model := range models {
		if p, found := b.of[model]; found {
			kept[model] = p
		}
	}
	b.of = kept
}

// post replaces a model's report. A report without requests, or without the samples of a node, is no report.
func (b *Board) post(model string, report *api.Capacity, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.of, model)
	if err == nil && report.Samples > 0 && len(report.Missing)+len(report.Disabled) == 0 {
		b.of[model] = posted{time.Now(), report.Tiers}
	}
}
