package server

import (
	"errors"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/faces/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// withGuesses adds guessed blocks to an answer of the index. The lookup began at looked. For a model without events and
// with workers without events, the answer has only guesses.
func (s *Server) withGuesses(q *api.Query, looked time.Time, a *api.Answer, err error) (*api.Answer, error) {
	pool := s.registry.Pool(q.Model)
	if err != nil {
		if a = onlyRegistered(q, pool, err); a == nil {
			return nil, err
		}
	}
	if !s.guesses.Any(q.Model) || a.Reason == api.ReasonNoBlocks {
		return a, nil
	}
	seq, err := sequence(q, a.BlockSize)
	if err != nil {
		return nil, err
	}
	depths := make([]uint32, len(pool.Ranks))
	if !s.guesses.Depths(q.Model, pool.Ranks, seq, depths) {
		return a, nil
	}
	rows := make(map[events.RankKey]int, len(a.Workers))
	for i := range a.Workers {
		rows[events.RankKey{Instance: a.Workers[i].Instance, Rank: a.Workers[i].Rank}] = i
	}
	confirmed := make([]uint32, len(depths))
	for i := range depths {
		r := &pool.Ranks[i]
		if len(q.Workers) > 0 && !slices.Contains(q.Workers, r.Instance) ||
			q.Ranks != nil && !slices.Contains(q.Ranks, api.RankPlace{Instance: r.Instance, Rank: r.Rank}) ||
			len(q.Partitions) > 0 && !slices.Contains(q.Partitions, r.Partition) {
			depths[i] = 0
		} else if at, ok := rows[r.RankKey]; ok {
			confirmed[i] = a.Workers[at].Device
		}
	}
	if a.UpToDate() {
		s.guesses.Refute(q.Model, pool.Ranks, seq, time.Since(looked), confirmed, depths)
	}
	for i, depth := range depths {
		r := &pool.Ranks[i]
		if depth == 0 {
			continue
		}
		at, ok := rows[r.RankKey]
		if !ok {
			at = len(a.Workers)
			a.Workers = append(a.Workers, api.Overlap{Instance: r.Instance, Rank: r.Rank})
		}
		if o := &a.Workers[at]; depth > o.Device {
			o.Guessed = depth
		}
	}
	s.registry.MarkAnswer(a)
	a.Finish(q.Idle || q.Explain, a.Reason)
	return a, nil
}

// observe records the ends of requests, and running requests, which give guesses. Requests of Dynamo's slot tracker
// give no guesses, because no query uses them.
func (s *Server) observe(of load.Model, r *load.Request) {
	s.announced.Observe(of.Name, r.Rank, r.Hashes, r.PrefillDone, r.Ended)
	s.recordEnd(of, r)
	if !dynamoselect.Tracked(of.Name) {
		s.guesses.Observe(of, r)
	}
}

// onlyRegistered returns the answer for a model without events and with workers without events, or nil if err has
// another reason.
func onlyRegistered(q *api.Query, pool *registry.Pool, err error) *api.Answer {
	var failed *api.Error
	none := func(r registry.PoolRank) bool {
		return r.Record.Events == api.EventsNone && (q.BlockSize == 0 || r.BlockSize == q.BlockSize)
	}
	at := slices.IndexFunc(pool.Ranks, none)
	if at < 0 || !errors.As(err, &failed) || failed.Code != api.CodeUnknownModel {
		return nil
	}
	size := pool.Ranks[at].BlockSize
	if slices.ContainsFunc(pool.Ranks, func(r registry.PoolRank) bool { return none(r) && r.BlockSize != size }) {
		return nil
	}
	blocks := max(len(q.Hashes), len(q.EngineHashes), len(q.Tokens)/int(max(size, 1)))
	a := &api.Answer{Model: q.Model, BlockSize: size, Blocks: blocks, Workers: []api.Overlap{},
		Partitions: []api.PartitionStatus{}, Complete: len(failed.Missing) == 0, Missing: failed.Missing,
		Reason: api.ReasonNotCached, L3: api.L3{Status: api.L3NotConfigured}}
	if blocks == 0 {
		a.Reason = api.ReasonNoBlocks
	}
	return a
}

// sequence makes the sequence hashes of a query's whole blocks.
func sequence(q *api.Query, blockSize uint32) ([]events.SeqHash, error) {
	if q.EngineHashes != nil {
		seq := make([]events.SeqHash, len(q.EngineHashes))
		for i, h := range q.EngineHashes {
			seq[i] = events.SeqHash(h)
		}
		return seq, nil
	}
	var locals []events.LocalHash
	if q.Tokens == nil {
		for _, h := range q.Hashes {
			locals = append(locals, events.LocalHash(h))
		}
		return events.SeqHashes(nil, locals), nil
	}
	locals, err := q.Locals(nil, blockSize, 0)
	return events.SeqHashes(nil, locals), err
}
