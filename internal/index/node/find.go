package node

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

type scratch struct {
	locals  []events.LocalHash
	allowed []radix.RankSet // by shard, like holding
	holding []radix.RankSet // the ranks of the answer
	answer  radix.Answer
	names   []events.BlockHash // the query's engine hashes
	named   radix.Named
	sets    []radix.TierSet // of Query.Within

	reflected []progress
	looked    cluster.Set // the partitions of the answer
	some      bool        // the answer excludes some partitions of the node
}

// Parts of a query, for Metrics.Stage.
const (
	StageHash  = "hash"  // hashing of a prompt's tokens
	StageIndex = "index" // the lookup in this node's index
	StageStore = "store" // the wait for a shared store
)

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Find answers a query from this node's index. Find is safe for concurrent use.
func (n *Node) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if err := n.reach(ctx, q); err != nil {
		return nil, err
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	f := finding{n: n, q: q, s: s}
	if err := f.open(); err != nil {
		return nil, err
	}
	shared, err := f.match(ctx)
	if err != nil {
		return nil, err
	}
	f.filter()
	return f.merge(ctx, shared)
}

// reach waits until this node has applied the log positions named by a query.
func (n *Node) reach(ctx context.Context, q *api.Query) error {
	for _, p := range q.Partitions {
		if int(p) >= len(n.parts) {
			return api.Errorf(api.CodeMalformed, "the query names partition %d; there are %d", p, len(n.parts))
		}
	}
	for _, want := range q.MinSeq {
		if err := n.waitFor(ctx, want); err != nil {
			return err
		}
	}
	return nil
}

// finding is the state of a query in Find: open selects the ranks, match searches the index, filter removes the ranks
// of partitions emptied during the search, and merge completes the answer.
type finding struct {
	n *Node
	q *api.Query
	s *scratch

	// Set by open.
	lapses  uint64             // of the node, read before the view
	missing []events.Partition // partitions of the query that do not serve
	view    *View
	served  *Served

	// lookaheads are the lookaheads to hash with. With perRank, a rank counts only for hashes with the rank's lookahead.
	// The list is nil if the answer is empty for the answer's Reason.
	lookaheads []uint32
	perRank    bool

	// Set by match.
	answer  *api.Answer
	allowed []radix.RankSet // by shard; nil: all
}

// open reads the view of the index and selects the model's ranks. The progress of the partitions is read before the
// view, and the view before the index, so the answer reflects at least the read progress.
func (f *finding) open() error {
	n, q := f.n, f.q
	f.lapses = n.lapses.Load()
	f.s.reflected = n.progress(f.s.reflected[:0])
	f.missing = f.s.recordServing(q.Partitions)
	f.view = n.view()
	var err *api.Error
	if f.served, err = f.view.serving(q, n.registered(q.Model)); err != nil {
		return f.unserved(err)
	}
	f.lookaheads, f.perRank = f.served.Lookaheads, q.Hashes == nil && q.EngineHashes == nil
	if !f.perRank {
		f.lookaheads = asGiven
	}
	return nil
}

// unserved returns the error for a query without usable ranks in the view. A partition that does not serve may have
// usable ranks.
func (f *finding) unserved(err *api.Error) error {
	if len(f.q.Partitions) > 0 {
		err.Missing = f.missing
		return err
	}
	if len(f.missing) > 0 && (err.Code == api.CodeUnknownModel || f.q.BlockSize != 0) {
		return &api.Error{Code: api.CodeNotReady, Missing: f.missing,
			Message: fmt.Sprintf("this node does not serve partitions %v now; of the served partitions: %s", f.missing,
				err.Message)}
	}
	return err
}

