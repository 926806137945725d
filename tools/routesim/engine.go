package routesim

import (
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Engine has the constants of an engine. All engines of a fleet have the same constants.
type Engine struct {
	BlockSize int `json:"block_size"` // tokens
	Capacity  int `json:"capacity"`   // tokens of KV memory, whole blocks of which count

	// MaxBatchedTokens limits the tokens of a step, MaxRequests the concurrent requests.
	MaxBatchedTokens int `json:"max_batched_tokens"`
	MaxRequests      int `json:"max_requests"`

	// Prefill is the number of tokens per second in a step with only prefill.
	Prefill float64 `json:"prefill_tokens_per_s"`

	// A step occupies the GPU for the longer of StepBase (reading the weights) and the time of its tokens at the rate
	// Prefill. StepPerRequest and StepPerToken are added for every decoding request and every token of its context.
	// Attention is added for every pair of a computed token and an earlier token. In seconds.
	StepBase       float64 `json:"step_base_s"`
	StepPerRequest float64 `json:"step_per_request_s"`
	StepPerToken   float64 `json:"step_per_context_token_s"`
	Attention      float64 `json:"attention_per_token_pair_s,omitempty"`

	// PrefillHost is the least duration of a step with prompt tokens: the host launches the kernels in sequence.
	// PrefillHost does not occupy the GPU. Delay is the mean time from the router's choice until the engine can schedule
	// the request (HTTP, parsing), with a variation of up to half. Reply is the delay from the end of a token's step to
	// the client and the routers. In seconds.
	PrefillHost float64 `json:"prefill_host_s,omitempty"`
	Delay       float64 `json:"delay_s,omitempty"`
	Reply       float64 `json:"reply_s,omitempty"`

	// Ahead is asynchronous scheduling: the engine plans a step at the start of the step before. A request that arrives
	// during a step then also waits for the next step.
	Ahead bool `json:"plans_ahead,omitempty"`

	// ReservePrompt admits a request only with memory for the whole rest of the prompt.
	ReservePrompt bool `json:"reserves_prompt,omitempty"`

	// EnginesPerGPU engines share a GPU, which divides its time equally among the engines with a running step. 0 and 1:
	// every engine has a GPU. ShareLoss is the lost share of the GPU's rate while several engines use the GPU.
	EnginesPerGPU int     `json:"engines_per_gpu,omitempty"`
	ShareLoss     float64 `json:"share_loss,omitempty"`

	// Host is the capacity of host memory for evicted blocks in tokens. Store is the capacity of the fleet's shared store
	// for computed blocks in tokens. 0 disables a tier. A load of n tokens takes a delay and n / rate seconds. The engine
	// loads only if a computation would take longer.
	Host      int     `json:"host_capacity"`
	HostDelay float64 `json:"host_delay_s"`
	HostRate  float64 `json:"host_tokens_per_s"`
	Store     int     `json:"store_capacity"`
	PullDelay float64 `json:"pull_delay_s"`
	PullRate  float64 `json:"pull_tokens_per_s"`
}

// micros is virtual time in µs.
type micros int64

const never = micros(math.MaxInt64)

func after(seconds float64) micros { return micros(math.Round(seconds * 1e6)) }

func (t micros) seconds() float64 { return float64(t) / 1e6 }

// request is a running request.
type request struct {
	prompt *Prompt
	output int // tokens
	number int // in the workload, over all stages
	stage  int

	session uint64 // 0: none
	retries int    // after crashes of the worker
	copies  bool   // a copy of a hot prefix, which no user sent
	before  uint32 // blocks of the copy that the worker held

	sent, first, done micros

	router, worker int
	booked         booking

	slots     []int32
	computed  int // tokens with KV; during decoding, the number at joined
	target    int // tokens of the prefill: the prompt, and output before a preemption
	generated int // output tokens; during decoding, the number at joined
	owed      int // expected tokens of remaining prefill
	ready     micros
	unnamed   bool // later blocks are not found by other requests, because the cache was reset
	admitted  bool // at least once
	decoding  bool
	joined    int // the engine's step before the first decoding step
	end       int // the last step of the request
	phase     int // the request needs a slot before every step with this number modulo the block size

	reused, loaded int  // prompt tokens at the start of the prefill: on the device, and loaded from host or store
	best, chosen   int  // prompt tokens at the time of routing: on the best worker, and on the chosen worker
	repeats        bool // earlier requests had a real prefix of the prompt, as defined by repeatedShare
}

// engine simulates an engine in steps: continuous batching with chunked prefill, as in vLLM. A step serves decoding
// requests first, then requests in prefill, then waiting requests in order of arrival while memory is available. If
// memory runs out, the newest request releases its slots and waits at the head of the queue.
//
// The cost of a step depends on the changes in the step, not on the number of running requests. All decoding requests
// advance by a token, so a step visits only decoding requests that need a slot or end.
type engine struct {
	cfg   Engine
	names []events.BlockHash // of the workload's blocks
	pool  *pool
	host  *enginesim.Cache
	store *enginesim.Cache // shared by all engines

	coming  []*request // in transit
	waiting []*request
	running []*request // in the order of their starts
	prefill []*request // the requests in running before decoding, in the same order

	steps    int
	decoding int
	context  int                // tokens of all decoding requests
	due      [][]*request       // decoding requests by phase
	ends     map[int][]*request // by the last step
	live     sparse[int32]      // blocks of the prompts of all requests here, with counts
	requests int
	owed     int // tokens of prefill
	busy     bool
	began    micros  // the latest step
	lasts    micros  // the latest step, on a separate GPU
	pieces   []piece // of the step under way
	downTill micros
	life     int // restarts

	publish func([]events.Event) // receives the events of a step and may keep them; may be nil
	news    []events.Event
	scratch []events.BlockHash

	computedTokens, outputTokens, preemptions int
	busyFor                                   micros
}

// piece is the part of a prompt in a step.
type piece struct {
	r *request
	n int // tokens
}

func newEngine(cfg Engine, names []events.BlockHash, store *enginesim.Cache, publish func([]events.Event)) *engine {
	e := &engine{cfg: cfg, names: names, store: store, publish: publish, live: newSparse[int32](len(names))}
	e.restart()
	return e
}

// restart empties the engine and returns its requests. The caller routes the requests again.
func (e *engine) restart() []*request {
	under := slices.Concat(e.running, e.waiting, e.coming)
	e.life++
	e.pool = newPool(e.cfg.Capacity/e.cfg.BlockSize, len(e.names), e.left)
	if e.cfg.Host > 0 {
		e.host = enginesim.NewCache(e.cfg.Host / e.cfg.BlockSize)
	}
	e.coming, e.waiting, e.running, e.prefill, e.pieces = nil, nil, nil, nil, nil
	e.due, e.ends = make([][]*request, e.cfg.BlockSize), map[int][]*request{}
	e.decoding, e.context, e.requests, e.owed, e.busy = 0, 0, 0, 0, false
	e.live.clear()
	e.news = append(e.news[:0], events.Event{Kind: events.Cleared})
	e.flush()
	return under
}

// resetCache drops all blocks, as a change of the weights requires. Running requests continue.
func (e *engine) resetCache() {
	e.pool.forget()
	if e.host != nil {
		e.host.Clear()
	}
	for _, r := range e.running {
		r.unnamed = true
	}
	e.news = append(e.news, events.Event{Kind: events.Cleared})
	e.flush()
}

// left is called by the pool for every block that leaves the device.
func (e *engine) left(b block) {
	name := e.names[b]
	if e.host != nil {
		e.announce(events.Stored, events.Host, name)
		e.scratch = e.host.Use([]events.BlockHash{name}, e.scratch[:0])
		for _, gone := range e.scratch {
			e.announce(events.Removed, events.Host, gone)
		}
	}
	e.announce(events.Removed, events.Device, name)
}

// announce records the removal of a block from a tier, or the copy of a block to the host. Consecutive records become a
// single event.
func (e *engine) announce(kind events.Kind, tier events.Tier, name events.BlockHash) {
	if e.publish == nil {
		return
	}
	if n := len(e.news); n > 0 && e.news[n-1].Kind == kind && e.news[n-1].Tier == tier {
		e.news[n-1].Blocks = append(e.news[n-1].Blocks, name)
		return
	}
	e.news = append(e.news, events.Event{Kind: kind, Tier: tier, Blocks: []events.BlockHash{name}})
}

// stored records that blocks from to to of a prompt are on the device.
func (e *engine) stored(p *Prompt, from, to int) {
	if from >= to {
		return
	}
	if e.store != nil {
		e.scratch = e.store.Use(p.Names[from:to], e.scratch[:0])
	}
	if e.publish == nil {
		return
	}
	ev := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
		Blocks: p.Names[from:to:to], Locals: p.locals()[from:to:to]}
	if from > 0 {
		ev.HasParent, ev.Parent = true, p.Names[from-1]
	}
	e.news = append(e.news, ev)
}

