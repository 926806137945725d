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

// Config configures the guesses of a node.
type Config struct {
	Settings
	Pool func(model string) *registry.Pool // returns the current ranks of a model
}

// tick is the interval between expirations.
const tick = 100 * time.Millisecond

// Service has the guesses of all models. Its methods may be called from any goroutine.
type Service struct {
	cfg Config
	now func() time.Duration // on the process's monotonic clock

	mu     sync.RWMutex // guards models. It is acquired while internal/choose/load's is held, never the other way round
	models map[load.Model]*model
}

// model has the guesses of one model.
type model struct {
	table  *Table
	pool   *registry.Pool // the pool of the table's rules
	places atomic.Pointer[places]
}

// places caches the positions of a list's ranks by the table's ids.
type places struct {
	first   *registry.PoolRank // the first element of the list
	n       int                // the length of the list
	changes uint64
	place   []int32
}

// New returns a service without guesses. Settings without a value get their defaults.
func New(cfg Config) (*Service, error) {
	if err := cfg.Settings.Check(); err != nil {
		return nil, err
	}
	cfg.Settings.SetDefaults()
	start := time.Now()
	return &Service{cfg: cfg, now: func() time.Duration { return time.Since(start) }, models: map[load.Model]*model{}}, nil
}

// Observe applies a change of a request. It is the function Watch of internal/choose/load.
func (s *Service) Observe(key load.Model, r *load.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.models[key]; m != nil || r.New {
		s.model(key).table.Observe(s.now(), r)
	}
}

// model returns the guesses of a model, and creates them if necessary. The caller holds s.mu.
func (s *Service) model(key load.Model) *model {
	m := s.models[key]
	if m == nil {
		m = &model{table: NewTable(s.cfg.MaxBlocks, s.cfg.PruneRatio, s.cfg.TTL)}
		s.models[key] = m
		s.refresh(m, s.cfg.Pool(key.Name))
	}
	return m
}

// Past yields the ended requests behind the guesses, for a starting node. It is the function Past of
// internal/choose/load.
func (s *Service) Past(key load.Model, yield func(*load.Request) bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if m := s.models[key]; m != nil {
		m.table.Past(s.now(), yield)
	}
}

// Recall applies a request from another node's [Service.Past]. It is the function Recall of internal/choose/load.
func (s *Service) Recall(key load.Model, r *load.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.model(key).table.Recall(s.now(), r)
}

// refresh updates a table's rules if the pool has changed.
func (s *Service) refresh(m *model, pool *registry.Pool) {
	if m.pool != pool {
		m.pool = pool
		m.table.SetRules(s.now(), s.cfg.rules(pool))
	}
}

// Any reports whether a model has any guesses.
func (s *Service) Any(name string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m := s.models[load.Model{Name: name}]
	return m != nil && m.table.Size() > 0
}

// Depths sets the predicted number of leading blocks of seq for each rank with a guess, and reports whether any rank
// has one. ranks are the model's pool, which does not change. depths has the same length and contains zeros.
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
		s.refresh(m, s.cfg.Pool(name)) // another call may have refreshed with a later pool since
		s.mu.Unlock()
		s.mu.RLock()
	}
	defer s.mu.RUnlock()
	if m == nil {
		return false
	}
	at := m.places.Load()
	if at == nil || at.first != &ranks[0] || at.n != len(ranks) || at.changes != m.table.changes {
		list := make(map[events.RankKey]int32, len(ranks))
		for i := range ranks {
			list[ranks[i].RankKey] = int32(i)
		}
		at = &places{first: &ranks[0], n: len(ranks)}
		at.place, at.changes = m.table.Places(list)
		m.places.Store(at)
	}
	return m.table.Depths(seq, at.place, depths)
}

// settle is the maximum delay between a prompt's first output token and its blocks in the index.
const settle = time.Second

// Refute compares the predicted depths of a prompt with those that events confirm. depths and confirmed have the length
// of ranks. If a rank with events should have announced its blocks before the lookup in the index, its guess is dropped
// and its depth becomes 0. age is the time since the lookup began. The index was up to date then.
func (s *Service) Refute(name string, ranks []registry.PoolRank, seq []events.SeqHash, age time.Duration,
	confirmed, depths []uint32) {
	if s.cfg.PredictTTL <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.models[load.Model{Name: name}]
	if m == nil {
		return
	}
	passed := s.now() - age - settle
	for i, depth := range depths {
		if r := &ranks[i]; depth > confirmed[i] && r.Record.Events != api.EventsNone &&
			m.table.Refute(r.RankKey, seq, int(confirmed[i]), passed) {
			depths[i] = 0
		}
	}
}

// Run expires guesses until ctx is done.
func (s *Service) Run(ctx context.Context) {
	loop.Every(ctx, tick, func(time.Time) { s.expire() })
}

func (s *Service) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, m := range s.models {
		pool := s.cfg.Pool(key.Name)
		if len(pool.Ranks) > 0 || m.pool == nil || len(m.pool.Ranks) > 0 {
			s.refresh(m, pool) // a pool without ranks is a new one each time
		}
		m.table.Expire(s.now())
	}
}

// Status counts the guesses of a model.
type Status struct {
	load.Model
	Blocks  int               // predicted blocks and blocks without hashes, counted per rank
	Dropped map[string]uint64 // dropped blocks since the node started, by reason
}

// Status lists the models with current or former guesses.
func (s *Service) Status() (list []Status) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for key, m := range s.models {
		st := Status{Model: key, Blocks: m.table.Size(), Dropped: map[string]uint64{}}
		for why, n := range m.table.Dropped {
			st.Dropped[Reason(why).String()] = n
		}
		list = append(list, st)
	}
	return list
}
