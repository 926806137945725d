package selection

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Loads has the tables of requests under way, by model. [load.Service] implements it.
type Loads interface {
	Book(ctx context.Context, model load.Model, b load.Booking) error
	PrefillComplete(ctx context.Context, model load.Model, id string) error
	Progress(ctx context.Context, model load.Model, id string) error
	OutputBlock(ctx context.Context, model load.Model, id string, fraction float64) error
	Free(ctx context.Context, model load.Model, id string) error

	// Read calls read with the table of a model, if there is one. The table is valid only during the call.
	Read(model load.Model, read func(*load.Table)) bool
	// ReadForeign calls read with the table of requests of foreign routers, if there are any.
	ReadForeign(model load.Model, read func(*load.Table))
	Models() []load.Model // models with a table
	Now() time.Duration   // of the tables' clock

	// Watch sends a value to the channel, unless it is full, after every possible change of a load.
	Watch(changed chan<- struct{})
}

// Guesses returns guesses of the leading blocks of a prompt on ranks. [guess.Service] implements it.
type Guesses interface {
	Depths(model string, ranks []registry.PoolRank, seq []events.SeqHash, depths []uint32) (some bool)
	Refute(model string, ranks []registry.PoolRank, seq []events.SeqHash, age time.Duration, confirmed, depths []uint32)
}

// Config configures a Service.
type Config struct {
	Find  func(ctx context.Context, q *api.Query) (*api.Answer, error)
	Pool  func(model string) *registry.Pool
	Loads Loads

	Engines Engines // the engines' reports of used memory; nil: none

	Penalties Penalties // the workers with failed requests; nil: none

	Sessions *affinity.Service // the workers of sessions; nil: no session affinity

	Guesses Guesses // guesses of held blocks; nil: none

	Sources Sources // KV sources of choices; zero: no search

	// Observe receives the outcome of each request with a readable prompt, except advisory and diagnostic requests. nil:
	// not called.
	Observe func(*Observed)

	Policy  string         // default policy of requests; default [DefaultPolicy]
	Routing routing.Config // of all policies

	// Pending bounds the choices that are kept for a booking by id.
	Pending PendingLimits

	// Stage is called with the duration of each stage of a selection; nil disables it.
	Stage func(ctx context.Context, stage string, took time.Duration)
}

// DefaultPolicy is the policy of requests without a policy.
const DefaultPolicy = "kvatlas"

// Service chooses and books. See the package comment.
type Service struct {
	cfg       Config
	selectors map[string]*routing.Selector
	pending   *pending
	pools     sync.Map     // model → *candidates
	room      *waitingRoom // nil: no request waits
	scratches sync.Pool
}