// flush publishes the events of a step.
func (e *engine) flush() {
	if len(e.news) > 0 && e.publish != nil {
		e.publish(e.news)
		e.news = nil
	}
	e.news = e.news[:0]
}

// usable returns the reusable leading blocks of a prompt of target tokens. The block of the last token is excluded,
// because its computation gives the next token.
func (e *engine) usable(p *Prompt, target int) []block {
	return p.blocks[:min(len(p.blocks), (target-1)/e.cfg.BlockSize)]
}

// would returns the tokens of a prompt that a new request would not compute, without evictions before the request's
// turn. The tokens are on the device, in prompts of earlier requests, or follow in host memory and in the store.
func (e *engine) would(p *Prompt) int {
	usable := e.usable(p, p.Tokens)
	n, names := prefix(usable, e.promised), p.Names[:len(usable)]
	if e.host != nil {
		n += e.host.Hit(names[n:])
	}
	if e.store != nil {
		n += e.store.Hit(names[n:])
	}
	return e.cfg.BlockSize * n
}

// forecast returns the seconds until the first token of a new request without later requests. The sum has the rest of
// the running step and the steps for all owed prompt tokens, with the decoding requests in every step.
func (e *engine) forecast(p *Prompt, now micros) float64 {
	rest := 0.0
	if e.busy {
		rest = max(0, (e.began + e.lasts - now).seconds())
	}
	own := p.Tokens - e.would(p)
	tokens := e.owed + own
	for _, x := range e.pieces {
		if e.busy {
			tokens -= x.n // computed by the running step
		}
	}
	steps := math.Ceil(float64(tokens) / float64(e.cfg.MaxBatchedTokens))
	step := max(e.cfg.StepBase, e.cfg.PrefillHost) + float64(e.decoding)*e.cfg.StepPerRequest +
		float64(e.context)*e.cfg.StepPerToken
	pairs := float64(own) * (float64(p.Tokens) - float64(own)/2)
	return rest + max(steps*step, float64(tokens)/e.cfg.Prefill) + pairs*e.cfg.Attention
}

