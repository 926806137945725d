package routesim

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// naivePool is a list of slots with linear search.
type naivePool struct {
	slots []naiveSlot
	max   int
	clock int
}

type naiveSlot struct {
	name     block
	refs     int
	released int // when
}

func (p *naivePool) find(name block) int {
	return slices.IndexFunc(p.slots, func(s naiveSlot) bool { return name != 0 && s.name == name })
}

// take returns a slot with the block name if present, otherwise the slot with the longest time in the free list.
func (p *naivePool) take(name block) int {
	if i := p.find(name); i >= 0 {
		p.slots[i].refs++
		return i
	}
	if len(p.slots) < p.max {
		p.slots = append(p.slots, naiveSlot{name: name, refs: 1})
		return len(p.slots) - 1
	}
	best := -1
	for i, s := range p.slots {
		if s.refs == 0 && (best < 0 || s.released < p.slots[best].released) {
			best = i
		}
	}
	if best >= 0 {
		p.slots[best] = naiveSlot{name: name, refs: 1}
	}
	return best
}

func (p *naivePool) release(slots []int) {
	for _, i := range slices.Backward(slots) {
		p.clock++
		p.slots[i].refs--
		p.slots[i].released = p.clock
	}
}

func (p *naivePool) idle() (n int) {
	for _, s := range p.slots {
		if s.refs == 0 {
			n++
		}
	}
	return n + p.max - len(p.slots)
}

// naiveEngine is an engine that visits every request in every step.
type naiveEngine struct {
	cfg                        Engine
	pool                       naivePool
	waiting, running, decoders []*naiveRequest
	pieces                     map[*naiveRequest]int
	order                      []*naiveRequest
}

type naiveRequest struct {
	r         *request
	slots     []int
	computed  int
	generated int
	decoding  bool
}

func (e *naiveEngine) arrive(r *request) { e.waiting = append(e.waiting, &naiveRequest{r: r}) }

func (e *naiveEngine) target(n *naiveRequest) int { return n.r.prompt.Tokens + n.generated }

// room gives a request slots for its first tokens, with preemption if necessary.
func (e *naiveEngine) room(n *naiveRequest, tokens int, preempted *bool) bool {
	for len(n.slots)*e.cfg.BlockSize < tokens {
		name := block(0)
		if at := len(n.slots); at < len(n.r.prompt.blocks) {
			name = n.r.prompt.blocks[at]
		}
		if i := e.pool.take(name); i >= 0 {
			n.slots = append(n.slots, i)
			continue
		}
		last := e.running[len(e.running)-1]
		*preempted = true
		e.pool.release(last.slots)
		if last.decoding {
			last.decoding = false
			e.decoders = slices.DeleteFunc(e.decoders, func(x *naiveRequest) bool { return x == last })
		}
		last.slots, last.computed = nil, 0
		delete(e.pieces, last)
		e.running = e.running[:len(e.running)-1]
		e.waiting = slices.Insert(e.waiting, 0, last)
		if last == n {
			return false
		}
	}
	return true
}

func (e *naiveEngine) begin(now micros) (micros, bool) {
	preempted := false
	e.pieces, e.order = map[*naiveRequest]int{}, nil
	for _, n := range slices.Clone(e.decoders) {
		if n.decoding {
			e.room(n, n.computed+1, &preempted)
		}
	}
	budget := e.cfg.MaxBatchedTokens - len(e.decoders)
	whole := func(from, to int) int { // the end of a piece of at most budget
		if to-from > budget {
			to = max(from, (from+budget)/e.cfg.BlockSize*e.cfg.BlockSize)
		}
		return to
	}
	for _, n := range slices.Clone(e.running) {
		if n.decoding || !slices.Contains(e.running, n) {
			continue
		}
		if to := whole(n.computed, e.target(n)); to > n.computed && e.room(n, to, &preempted) {
			e.pieces[n] = to - n.computed
			e.order = append(e.order, n)
			budget -= to - n.computed
		}
	}
	for !preempted && len(e.waiting) > 0 && budget > 0 && len(e.running) < e.cfg.MaxRequests {
		n := e.waiting[0]
		hit, idle := 0, 0
		for hit < len(n.r.prompt.blocks) && (hit+1)*e.cfg.BlockSize < e.target(n) {
			i := e.pool.find(n.r.prompt.blocks[hit])
			if i < 0 {
				break
			}
			if e.pool.slots[i].refs == 0 {
				idle++
			}
			hit++
		}
		from := hit * e.cfg.BlockSize
		to := whole(from, e.target(n))
		need := (to+e.cfg.BlockSize-1)/e.cfg.BlockSize - hit + idle
		if to == from || need > e.pool.idle() {
			break
		}
		e.waiting = e.waiting[1:]
		e.running = append(e.running, n)
		e.room(n, to, &preempted)
		if !n.r.admitted {
			n.r.admitted, n.r.reused = true, from
		}
		n.computed = from
		e.pieces[n] = to - from
		e.order = append(e.order, n)
		budget -= to - from
	}
	tokens, context := len(e.decoders), 0
	for _, d := range e.decoders {
		context += d.computed
	}
	for _, n := range e.pieces {
		tokens += n
	}
	if tokens == 0 {
		return never, false
	}
	s := max(e.cfg.StepBase, float64(tokens)/e.cfg.Prefill) + float64(len(e.decoders))*e.cfg.StepPerRequest +
		float64(context)*e.cfg.StepPerToken
	return now + max(1, after(s)), true
}

