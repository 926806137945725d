package capacity

import (
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config configures a Tracker.
type Config struct {
	// Samples bounds the references of each model's log, of 32 bytes each.
	Samples int

	// Blocks returns the number of blocks in the caches of a model's workers. A log covers 8 times as many different
	// blocks, so that curves reach to four times the size. nil means 0.
	Blocks func(model string) uint64
}

const (
	// MaxSamples is the largest number of references in a log. The references and the workers of a log have less than
	// 1 MiB.
	MaxSamples = 28_000

	reach     = 8       // times the blocks of the caches
	minCover  = 1 << 16 // different blocks that a log covers at least
	maxModels = 64      // further models have no log

	// maxStrays is the number of successive requests with another block size that replace a model's log.
	maxStrays = 1000
)

// Tracker stores the sampled references of a node, by model. It is safe for concurrent use.
type Tracker struct {
	cfg  Config
	mu   sync.Mutex
	logs map[string]*Log
}

// New returns a tracker without references.
func New(cfg Config) *Tracker {
	if cfg.Blocks == nil {
		cfg.Blocks = func(string) uint64 { return 0 }
	}
	return &Tracker{cfg: cfg, logs: map[string]*Log{}}
}

// Requested adds a request with the names of the prompt's blocks, in order. An empty worker is unknown. Requested keeps
// no reference to names.
func (t *Tracker) Requested(model string, size uint32, at time.Time, worker events.WorkerID, names []funnel.Name) {
	if len(names) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.logs[model]
	switch {
	case l == nil && len(t.logs) >= maxModels:
		return
	case l == nil || l.BlockSize != size && l.strays >= maxStrays:
		l = NewLog(size, t.cfg.Samples)
		t.logs[model] = l
	case l.BlockSize != size:
		l.strays++
		l.Skipped += uint64(len(names))
		return
	}
	l.strays = 0
	if len(l.Refs)+len(names) > l.size {
		l.want = max(minCover, reach*t.cfg.Blocks(model))
	}
	l.Add(at.UnixMicro(), worker, names)
}

// Samples returns a model's sampled references, at most most of them; nil if the model has no log.
func (t *Tracker) Samples(model string, most int) *Samples {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.logs[model]
	if l == nil {
		return nil
	}
	return l.Thinned(most)
}
