package routesim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// loads is a router's view of the running requests on a worker, by the rules of Dynamo's slot tracker. prefill counts
// until the first token. The blocks, which requests share, and the requests count until the end.
type loads struct {
	prefill  int // tokens
	requests int
	tokens   int           // of the prompts
	active   sparse[int32] // blocks with the number of their requests

	prefilling int    // requests with prefill
	since      micros // when there was none last
	pace       routing.Pace
	unique     routing.Unique
	memory     routing.Memory
}

// table has the guesses of a router without events about a worker.
type table struct {
	until sparse[micros] // with a TTL
	lru   *pool
}

func (t *table) depth(names []block, now micros) int {
	if t.lru != nil {
		return prefix(names, t.lru.held)
	}
	return prefix(names, func(b block) bool { return t.until.get(b) > now })
}

// booking is a router's record of a running request.
type booking struct {
	life    int // of the router
	prefill int // charged tokens
	sent    micros
	lru     *pool
	slots   []int32 // of lru
}

// router chooses workers for its requests.
type router struct {
	life     int // restarts
	loads    []loads
	tables   []table
	rule     rule
	selector *routing.Selector
}

// fleet has the routers of an arm with their knowledge, and the engines.
type fleet struct {
	arm     Arm
	way     way
	cfg     Engine
	blocks  int   // of the workload
	placed  []int // recorded choices
	engines []*engine
	routers []*router
	index   *radix.Index
	ranks   []radix.RankID
	answer  radix.Answer

	sessions *affinity.Machine // nil: sessions are not recognised
	seq      []events.SeqHash  // of the prompt in hand

	reuse routing.Reuse // of an arm with shared state
	warm  *warmUp       // nil: no prefix is copied

	tableBlocks, tableDepth int
	ttl                     micros

	rng        *rand.Rand
	workers    []routing.Worker
	candidates []routing.Candidate
	live       []int
	scratch    routing.Scratch
}

func newFleet(cfg Config, engines []*engine, rng *rand.Rand) (*fleet, error) {
	e := cfg.Workload.Engine
	way, err := cfg.Arm.way()
	if err != nil {
		return nil, err
	}
	if cfg.Arm == ArmCacheAware && len(engines) > treeWorkers {
		return nil, fmt.Errorf("the arm %s has %d workers, but the tree has room for %d", cfg.Arm, len(engines), treeWorkers)
	}
	f := &fleet{arm: cfg.Arm, way: way, cfg: e, blocks: len(cfg.Workload.names),
		placed: cfg.Workload.Placed[cfg.Arm], engines: engines, rng: rng,
		workers: make([]routing.Worker, len(engines)), candidates: make([]routing.Candidate, len(engines))}
	if f.tableBlocks = e.Capacity / e.BlockSize; cfg.TableTokens > 0 {
		f.tableBlocks = max(1, cfg.TableTokens/e.BlockSize)
	}
	if f.tableDepth = math.MaxInt; cfg.TableDepth > 0 {
		f.tableDepth = max(1, cfg.TableDepth/e.BlockSize)
	}
	if f.ttl = after(cfg.TTL); cfg.TTL == 0 {
		f.ttl = after(120)
	}
	for w := range f.workers {
		f.workers[w] = routing.Worker{ID: events.WorkerID(fmt.Sprintf("w%d", w)),
			TotalKVBlocks: uint64(engines[w].pool.capacity()), MaxNumBatchedTokens: uint64(e.MaxBatchedTokens)}
	}
	f.warm = newWarmUp(cfg, way)
	if way.follow {
		f.sessions = affinity.NewMachine(0, affinity.Config{Origin: 1, TTL: sessionLife})
	}
	if way.tune != nil {
		way.tune(&cfg.Routing)
	}
	for range cfg.Routers {
		r := &router{}
		if way.policy != "" {
			if r.selector, err = routing.New(way.policy, cfg.Routing); err != nil {
				return nil, err
			}
		}
		f.routers = append(f.routers, r)
	}
	f.restartRouters()
	if way.knows == knowsIndex {
		f.freshIndex()
	}
	return f, nil
}

