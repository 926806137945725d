package scatter

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// View is the state of the cluster at a moment. A View is immutable.
type View interface {
	Serving(p events.Partition) []string // nodes that serve a partition, best first
	// Fit returns the number of equally good nodes; the rest is for lack of an alternative.
	Fit(p events.Partition) int
	MayServe(p events.Partition, model string) bool // whether the partition may have workers of a model
	Finishes(node string) bool                      // whether another node finishes forwarded queries
}

// Transport sends requests to other nodes.
type Transport interface {
	// Send sends a request for an operation, in MessagePack, and returns at once. The receiver gets the reply with the
	// tag. patience bounds the wait, trace is the header of the trace. See [rpc.Pool].
	Send(node, op string, patience time.Duration, trace string, body []byte, to rpc.Receiver, tag int) (
		id uint64, err error)

	// Redirect sends a pending reply to another receiver.
	Redirect(id uint64, to rpc.Receiver, tag int)
}

// Question is a query's lookup in the shared store of workers.
type Question interface {
	Asked() bool // whether a store can be queried
	// Merge waits for the result, within bounds, and adds it to the answer.
	Merge(ctx context.Context, answer *api.Answer)
}

// Local is an indexer of one node's data.
type Local interface {
	Find(ctx context.Context, q *api.Query) (*api.Answer, error)
	Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error)
}

// Config configures a [Scatter].
type Config struct {
	Self        string // name of this node in the view
	Partitions  uint32
	PartitionOf func(events.WorkerID) (events.Partition, error)

	Local Local // this node's data

	// View returns the present state of the cluster; nil if this node is alone.
	View func() View

	Transport Transport
	Hedges    *rpc.Budget // common to the requests of this transport

	// Forward sends a query to the finisher, which answers at the subject reply. nil: queries are not forwarded.
	Forward func(node string, patience time.Duration, trace, reply string, body []byte) error

	// Store begins a query's lookup in the shared store. nil: no store.
	Store func(q *api.Query, blockSize uint32) Question

	Metrics Metrics // nil: [NoMetrics]
}

// Metrics measures queries and the requests to other nodes. Any goroutine may call its methods.
type Metrics interface {
	Asked(kind string)                          // counts a request to another node, by [Kind]
	Replied(outcome string, took time.Duration) // records the end of such a request: "ok", or an error's code
	HedgesDenied(n int)                         // counts hedges that were due and not made
	Forwarded(outcome string)                   // counts a forwarded query
	Missing(op string, n int)                   // counts partitions that an answer lacks

	// Stage records the duration of a part of the context's query: StageHash, StagePeers or StageStore.
	Stage(ctx context.Context, stage string, took time.Duration)
}

// NoMetrics measures nothing. Embed it to implement a part of [Metrics].
type NoMetrics struct{}

func (NoMetrics) Asked(string)                                 {}
func (NoMetrics) Replied(string, time.Duration)                {}
func (NoMetrics) HedgesDenied(int)                             {}
func (NoMetrics) Forwarded(string)                             {}
func (NoMetrics) Missing(string, int)                          {}
func (NoMetrics) Stage(context.Context, string, time.Duration) {}

// The parts of a scattered query, for Metrics.Stage.
const (
	StageHash  = "hash"  // the hashes of a prompt's tokens
	StagePeers = "peers" // until all nodes have answered, including this node
	StageStore = "store" // the wait for the shared store
)

// Scatter answers for a whole cluster, and is safe for concurrent use.
type Scatter struct {
	cfg    Config
	peers  *Peers
	begun  time.Time
	queues sync.Pool

	forwards forwards

	mu       sync.Mutex
	late     map[string]*lateReplies // by node
	readings map[readingKey]reading

	// missing has the begin of the time without an answer, by partition, in nanoseconds plus one; 0: answered.
	missing []atomic.Int64
}

// maxReadings bounds the known hashings of models.
const maxReadings = 1024

// New returns a Scatter.
func New(cfg Config) *Scatter {
	cfg.Metrics = cmp.Or[Metrics](cfg.Metrics, NoMetrics{})
	s := &Scatter{
		cfg: cfg, peers: NewPeers(cfg.Hedges), begun: time.Now(), late: map[string]*lateReplies{},
		readings: map[readingKey]reading{}, missing: make([]atomic.Int64, cfg.Partitions),
	}
	s.forwards.list = map[uint64]*Forward{}
	s.forwards.last = uint64(time.Now().UnixNano()) // so that reports to an earlier process of this name match nothing
	s.forwards.timer = time.AfterFunc(time.Hour, s.tickForwards)
	s.forwards.timer.Stop()
	s.queues.New = func() any {
		timer := time.NewTimer(time.Hour)
		timer.Stop()
		return &replyQueue{s: s, arrived: make(chan struct{}, 1), timer: timer}
	}
	return s
}

func (s *Scatter) now() time.Duration { return time.Since(s.begun) }