// promised reports whether a block is on the device or in the prompt of a request here.
func (e *engine) promised(b block) bool { return e.live.get(b) > 0 || e.pool.held(b) }

// fits reports whether a request can ever run here.
func (e *engine) fits(p *Prompt, output int) bool {
	return e.blocks(p.Tokens+output) <= e.pool.capacity()
}

func (e *engine) blocks(tokens int) int { return (tokens + e.cfg.BlockSize - 1) / e.cfg.BlockSize }

// arrive adds a request that fits.
func (e *engine) arrive(r *request) {
	e.expect(r)
	e.queue(r)
}

// expect records a request in transit.
func (e *engine) expect(r *request) {
	r.owed = r.prompt.Tokens - e.would(r.prompt)
	e.owed += r.owed
	e.requests++
	for _, b := range r.prompt.blocks {
		e.live.set(b, e.live.get(b)+1)
	}
	e.coming = append(e.coming, r)
}

// queue adds an expected request to the waiting requests.
func (e *engine) queue(r *request) {
	e.coming = slices.DeleteFunc(e.coming, func(x *request) bool { return x == r })
	e.waiting = append(e.waiting, r)
}

// plan is a started step of an engine.
type plan struct {
	host micros // the least duration
	gpu  micros // time on a separate GPU
}

// begin plans a step. Without work it returns an empty plan and the time of the next work, or never.
func (e *engine) begin(now micros) (p plan, wake micros) {
	e.pieces = e.pieces[:0]
	preempted := e.preemptions
	phase := (e.steps + 1) % e.cfg.BlockSize
	for _, r := range slices.Clone(e.due[phase]) {
		if r.decoding && !e.grow(r, r.tokens(e)+1) {
			continue // the request itself was preempted
		}
	}
	budget := e.cfg.MaxBatchedTokens - e.decoding
	wake = never
	for _, r := range slices.Clone(e.prefill) {
		if r.decoding || r.slots == nil {
			continue // the request was preempted for an earlier request
		}
		if r.ready > now {
			wake = min(wake, r.ready)
			continue
		}
		if n := e.part(r.target, r.computed, budget); n > 0 && e.grow(r, r.computed+n) {
			e.pieces = append(e.pieces, piece{r, n})
			budget -= n
		}
	}
	if !e.cfg.Ahead || e.decoding+len(e.pieces) == 0 {
		wake = min(wake, e.admitWaiting(now, budget, preempted, true))
	}
	// drop the pieces of requests that were preempted later
	e.pieces = slices.DeleteFunc(e.pieces, func(p piece) bool { return p.r.slots == nil })
	tokens, pairs := e.decoding, 0.0
	for _, p := range e.pieces {
		tokens += p.n
		pairs += float64(p.n) * (float64(p.r.computed) + float64(p.n)/2)
	}
	if tokens == 0 {
		e.flush()
		return plan{}, wake
	}
	seconds := max(e.cfg.StepBase, float64(tokens)/e.cfg.Prefill) + float64(e.decoding)*e.cfg.StepPerRequest +
		float64(e.context)*e.cfg.StepPerToken + pairs*e.cfg.Attention
	if len(e.pieces) > 0 {
		p.host = after(e.cfg.PrefillHost)
	}
	p.gpu = max(1, after(seconds))
	e.busy, e.began, e.lasts = true, now, max(p.host, p.gpu)
	e.busyFor += e.lasts
	if e.cfg.Ahead {
		e.planAhead(now, preempted)
	}
	return p, never
}

