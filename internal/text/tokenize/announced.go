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

// Check is the result of comparing a request's tokens with its worker's events.
type Check string

// The checks.
const (
	Match    Check = "match"    // the worker holds the prompt's blocks
	Partial  Check = "partial"  // the worker holds only the first blocks
	Mismatch Check = "mismatch" // the worker holds none of the blocks, although it has stored others
	Unknown  Check = "unknown"  // the worker's events do not decide
)

// Bounds of checks.
const (
	checkedBlocks = 64 // per prompt
	checkedAtOnce = 16 // models with a check in progress
	checkedModels = 256
	checkPatience = 5 * time.Minute // for the first output token

	recentChecks  = 20
	fewMismatches = 3 // minimum for a problem, if most recent checks are mismatches
)

// settling contains the delays of the two look-ups after a request's first output token. By then, the worker's events
// have arrived.
var settling = []time.Duration{time.Second, 4 * time.Second}

// AnnouncedConfig configures an [Announced]. All fields but Pause are required.
type AnnouncedConfig struct {
	Find   func(ctx context.Context, q *api.Query) (*api.Answer, error)
	Worker func(ctx context.Context, rank api.RankPlace) *api.WorkerInfo // returns nil for an unknown worker

	// Pause is the time after a match in which no request of the model is followed, for engines that receive the tokens of
	// other requests in place of texts; 0: none.
	Pause time.Duration

	Observe func(model string, c Check)
	Warn    func(problem string) // called when a model gets a problem
}

// Announced compares this service's tokens with the events of engines. It follows one request of each model at a time.
// At the first output token, the worker has announced the prompt's blocks, if both have the same tokens. Announced is
// safe for concurrent use.
//
// A check is a mismatch only if other explanations are excluded. The worker's events arrive, and it has stored blocks
// since the booking. No block waits for its parent, and no cache was cleared. The request is still in progress, so its
// blocks cannot be evicted, or no block was evicted since.
type Announced struct {
	cfg   AnnouncedConfig
	begun chan *sent // has room for all followed requests

	mu       sync.Mutex
	followed map[string]*sent   // by model
	recent   map[string][]Check // by model; without Unknown
	last     map[string]*sent   // by model: the last mismatch
	warned   map[string]bool
	compared map[string]time.Time // by model: the time of the last result
}

// sent is a followed request.
type sent struct {
	query     api.Query // for its first blocks
	blocks    int       // number of blocks that the worker will hold
	chat      bool
	rank      api.RankPlace
	seq       []events.SeqHash
	prefilled chan struct{} // closed at the first output token
	ended     chan struct{} // closed at the end of the request
}

// NewAnnounced returns an Announced that follows no request.
func NewAnnounced(cfg AnnouncedConfig) *Announced {
	return &Announced{cfg: cfg, begun: make(chan *sent, checkedAtOnce), followed: map[string]*sent{},
		recent: map[string][]Check{}, last: map[string]*sent{}, warned: map[string]bool{},
		compared: map[string]time.Time{}}
}

// Begin follows a booked request with a text, unless another request of the model is followed. chat reports whether the
// text is a chat. It reports whether the engine must receive the text in place of the tokens: if the request is
// followed, and if the engines had other tokens than this service in one of the recent comparisons.
func (a *Announced) Begin(q *api.Query, chat bool, chosen *api.Selection) (keepText bool) {
	size := int(chosen.BlockSize)
	tokens := q.Tokens[:min(len(q.Tokens), checkedBlocks*size+1)]
	a.mu.Lock()
	defer a.mu.Unlock()
	differed := slices.ContainsFunc(a.recent[q.Model], func(c Check) bool { return c != Match })
	if !chosen.Booked || chosen.Prefill != nil || size == 0 || len(tokens) <= size {
		return differed // a decode worker may or may not announce blocks that a prefill worker sends
	}
	blocks := (len(tokens) - 1) / size // some engines do not store the block with the last token
	if int(chosen.Device) >= blocks {
		return differed // no block will be new
	}
	_, known := a.recent[q.Model]
	pause := !differed && time.Since(a.compared[q.Model]) < a.cfg.Pause
	if pause || a.followed[q.Model] != nil ||
		len(a.followed) == checkedAtOnce || !known && len(a.recent) == checkedModels {
		return differed
	}
	hasher, err := events.NewHasher(chosen.BlockSize, events.Space{LoRA: q.LoRA, Salt: q.CacheSalt})
	if err != nil {
		return differed
	}
	s := &sent{chat: chat, blocks: blocks, rank: api.RankPlace{Instance: chosen.Worker, Rank: chosen.Rank},
		seq: events.SeqHashes(nil, hasher.Hash(nil, tokens))[:blocks], prefilled: make(chan struct{}),
		ended: make(chan struct{}),
		query: api.Query{Model: q.Model, BlockSize: chosen.BlockSize, LoRA: q.LoRA, CacheSalt: q.CacheSalt,
			Tokens: slices.Clone(tokens), Workers: []events.WorkerID{chosen.Worker}, Idle: true, Explain: true}}
	a.followed[q.Model] = s
	a.begun <- s
	return true
}

// Observe processes progress of a request on any node: its rank, and the sequence hashes of its prompt.
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

// closeOnce closes a channel. The caller holds the lock.
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

// follow follows a request to its result. The result is empty if the request provides no information.
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
		case want == 0: // the engine's lookahead exceeds the prompt
			return Unknown
		case held >= want:
			return Match
		case i < len(settling)-1:
		case !answer.UpToDate() || !decisive(before, a.cfg.Worker(ctx, s.rank), closed(s.ended)):
			return Unknown
		case held > 0:
			return Partial
		}
	}
	return Mismatch
}

// held returns the number of leading blocks of a prompt on its worker, over all ranks and tiers.
func (s *sent) held(answer *api.Answer) int {
	most := uint32(0)
	for i := range answer.Workers {
		o := &answer.Workers[i]
		n := o.Total()
		if p := o.Path; p != nil { // a hybrid model holds more blocks than it can use
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

// decisive reports whether a rank's events since a booking would contain the request's blocks.
func decisive(before, after *api.WorkerInfo, ended bool) bool {
	return before != nil && after != nil && before.Incarnation == after.Incarnation && after.Stored > before.Stored &&
		(after.Engine == "" || after.Engine == api.EngineConnected) && !after.CatchingUp && after.Pending <= before.Pending &&
		after.Cleared == before.Cleared && (!ended || after.Removed == before.Removed)
}

// end records the result of a request.
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
		a.compared[model] = time.Now()
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

// problem returns the problem of a model's tokens; empty without a problem.
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
	return fmt.Sprintf("of the last %d compared texts for model %s, %d have other tokens "+
		"in the engines' events, so queries miss their blocks; the last were %s for worker %s; what to do: compare "+
		"with indexer tokenizer check, or give the model a render URL; if only LoRA adapters or cache salts differ, name them "+
		"in requests", len(list), model, wrong, what, last.rank.Instance)
}

// Problems lists the models with other tokens in the engines.
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