// sessionLife is the time to live of a session after the last request.
const sessionLife = 10 * time.Minute

// follow routes a request to the worker of the session that the prompt continues.
func (f *fleet) follow(to *routing.Request, now micros) {
	f.sessions.Step(duration(now))
	if rank, ok := f.sessions.Follow(duration(now), "", f.seq); ok {
		to.Affinity = &routing.Target{Worker: rank.Instance}
	}
}

// restartRouters empties the state of the routers.
func (f *fleet) restartRouters() {
	for i, r := range f.routers {
		r.life++
		if f.way.shares && (i > 0 || r.loads != nil) {
			r.loads, r.rule = f.routers[0].loads, f.routers[0].rule
		} else {
			if f.way.rule != nil {
				r.rule = f.way.rule(f)
			}
			r.loads = make([]loads, len(f.engines))
			for w := range r.loads {
				r.loads[w].active = newSparse[int32](f.blocks)
			}
		}
		if f.way.knows == knowsTables {
			r.tables = make([]table, len(f.engines))
			for w := range r.tables {
				f.freshTable(r, w)
			}
		}
	}
	if f.index != nil && !f.way.shares {
		f.freshIndex()
	}
}

func (f *fleet) freshTable(r *router, w int) {
	if f.arm == ArmApproxLRU {
		r.tables[w] = table{lru: newPool(f.tableBlocks, f.blocks, nil)}
	} else {
		r.tables[w] = table{until: newSparse[micros](f.blocks)}
	}
}

// freshIndex replaces the index by an empty index. All routers receive the same events, so a single index represents
// the indexes of all routers.
func (f *fleet) freshIndex() {
	f.index, f.ranks = radix.New(radix.Config{}), nil
	for range f.engines {
		f.ranks = append(f.ranks, f.index.AddRank(0, uint32(f.cfg.BlockSize)))
	}
}

// workerRestarted drops the guesses about a departed worker.
func (f *fleet) workerRestarted(w int) {
	for _, r := range f.routers {
		if r.tables != nil {
			f.freshTable(r, w)
		}
		if r.rule != nil {
			r.rule.left(w)
		}
	}
}

// choose chooses a worker for a request and books the request.
func (f *fleet) choose(r *request, now micros) error {
	router := f.routers[r.router]
	f.live = f.live[:0]
	for w, e := range f.engines {
		if now >= e.downTill {
			f.live = append(f.live, w)
		}
	}
	if f.placed != nil {
		r.worker = f.placed[r.number]
	} else if router.rule != nil {
		r.worker = router.rule.choose(router, r, f.live, now)
	} else {
		return f.byPolicy(router, r, now)
	}
	f.book(router, r, r.prompt.Tokens, now)
	return nil
}