// admitWaiting admits waiting requests in order within the budget of a step: of the starting step, or of the next step.
// It returns the time at which the next request has loaded its blocks from other tiers.
func (e *engine) admitWaiting(now micros, budget, preempted int, begins bool) (wake micros) {
	wake = never
	for len(e.waiting) > 0 && budget > 0 && len(e.running) < e.cfg.MaxRequests && preempted == e.preemptions {
		r := e.waiting[0]
		n, ok := e.admit(r, now, budget)
		if !ok {
			break
		}
		e.waiting = e.waiting[1:]
		e.running, e.prefill = append(e.running, r), append(e.prefill, r)
		if r.ready > now {
			wake = min(wake, r.ready)
			continue
		}
		if begins {
			e.pieces = append(e.pieces, piece{r, n})
		}
		budget -= n
	}
	return wake
}

// planAhead admits requests to the step after the starting step. The requests have their blocks from now on.
func (e *engine) planAhead(now micros, preempted int) {
	budget := e.cfg.MaxBatchedTokens - e.decoding
	for _, r := range e.prefill {
		budget -= r.target - r.computed
	}
	for _, p := range e.pieces {
		if budget += p.n; p.r.computed+p.n == p.r.target {
			budget-- // the request decodes then
		}
	}
	e.admitWaiting(now, budget, preempted, false)
	e.flush()
}

// admit gives a waiting request the slots for the first piece.
func (e *engine) admit(r *request, now micros, budget int) (n int, ok bool) {
	size := e.cfg.BlockSize
	r.target = r.prompt.Tokens + r.generated
	var blocks []block
	if !r.unnamed {
		blocks = e.usable(r.prompt, r.target)
	}
	hit := prefix(blocks, e.pool.held)
	r.ready = 0
	there := hit
	from := func(cache *enginesim.Cache, delay, rate float64) {
		if cache == nil || there == len(blocks) {
			return
		}
		if more := cache.Hit(r.prompt.Names[there:len(blocks)]); more > 0 {
			if s := delay + float64(more*size)/rate; s < float64(more*size)/e.cfg.Prefill {
				there += more
				r.ready = max(r.ready, now) + after(s)
			}
		}
	}
	from(e.host, e.cfg.HostDelay, e.cfg.HostRate)
	from(e.store, e.cfg.PullDelay, e.cfg.PullRate)
	if n = e.part(r.target, there*size, budget); n == 0 {
		return 0, false
	}
	idle := 0
	for _, b := range blocks[:hit] {
		if e.pool.slots[e.pool.at.get(b)].refs == 0 {
			idle++
		}
	}
	first := there*size + n
	if r.ready > 0 {
		first = there * size // the rest after the load
	}
	need := e.blocks(first)
	if e.cfg.ReservePrompt {
		need = e.blocks(r.target)
	}
	if need-hit+idle > e.pool.available() {
		return 0, false
	}
	for _, b := range blocks[:hit] {
		i, _ := e.pool.pin(b)
		r.slots = append(r.slots, i)
	}
	if r.slots == nil {
		r.slots = []int32{}
	}
	r.computed = there * size
	e.fill(r, first)
	e.owed -= r.owed
	r.owed = r.target - r.computed
	e.owed += r.owed
	if !r.admitted {
		r.admitted, r.reused, r.loaded = true, hit*size, (there-hit)*size
	}
	return n, true
}

// part returns the number of tokens in the next piece: all remaining tokens, or as many whole blocks as the budget
// allows.
func (e *engine) part(target, computed, budget int) int {
	n := target - computed
	if n > budget {
		n = max(0, budget-(computed+budget)%e.cfg.BlockSize)
	}
	return n
}

