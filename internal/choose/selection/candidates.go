package selection

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// candidates are a pool's ranks in the form of pkg/routing. They are immutable.
type candidates struct {
	pool      *registry.Pool
	blockSize uint32
	list      []routing.Candidate
	ranks     []registry.PoolRank    // of list
	at        map[events.RankKey]int // in list

	memories memories

	numbers atomic.Pointer[[]atomic.Pointer[place]] // by api.Overlap.Number; nil: unknown
	rows    atomic.Pointer[rowMap]                  // as of the last choice
	reports atomic.Pointer[engineStates]
	foreign atomic.Pointer[rowMap] // the same for the table of foreign requests
}

// place is a rank's index in a list of candidates. The worker name is the index's own string instead of the
// registration's, because a comparison of a string with itself is fast.
type place struct {
	rank events.RankKey
	at   int
}

// rowMap maps the rows of a load table to candidates; -1: no candidate. It changes only with the table's generation.
type rowMap struct {
	table      *load.Table
	generation uint64
	at         []int32
}

// rowsOf returns the map of a table's rows. last has the map of the last choice.
func (of *candidates) rowsOf(t *load.Table, last *atomic.Pointer[rowMap]) []int32 {
	m := last.Load()
	if m == nil || m.table != t || m.generation != t.Generation() {
		rows := t.Rows()
		m = &rowMap{t, t.Generation(), make([]int32, len(rows))}
		for i := range rows {
			m.at[i] = -1
			if at, ok := of.at[rows[i].Rank]; ok {
				m.at[i] = int32(at)
			}
		}
		last.Store(m)
	}
	return m.at
}

// place returns the list index of an answer's rank; false if the rank is not registered. Numbers are only hints.
func (of *candidates) place(o *api.Overlap) (int, bool) {
	numbers := of.numbers.Load()
	if numbers != nil && o.Number < uint32(len(*numbers)) {
		if p := (*numbers)[o.Number].Load(); p != nil && p.rank.Rank == o.Rank && p.rank.Instance == o.Instance {
			return p.at, true
		}
	}
	rank := events.RankKey{Instance: o.Instance, Rank: o.Rank}
	at, ok := of.at[rank]
	if !ok || o.Number == 0 || o.Number > maxNumber {
		return at, ok
	}
	if numbers == nil || o.Number >= uint32(len(*numbers)) {
		more := make([]atomic.Pointer[place], 2*o.Number+64)
		if numbers != nil {
			for i := range *numbers {
				more[i].Store((*numbers)[i].Load())
			}
		}
		numbers = &more
		of.numbers.Store(numbers)
	}
	(*numbers)[o.Number].Store(&place{rank, at})
	return at, true
}

// maxNumber bounds the memory of places.
const maxNumber = 1 << 20

// candidates returns the candidates of a model. A given block size is checked. The candidates are recreated when the
// pool has changed.
func (s *Service) candidates(model string, blockSize uint32) (*candidates, error) {
	pool := s.cfg.Pool(model)
	known, _ := s.pools.Load(model)
	of, _ := known.(*candidates)
	if of == nil || of.pool != pool {
		if len(pool.Ranks) == 0 {
			s.pools.Delete(model)
			return nil, api.Errorf(api.CodeUnknownModel,
				"no worker is registered for the model %q; check its name, and `indexer workers`", model)
		}
		before := of
		of = newCandidates(pool)
		of.carry(before)
		s.pools.Store(model, of)
	}
	if of.blockSize == 0 && blockSize == 0 {
		return nil, api.Errorf(api.CodeBlockSizeMismatch,
			"workers serve %q with different block sizes: %s; the request must name one", model, of.sizes())
	}
	has := func(r registry.PoolRank) bool { return r.BlockSize == blockSize }
	if blockSize != 0 && !slices.ContainsFunc(pool.Ranks, has) {
		return nil, api.Errorf(api.CodeBlockSizeMismatch,
			"the request asks for %q with blocks of %d tokens; the workers have blocks of %s", model, blockSize, of.sizes())
	}
	if of.blockSize == 0 {
		return of.withBlockSize(blockSize), nil
	}
	return of, nil
}

