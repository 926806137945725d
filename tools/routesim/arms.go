package routesim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Arm is a way to choose workers.
type Arm string

// The arms. All that know anything of caches choose by the policy dynamo of pkg/routing; they differ in what they know.
const (
	ArmRandom     Arm = "random"
	ArmRoundRobin Arm = "round-robin"
	ArmLeastLoad  Arm = "least-load" // by the requests under way, which all routers know

	// Each router believes what it sent where: for 120 seconds, or as much as the worker's memory has room for. It
	// knows its own requests under way.
	ArmApproxTTL Arm = "approx-ttl"
	ArmApproxLRU Arm = "approx-lru"

	// Each router has an index of its own from the engines' events, and knows its own requests under way. With
	// ArmExactRestart all routers are restarted, and so empty, after half the requests.
	ArmExactOwn     Arm = "exact-own"
	ArmExactRestart Arm = "exact-restart"

	ArmSticky Arm = "sticky" // the worker of the request's session

	// All routers ask one index, and share what is under way; a restart of a router loses neither.
	ArmExactShared Arm = "exact-shared"

	// What is true of caches and load at the moment of choice.
	ArmOracle Arm = "oracle"
)

// Arms are all arms, in the order of what they know.
var Arms = []Arm{ArmRandom, ArmRoundRobin, ArmLeastLoad, ArmApproxTTL, ArmApproxLRU, ArmExactRestart, ArmExactOwn,
	ArmExactShared, ArmOracle}

// ParseArms reads names of arms.
func ParseArms(names []string) (arms []Arm, err error) {
	for _, n := range names {
		a := Arm(strings.TrimSpace(n))
		if !slices.Contains(Arms, a) {
			return nil, fmt.Errorf("there is no arm %q; there are %v", n, Arms)
		}
		if !slices.Contains(arms, a) {
			arms = append(arms, a)
		}
	}
	return arms, nil
}

// scales reports whether the number of routers makes a difference.
func (a Arm) scales() bool {
	return a.tables() || a == ArmExactOwn || a == ArmExactRestart || a == ArmExactShared
}

func (a Arm) tables() bool { return a == ArmApproxTTL || a == ArmApproxLRU }
func (a Arm) index() bool  { return a == ArmExactOwn || a == ArmExactRestart || a == ArmExactShared }

// shares reports whether all routers know of all requests under way.
func (a Arm) shares() bool { return a == ArmExactShared || a == ArmLeastLoad }

// books reports whether routers keep which blocks requests under way have.
func (a Arm) books() bool { return a.tables() || a.index() || a == ArmLeastLoad }

func (a Arm) policy() string {
	switch a {
	case ArmRandom:
		return "random"
	case ArmRoundRobin:
		return "round_robin"
	case ArmLeastLoad:
		return "least_load"
	}
	return "dynamo"
}

// loads is what a router knows of the requests under way on one worker, by the rules of Dynamo's slot tracker: prefill
// counts until the first token; blocks, which requests share, and requests count until the end.
type loads struct {
	prefill  int // tokens
	requests int
	active   sparse[int32] // blocks, with how many requests have them
}

// table is what a router without events believes of one worker.
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

// booking is one request in a router's books.
type booking struct {
	life    int // of the router
	prefill int // tokens that are charged
	lru     *pool
	slots   []int32 // of lru
}

// router chooses for the requests that come to it.
type router struct {
	life     int // restarts
	loads    []loads
	tables   []table
	selector *routing.Selector
}

// fleet is what the routers of one arm know, and what is true.
type fleet struct {
	arm     Arm
	cfg     Engine
	blocks  int    // of the workload
	placed  string // recorded choices
	engines []*engine
	routers []*router
	index   *radix.Index
	ranks   []radix.RankID
	answer  radix.Answer

	tableBlocks, tableDepth int
	ttl                     micros

	rng        *rand.Rand
	workers    []routing.Worker
	candidates []routing.Candidate
	scratch    routing.Scratch
}

func newFleet(cfg Config, engines []*engine, rng *rand.Rand) (*fleet, error) {
	e := cfg.Workload.Engine
	f := &fleet{arm: cfg.Arm, cfg: e, blocks: len(cfg.Workload.names), placed: cfg.Workload.Placed[cfg.Arm], engines: engines, rng: rng,
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
			TotalKVBlocks: uint64(e.Capacity / e.BlockSize), MaxNumBatchedTokens: uint64(e.MaxBatchedTokens)}
	}
	for range cfg.Routers {
		s, err := routing.New(cfg.Arm.policy(), cfg.Routing)
		if err != nil {
			return nil, err
		}
		f.routers = append(f.routers, &router{selector: s})
	}
	f.restartRouters()
	if f.arm.index() {
		f.freshIndex()
	}
	return f, nil
}