// fill gives a request the slots for a number of tokens. It reports false after giving some slots if no more are
// available. Evictions are announced before stores.
func (e *engine) fill(r *request, tokens int) bool {
	names := r.prompt.blocks
	if r.unnamed {
		names = nil
	}
	from := len(r.slots) // of the run of new blocks
	for need := e.blocks(tokens); len(r.slots) < need; {
		at, name := len(r.slots), block(0)
		if at < len(names) {
			name = names[at]
			if i, ok := e.pool.pin(name); ok { // another request was faster
				e.stored(r.prompt, from, at)
				from = at + 1
				r.slots = append(r.slots, i)
				continue
			}
		}
		i, ok := e.pool.take(name)
		if !ok {
			break
		}
		r.slots = append(r.slots, i)
	}
	e.stored(r.prompt, from, min(len(r.slots), len(names)))
	return len(r.slots) >= e.blocks(tokens)
}

// grow is fill with preemption: the newest request releases its slots, repeatedly. It reports false if r itself was
// preempted.
func (e *engine) grow(r *request, tokens int) bool {
	for !e.fill(r, tokens) {
		last := e.running[len(e.running)-1]
		e.preempt(last)
		if last == r {
			return false
		}
	}
	return true
}

// preempt releases a running request's slots. The request waits again.
func (e *engine) preempt(r *request) {
	e.preemptions++
	if r.decoding {
		e.leave(r)
	} else {
		e.prefill = slices.DeleteFunc(e.prefill, func(x *request) bool { return x == r })
	}
	e.running = slices.DeleteFunc(e.running, func(x *request) bool { return x == r })
	e.pool.release(r.slots)
	r.slots, r.computed, r.unnamed = nil, 0, false
	e.owed -= r.owed
	r.owed = r.prompt.Tokens + r.generated
	e.owed += r.owed
	e.waiting = slices.Insert(e.waiting, 0, r)
}

// tokens is of how many tokens the KV of a request is there.
func (r *request) tokens(e *engine) int {
	if r.decoding {
		return r.computed + e.steps - r.joined
	}
	return r.computed
}

// join starts the decoding of a request. The ended step gave the first token.
func (e *engine) join(r *request) {
	r.decoding, r.joined = true, e.steps
	e.decoding++
	e.context += r.computed
	size := e.cfg.BlockSize
	r.phase = (e.steps + 1 + (size-r.computed%size)%size) % size
	e.due[r.phase] = append(e.due[r.phase], r)
	r.end = e.steps + r.output - r.generated
	e.ends[r.end] = append(e.ends[r.end], r)
}

// leave ends a request's decoding.
func (e *engine) leave(r *request) {
	e.decoding--
	e.context -= r.tokens(e)
	r.computed, r.generated = r.tokens(e), r.generated+e.steps-r.joined
	r.decoding = false
	drop := func(list []*request) []*request {
		return slices.DeleteFunc(list, func(x *request) bool { return x == r })
	}
	e.due[r.phase] = drop(e.due[r.phase])
	if e.ends[r.end] = drop(e.ends[r.end]); len(e.ends[r.end]) == 0 {
		delete(e.ends, r.end)
	}
}

// finish ends the running step. It returns the requests with a first token, and the completed requests.
func (e *engine) finish(now micros) (began, done []*request) {
	e.busy = false
	e.steps++
	e.context += e.decoding
	e.outputTokens += e.decoding
	for _, r := range slices.Clone(e.ends[e.steps]) {
		e.leave(r)
		done = append(done, r)
	}
	for _, p := range e.pieces {
		r := p.r
		r.computed += p.n
		r.owed -= p.n
		e.owed -= p.n
		e.computedTokens += p.n
		if r.computed < r.target {
			continue
		}
		r.generated++
		e.outputTokens++
		if r.first == 0 {
			r.first = now + after(e.cfg.Reply)
			began = append(began, r)
		}
		e.prefill = slices.DeleteFunc(e.prefill, func(x *request) bool { return x == r })
		if r.generated >= r.output {
			done = append(done, r)
		} else {
			e.join(r)
		}
	}
	e.pieces = e.pieces[:0]
	for _, r := range done {
		r.done = now + after(e.cfg.Reply)
		e.pool.release(r.slots)
		r.slots = nil
		e.running = slices.DeleteFunc(e.running, func(x *request) bool { return x == r })
		e.forget(r)
	}
	e.flush()
	return began, done
}

// forget removes a request from the engine.
func (e *engine) forget(r *request) {
	e.requests--
	e.owed -= r.owed
	r.owed = 0
	for _, b := range r.prompt.blocks {
		e.live.set(b, e.live.get(b)-1)
	}
}
