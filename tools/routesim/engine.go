package routesim

import (
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Engine are the constants of one engine. All engines of a fleet have the same.
type Engine struct {
	BlockSize int `json:"block_size"` // tokens
	Capacity  int `json:"capacity"`   // tokens of KV memory, whole blocks of which count

	// MaxBatchedTokens bounds the tokens of one step, MaxRequests the requests that run together.
	MaxBatchedTokens int `json:"max_batched_tokens"`
	MaxRequests      int `json:"max_requests"`

	// Prefill is the tokens per second of a step that does nothing else.
	Prefill float64 `json:"prefill_tokens_per_s"`

	// A step occupies the GPU for the longer of StepBase (reading the weights) and the time of its tokens at the rate
	// Prefill. StepPerRequest and StepPerToken are added for each decoding request and each token of its context.
	// Attention is added for each pair of a computed token and a token before it. In seconds.
	StepBase       float64 `json:"step_base_s"`
	StepPerRequest float64 `json:"step_per_request_s"`
	StepPerToken   float64 `json:"step_per_context_token_s"`
	Attention      float64 `json:"attention_per_token_pair_s,omitempty"`

	// PrefillHost is the least duration of a step that computes prompt tokens: the host launches the kernels one by
	// one. It does not occupy the GPU. Delay is the mean time from the router's choice until the engine can schedule
	// the request (HTTP, parsing); it varies by up to half of it. Reply is the time of a token from the end of its step
	// to the client, and to the routers' books. In seconds.
	PrefillHost float64 `json:"prefill_host_s,omitempty"`
	Delay       float64 `json:"delay_s,omitempty"`
	Reply       float64 `json:"reply_s,omitempty"`

	// Ahead is asynchronous scheduling: the engine plans a step when the step before it starts, so a request that
	// arrives during a step waits for the step after it too.
	Ahead bool `json:"plans_ahead,omitempty"`

	// ReservePrompt admits a request only if there is memory for the whole rest of its prompt.
	ReservePrompt bool `json:"reserves_prompt,omitempty"`

	// EnginesPerGPU engines share one GPU, which divides its time equally among those with a step under way. 0 and 1:
	// each engine has a GPU. ShareLoss is the share of the GPU's rate that is lost while several engines use it.
	EnginesPerGPU int     `json:"engines_per_gpu,omitempty"`
	ShareLoss     float64 `json:"share_loss,omitempty"`

	// Host is how many tokens host memory holds of what leaves the device; Store the same of what the fleet's shared
	// store holds of what any engine computed. 0: there is none. Loading n tokens takes a delay and n / rate seconds,
	// and is done only where computing them would take longer.
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

// request is one request under way.
type request struct {
	prompt *Prompt
	output int // tokens
	number int // in the workload, over all stages
	stage  int

	session uint64 // 0: none
	retries int    // after crashes of its worker

	sent, first, done micros

	router, worker int
	booked         booking

	slots     []int32
	computed  int // tokens of which the KV is there, as of joined if it decodes
	target    int // tokens of the prefill: the prompt, and output before a preemption
	generated int // tokens that came out, as of joined if it decodes
	owed      int // tokens of prefill that it is expected to need yet
	ready     micros
	unnamed   bool // its further blocks are not found by others, since the cache was reset
	admitted  bool // at least once
	decoding  bool
	joined    int // the engine's step after which it began to decode
	end       int // the step with which it will be done
	phase     int // it needs a slot before each step of this number modulo the block size

	reused, loaded int  // tokens of the prompt that were on the device, and that came from host or store, when it began
	best, chosen   int  // tokens of the prompt that it could have found on some worker, and on the one that was chosen
	repeats        bool // a real prefix of the prompt, as repeatedShare has it, came in earlier requests
}

// engine steps one engine: continuous batching with chunked prefill, as vLLM does it. Decoding requests come first,
// then requests whose prefill has begun, then waiting ones in order of arrival while there is memory for them. If
// memory runs out, the request that began last gives its slots back and waits again, before all others.
//
// Each step costs the work of what changes in it, not of what runs: all decoding requests go on by one token, so only
// those that need another slot or end with it are touched.
type engine struct {
	cfg   Engine
	names []events.BlockHash // of the workload's blocks
	pool  *pool
	host  *enginesim.Cache
	store *enginesim.Cache // shared with the others

	coming  []*request // on their way
	waiting []*request
	running []*request // in the order in which they began
	prefill []*request // those of running that do not decode, in that order

	steps    int
	decoding int
	context  int                // tokens, of all that decode
	due      [][]*request       // decoding requests by phase
	ends     map[int][]*request // by the step with which they end
	live     sparse[int32]      // blocks of the prompts of all requests here, with their number
	requests int
	owed     int // tokens of prefill
	busy     bool
	began    micros  // the latest step
	lasts    micros  // the latest step, on a GPU of its own
	pieces   []piece // of the step under way
	downTill micros
	life     int // restarts

	publish func([]events.Event) // receives the events of a step, and may keep them; may be nil
	news    []events.Event
	scratch []events.BlockHash

	computedTokens, outputTokens, preemptions int
	busyFor                                   micros
}

// piece is a part of a prompt that a step computes.
type piece struct {
	r *request
	n int // tokens
}

func newEngine(cfg Engine, names []events.BlockHash, store *enginesim.Cache, publish func([]events.Event)) *engine {
	e := &engine{cfg: cfg, names: names, store: store, publish: publish, live: newSparse[int32](len(names))}
	e.restart()
	return e
}

// restart empties the engine and returns its requests. The caller routes them again.
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

// resetCache forgets all blocks, as a change of the weights requires. Running requests continue.
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

// left is called by the pool for each block that leaves the device.
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

// announce notes that one block was removed from a tier, or copied to the host; consecutive ones make one event.
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

// stored notes that blocks from to to of a prompt are on the device now.
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

// usable returns the leading blocks of a prompt of target tokens that may be reused: not the block of the last token,
// which is computed to get the next token.
func (e *engine) usable(p *Prompt, target int) []block {
	return p.blocks[:min(len(p.blocks), (target-1)/e.cfg.BlockSize)]
}

// would returns the tokens of a prompt that a request which comes now would not compute, if nothing is evicted before
// its turn: those on the device, those of requests before it, and those that follow in host memory and in the store.
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

// forecast returns the seconds until the first token of a request that came now, if none came after it: the rest of the
// step under way, and the steps for the prompt tokens that are owed and its own, each with the decoding requests.
func (e *engine) forecast(p *Prompt, now micros) float64 {
	rest := 0.0
	if e.busy {
		rest = max(0, (e.began + e.lasts - now).seconds())
	}
	own := p.Tokens - e.would(p)
	tokens := e.owed + own
	for _, x := range e.pieces {
		if e.busy {
			tokens -= x.n // the step under way computes them
		}
	}
	steps := math.Ceil(float64(tokens) / float64(e.cfg.MaxBatchedTokens))
	step := max(e.cfg.StepBase, e.cfg.PrefillHost) + float64(e.decoding)*e.cfg.StepPerRequest +
		float64(e.context)*e.cfg.StepPerToken
	pairs := float64(own) * (float64(p.Tokens) - float64(own)/2)
	return rest + max(steps*step, float64(tokens)/e.cfg.Prefill) + pairs*e.cfg.Attention
}

// promised reports whether a block is on the device, or in a prompt of a request that is here.
func (e *engine) promised(b block) bool { return e.live.get(b) > 0 || e.pool.held(b) }

// fits reports whether a request can ever run here.
func (e *engine) fits(p *Prompt, output int) bool {
	return e.blocks(p.Tokens+output) <= e.pool.capacity()
}

func (e *engine) blocks(tokens int) int { return (tokens + e.cfg.BlockSize - 1) / e.cfg.BlockSize }

// arrive takes a request that fits.
func (e *engine) arrive(r *request) {
	e.expect(r)
	e.queue(r)
}

// expect notes a request that is on its way.
func (e *engine) expect(r *request) {
	r.owed = r.prompt.Tokens - e.would(r.prompt)
	e.owed += r.owed
	e.requests++
	for _, b := range r.prompt.blocks {
		e.live.set(b, e.live.get(b)+1)
	}
	e.coming = append(e.coming, r)
}

// queue lets an expected request wait for its turn.
func (e *engine) queue(r *request) {
	e.coming = slices.DeleteFunc(e.coming, func(x *request) bool { return x == r })
	e.waiting = append(e.waiting, r)
}

// plan is a step that an engine has begun.
type plan struct {
	host micros // the least duration
	gpu  micros // time on a GPU of its own
}

// begin plans a step. Without work it returns no plan, and the time at which there will be some, or never.
func (e *engine) begin(now micros) (p plan, wake micros) {
	e.pieces = e.pieces[:0]
	preempted := e.preemptions
	phase := (e.steps + 1) % e.cfg.BlockSize
	for _, r := range slices.Clone(e.due[phase]) {
		if r.decoding && !e.grow(r, r.tokens(e)+1) {
			continue // it was preempted itself
		}
	}
	budget := e.cfg.MaxBatchedTokens - e.decoding
	wake = never
	for _, r := range slices.Clone(e.prefill) {
		if r.decoding || r.slots == nil {
			continue // preempted for one before it
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
	// what was planned for a request that had to make room after that is not done
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

// admitWaiting admits waiting requests in order, as far as the budget of a step goes: of the step that begins, or of
// the one after it. It returns when the next of them has loaded what is in other tiers.
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

// planAhead admits requests to the step after the one that begins. They have their blocks from now on.
func (e *engine) planAhead(now micros, preempted int) {
	budget := e.cfg.MaxBatchedTokens - e.decoding
	for _, r := range e.prefill {
		budget -= r.target - r.computed
	}
	for _, p := range e.pieces {
		if budget += p.n; p.r.computed+p.n == p.r.target {
			budget-- // it decodes then
		}
	}
	e.admitWaiting(now, budget, preempted, false)
	e.flush()
}

// admit gives a waiting request the slots for its first piece.
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
		first = there * size // the rest when it is loaded
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

// part is how many tokens of a prompt the next piece has: all that are left, or as many whole blocks as the budget
// allows.
func (e *engine) part(target, computed, budget int) int {
	n := target - computed
	if n > budget {
		n = max(0, budget-(computed+budget)%e.cfg.BlockSize)
	}
	return n
}

// fill gives a request the slots that it needs for so many tokens. It reports false, having given some, if there are no
// more. What leaves for it is announced before what is stored.
func (e *engine) fill(r *request, tokens int) bool {
	names := r.prompt.blocks
	if r.unnamed {
		names = nil
	}
	from := len(r.slots) // of the run of blocks that are new
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

// grow is fill, for which others have to make room if there is none: the one that began last, again and again. It
// reports false if that was r itself.
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

// preempt takes a running request's slots, so that it waits again.
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

// join lets a request decode, whose first token came with the step that has ended.
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

// finish ends the step under way. It returns the requests whose first token came, and those that are done.
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

// forget ends what the engine keeps of a request.
func (e *engine) forget(r *request) {
	e.requests--
	e.owed -= r.owed
	r.owed = 0
	for _, b := range r.prompt.blocks {
		e.live.set(b, e.live.get(b)-1)
	}
}