// newCandidates returns the candidates of a pool. The block size is 0 if ranks differ in it.
func newCandidates(pool *registry.Pool) *candidates {
	of := &candidates{pool: pool, ranks: pool.Ranks, blockSize: pool.Ranks[0].BlockSize, at: map[events.RankKey]int{}}
	var worker *routing.Worker
	var last *registry.PoolRank
	for i := range pool.Ranks {
		r := &pool.Ranks[i]
		if r.BlockSize != of.blockSize {
			of.blockSize = 0
		}
		if last == nil || last.Instance != r.Instance || last.Record != r.Record {
			worker = newWorker(r)
		}
		last = r
		of.at[r.RankKey] = len(of.list)
		of.list = append(of.list, routing.Candidate{Worker: worker, Rank: r.Rank, HasLoad: true})
	}
	return of
}

// withBlockSize returns the candidates with this block size.
func (of *candidates) withBlockSize(blockSize uint32) *candidates {
	return newCandidates(&registry.Pool{Model: of.pool.Model,
		Ranks: slices.DeleteFunc(slices.Clone(of.pool.Ranks), func(r registry.PoolRank) bool {
			return r.BlockSize != blockSize
		})})
}

func (of *candidates) sizes() string {
	var sizes []string
	for i := range of.pool.Ranks {
		if size := fmt.Sprint(of.pool.Ranks[i].BlockSize); !slices.Contains(sizes, size) {
			sizes = append(sizes, size)
		}
	}
	return strings.Join(sizes, ", ")
}

func newWorker(r *registry.PoolRank) *routing.Worker {
	w := &routing.Worker{
		ID: r.Instance, Endpoint: r.Record.Endpoint, Role: routing.Role(r.Record.Role), State: routing.State(r.Record.State),
		Reasons: r.Record.Reasons, Taints: taints(r.Record), LoRAs: r.Record.LoRAAdapters,
		TotalKVBlocks: r.Record.TotalKVBlocks, MaxNumBatchedTokens: r.Record.MaxBatchedTokens,
	}
	if w.State == routing.Schedulable {
		w.State = routing.Schedulable // the same bytes: every choice compares them
	}
	return w
}

// taints returns the taints of a record, with taints for the worker's topology in Dynamo's form.
func taints(r *api.WorkerRecord) []string {
	list := r.Taints
	for domain, value := range r.TopologyDomains {
		list = append(slices.Clip(list), routing.TopologyTaint(domain, value))
	}
	return list
}

// selection converts a choice for clients.
func (of *candidates) selection(
	r *api.SelectRequest, a *api.Answer, selector *routing.Selector, choice *routing.Choice,
) *api.Selection {
	out := &api.Selection{
		Model: r.Model, BlockSize: of.blockSize, RequestID: r.RequestID,
		Worker: choice.Worker, Rank: choice.Rank, Endpoint: of.ranks[choice.Index].Record.Endpoint,
		Policy: selector.Policy(), Cost: choice.Cost, Probability: choice.Probability,
		RequiredBlocks: choice.RequiredBlocks, EffectiveOverlap: choice.EffectiveOverlap,
		CachedTokens: choice.CachedTokens, EffectivePrefillTokens: choice.EffectivePrefillTokens,
		TrackPrefillTokens: choice.TrackPrefillTokens, PotentialDecodeBlocks: choice.PotentialDecodeBlocks,
		Complete: a.Complete, Missing: a.Missing, Explanation: choice.Explanation,
	}
	for i := range a.Workers {
		if o := &a.Workers[i]; o.Instance == out.Worker && o.Rank == out.Rank {
			out.Device, out.Host, out.Disk, out.External, out.L3 = o.Device, o.Host, o.Disk, o.External, o.L3
		}
	}
	return out
}