// match searches the index and adds the ranks with blocks of the prompt to the answer. match also starts a concurrent
// question to the shared store, and returns the question.
func (f *finding) match(ctx context.Context) (*L3Question, error) {
	n, q, s := f.n, f.q, f.s
	begun := time.Now()
	if err := s.hash(q, f.served.BlockSize, f.lookaheads[0]); err != nil {
		return nil, err
	}
	if q.Tokens != nil {
		begun = n.stage(ctx, StageHash, begun)
	}
	f.answer = &api.Answer{Model: q.Model, BlockSize: f.served.BlockSize, Workers: []api.Overlap{},
		Blocks: max(len(s.locals), len(q.EngineHashes))}
	if q.Raw {
		f.answer.Workers = q.Room[:0]
	}
	if q.Hashed != nil {
		f.answer.Lookaheads = f.served.Lookaheads
	}
	shared := n.l3.begin(q, f.served.BlockSize)
	some := false
	f.allowed, some = n.allow(s, q.Workers, f.served)
	switch {
	case !some:
		f.answer.Reason = api.ReasonNotAllowed
	case f.answer.Blocks == 0:
		f.answer.Reason = api.ReasonNoBlocks
	}
	if f.answer.Reason != "" {
		f.lookaheads = nil
	}
	s.holding = cleared(s.holding, len(n.shards))
	for i, lookahead := range f.lookaheads {
		if i > 0 {
			if err := s.hash(q, f.served.BlockSize, lookahead); err != nil {
				return nil, err
			}
		}
		for _, shard := range f.served.Shards {
			found, err := s.match(n.shards[shard].index, q, f.served.Space, shardSet(f.allowed, shard))
			if err != nil {
				return nil, err
			}
			f.add(found, shard, lookahead)
		}
	}
	n.stage(ctx, StageIndex, begun)
	return shared, nil
}

// add adds the ranks found in a shard with one lookahead to the answer.
func (f *finding) add(found *radix.Answer, shard int, lookahead uint32) {
	q, s, answer := f.q, f.s, f.answer
	answer.Workers = slices.Grow(answer.Workers, len(found.Ranks))
	within := slices.Clone(found.Within) // the answer outlives the scratch
	for i, o := range found.Ranks {
		r := f.view.Rank(shard, o.Rank)
		if r == nil || !s.sees(r) || f.perRank && r.Lookahead != lookahead {
			continue
		}
		s.holding[shard].Add(o.Rank)
		overlap := api.Overlap{
			Instance: r.Key.Instance, Rank: r.Key.Rank,
			Device: o.Depth[0], Host: o.Depth[1], Disk: o.Depth[2], External: o.Depth[3],
		}
		if r.Bounded {
			overlap.Bound = api.BoundFullAttentionOnly
		}
		if k := len(q.Within); k > 0 {
			if list := within[i*k : (i+1)*k : (i+1)*k]; slices.Max(list) > 0 {
				overlap.Within = list
			}
		}
		if q.Raw || len(q.Partitions) > 0 {
			overlap.Held, overlap.Full = r.memory.load()
		}
		if q.Raw {
			overlap.Number = uint32(o.Rank.Slot()*len(f.n.shards)+shard) + 1
		}
		answer.Workers = append(answer.Workers, overlap)
	}
}

// filter removes the ranks of partitions that have ceased to serve since open, because the partition may have been
// emptied during the search.
func (f *finding) filter() {
	if f.n.lapses.Load() == f.lapses {
		return
	}
	f.missing = f.n.lapsed(f.s, f.missing)
	f.answer.Workers = slices.DeleteFunc(f.answer.Workers, func(o api.Overlap) bool {
		r := f.served.rank(events.RankKey{Instance: o.Instance, Rank: o.Rank})
		return r == nil || !f.s.sees(r)
	})
}

// merge completes the answer: the reflected progress, idle ranks, explanations and the blocks of the shared store.
func (f *finding) merge(ctx context.Context, shared *L3Question) (*api.Answer, error) {
	n, q, s, answer := f.n, f.q, f.s, f.answer
	s.reflects(answer, q, f.served, f.missing)
	idle := s.idle(f.served, f.allowed)
	if q.Idle {
		for r := range idle {
			answer.Workers = append(answer.Workers, api.Overlap{Instance: r.Key.Instance, Rank: r.Key.Rank})
		}
	}
	if q.Idle || answer.Reason != "" {
		idle = noRanks
	}
	if q.Explain && f.lookaheads != nil {
		if err := f.explain(); err != nil {
			return nil, err
		}
	}
	if q.WithEngineHashes && f.lookaheads != nil {
		if err := f.engineHashes(); err != nil {
			return nil, err
		}
	}
	if shared.Asked() {
		begun := time.Now()
		defer func() { n.stage(ctx, StageStore, begun) }()
	}
	shared.merge(ctx, answer, idle)
	finish := answer.Finish
	if q.Raw {
		finish = answer.FinishRaw
	}
	finish(q.Idle, cmp.Or(answer.Reason, api.ReasonNotCached))
	return answer, nil
}

