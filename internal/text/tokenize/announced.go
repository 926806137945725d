package tokenize

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Check is what comes of comparing the tokens of a request with what its worker has announced.
type Check string

// The checks.
const (
	Match    Check = "match"    // the worker holds the prompt's blocks
	Partial  Check = "partial"  // it holds the first of them only
	Mismatch Check = "mismatch" // it holds none of them, though it has stored others
	Unknown  Check = "unknown"  // its events do not say
)

// Of checks.
const (
	checkedBlocks = 64 // of a prompt at most
	checkedAtOnce = 16 // models
	checkedModels = 256
	checkPatience = 5 * time.Minute // for the first output token

	recentChecks  = 20
	fewMismatches = 3 // are a problem, if they are most of the recent checks
)

// settling is when a worker is looked at: so long after a request's first output token, and so long after that. Its
// events have come by then.
var settling = []time.Duration{time.Second, 4 * time.Second}

// AnnouncedConfig is what an [Announced] needs.
type AnnouncedConfig struct {
	Find   func(ctx context.Context, q *api.Query) (*api.Answer, error)
	Worker func(ctx context.Context, rank api.RankPlace) *api.WorkerInfo // nil: it is not known

	Observe func(model string, c Check)
	Warn    func(problem string) // a model has a problem that it had not before
}

// Announced compares tokens that were made here with those that engines announce. Of each model it follows one request
// at a time: when that has its first output token, its worker has announced the blocks of its prompt, if its tokens
// are those that were made here. Any goroutine may use it.
//
// A check is a mismatch only if nothing else explains it: the worker's events come, and it has stored blocks since the
// request was booked; none of them waits for its parent; and either the request is still under way, so that its
// blocks cannot have been evicted, or nothing was evicted since.
type Announced struct {
	cfg   AnnouncedConfig
	begun chan *sent // room for all that are followed

	mu       sync.Mutex
	followed map[string]*sent   // by model
	recent   map[string][]Check // by model; none is Unknown
	last     map[string]*sent   // by model: of the last that did not match
	warned   map[string]bool
}

// sent is a request that is followed.
type sent struct {
	query     api.Query // of its first blocks
	blocks    int       // that its worker will hold
	chat      bool
	rank      api.RankPlace
	seq       []events.SeqHash
	prefilled chan struct{} // closed when it has its first output token
	ended     chan struct{} // closed when it has ended
}

// NewAnnounced returns one that follows nothing yet.
func NewAnnounced(cfg AnnouncedConfig) *Announced {
	return &Announced{cfg: cfg, begun: make(chan *sent, checkedAtOnce), followed: map[string]*sent{},
		recent: map[string][]Check{}, last: map[string]*sent{}, warned: map[string]bool{}}
}