func (e *naiveEngine) finish(now micros) (done int) {
	var over []*naiveRequest
	for _, d := range slices.Clone(e.decoders) {
		d.computed++
		d.generated++
		if d.generated == d.r.output {
			over = append(over, d)
		}
	}
	for _, n := range e.order {
		piece, ok := e.pieces[n]
		if !ok {
			continue
		}
		if n.computed += piece; n.computed < e.target(n) {
			continue
		}
		n.generated++
		if n.r.first == 0 {
			n.r.first = now
		}
		if n.generated == n.r.output {
			over = append(over, n)
		} else {
			n.decoding = true
			e.decoders = append(e.decoders, n)
		}
	}
	for _, n := range over {
		n.r.done = now
		e.pool.release(n.slots)
		gone := func(x *naiveRequest) bool { return x == n }
		e.running, e.decoders = slices.DeleteFunc(e.running, gone), slices.DeleteFunc(e.decoders, gone)
	}
	return len(over)
}

// drive runs requests on an engine.
func drive(reqs []*request, arrive func(*request), begin func(micros) (micros, bool), finish func(micros)) {
	now, end, busy := micros(0), never, false
	for next := 0; ; {
		if next < len(reqs) && (!busy || reqs[next].sent <= end) {
			now = max(now, reqs[next].sent)
			arrive(reqs[next])
			next++
		} else if busy {
			now, busy = end, false
			finish(now)
		} else {
			return
		}
		if !busy {
			end, busy = begin(now)
		}
	}
}

// alone is begin on a separate GPU.
func (e *engine) alone(now micros) (micros, bool) {
	p, wake := e.begin(now)
	if p.gpu == 0 {
		return wake, false
	}
	return now + max(p.host, p.gpu), true
}

// small returns an engine with small limits, so that a few requests trigger all cases.
func small(rng *rand.Rand) Engine {
	e := Defaults()
	e.BlockSize = 1 << (1 + rng.IntN(3))
	e.Capacity = e.BlockSize * (30 + rng.IntN(30))
	e.MaxBatchedTokens = e.BlockSize + rng.IntN(60)
	e.MaxRequests = 1 + rng.IntN(8)
	return e
}

// randomWorkload returns prompts with shared prefixes that fit into an engine.
func randomWorkload(rng *rand.Rand, e Engine, requests int) Workload {
	var st Stage
	at := 0.0
	for range requests {
		at += rng.ExpFloat64() * 0.02
		most := e.Capacity / 2
		p := &Prompt{Tokens: 1 + rng.IntN(most)}
		family, branch := rng.Uint64N(4), rng.IntN(8)
		for b := range p.Tokens / e.BlockSize {
			of := family
			if b > branch {
				of = family + 10*uint64(branch) + 100*rng.Uint64N(2)
			}
			parent := uint64(0)
			if b > 0 {
				parent = uint64(p.Names[b-1])
			}
			p.Names = append(p.Names, events.BlockHash(mix(parent^mix(of+1))|1))
		}
		st.Arrivals = append(st.Arrivals, Arrival{At: at, Prompt: p, Output: 1 + rng.IntN(e.Capacity/3),
			Session: rng.Uint64N(5)})
	}
	st.Rate = float64(requests) / at
	w := Workload{Name: "random", Stages: []Stage{st}, Engine: e, Workers: 2}
	w.number()
	return w
}

func requestsOf(w Workload) (reqs []*request) {
	for i, a := range w.Stages[0].Arrivals {
		reqs = append(reqs, &request{prompt: a.Prompt, output: a.Output, number: i, sent: after(a.At)})
	}
	return reqs
}

