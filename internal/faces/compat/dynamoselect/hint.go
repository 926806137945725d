package dynamoselect

import (
	"context"
	"sync"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// kvHint is a versioned message to an engine about blocks that it can fetch from another engine, as KvHint of
// ai-dynamo/dynamo › lib/kv-router/src/kv_hints.rs.
type kvHint struct {
	Version string         `json:"protocol_version"`
	ID      string         `json:"message_id"` // the id of the selection
	Actions []kvHintAction `json:"actions"`
}

type kvHintAction struct {
	ID      string  `json:"action_id"`
	Type    string  `json:"action_type"`
	Version string  `json:"action_version"`
	Payload kvFetch `json:"payload"`
}

// kvFetch has the engine's hashes of the leading blocks of the prompt at the source. The chosen engine fetches the
// blocks that it lacks.
type kvFetch struct {
	Source string   `json:"source_control_endpoint"`
	Blocks []uint64 `json:"block_hashes"`
}

func newKVHint(selection, source string, blocks []uint64) *kvHint {
	return &kvHint{"0.1", selection, []kvHintAction{{"a1", "kv.fetch", "1.0", kvFetch{source, blocks}}}}
}

// role returns the role of a worker that can use hints; empty for other workers.
func (w *worker) role() string {
	if w == nil {
		return ""
	}
	return or(w.HintType, "")
}

// hintCache has the workers with a role for the last pool of each model, because bookings read them.
type hintCache struct {
	mu     sync.Mutex
	models map[string]hintWorkers
}

type hintWorkers struct {
	pool    *registry.Pool
	workers map[events.WorkerID]*worker
}

// hintable returns the posted workers of a pool with a role.
func (s *selectService) hintable(model string, pool *registry.Pool) map[events.WorkerID]*worker {
	c := &s.hints
	c.mu.Lock()
	defer c.mu.Unlock()
	if of := c.models[model]; of.pool == pool {
		return of.workers
	}
	of := hintWorkers{pool, map[events.WorkerID]*worker{}}
	for _, w := range s.all() {
		if w.role() != "" && w.key().name() == model {
			of.workers[events.WorkerID(w.ID)] = w
		}
	}
	if c.models == nil {
		c.models = map[string]hintWorkers{}
	}
	c.models[model] = of
	return of.workers
}

// hint returns the hint for a booked request; nil without a better source. The source is a schedulable rank with the
// role of the chosen rank, a control endpoint, and a longer prefix in device and host memory. Of equal prefixes, the
// least worker and rank counts.
func (s *selectService) hint(ctx context.Context, selection string, p *api.Prompt, pool *registry.Pool,
	chosen events.RankKey) *kvHint {
	q := p.Query()
	q.L3, q.Diagnostic = api.L3Off, true
	able := s.hintable(q.Model, pool)
	role := able[chosen.Instance].role()
	if role == "" || q.Tokens == nil && len(q.Hashes) == 0 {
		return nil
	}
	a, err := s.Find(ctx, &q)
	if err != nil {
		return nil
	}
	var source *api.Overlap
	depth := uint32(0)
	for i := range a.Workers {
		if o := &a.Workers[i]; o.Instance == chosen.Instance && o.Rank == chosen.Rank {
			depth = o.Device + o.Host
		}
	}
	for i := range a.Workers {
		o := &a.Workers[i]
		at := events.RankKey{Instance: o.Instance, Rank: o.Rank}
		w, rank, n := able[o.Instance], pool.Rank(at), o.Device+o.Host
		if at == chosen || w.role() != role || w.HintEndpoints[o.Rank] == "" || or(w.SourceMode, "") == "state_agent_v2" ||
			rank == nil || !schedulable(*rank) || !a.Present(o, rank.Partition) {
			continue
		}
		if n > depth || source != nil && n == depth && before(at, source) {
			source, depth = o, n
		}
	}
	if source == nil {
		return nil
	}
	q.Ranks, q.WithEngineHashes = []api.RankPlace{{Instance: source.Instance, Rank: source.Rank}}, true
	named, err := s.Find(ctx, &q)
	if err != nil || len(named.Workers) != 1 || len(named.Workers[0].EngineHashes) < int(depth) {
		return nil // the rank has evicted blocks meanwhile
	}
	return newKVHint(selection, able[source.Instance].HintEndpoints[source.Rank], named.Workers[0].EngineHashes[:depth])
}

// before reports whether a rank precedes the rank of an overlap.
func before(at events.RankKey, o *api.Overlap) bool {
	if c := compat.CompareIDs(id(at.Instance), id(o.Instance)); c != 0 {
		return c < 0
	}
	return at.Rank < o.Rank
}