// New returns a service. It fails if the configuration is invalid.
func New(cfg Config) (*Service, error) {
	if cfg.Policy == "" {
		cfg.Policy = DefaultPolicy
	}
	if cfg.Stage == nil {
		cfg.Stage = func(context.Context, string, time.Duration) {}
	}
	s := &Service{cfg: cfg, selectors: map[string]*routing.Selector{}, pending: newPending(cfg.Pending)}
	for _, name := range routing.Policies() {
		selector, err := routing.New(name, cfg.Routing)
		if err != nil {
			return nil, err
		}
		s.selectors[name] = selector
	}
	if s.selectors[cfg.Policy] == nil {
		return nil, fmt.Errorf("no policy is named %q; there are %s", cfg.Policy,
			strings.Join(routing.Policies(), ", "))
	}
	if cfg.Routing.Queue != nil {
		s.room = newWaitingRoom(cfg.Routing.Queue)
		cfg.Loads.Watch(s.room.changed)
	}
	s.scratches.New = func() any {
		return &scratch{rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
	}
	return s, nil
}

// scratch has the reusable memory of a selection.
type scratch struct {
	rng     *rand.Rand
	asked   asked
	began   time.Time // start of the present stage
	looked  time.Time // start of the lookup in the index
	request routing.Request
	list    []routing.Candidate
	depths  []int32 // by row of the load table
	room    []api.Overlap
	locals  []events.LocalHash
	seq     []events.SeqHash
	guessed []uint32 // guessed leading blocks, by rank; empty: none

	confirmed []uint32 // device depths by the index, without guesses
	routing   routing.Scratch
}

// stages of a selection, for measurements.
const (
	stageHash   = "hash"
	stageMatch  = "match"
	stageLoad   = "load"
	stageChoose = "choose"
	stageBook   = "book"
)

// Details has the inputs of a selection.
type Details struct {
	Chosen         routing.Candidate
	Ranks          []routing.Candidate // of the chosen worker, Chosen among them
	SequenceHashes []events.SeqHash    // of the prompt
}

// hashed returns a scratch with the hashes of a prompt's whole blocks, and the length of the prompt in tokens. The
// caller puts the scratch back into s.scratches.
func (s *Service) hashed(p *api.Prompt, blockSize uint32) (x *scratch, isl uint64, err error) {
	x = s.scratches.Get().(*scratch)
	x.began = time.Now()
	if isl, err = x.hash(p, blockSize); err != nil {
		s.scratches.Put(x)
		return nil, 0, err
	}
	return x, isl, nil
}

// lap ends a stage.
func (s *Service) lap(ctx context.Context, x *scratch, stage string) {
	now := time.Now()
	s.cfg.Stage(ctx, stage, now.Sub(x.began))
	x.began = now
}

// Select chooses a worker for a prompt, and books the request there if Book is set.
func (s *Service) Select(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
	return s.SelectDetailed(ctx, r, nil)
}

// SelectDetailed is [Service.Select] and writes the inputs of the selection into d, unless d is nil. The request must
// not be disaggregated. An advisory choice is kept like any other.
func (s *Service) SelectDetailed(ctx context.Context, r *api.SelectRequest, d *Details) (out *api.Selection, _ error) {
	selector := s.selectors[s.policy(r.Policy)]
	if selector == nil {
		return nil, api.Errorf(api.CodeMalformed, "policy is %.40q; there are %s", r.Policy,
			strings.Join(routing.Policies(), ", "))
	}
	of, err := s.candidates(r.Model, r.BlockSize)
	if err != nil {
		return nil, err
	}
	var by routing.AffinitySource
	if r.SessionID != "" && s.cfg.Sessions != nil {
		in, session, end, err := s.inSession(ctx, r)
		if err != nil {
			return nil, err
		}
		defer end()
		r, by = in, session
	}
	prompt := r.Prompt()
	x, isl, err := s.hashed(&prompt, of.blockSize)
	if err != nil {
		return nil, err
	}
	defer s.scratches.Put(x)
	if s.cfg.Observe != nil && !r.Advisory && !r.Diagnostic {
		defer s.observe(x, r, of, isl, x.began, &out)
	}
	s.lap(ctx, x, stageHash)
	answer, err := s.match(ctx, r, of, x)
	if err != nil {
		return nil, err
	}
	s.guess(x, of)
	s.lap(ctx, x, stageMatch)
	x.setRequest(r, of, answer, isl)
	x.request.AffinityBy = by
	s.follow(r, x)
	a := &x.asked
	*a = asked{r, selector, of, answer, len(x.seq), d}
	if s.room != nil && !r.Advisory {
		x.request.Queue = s.room.cfg
	}
	var c chosen
	if x.request.Queue != nil {
		c, err = s.admit(ctx, a, x)
	} else if c, err = s.decide(ctx, a, x); err == nil {
		err = s.settle(ctx, r, &c)
	}
	if err != nil {
		return nil, err
	}
	if c.out.Booked {
		s.lap(ctx, x, stageBook)
	}
	return c.out, nil
}

// decide chooses the worker of a request, or both workers. With an error, only chosen.busy is valid.
func (s *Service) decide(ctx context.Context, a *asked, x *scratch) (chosen, error) {
	if a.r.Disaggregated {
		return s.chooseBoth(ctx, a, x)
	}
	return s.choose(ctx, a, x)
}

// settle books a choice, or keeps it, by the request.
func (s *Service) settle(ctx context.Context, r *api.SelectRequest, c *chosen) error {
	if r.RequestID == "" || r.Advisory && !c.detailed {
		return nil
	}
	c.session = r.SessionID
	if !r.Book {
		s.pending.add(r.Model, c)
		return nil
	}
	s.pending.drop(r.Model, r.RequestID)
	err := s.book(ctx, r.Model, c)
	c.out.Booked = err == nil
	return err
}

// asked is a request for a choice with the answer of the index.
type asked struct {
	r        *api.SelectRequest
	selector *routing.Selector
	of       *candidates
	answer   *api.Answer
	blocks   int // whole blocks of the prompt
	details  *Details
}

// unknown returns the endpoints of the request without a registered candidate.
func (a *asked) unknown() []string {
	if a.r.Endpoints == nil {
		return nil
	}
	_, unknown := a.of.pool.At(a.r.Endpoints)
	return unknown
}

// refused converts a refusal of pkg/routing for the client.
func (a *asked) refused(err error) error {
	e := refused(err)
	if unknown := a.unknown(); len(unknown) > 0 {
		e.Message += fmt.Sprintf("; no worker of the model is registered at %s", registry.First(unknown))
	}
	return e
}

// chosen is a choice with its booking. The booking's hashes belong to the scratch.
type chosen struct {
	out      *api.Selection
	booking  load.Booking
	eligible int          // eligible ranks
	detailed bool         // of SelectDetailed
	prefill  load.Booking // booking of a disaggregated request on the prefill worker; no ID: none
	session  string       // of the request; empty: none

	busy *routing.Refusal // with an error: the refusal because all eligible ranks are busy; nil: another reason
}

// setRequest creates the request for pkg/routing.
func (x *scratch) setRequest(r *api.SelectRequest, of *candidates, answer *api.Answer, isl uint64) {
	x.request = routing.Request{
		ISL: isl, BlockSize: of.blockSize, ExpectedOutputTokens: r.ExpectedOutputTokens,
		Role: r.Role, LoRA: r.LoRA, Pin: r.Pinned, Affinity: r.Affinity, Allowed: r.Workers,
		Excluded: r.Excluded, Endpoints: r.Endpoints,
		RequiredTaints: r.RequiredTaints, Shared: answer.L3.Ranges, Explain: r.Explain,
	}
	if r.Overrides != nil {
		x.request.Overrides = *r.Overrides
	}
	for taint, weight := range r.PreferredTaints {
		x.request.PreferredTaints = append(x.request.PreferredTaints,
			routing.TaintWeight{Taint: taint, Weight: float32(weight)})
	}
}

// choose chooses a worker for x.request. In a prefill pool, blocks of requests are not counted. With an error, only
// c.busy is valid.
func (s *Service) choose(ctx context.Context, a *asked, x *scratch) (c chosen, err error) {
	seq := x.seq
	if x.request.Role == routing.Prefill {
		seq = seq[:0]
	}
	x.request.Blocks = uint64(len(seq))
	s.fill(x, a.of, a.answer, seq)
	s.weigh(x, a.of, a.r.Model, seq, reuse(a.selector, &x.request))
	s.reported(x, a.of)
	s.penalise(x, a.of)
	s.lap(ctx, x, stageLoad)
	choice, err := a.selector.Choose(&x.request, x.list, x.rng, &x.routing)
	if err != nil {
		if r, is := errors.AsType[*routing.Refusal](err); is && r.Code == routing.AllBusy {
			c.busy = r
		}
		return c, a.refused(err)
	}
	s.lap(ctx, x, stageChoose)
	c.out = a.of.selection(a.r, a.answer, a.selector, &choice)
	c.out.ISLTokens, c.out.Blocks, c.out.Candidates = x.request.ISL, a.blocks, len(x.list)
	c.out.UnknownEndpoints, c.eligible = a.unknown(), choice.Eligible
	if picked := &x.list[choice.Index]; picked.Guessed > 0 {
		c.out.Guessed = picked.Device
	}
	if d := a.details; d != nil {
		c.detailed = true
		d.Chosen, d.SequenceHashes, d.Ranks = x.list[choice.Index], slices.Clone(seq), d.Ranks[:0] // once more after a wait
		for i := range x.list {
			if x.list[i].Worker.ID == choice.Worker {
				d.Ranks = append(d.Ranks, x.list[i])
			}
		}
	}
	busyOrNot(a, &x.list[choice.Index], c.out)
	c.out.KVSource = s.cfg.Sources.source(a.answer, a.of, x.list, choice.Index, a.r, x.rng)
	c.booking = load.Booking{
		ID: a.r.RequestID, Rank: events.RankKey{Instance: choice.Worker, Rank: choice.Rank}, Hashes: seq,
		NoReuse: !reuse(a.selector, &x.request), ExpectedOutput: a.r.ExpectedOutputTokens,
	}
	if choice.TrackPrefillTokens {
		c.booking.PrefillTokens = int64(choice.EffectivePrefillTokens)
	}
	return c, nil
}

func (s *Service) policy(name string) string {
	if name == "" {
		return s.cfg.Policy
	}
	return name
}

// reuse reports whether requests with common prefixes share blocks on a worker.
func reuse(selector *routing.Selector, r *routing.Request) bool {
	return selector.Config().With(&r.Overrides).RouterAssumeKVReuse
}

// hash computes the local and sequence hashes of a prompt's whole blocks, and returns the length of the prompt in
// tokens.
func (x *scratch) hash(p *api.Prompt, blockSize uint32) (isl uint64, err error) {
	x.locals, x.seq = x.locals[:0], x.seq[:0]
	isl = p.ISLTokens
	switch {
	case p.Tokens != nil:
		q := p.Query()
		if x.locals, err = q.Locals(x.locals, blockSize, 0); err != nil {
			return 0, err
		}
		isl = max(isl, uint64(len(p.Tokens))) // a text may have more tokens than the lookup
	default:
		x.locals = slices.Grow(x.locals, len(p.Hashes))[:len(p.Hashes)]
		for i, h := range p.Hashes {
			x.locals[i] = events.LocalHash(h)
		}
	}
	switch {
	case p.SequenceHashes == nil && p.EngineHashes != nil:
		for _, h := range p.EngineHashes {
			x.seq = append(x.seq, events.SeqHash(h))
		}
	case p.SequenceHashes == nil:
		x.seq = events.SeqHashes(x.seq, x.locals)
	case p.Tokens != nil && len(p.SequenceHashes) != len(x.locals):
		return 0, api.Errorf(api.CodeMalformed, "there are %d sequence_hashes; the tokens have %d whole blocks",
			len(p.SequenceHashes), len(x.locals))
	default:
		for _, h := range p.SequenceHashes {
			x.seq = append(x.seq, events.SeqHash(h))
		}
	}
	whole := uint64(len(x.seq)) * uint64(blockSize)
	if isl == 0 {
		isl = whole
	}
	if isl < whole {
		return 0, api.Errorf(api.CodeMalformed, "isl_tokens is %d; %d whole blocks of %d tokens have %d", isl,
			len(x.seq), blockSize, whole)
	}
	return isl, nil
}

// match queries the index for the candidates' depths. For a model without events, all depths are 0.
func (s *Service) match(ctx context.Context, r *api.SelectRequest, of *candidates, x *scratch) (*api.Answer, error) {
	x.looked = time.Now()
	nothing := func(missing []events.Partition) *api.Answer {
		return &api.Answer{Model: r.Model, BlockSize: of.blockSize, Complete: len(missing) == 0, Missing: missing}
	}
	if len(x.locals) == 0 && len(r.EngineHashes) == 0 {
		return nothing(nil), nil
	}
	q := r.Query
	q.Explain, q.Idle, q.Workers, q.Endpoints = false, false, nil, nil
	q.BlockSize, q.Raw, q.Room = of.blockSize, true, x.room
	q.DeadlineMS, q.WithEngineHashes, q.Within = 0, false, s.cfg.Sources.within()
	if s.cfg.Routing.SharedCacheMode == routing.SharedDynamo { // blocks behind holes count too
		q.L3 = cmp.Or(q.L3, api.L3All)
	}
	ctx, done := r.Bounded(ctx)
	defer done()
	answer, err := s.cfg.Find(ctx, &q)
	if err == nil {
		x.room = answer.Workers[:0]
		return answer, nil
	}
	switch e := api.AsError(err); e.Code {
	case api.CodeUnknownModel: // registered, without events yet
		return nothing(e.Missing), nil
	case api.CodeNotReady, api.CodeUnavailable, api.CodeBehind:
		if r.DeadlineMS > 0 { // no answer in time: the loads decide
			late := nothing(e.Missing)
			late.Complete = false
			return late, nil
		}
	}
	return nil, err
}

// fill sets the candidates: all registered ranks, with the depths of the answer. seq has the blocks that may refute
// guesses.
func (s *Service) fill(x *scratch, of *candidates, a *api.Answer, seq []events.SeqHash) {
	x.list = append(x.list[:0], of.list...)
	for i := range a.Workers {
		o := &a.Workers[i]
		at, ok := of.place(o)
		if !ok {
			continue // the registration has ended
		}
		c := &x.list[at]
		c.Device, c.Host, c.Disk, c.WouldLoad = o.Device, o.Host, o.Disk+o.External, o.L3
	}
	of.observe(a, x.list)
	// a rank without blocks would load the same blocks from the start as any other
	for i := range x.list {
		if a.L3.FromStart == 0 {
			break
		}
		c := &x.list[i]
		if c.Device+c.Host+c.Disk+c.WouldLoad == 0 && of.ranks[i].Record.Events != api.EventsNone {
			c.WouldLoad = a.L3.FromStart
		}
	}
	if len(x.guessed) > 0 && a.UpToDate() {
		x.confirmed = x.confirmed[:0]
		for i := range x.list {
			x.confirmed = append(x.confirmed, x.list[i].Device)
		}
		s.cfg.Guesses.Refute(of.pool.Model, of.ranks, seq, time.Since(x.looked), x.confirmed, x.guessed)
	}
	for i, depth := range x.guessed {
		if c := &x.list[i]; depth > c.Device {
			c.Guess(depth)
		}
	}
}

// guess looks up the guessed blocks of the prompt on each rank.
func (s *Service) guess(x *scratch, of *candidates) {
	x.guessed = x.guessed[:0]
	if s.cfg.Guesses == nil {
		return
	}
	x.guessed = slices.Grow(x.guessed, len(of.ranks))[:len(of.ranks)]
	clear(x.guessed)
	if !s.cfg.Guesses.Depths(of.pool.Model, of.ranks, x.seq, x.guessed) {
		x.guessed = x.guessed[:0]
	}
}

// table returns the load table of a model.
func table(model string) load.Model { return load.Model{Name: model} }

// weigh writes the candidates' loads, for a prompt with the blocks of seq.
func (s *Service) weigh(x *scratch, of *candidates, model string, seq []events.SeqHash, reuse bool) {
	blocks := uint64(len(seq))
	if !reuse {
		seq = nil // without reuse, its blocks are its own
	}
	booked := s.cfg.Loads.Read(table(model), func(t *load.Table) {
		at, now := of.rowsOf(t, &of.rows), s.cfg.Loads.Now()
		var fleet routing.Pace
		for i, at := range at {
			if at >= 0 {
				pace, _ := t.Pace(i, now)
				fleet.Add(pace)
			}
		}
		prior := fleet.Rate(0)
		x.start(blocks, prior, fleet.Life(), of.memories.shown.Load())
		x.depths = t.Depths(x.depths, seq)
		for i, at := range at {
			if at >= 0 {
				c := &x.list[at]
				x.add(c, t, i, blocks)
				pace, working := t.Pace(i, now)
				c.WorkingMS, c.Busy, c.PrefillRate = working, pace.Busy(), pace.Rate(prior)
			}
		}
		of.remember(t, now, x.list)
	})
	if !booked {
		x.start(blocks, 0, 0, nil)
	}
	s.cfg.Loads.ReadForeign(table(model), func(t *load.Table) {
		x.depths = t.Depths(x.depths, seq)
		for i, at := range of.rowsOf(t, &of.foreign) {
			if at >= 0 {
				x.add(&x.list[at], t, i, blocks)
			}
		}
	})
}

// start writes the load of idle candidates: all blocks of the prompt are new. memories may be nil. One pass over the
// candidates writes all fields, because the candidates exceed the processor's first cache.
func (x *scratch) start(blocks uint64, rate, life float64, memories *[]*routing.Memory) {
	for i := range x.list {
		c := &x.list[i]
		c.NewBlocks, c.Busy, c.PrefillRate, c.LifeMS = blocks, routing.PriorBusy, rate, life
		if memories != nil {
			c.Memory = (*memories)[i]
		}
	}
}

// add adds the load of a table's row to its candidate. x.depths has the depths of the table, and blocks is the length
// of the prompt. Blocks that requests of two tables share count twice.
func (x *scratch) add(c *routing.Candidate, t *load.Table, row int, blocks uint64) {
	l := &t.Rows()[row]
	c.ActivePrefillTokens += uint64(l.PrefillTokens)
	c.ActiveBlocks += uint64(l.Blocks)
	c.ActiveRequests += uint64(l.Requests)
	c.PrefillRequests += uint64(l.Prefilling)
	c.NewBlocks = min(c.NewBlocks, blocks-uint64(x.depths[row]))
}