// Find answers a query from all nodes. The answer lists the searched partitions.
func (s *Scatter) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	a, err := s.findAnywhere(ctx, q)
	if err == nil && !q.Raw {
		dropMemory(a)
	}
	return a, err
}

// dropMemory removes the state of the ranks' memory from an answer, because only nodes exchange it.
func dropMemory(a *api.Answer) {
	for i := range a.Workers {
		a.Workers[i].Held, a.Workers[i].Full = 0, 0
	}
}

// findAnywhere answers a query from this node alone if all wanted partitions are served here, and otherwise from all
// nodes.
func (s *Scatter) findAnywhere(ctx context.Context, q *api.Query) (*api.Answer, error) {
	view := s.cfg.View()
	if view == nil {
		return s.cfg.Local.Find(ctx, q)
	}
	if err := s.check(q); err != nil {
		return nil, err
	}
	if s.keepsAll(view) {
		a, err := s.cfg.Local.Find(ctx, q)
		if done(a, err, true) {
			return a, err
		}
	}
	wanted, own := s.plan(view, q)
	if own {
		here := *q
		here.Partitions = list(wanted)
		a, err := s.cfg.Local.Find(ctx, &here)
		if done(a, err, false) {
			return a, err
		}
	}
	a, err := s.find(ctx, q, wanted)
	if api.HasCode(err, api.CodeUnknownModel) && len(q.Partitions) == 0 &&
		uint32(len(wanted)) < s.cfg.Partitions {
		// nodes announce new models with a delay
		return s.find(ctx, q, s.all(view, func(events.Partition) bool { return true }))
	}
	return a, err
}

// done reports whether the answer of this node suffices. everything: all partitions are covered.
func done(a *api.Answer, err error, everything bool) bool {
	if err == nil {
		return a.Complete
	}
	if e, is := errors.AsType[*api.Error](err); is {
		return e.Code != api.CodeNotReady && (!Verdict(e) || everything && len(e.Missing) == 0)
	}
	return true
}

// keepsAll reports whether this node serves every partition.
func (s *Scatter) keepsAll(view View) bool {
	for p := range events.Partition(s.cfg.Partitions) {
		if !s.keeps(view.Serving(p), view.Fit(p)) {
			return false
		}
	}
	return true
}

// keeps reports whether this node is among the fit nodes.
func (s *Scatter) keeps(serving []string, fit int) bool {
	k := slices.Index(serving, s.cfg.Self)
	return k >= 0 && k < fit
}

func (s *Scatter) check(q *api.Query) error {
	for _, p := range q.Partitions {
		if uint32(p) >= s.cfg.Partitions {
			return api.Errorf(api.CodeMalformed, "the query has partition %d; there are %d", p, s.cfg.Partitions)
		}
	}
	for _, m := range q.MinSeq {
		if uint32(m.Partition) >= s.cfg.Partitions {
			return api.Errorf(api.CodeMalformed, "min_seq has partition %d; there are %d", m.Partition,
				s.cfg.Partitions)
		}
	}
	return nil
}

// plan returns the partitions of a query: partitions that may have workers of the model, and partitions in min_seq;
// all, if there are none. own: this node serves all of them.
func (s *Scatter) plan(view View, q *api.Query) (wanted []Wanted, own bool) {
	asked := func(p events.Partition) bool { return len(q.Partitions) == 0 || slices.Contains(q.Partitions, p) }
	wanted = s.all(view, func(p events.Partition) bool {
		return asked(p) && (view.MayServe(p, q.Model) ||
			slices.ContainsFunc(q.MinSeq, func(m api.PartitionSeq) bool { return m.Partition == p }))
	})
	if len(wanted) == 0 {
		wanted = s.all(view, asked)
	}
	for i := range wanted {
		if !s.keeps(wanted[i].Serving, wanted[i].Fit) {
			return wanted, false
		}
	}
	return wanted, true
}

// all returns partitions with their nodes.
func (s *Scatter) all(view View, some func(events.Partition) bool) []Wanted {
	wanted := make([]Wanted, 0, s.cfg.Partitions)
	for p := range events.Partition(s.cfg.Partitions) {
		if some(p) {
			wanted = append(wanted, Wanted{Partition: p, Serving: view.Serving(p), Fit: view.Fit(p)})
		}
	}
	return wanted
}

func list(wanted []Wanted) []events.Partition {
	out := make([]events.Partition, len(wanted))
	for i := range wanted {
		out[i] = wanted[i].Partition
	}
	return out
}

// reading is the hashing of a model's workers.
type reading struct {
	blockSize  uint32
	lookaheads []uint32
}

// holds reports whether hashes by r match all workers, if now is their present hashing.
func (r reading) holds(now reading) bool {
	return r.blockSize == now.blockSize &&
		!slices.ContainsFunc(now.lookaheads, func(l uint32) bool { return !slices.Contains(r.lookaheads, l) })
}

// readingKey identifies the queries of a reading.
type readingKey struct {
	model     string
	blockSize uint32 // of the query
}

