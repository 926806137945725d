package guess

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config is a node's.
type Config struct {
	Settings
	Pool func(model string) *registry.Pool // who serves a model now
}

// tick is how often guesses expire.
const tick = 100 * time.Millisecond

// Service has the guesses of all models. Its methods may be called from any goroutine.
type Service struct {
	cfg Config
	now func() time.Duration // on the process's monotonic clock

	mu     sync.RWMutex // of what follows. Readers share it; it is taken within internal/choose/load's, never around it
	models map[load.Model]*model
}

// model is one model's guesses.
type model struct {
	table  *Table
	pool   *registry.Pool // of which the table has the rules
	places atomic.Pointer[places]
}

// places is where the ranks of a list stand by the table's ids.
type places struct {
	of      *registry.PoolRank // the list's first, and its length
	n       int
	changes uint64
	place   []int32
}

// New returns a service without guesses. Settings that are not set have their defaults.
func New(cfg Config) (*Service, error) {
	if err := cfg.Settings.Check(); err != nil {
		return nil, err
	}
	cfg.Settings.SetDefaults()
	start := time.Now()
	return &Service{cfg: cfg, now: func() time.Duration { return time.Since(start) }, models: map[load.Model]*model{}}, nil
}

// Observe takes news of a request; it is what internal/choose/load's Watch is set to.
func (s *Service) Observe(of load.Model, r *load.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[of]; m != nil || r.New {
		s.model(of).table.Observe(s.now(), r)
	}
}

// model returns a model's guesses, and makes them. s.mu is held.
func (s *Service) model(of load.Model) *model {
	m := s.models[of]
	if m == nil {
		m = &model{table: NewTable(s.cfg.MaxBlocks, s.cfg.PruneRatio, s.cfg.TTL)}
		s.models[of] = m
		s.refresh(m, s.cfg.Pool(of.Name))
	}
	return m
}

// Past and Recall hand on what is guessed to a node that starts; they are what internal/choose/load's are set to.
func (s *Service) Past(of load.Model, yield func(*load.Request) bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if m := s.models[of]; m != nil {
		m.table.Past(s.now(), yield)
	}
}

// Recall takes what another node's [Service.Past] has yielded.
func (s *Service) Recall(of load.Model, r *load.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.model(of).table.Recall(s.now(), r)
}

// refresh has a table know who is registered now.
func (s *Service) refresh(m *model, pool *registry.Pool) {
	if m.pool != pool {
		m.pool = pool
		m.table.SetRules(s.now(), s.cfg.rules(pool))
	}
}

// Any reports whether anything is guessed of a model.
func (s *Service) Any(name string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m := s.models[load.Model{Name: name}]
	return m != nil && m.table.Size() > 0
}

// Depths sets, for each of the ranks that is guessed to hold leading blocks of seq, how many, and reports whether there
// is any. The ranks are of the model's pool and do not change; depths are as many, all 0.
func (s *Service) Depths(name string, ranks []registry.PoolRank, seq []events.SeqHash, depths []uint32) bool {
	if len(seq) == 0 || len(ranks) == 0 {
		return false
	}
	pool := s.cfg.Pool(name)
	s.mu.RLock()
	m := s.models[load.Model{Name: name}]
	if m != nil && m.pool != pool {
		s.mu.RUnlock()
		s.mu.Lock()
		s.refresh(m, pool)
		s.mu.Unlock()
		s.mu.RLock()
	}
	defer s.mu.RUnlock()
	if m == nil {
		return false
	}
	at := m.places.Load()
	if at == nil || at.of != &ranks[0] || at.n != len(ranks) || at.changes != m.table.changes {
		list := make(map[events.RankKey]int32, len(ranks))
		for i := range ranks {
			list[ranks[i].RankKey] = int32(i)
		}
		at = &places{of: &ranks[0], n: len(ranks)}
		at.place, at.changes = m.table.Places(list)
		m.places.Store(at)
	}
	return m.table.Depths(seq, at.place, depths)
}

// settle is how long after a prompt's first output token its blocks are in the index at the latest.
const settle = time.Second

// Refute compares guesses with what events confirm of a prompt: depths and confirmed are as many as the ranks. Where a
// rank with events should have announced more by now, its guess is dropped, and its depth is 0. The events must be
// known up to now.
func (s *Service) Refute(name string, ranks []registry.PoolRank, seq []events.SeqHash, confirmed, depths []uint32) {
	if s.cfg.PredictTTL <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.models[load.Model{Name: name}]
	if m == nil {
		return
	}
	now := s.now()
	for i, depth := range depths {
		if r := &ranks[i]; depth > confirmed[i] && r.Record.Events != api.EventsNone &&
			m.table.Refute(r.RankKey, seq, int(confirmed[i]), now-settle) {
			depths[i] = 0
		}
	}
}

// Run lets guesses expire until ctx ends.
func (s *Service) Run(ctx context.Context) {
	loop.Every(ctx, tick, func(time.Time) { s.expire() })
}

func (s *Service) expire() {
	s.mu.RLock()
	pools := make(map[load.Model]*registry.Pool, len(s.models))
	for of := range s.models {
		pools[of] = nil
	}
	s.mu.RUnlock()
	for of := range pools {
		pools[of] = s.cfg.Pool(of.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for of, pool := range pools {
		m := s.models[of]
		if len(pool.Ranks) > 0 || m.pool == nil || len(m.pool.Ranks) > 0 {
			s.refresh(m, pool) // a pool without ranks is another one each time
		}
		m.table.Expire(s.now())
	}
}

// Status is a model's.
type Status struct {
	load.Model
	Blocks  int               // that are guessed, or taken beside, counted for each rank
	Dropped map[string]uint64 // since the node started, by reason
}

// Status lists models that have or had guesses.
func (s *Service) Status() (list []Status) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for of, m := range s.models {
		st := Status{Model: of, Blocks: m.table.Size(), Dropped: map[string]uint64{}}
		for why, n := range m.table.Dropped {
			st.Dropped[Reason(why).String()] = n
		}
		list = append(list, st)
	}
	return list
}