// TestEngineAgainstNaive checks that every request starts and ends at the same time as on a naive engine, with the same
// reuse.
func TestEngineAgainstNaive(t *testing.T) {
	preemptions, reused := 0, 0
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 2))
		cfg := small(rng)
		w := randomWorkload(rng, cfg, 60)
		got, want := requestsOf(w), requestsOf(w)
		e := newEngine(cfg, w.names, nil, nil)
		drive(got, e.arrive, e.alone, func(now micros) { e.finish(now) })
		twin := &naiveEngine{cfg: cfg, pool: naivePool{max: cfg.Capacity / cfg.BlockSize}}
		drive(want, twin.arrive, twin.begin, func(now micros) { twin.finish(now) })
		for i, r := range got {
			x := want[i]
			if r.first != x.first || r.done != x.done || r.reused != x.reused {
				t.Fatalf("seed %d request %d: first %v, done %v, reused %d; want %v, %v, %d", seed, i, r.first, r.done,
					r.reused, x.first, x.done, x.reused)
			}
			if r.done == 0 || r.first < r.sent || r.done < r.first {
				t.Fatalf("seed %d request %d: sent %v, first %v, done %v", seed, i, r.sent, r.first, r.done)
			}
			reused += r.reused
		}
		preemptions += e.preemptions
	}
	if preemptions < 100 || reused == 0 {
		t.Errorf("%d preemptions, %d tokens reused: the cases are too easy", preemptions, reused)
	}
}

// TestEngineEvents checks that an index of an engine's events has the content of the engine's memory after every step.
func TestEngineEvents(t *testing.T) {
	for seed := range uint64(testkit.Rounds(30)) {
		rng := rand.New(rand.NewPCG(seed, 3))
		cfg := small(rng)
		if seed%2 == 1 {
			cfg.Host, cfg.HostDelay, cfg.HostRate = cfg.Capacity/2, 0, 1e9
		}
		w := randomWorkload(rng, cfg, 40)
		x := radix.New(radix.Config{})
		id := x.AddRank(0, uint32(cfg.BlockSize))
		e := newEngine(cfg, w.names, nil, func(evs []events.Event) {
			if c := x.Apply(id, 0, evs); c.Conflicts+c.Pending+c.UnknownRemovals+c.Malformed > 0 {
				t.Fatalf("seed %d: %+v", seed, c)
			}
		})
		reqs := requestsOf(w)
		drive(reqs, e.arrive, e.alone, func(now micros) {
			e.finish(now)
			if rng.IntN(50) == 0 {
				e.resetCache()
			}
			var a radix.Answer
			for _, r := range reqs {
				x.Match(0, r.prompt.locals(), nil, &a)
				device, host := 0, 0
				for _, o := range a.Ranks {
					device, host = int(o.Depth[0]), int(o.Depth[1])
				}
				if want := prefix(r.prompt.blocks, e.pool.held); device != want {
					t.Fatalf("seed %d: the index has %d blocks of request %d, the engine has %d", seed, device, r.number, want)
				}
				if e.host == nil {
					continue
				}
				if want := e.host.Hit(r.prompt.Names[device:]); host < want {
					t.Fatalf("seed %d: the index has %d blocks of request %d in host memory, the engine has %d", seed, host,
						r.number, want)
				}
			}
		})
	}
}

// TestTiers checks that evicted blocks are loaded from host memory, and blocks of another engine from the store, if a
// load is faster than a computation.
func TestTiers(t *testing.T) {
	cfg := Defaults()
	cfg.BlockSize, cfg.Capacity, cfg.Host, cfg.Store = 64, 64*100, 64*200, 64*1000
	w := sharedPrefix{groups: 3, prompts: 1, system: 4096, question: 100, output: 2,
		stages: [][2]float64{{1, 9}}}.workload("", 1, 64, nil)
	w.Engine = cfg
	one := func(host, store bool, rate float64) (loaded int) {
		cfg := cfg
		cfg.PullRate, cfg.HostRate = rate, rate
		var shared *enginesim.Cache
		if store {
			shared = enginesim.NewCache(cfg.Store / 64)
		}
		if !host {
			cfg.Host = 0
		}
		e := newEngine(cfg, w.names, shared, nil)
		reqs := requestsOf(w)
		drive(reqs, e.arrive, func(now micros) (micros, bool) {
			at, step := e.alone(now)
			if !step && at != never {
				return e.alone(at) // nothing else is to come
			}
			return at, step
		}, func(now micros) { e.finish(now) })
		for _, r := range reqs {
			if r.done == 0 {
				t.Fatalf("host %v, store %v: request %d does not end", host, store, r.number)
			}
			loaded += r.loaded
		}
		return loaded
	}
	if n := one(false, false, 1e9); n != 0 {
		t.Errorf("%d tokens loaded from nowhere", n)
	}
	// three prompts alternate in memory for one and a half: most of the six are loaded
	for _, host := range []bool{true, false} {
		if n := one(host, !host, 1e9); n < 6*2000 || n > 6*4196 {
			t.Errorf("host %v: %d tokens loaded of six prompts of 4,196", host, n)
		}
		if n := one(host, !host, 100); n != 0 {
			t.Errorf("host %v: %d tokens loaded, but a computation is faster", host, n)
		}
	}
}
