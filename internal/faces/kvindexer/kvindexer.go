package kvindexer

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Config provides the queries and the workers of a Service. Both fields are required.
type Config struct {
	Find  func(ctx context.Context, q *api.Query) (*api.Answer, error)
	Pools func() []*registry.Pool // returns the pools of all models
}

// Service is the index for SGLang's router. It is safe for concurrent use.
type Service struct {
	kvindexerpb.UnimplementedKVIndexerServer
	cfg Config
}

// New returns a service.
func New(cfg Config) *Service { return &Service{cfg: cfg} }

// servable lists the tiers that the router counts.
var servable = []api.Tiers{"device+host"}

// pool contains the ranks of a model with one block size and an address.
type pool struct {
	*registry.Pool
	blockSize uint32
}

func (s *Service) pools() (list []pool) {
	for _, p := range s.cfg.Pools() {
		first := len(list)
		for i := range p.Ranks {
			r := &p.Ranks[i]
			if r.Record.Endpoint != "" && !slices.Contains(list[first:], pool{p, r.BlockSize}) {
				list = append(list, pool{p, r.BlockSize})
			}
		}
	}
	return list
}

// MatchExternalKvPrefix implements kv_indexer.v1. The router chooses by load alone after UNAVAILABLE,
// DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED or OUT_OF_RANGE, and fails the request after any other code. Therefore other
// codes are returned only for faults that an operator must correct.
func (s *Service) MatchExternalKvPrefix(ctx context.Context, q *kvindexerpb.MatchExternalKvPrefixRequest) (
	*kvindexerpb.MatchExternalKvPrefixResponse, error) {
	asked := q.Hashes
	if n := int(q.MaxBlocks); n > 0 && n < len(asked) {
		asked = asked[:n]
	}
	if len(asked) > api.MaxTokens {
		return nil, status.Errorf(codes.OutOfRange, "%d hashes, more than %d: set max_blocks", len(asked),
			api.MaxTokens)
	}
	hashes := make(api.Hashes, len(asked))
	for i, h := range asked {
		hashes[i] = uint64(h)
	}
	m := merger{at: map[string]int{}}
	if pools := s.pools(); len(pools) > 0 && len(hashes) > 0 {
		var others sync.WaitGroup
		for _, p := range pools[1:] {
			others.Go(func() { m.add(&p, s.find(ctx, &p, hashes)) })
		}
		m.add(&pools[0], s.find(ctx, &pools[0], hashes))
		others.Wait()
	}
	if m.err != nil && !m.answered {
		return nil, m.err
	}
	return m.answer(len(asked)), nil
}

// found is the result of a query for one pool.
type found struct {
	answer *api.Answer
	err    error
}

func (s *Service) find(ctx context.Context, p *pool, hashes api.Hashes) found {
	a, err := s.cfg.Find(ctx, &api.Query{Model: p.Model, BlockSize: p.blockSize, EngineHashes: hashes, Within: servable,
		L3: api.L3Off, Raw: true})
	return found{a, err}
}

// merger merges the results of pools.
type merger struct {
	mu      sync.Mutex
	matches []*kvindexerpb.ExternalKvPrefixMatch
	at      map[string]int // index of an address in matches

	answered bool  // a pool has answered
	err      error // error of another pool
}

func (m *merger) add(p *pool, f found) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.err != nil {
		m.err = cmp.Or(m.err, refusal(f.err))
		return
	}
	m.answered = true
	for i := range f.answer.Workers {
		o := &f.answer.Workers[i]
		depth := o.Device + o.Host // a node of an older release does not report the depth within tiers
		if len(o.Within) > 0 {
			depth = o.Within[0]
		}
		r := p.Rank(events.RankKey{Instance: o.Instance, Rank: o.Rank})
		if depth == 0 || r == nil || r.Record.Endpoint == "" {
			continue
		}
		at, known := m.at[r.Record.Endpoint]
		switch {
		case !known:
			m.at[r.Record.Endpoint] = len(m.matches)
			m.matches = append(m.matches, &kvindexerpb.ExternalKvPrefixMatch{WorkerAddress: r.Record.Endpoint,
				MatchedPrefixBlocks: depth, WorkerId: string(o.Instance)})
		case depth > m.matches[at].MatchedPrefixBlocks:
			m.matches[at].MatchedPrefixBlocks, m.matches[at].WorkerId = depth, string(o.Instance)
		}
	}
}

// refusal returns the error of a call after a failed query; nil if the failure only means that no blocks are held.
func refusal(err error) error {
	var e *api.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case api.CodeUnknownModel, api.CodeBlockSizeMismatch: // no announced blocks, or blocks of another size
		return nil
	case api.CodeBusy, api.CodeOverloaded, api.CodeTooLarge, api.CodeBehind:
		return e
	}
	return api.Errorf(api.CodeUnavailable, "%s", e.Message)
}

// answer returns the workers, deepest first.
func (m *merger) answer(read int) *kvindexerpb.MatchExternalKvPrefixResponse {
	slices.SortFunc(m.matches, func(a, b *kvindexerpb.ExternalKvPrefixMatch) int {
		return cmp.Or(cmp.Compare(b.MatchedPrefixBlocks, a.MatchedPrefixBlocks),
			cmp.Compare(a.WorkerAddress, b.WorkerAddress))
	})
	a := &kvindexerpb.MatchExternalKvPrefixResponse{Matches: m.matches, BlocksRead: uint32(read)}
	if len(m.matches) > 0 {
		a.BestPrefixBlocks = m.matches[0].MatchedPrefixBlocks
	}
	return a
}