// engineHashes adds the engines' hashes to the ranks of the answer.
func (f *finding) engineHashes() error {
	for _, lookahead := range f.lookaheads {
		if err := f.s.hash(f.q, f.served.BlockSize, lookahead); err != nil {
			return err
		}
		for i := range f.answer.Workers {
			o := &f.answer.Workers[i]
			r := f.served.rank(events.RankKey{Instance: o.Instance, Rank: o.Rank})
			if r == nil || f.perRank && r.Lookahead != lookahead {
				continue
			}
			for _, name := range f.n.shards[r.Shard].index.Names(r.ID, f.s.locals) {
				o.EngineHashes = append(o.EngineHashes, uint64(name))
			}
		}
	}
	return nil
}

// stage records the duration of a part of a query that ends now.
func (n *Node) stage(ctx context.Context, stage string, begun time.Time) (now time.Time) {
	now = time.Now()
	n.cfg.Metrics.Stage(ctx, stage, now.Sub(begun))
	return now
}

// match searches the index for the query's blocks.
func (s *scratch) match(x *radix.Index, q *api.Query, space uint32, allowed *radix.RankSet) (*radix.Answer, error) {
	s.sets = s.sets[:0]
	for _, within := range q.Within {
		list, err := within.List()
		if err != nil {
			return nil, err
		}
		set := radix.TierSet(0)
		for _, t := range list {
			set |= 1 << (t - 1)
		}
		s.sets = append(s.sets, set)
	}
	s.answer.Sets, s.named.Sets = s.sets, s.sets
	if q.EngineHashes == nil {
		x.Match(space, s.locals, allowed, &s.answer)
		return &s.answer, nil
	}
	s.names = s.names[:0]
	for _, h := range q.EngineHashes {
		s.names = append(s.names, events.BlockHash(h))
	}
	x.MatchNames(space, s.names, allowed, &s.named)
	return &s.named.Answer, nil
}

// asGiven is the list of lookaheads for a query with hashed blocks.
var asGiven = []uint32{0}

// hash computes the local hashes of the query's blocks for a lookahead, or copies the hashes of the query.
func (s *scratch) hash(q *api.Query, blockSize, lookahead uint32) error {
	s.locals = s.locals[:0]
	if q.Tokens == nil {
		given := q.Hashes
		if q.Hashed != nil {
			given = q.HashedFor(lookahead)
		}
		s.locals = slices.Grow(s.locals, len(given))[:len(given)]
		for i, h := range given {
			s.locals[i] = events.LocalHash(h)
		}
		return nil
	}
	var err error
	s.locals, err = q.Locals(s.locals, blockSize, lookahead)
	return err
}

// noRanks is an empty iterator.
func noRanks(func(*RankOfView) bool) {}

// idle iterates over the ranks that may serve a query and hold no block of the prompt.
func (s *scratch) idle(served *Served, allowed []radix.RankSet) iter.Seq[*RankOfView] {
	return func(yield func(*RankOfView) bool) {
		for _, r := range served.Ranks {
			if s.sees(r) && (allowed == nil || allowed[r.Shard].Has(r.ID)) && !s.holding[r.Shard].Has(r.ID) && !yield(r) {
				return
			}
		}
	}
}

// recordServing records the serving partitions among the named partitions, or among all if named is empty, and returns
// the rest. The returned partitions may have workers of the model.
func (s *scratch) recordServing(named []events.Partition) (missing []events.Partition) {
	clear(s.looked)
	s.some = len(named) > 0
	for p := range s.reflected {
		p := events.Partition(p)
		switch {
		case s.some && !slices.Contains(named, p):
		case s.reflected[p].whole:
			s.looked.Add(p)
		default:
			missing = append(missing, p)
		}
	}
	s.some = s.some || len(missing) > 0
	return missing
}

// lapsed moves the partitions that have ceased to serve since recordServing to missing.
func (n *Node) lapsed(s *scratch, missing []events.Partition) []events.Partition {
	for p, now := range n.progress(nil) {
		p := events.Partition(p)
		if s.looked.Has(p) && (!now.whole || now.lapses != s.reflected[p].lapses) {
			s.looked.Remove(p)
			s.some = true
			missing = append(missing, p)
		}
	}
	slices.Sort(missing)
	return missing
}

func (s *scratch) reflects(answer *api.Answer, q *api.Query, served *Served, missing []events.Partition) {
	answer.Complete, answer.Missing = len(missing) == 0, missing
	list := served.Partitions
	if len(q.Partitions) > 0 {
		list = s.looked.List()
	}
	answer.Partitions = make([]api.PartitionStatus, 0, len(list))
	for _, p := range list {
		if s.looked.Has(p) {
			answer.Partitions = append(answer.Partitions, s.reflected[p].status(p))
		}
	}
}