// Begin follows a request that came as a text, a chat or not, and was booked, unless another of its model is followed.
func (a *Announced) Begin(q *api.Query, chat bool, chosen *api.Selection) {
	size := int(chosen.BlockSize)
	tokens := q.Tokens[:min(len(q.Tokens), checkedBlocks*size+1)]
	if !chosen.Booked || chosen.Prefill != nil || size == 0 || len(tokens) <= size {
		return // what a decode worker is sent by a prefill worker, it may announce or not
	}
	blocks := (len(tokens) - 1) / size // some engines store no block with the last token
	if int(chosen.Device) >= blocks {
		return // nothing new will be stored
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, known := a.recent[q.Model]
	if a.followed[q.Model] != nil || len(a.followed) == checkedAtOnce || !known && len(a.recent) == checkedModels {
		return
	}
	hasher, err := events.NewHasher(chosen.BlockSize, events.Space{LoRA: q.LoRA, Salt: q.CacheSalt})
	if err != nil {
		return
	}
	s := &sent{chat: chat, blocks: blocks, rank: api.RankPlace{Instance: chosen.Worker, Rank: chosen.Rank},
		seq: events.SeqHashes(nil, hasher.Hash(nil, tokens))[:blocks], prefilled: make(chan struct{}),
		ended: make(chan struct{}),
		query: api.Query{Model: q.Model, BlockSize: chosen.BlockSize, LoRA: q.LoRA, CacheSalt: q.CacheSalt,
			Tokens: slices.Clone(tokens), Workers: []events.WorkerID{chosen.Worker}, Idle: true, Explain: true}}
	a.followed[q.Model] = s
	a.begun <- s
}

// Observe takes news of a request under way, on whichever node: where it is, and the sequence hashes of its prompt.
func (a *Announced) Observe(model string, rank events.RankKey, seq []events.SeqHash, prefilled, ended bool) {
	if !prefilled && !ended {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.followed[model]
	if s == nil || rank != (events.RankKey{Instance: s.rank.Instance, Rank: s.rank.Rank}) || len(seq) < len(s.seq) ||
		!slices.Equal(seq[:len(s.seq)], s.seq) {
		return
	}
	if prefilled {
		closeOnce(s.prefilled)
	}
	if ended {
		closeOnce(s.ended)
	}
}

// closeOnce closes a channel that only who holds the lock closes.
func closeOnce(c chan struct{}) {
	if !closed(c) {
		close(c)
	}
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Run follows requests until ctx ends.
func (a *Announced) Run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		select {
		case s := <-a.begun:
			all.Go(func() { a.end(s, a.follow(ctx, s)) })
		case <-ctx.Done():
			return
		}
	}
}

// follow follows a request. It returns nothing of one that has said nothing.
func (a *Announced) follow(ctx context.Context, s *sent) Check {
	before := a.cfg.Worker(ctx, s.rank)
	if before != nil && before.Record != nil && before.Record.Events == api.EventsNone {
		return ""
	}
	select {
	case <-s.prefilled:
	case <-s.ended:
		if !closed(s.prefilled) {
			return ""
		}
	case <-time.After(checkPatience):
		return ""
	case <-ctx.Done():
		return ""
	}
	for i, wait := range settling {
		if !loop.Wait(ctx, wait) {
			return ""
		}
		answer, err := a.cfg.Find(ctx, &s.query)
		if err != nil {
			return Unknown
		}
		held := s.held(answer)
		switch want := min(s.blocks, answer.Blocks); {
		case want == 0: // the engine hashes further ahead than the prompt goes
			return Unknown
		case held >= want:
			return Match
		case i < len(settling)-1:
		case !answer.UpToDate() || !tells(before, a.cfg.Worker(ctx, s.rank), closed(s.ended)):
			return Unknown
		case held > 0:
			return Partial
		}
	}
	return Mismatch
}

// held is how many leading blocks of a prompt its worker holds, whichever of its ranks and tiers.
func (s *sent) held(answer *api.Answer) int {
	most := uint32(0)
	for i := range answer.Workers {
		o := &answer.Workers[i]
		n := o.Total()
		if p := o.Path; p != nil { // of a hybrid model, more is held than can be used
			n = 0
			for _, run := range p.Held {
				if run.From == n {
					n = run.To
				}
			}
		}
		most = max(most, n)
	}
	return int(most)
}

// tells reports whether what a rank's engine has announced since a request was booked has the request's blocks in it.
func tells(before, after *api.WorkerInfo, ended bool) bool {
	return before != nil && after != nil && before.Incarnation == after.Incarnation && after.Stored > before.Stored &&
		(after.Engine == "" || after.Engine == api.EngineConnected) && !after.CatchingUp && after.Pending <= before.Pending &&
		(!ended || after.Removed == before.Removed)
}

// end notes what came of a request.
func (a *Announced) end(s *sent, c Check) {
	model := s.query.Model
	a.mu.Lock()
	delete(a.followed, model)
	warn := ""
	switch c {
	case Partial, Mismatch:
		a.last[model] = s
		fallthrough
	case Match:
		list := append(a.recent[model], c)
		a.recent[model] = list[max(0, len(list)-recentChecks):]
		problem := a.problem(model)
		if problem != "" && !a.warned[model] {
			warn = problem
		}
		a.warned[model] = problem != ""
	}
	a.mu.Unlock()
	if c != "" {
		a.cfg.Observe(model, c)
	}
	if warn != "" {
		a.cfg.Warn(warn)
	}
}

// problem is what is wrong with a model's tokens; empty: nothing is known to be.
func (a *Announced) problem(model string) string {
	wrong, list := 0, a.recent[model]
	for _, c := range list {
		if c != Match {
			wrong++
		}
	}
	if wrong < fewMismatches || 2*wrong <= len(list) {
		return ""
	}
	what, last := "a prompt", a.last[model]
	if last.chat {
		what = "messages"
	}
	return fmt.Sprintf("of the last %d texts for model %s that were compared with what engines announced, %d have other "+
		"tokens there, so that workers that hold their blocks are not found; the last were %s for worker %s; what to do: compare "+
		"with indexer tokenizer check, or give the model a render URL; if only LoRA adapters or cache salts differ, name them "+
		"in requests", len(list), model, wrong, what, last.rank.Instance)
}

// Problems says for which models engines make other tokens.
func (a *Announced) Problems() (list []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, model := range slices.Sorted(maps.Keys(a.recent)) {
		if p := a.problem(model); p != "" {
			list = append(list, p)
		}
	}
	return list
}