// find scatters a query. Tokens are hashed here, once. An unknown hashing of the model's workers is requested first.
func (s *Scatter) find(ctx context.Context, q *api.Query, wanted []Wanted) (*api.Answer, error) {
	share := *q
	share.L3, share.L3TimeoutMS = api.L3Off, 0
	if q.Tokens == nil {
		a, err := s.union(ctx, &share, wanted)
		if err != nil {
			return nil, err
		}
		if q.Hashed == nil {
			a.Lookaheads = nil
		}
		return s.finish(ctx, q, a, s.askStore(q, a.BlockSize)), nil
	}
	share.Tokens, share.LoRA, share.CacheSalt, share.Media = nil, "", "", nil
	key := readingKey{q.Model, q.BlockSize}
	known := s.recall(key)
	for range 4 { // the hashing changes only when all workers begin again
		share.Hashed = []api.Hashed{{}}
		var question Question
		if known.blockSize > 0 {
			var err error
			begun := time.Now()
			if share.Hashed, err = known.hash(q); err != nil {
				return nil, err
			}
			s.cfg.Metrics.Stage(ctx, StageHash, time.Since(begun))
			question = s.askStore(q, known.blockSize)
		}
		share.Idle = q.Idle || question != nil && question.Asked()
		a, err := s.union(ctx, &share, wanted)
		if err != nil {
			return nil, err
		}
		was := known
		if known = (reading{a.BlockSize, a.Lookaheads}); len(known.lookaheads) == 0 {
			known.lookaheads = []uint32{0}
		}
		s.remember(key, known)
		if was.holds(known) {
			a.Lookaheads = nil
			return s.finish(ctx, q, a, question), nil
		}
	}
	return nil, api.Errorf(api.CodeUnavailable, "the workers of %q keep changing their hashing", q.Model)
}

// hash hashes a query's tokens for each lookahead of the model's workers.
func (r reading) hash(q *api.Query) (list []api.Hashed, err error) {
	var locals []events.LocalHash
	for _, lookahead := range r.lookaheads {
		if locals, err = q.Locals(locals[:0], r.blockSize, lookahead); err != nil {
			return nil, err
		}
		h := api.Hashed{Lookahead: lookahead, Hashes: make(api.Hashes, len(locals))}
		for i, l := range locals {
			h.Hashes[i] = uint64(l)
		}
		list = append(list, h)
	}
	return list, nil
}

// askStore begins a query's lookup in the shared store; nil without a store.
func (s *Scatter) askStore(q *api.Query, blockSize uint32) Question {
	if s.cfg.Store == nil {
		return nil
	}
	return s.cfg.Store(q, blockSize)
}

// finish adds the result of the shared store.
func (s *Scatter) finish(ctx context.Context, q *api.Query, a *api.Answer, question Question) *api.Answer {
	if question != nil {
		begun := time.Now()
		if question.Merge(ctx, a); question.Asked() {
			s.cfg.Metrics.Stage(ctx, StageStore, time.Since(begun))
		}
	}
	if q.Raw {
		a.FinishRaw(q.Idle, a.Reason)
	} else {
		a.Finish(q.Idle, a.Reason)
	}
	return a
}

// recall returns the last known hashing of a model's workers; zero if unknown.
func (s *Scatter) recall(key readingKey) reading {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.readings[key]
}

func (s *Scatter) remember(key readingKey, r reading) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.readings) >= maxReadings {
		clear(s.readings)
	}
	s.readings[key] = r
}

// union sends a query with hashes, without tokens, to a node for each partition.
func (s *Scatter) union(ctx context.Context, q *api.Query, wanted []Wanted) (*api.Answer, error) {
	u, begun := NewUnion(q, s.cfg.PartitionOf), time.Now()
	asking, span := tracing.Start(ctx, StagePeers)
	missing, err := s.gather(asking, wanted, &finding{query: q, union: u, local: s.cfg.Local})
	span.End()
	s.cfg.Metrics.Stage(ctx, StagePeers, time.Since(begun))
	if err != nil {
		return nil, err
	}
	return u.Answer(missing)
}

// Workers returns the ranks of all nodes. Nodes exchange the list in pages.
func (s *Scatter) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	view := s.cfg.View()
	if view == nil {
		return s.cfg.Local.Workers(ctx, asked)
	}
	all := &api.WorkerList{Workers: []api.WorkerInfo{}, Next: asked.After}
	for {
		part := api.WorkersRequest{After: all.Next, Limit: api.WorkersPage}
		if left := asked.Limit - len(all.Workers); asked.Limit > 0 {
			part.Limit = min(part.Limit, left)
		}
		g := &listing{local: s.cfg.Local, asked: part, list: &api.WorkerList{Workers: []api.WorkerInfo{}}}
		missing, err := s.gather(ctx, s.all(view, func(events.Partition) bool { return true }), g)
		if err != nil {
			return nil, err
		}
		if all.Append(g.finish(missing)); all.Next == nil || len(all.Workers) == asked.Limit && asked.Limit > 0 {
			return all, nil
		}
	}
}
