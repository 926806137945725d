package guess

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Policy determines the lifetime of guesses about workers without events.
type Policy string

// The policies.
const (
	TTL Policy = "ttl" // Settings.TTL after the last request with the block
	LRU Policy = "lru" // until the engine would evict the block; as TTL if total_kv_blocks is not registered
	Off Policy = "off" // no guesses
)

// Settings are the operator's settings of guesses. They should be equal on all nodes.
type Settings struct {
	Policy Policy        // for workers without events; default ttl
	TTL    time.Duration // lifetime of guesses about workers without events; default 120 s

	// PredictTTL is the lifetime of guesses about workers with events: the delay of events after a booking. Default 0: no
	// such guesses.
	PredictTTL time.Duration

	// MaxBlocks bounds the guesses of each model, counted per rank. Default 2^20, with lru 2^24. A block takes 8 bytes,
	// and a slot of some 100 bytes per rank and node of the trie.
	MaxBlocks int

	// PruneRatio is the remaining share of MaxBlocks after a model exceeds it. Default 0.8; above 0, at most 1.
	PruneRatio float64
}

// MaxPredictTTL bounds PredictTTL. A longer delay of events is a failure.
const MaxPredictTTL = time.Minute

// SetDefaults sets the default of each zero value.
func (s *Settings) SetDefaults() {
	if s.Policy == "" {
		s.Policy = TTL
	}
	if s.TTL == 0 {
		s.TTL = 120 * time.Second
	}
	if s.MaxBlocks == 0 {
		s.MaxBlocks = 1 << 20
		if s.Policy == LRU {
			s.MaxBlocks = 1 << 24
		}
	}
	if s.PruneRatio == 0 {
		s.PruneRatio = 0.8
	}
}

// Check returns all invalid settings as errors with the names of their flags. Zero values are valid defaults.
func (s *Settings) Check() error {
	var errs []error
	bad := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(s.Policy != "" && s.Policy != TTL && s.Policy != LRU && s.Policy != Off, "--guess-policy %q is none of %s, %s, %s",
		s.Policy, TTL, LRU, Off)
	bad(s.TTL < 0, "--guess-ttl %v is negative", s.TTL)
	bad(s.PredictTTL < 0 || s.PredictTTL > MaxPredictTTL, "--predict-ttl %v is not from 0 (off) to %v", s.PredictTTL,
		MaxPredictTTL)
	bad(s.MaxBlocks < 0 || s.MaxBlocks > 1<<28, "--guess-max-blocks %d is not from 1 to 2^28", s.MaxBlocks)
	bad(s.PruneRatio != 0 && !(s.PruneRatio > 0 && s.PruneRatio <= 1), "--guess-prune-ratio %v is not above 0 and up to 1",
		s.PruneRatio)
	return errors.Join(errs...)
}

// rule returns the rule for a rank by its registration and the state of its engine. An engine that ended or sleeps
// holds nothing.
func (s *Settings) rule(rank *registry.PoolRank) Rule {
	r := rank.Record
	switch {
	case rank.Engine == api.EngineGone, rank.Engine == api.EngineAsleep:
		return Rule{}
	case r.Events != api.EventsNone && rank.Engine == api.EngineConnected:
		return Rule{TTL: s.PredictTTL, Life: rank.EngineSince.UnixNano()}
	case r.Events != api.EventsNone:
		return Rule{TTL: s.PredictTTL}
	case s.Policy == Off:
		return Rule{}
	case s.Policy == LRU && r.TotalKVBlocks > 0:
		return Rule{Capacity: int(min(r.TotalKVBlocks, math.MaxInt32))}
	}
	return Rule{TTL: s.TTL}
}

func (s *Settings) rules(pool *registry.Pool) map[events.RankKey]Rule {
	rules := make(map[events.RankKey]Rule, len(pool.Ranks))
	for i := range pool.Ranks {
		rules[pool.Ranks[i].RankKey] = s.rule(&pool.Ranks[i])
	}
	return rules
}