// list returns the live workers as candidates for a request, and sets f.seq.
func (f *fleet) list(router *router, r *request, now micros) []routing.Candidate {
	blocks, names := r.prompt.blocks, r.prompt.Names
	if f.index != nil {
		f.index.Match(0, r.prompt.locals(), nil, &f.answer)
	}
	var fleet routing.Pace
	for _, w := range f.live {
		router.loads[w].pace.Tick(duration(now))
		fleet.Add(&router.loads[w].pace)
	}
	f.seq = f.seq[:0]
	for _, name := range r.prompt.Names {
		f.seq = append(f.seq, events.SeqHash(name))
	}
	list := f.candidates[:0]
	for _, w := range f.live {
		e := f.engines[w]
		c := routing.Candidate{Worker: &f.workers[w]}
		l := &router.loads[w]
		c.HasLoad, c.ActivePrefillTokens, c.ActiveRequests = true, uint64(l.prefill), uint64(l.requests)
		c.ActiveBlocks, c.PrefillRequests = uint64(l.active.used), uint64(l.prefilling)
		c.PrefillRate, c.Busy, c.LifeMS = l.pace.Rate(fleet.Rate(0)), l.pace.Busy(), fleet.Life()
		if l.prefilling > 0 {
			c.WorkingMS = l.pace.Working(duration(now), duration(l.since))
		}
		switch f.way.knows {
		case knowsIndex:
			c.Device, c.Host = f.indexed(w)
			if f.way.shares {
				c.Memory = f.memory(w, &c)
			}
		case knowsTables:
			c.Device = uint32(router.tables[w].depth(blocks[:min(len(blocks), f.tableDepth)], now))
		case knowsTruth:
			c.Device = uint32(prefix(blocks, e.promised))
			if e.host != nil {
				c.Host = uint32(e.host.Hit(names[c.Device:]))
			}
			c.ActivePrefillTokens, c.ActiveBlocks, c.ActiveRequests = uint64(e.owed), uint64(e.live.used), uint64(e.requests)
		}
		if f.way.knows != knowsNothing {
			if e.store != nil {
				c.WouldLoad = uint32(e.store.Hit(names[min(len(names), int(c.Device+c.Host)):]))
			}
			active := &l.active
			if f.way.knows == knowsTruth {
				active = &e.live
			}
			c.NewBlocks = uint64(len(blocks) - prefix(blocks, func(b block) bool { return active.get(b) > 0 }))
		}
		if f.way.fill != nil {
			f.way.fill(&c, f.facts(w, r))
		}
		list = append(list, c)
	}
	return list
}

// byPolicy chooses by a policy of pkg/routing.
func (f *fleet) byPolicy(router *router, r *request, now micros) error {
	list := f.list(router, r, now)
	req := routing.Request{ISL: uint64(r.prompt.Tokens), BlockSize: uint32(f.cfg.BlockSize),
		Blocks: uint64(len(r.prompt.Names)), ExpectedOutputTokens: uint32(r.output)}
	if f.sessions != nil {
		f.follow(&req, now)
	}
	if f.way.shares {
		routing.Longest(list, func(i int, alone bool) { router.loads[f.live[i]].unique.Longest(alone) })
		f.reuse.Requested(duration(now), f.seq)
	}
	choice, err := router.selector.Choose(&req, list, f.rng, &f.scratch)
	if err != nil {
		return err
	}
	r.worker = f.live[choice.Index]
	if f.warm != nil {
		f.warm.tracker.Chose(duration(now), &hot.Choice{Request: &req, Ranks: list, Chosen: choice.Index, Sequence: f.seq,
			Locals: r.prompt.locals()})
	}
	if f.sessions != nil {
		rank := events.RankKey{Instance: choice.Worker}
		if _, _, err := f.sessions.BindPrompt(duration(now), "", f.seq, rank, ""); err != nil {
			return err
		}
	}
	f.book(router, r, int(choice.EffectivePrefillTokens), now)
	return nil
}

// memory returns the evictions that a prompt causes on a worker's device, as far as events and bookings show them. It
// returns nil before the first eviction.
func (f *fleet) memory(w int, c *routing.Candidate) *routing.Memory {
	l := &f.routers[0].loads[w]
	l.memory.Tiered = l.memory.Tiered || c.Host > 0
	held, full := f.index.DeviceMemory(f.ranks[w])
	if full == 0 {
		return nil
	}
	age := routing.EvictionAge(uint64(full), uint32(f.cfg.BlockSize), c.PrefillRate, c.Busy)
	l.memory.Free, l.memory.Unique, l.memory.Again = uint64(max(full-held, 0)), l.unique.Share(), f.reuse.Again(age)
	return &l.memory
}

// indexed returns the leading blocks of the prompt on a worker in the index, on the device and in the next tier.
func (f *fleet) indexed(w int) (device, host uint32) {
	for i := range f.answer.Ranks {
		if o := &f.answer.Ranks[i]; o.Rank == f.ranks[w] {
			device, host = o.Depth[0], o.Depth[1]
		}
	}
	return device, host
}