// sees reports whether a rank's partition is part of the answer.
func (s *scratch) sees(r *RankOfView) bool { return !s.some || s.looked.Has(r.Partition) }

// registered returns the registered block size of a model; 0 if there is none.
func (n *Node) registered(model string) uint32 {
	if n.cfg.BlockSize == nil {
		return 0
	}
	return n.cfg.BlockSize(model)
}

// sizesOf lists the block sizes of a model, with the ranks of the size. If a block size is registered, ranks with a
// different size are excluded, because the workers do not match the model.
func (v *View) sizesOf(model string, registered uint32) []*Served {
	list := v.Models[model]
	if registered == 0 {
		return list
	}
	for i, s := range list {
		if s.BlockSize == registered {
			return list[i : i+1]
		}
	}
	return nil
}

func (v *View) serving(q *api.Query, registered uint32) (*Served, *api.Error) {
	list := v.sizesOf(q.Model, registered)
	if len(list) == 0 {
		return nil, api.Errorf(api.CodeUnknownModel, "no worker has announced the model %q%s", q.Model, v.modelsText())
	}
	if q.BlockSize == 0 && len(list) == 1 {
		return list[0], nil
	}
	var sizes []string
	for _, s := range list {
		if s.BlockSize == q.BlockSize {
			return s, nil
		}
		sizes = append(sizes, fmt.Sprint(s.BlockSize))
	}
	if q.BlockSize == 0 {
		return nil, api.Errorf(api.CodeBlockSizeMismatch,
			"workers serve %q with different block sizes: %s; the query must name a size", q.Model, strings.Join(sizes,
				", "))
	}
	return nil, api.Errorf(api.CodeBlockSizeMismatch,
		"the query asks for %q with blocks of %d tokens; the workers have blocks of %s", q.Model, q.BlockSize,
		strings.Join(sizes, ", "))
}

// BlockSizes returns the block sizes of a model's workers in the partitions of this node, ascending.
func (n *Node) BlockSizes(model string) (sizes []uint32) {
	for _, s := range n.view().sizesOf(model, n.registered(model)) {
		sizes = append(sizes, s.BlockSize)
	}
	return sizes
}

// modelsText lists some of the models for an error message.
func (v *View) modelsText() string {
	names := slices.Sorted(maps.Keys(v.Models))
	switch {
	case len(names) == 0:
		return ", nor any other model; feed a model with worker-shim run"
	case len(names) > 8:
		return fmt.Sprintf("; the models are %s and %d more", strings.Join(names[:8], ", "), len(names)-8)
	}
	return "; known: " + strings.Join(names, ", ")
}

// allow returns the sets of ranks, by shard, to which a query is restricted; nil means all ranks. some is false if no
// rank remains.
func (n *Node) allow(s *scratch, workers []events.WorkerID, served *Served) (sets []radix.RankSet, some bool) {
	if len(workers) == 0 {
		return nil, true
	}
	s.allowed = cleared(s.allowed, len(n.shards))
	for _, w := range workers {
		i, _ := served.search(events.RankKey{Instance: w})
		for ; i < len(served.Ranks) && served.Ranks[i].Key.Instance == w; i++ {
			s.allowed[served.Ranks[i].Shard].Add(served.Ranks[i].ID)
			some = true
		}
	}
	return s.allowed, some
}

// search returns the index of the first rank that is not less than key, and whether the rank is key.
func (s *Served) search(key events.RankKey) (i int, found bool) {
	return slices.BinarySearchFunc(s.Ranks, key,
		func(r *RankOfView, key events.RankKey) int { return r.Key.Compare(key) })
}

// rank returns the rank with a key; nil if there is none.
func (s *Served) rank(key events.RankKey) *RankOfView {
	if i, found := s.search(key); found {
		return s.Ranks[i]
	}
	return nil
}

// cleared returns n empty sets and reuses the memory of sets.
func cleared(sets []radix.RankSet, n int) []radix.RankSet {
	for len(sets) < n {
		sets = append(sets, radix.RankSet{})
	}
	for i := range sets {
		sets[i].Clear()
	}
	return sets
}

// shardSet returns a shard's element of sets; nil (all ranks) if sets is nil.
func shardSet(sets []radix.RankSet, shard int) *radix.RankSet {
	if sets == nil {
		return nil
	}
	return &sets[shard]
}