// restartRouters empties what routers keep themselves.
func (f *fleet) restartRouters() {
	for i, r := range f.routers {
		r.life++
		if f.arm.shares() && (i > 0 || r.loads != nil) {
			r.loads = f.routers[0].loads
		} else {
			r.loads = make([]loads, len(f.engines))
			for w := range r.loads {
				r.loads[w].active = newSparse[int32](f.blocks)
			}
		}
		if f.arm.tables() {
			r.tables = make([]table, len(f.engines))
			for w := range r.tables {
				f.freshTable(r, w)
			}
		}
	}
	if f.index != nil && f.arm != ArmExactShared {
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

// freshIndex is an index that has seen no event. Routers with an index each see the same events, so that one stands for
// all.
func (f *fleet) freshIndex() {
	f.index, f.ranks = radix.New(radix.Config{}), nil
	for range f.engines {
		f.ranks = append(f.ranks, f.index.AddRank(0, uint32(f.cfg.BlockSize)))
	}
}

// workerRestarted is what routers make of a worker that left and came back: what they believed of it is gone.
func (f *fleet) workerRestarted(w int) {
	for _, r := range f.routers {
		if r.tables != nil {
			f.freshTable(r, w)
		}
	}
}

// choose chooses a worker for a request, and books it there.
func (f *fleet) choose(r *request, now micros) error {
	router := f.routers[r.router]
	if placed := f.placed; placed != "" {
		r.worker = int(placed[r.number] - '0')
		f.book(router, r, r.prompt.Tokens, now)
		return nil
	}
	blocks, names, size := r.prompt.blocks, r.prompt.Names, f.cfg.BlockSize
	if f.arm.index() {
		f.index.Match(0, r.prompt.locals(), nil, &f.answer)
	}
	list := f.candidates[:0]
	for w, e := range f.engines {
		if now < e.downTill {
			continue
		}
		c := routing.Candidate{Worker: &f.workers[w]}
		l := &router.loads[w]
		c.HasLoad, c.ActivePrefillTokens, c.ActiveRequests = true, uint64(l.prefill), uint64(l.requests)
		c.ActiveBlocks = uint64(l.active.used)
		switch {
		case f.arm.index():
			for i := range f.answer.Ranks {
				if o := &f.answer.Ranks[i]; o.Rank == f.ranks[w] {
					c.Device, c.Host = o.Depth[0], o.Depth[1]
				}
			}
		case f.arm.tables():
			c.Device = uint32(router.tables[w].depth(blocks[:min(len(blocks), f.tableDepth)], now))
		case f.arm == ArmOracle:
			c.Device = uint32(prefix(blocks, e.promised))
			if e.host != nil {
				c.Host = uint32(e.host.Hit(names[c.Device:]))
			}
			c.ActivePrefillTokens, c.ActiveBlocks, c.ActiveRequests = uint64(e.owed), uint64(e.live.used), uint64(e.requests)
		}
		if f.arm.policy() == "dynamo" {
			if e.store != nil {
				c.WouldLoad = uint32(e.store.Hit(names[min(len(names), int(c.Device+c.Host)):]))
			}
			active := &l.active
			if f.arm == ArmOracle {
				active = &e.live
			}
			c.NewBlocks = uint64(len(blocks) - prefix(blocks, func(b block) bool { return active.get(b) > 0 }))
		}
		list = append(list, c)
	}
	req := routing.Request{ISL: uint64(r.prompt.Tokens), BlockSize: uint32(size), Blocks: uint64(len(names))}
	choice, err := router.selector.Choose(&req, list, f.rng, &f.scratch)
	if err != nil {
		return err
	}
	for w := range f.workers {
		if list[choice.Index].Worker == &f.workers[w] {
			r.worker = w
		}
	}
	f.book(router, r, int(choice.EffectivePrefillTokens), now)
	return nil
}

// book notes a request under way, and, without events, that its prompt's blocks will be on the worker.
func (f *fleet) book(router *router, r *request, prefill int, now micros) {
	blocks, l := r.prompt.blocks, &router.loads[r.worker]
	b := booking{life: router.life, prefill: prefill}
	l.prefill += b.prefill
	l.requests++
	if f.arm.books() {
		for _, b := range blocks {
			l.active.set(b, l.active.get(b)+1)
		}
	}
	if f.arm.tables() {
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

// prefilled ends what a request's prefill counts.
func (f *fleet) prefilled(r *request) {
	if router := f.routers[r.router]; f.arm.shares() || r.booked.life == router.life {
		router.loads[r.worker].prefill -= r.booked.prefill
		r.booked.prefill = 0
	}
}

// free ends a booking.
func (f *fleet) free(r *request) {
	f.prefilled(r)
	router := f.routers[r.router]
	if !f.arm.shares() && r.booked.life != router.life {
		return
	}
	l := &router.loads[r.worker]
	l.requests--
	if f.arm.books() {
		for _, b := range r.prompt.blocks {
			l.active.set(b, l.active.get(b)-1)
		}
	}
	if b := &r.booked; b.lru != nil {
		b.lru.release(b.slots) // of a table that is forgotten it does no harm
		b.lru, b.slots = nil, nil
	}
}

// learn applies an engine's events to the index.
func (f *fleet) learn(w int, now micros, evs []events.Event) {
	f.index.Apply(f.ranks[w], events.Millis(now/1000), evs)
}