// Facts are the true state of a worker when a request is routed.
type Facts struct {
	Worker     int
	QueuedWork int // uncomputed prompt tokens of all requests
	Waiting    int // requests before their start
	Decoding   int // decoding requests
	Context    int // tokens of all decoding requests
	Device     int // leading blocks of the prompt on the device
	Host       int // following blocks in host memory
	Free       int // blocks without content
	Evictable  int // blocks with content and without a request

	// Dropped is the number of blocks evicted for the rest of the prompt. DroppedUnique counts the dropped blocks without
	// a copy on another worker's device.
	Dropped, DroppedUnique int
}

// facts returns the true state of a worker.
func (f *fleet) facts(w int, r *request) Facts {
	e := f.engines[w]
	x := Facts{Worker: w, QueuedWork: e.owed, Waiting: len(e.waiting), Decoding: e.decoding, Context: e.context,
		Device: prefix(r.prompt.blocks, e.pool.held)}
	if e.host != nil {
		x.Host = e.host.Hit(r.prompt.Names[x.Device:])
	}
	x.Free, x.Evictable = e.pool.idle()
	x.Dropped = max(0, min(x.Evictable, e.blocks(r.prompt.Tokens+r.output)-x.Device-x.Free))
	e.pool.oldest(x.Dropped, func(b block) {
		for other, o := range f.engines {
			if other != w && o.pool.held(b) {
				return
			}
		}
		x.DroppedUnique++
	})
	return x
}

// book records a running request and, without events, the expected blocks of the prompt on the worker.
func (f *fleet) book(router *router, r *request, prefill int, now micros) {
	blocks, l := r.prompt.blocks, &router.loads[r.worker]
	b := booking{life: router.life, prefill: prefill, sent: now}
	if l.prefill += b.prefill; b.prefill > 0 {
		if l.prefilling == 0 {
			l.since = now
		}
		l.prefilling++
	}
	l.requests++
	l.tokens += r.prompt.Tokens
	if f.way.books() {
		for _, b := range blocks {
			l.active.set(b, l.active.get(b)+1)
		}
	}
	if f.way.knows == knowsTables {
		t := &router.tables[r.worker]
		if t.lru == nil {
			for _, b := range blocks {
				t.until.set(b, now+f.ttl)
			}
		} else {
			b.lru = t.lru
			for i := range (r.prompt.Tokens + r.output + f.cfg.BlockSize - 1) / f.cfg.BlockSize {
				name := block(0)
				if i < len(blocks) {
					name = blocks[i]
				}
				slot, ok := t.lru.pin(name)
				if !ok {
					if slot, ok = t.lru.take(name); !ok {
						break
					}
				}
				b.slots = append(b.slots, slot)
			}
		}
	}
	r.booked = b
}

// prefilled removes the prefill of a request from the load.
func (f *fleet) prefilled(r *request, now micros) {
	router := f.routers[r.router]
	if b := &r.booked; b.prefill > 0 && (f.way.shares || b.life == router.life) {
		l := &router.loads[r.worker]
		l.pace.Prefilled(duration(now), duration(b.sent), int64(b.prefill))
		l.prefill -= b.prefill
		l.prefilling--
		b.prefill = 0
	}
}

// duration converts a time to pkg/routing. The result is above 0.
func duration(t micros) time.Duration { return time.Duration(t+1) * time.Microsecond }

// free ends a booking.
func (f *fleet) free(r *request, now micros) {
	f.prefilled(r, now)
	router := f.routers[r.router]
	if !f.way.shares && r.booked.life != router.life {
		return
	}
	l := &router.loads[r.worker]
	l.pace.Ended(duration(now), duration(r.booked.sent))
	l.requests--
	l.tokens -= r.prompt.Tokens
	if f.way.books() {
		for _, b := range r.prompt.blocks {
			l.active.set(b, l.active.get(b)-1)
		}
	}
	if b := &r.booked; b.lru != nil {
		b.lru.release(b.slots) // harmless for a discarded table
		b.lru, b.slots = nil, nil
	}
}

// learn applies an engine's events to the index.
func (f *fleet) learn(w int, now micros, evs []events.Event) {
	f.index.Apply(f.ranks[w], events.Millis(now/1000), evs)
}
