package routesim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Disturbance happens once, when half of the measured requests have come.
type Disturbance string

// The disturbances.
const (
	RestartRouters Disturbance = "router" // all routers begin anew
	RestartEngine  Disturbance = "engine" // the first engine crashes, and is back and empty after 20 seconds
	ResetCaches    Disturbance = "cache"  // all engines drop their prefix caches, as with new weights
)

// Disturbances lists all disturbances.
var Disturbances = []Disturbance{RestartRouters, RestartEngine, ResetCaches}

// downFor is how long a crashed engine is away.
const downFor = 20 * 1_000_000 // µs

// Config configures a run.
type Config struct {
	Workload Workload
	Arm      Arm
	Routers  int // 1 or more
	Workers  int // 1 or more
	Seed     uint64
	Disturb  []Disturbance

	// EventLag is the time from an engine's event to the index, in seconds.
	EventLag float64

	// TTL is the lifetime of the guesses of approx-ttl, in seconds; 0: 120.
	TTL float64

	// TableTokens is the capacity of approx-lru's guesses for a worker; 0: the worker's capacity. TableDepth is the length
	// of a prompt's head in approximate routers, in tokens; 0: the whole prompt.
	TableTokens, TableDepth int

	// Routing are the constants of the policies.
	Routing routing.Config

	// WarmUp is the largest number of copies of hot prefixes in a minute, for arms with shared state; 0: none.
	WarmUp int

	// Progress is called at intervals with the number of completed requests. nil disables the call.
	Progress func(done, of int)

	// Done is called for every completed request, in order of completion. nil disables the call.
	Done func(Outcome)
}

// Outcome is a completed request. Times are seconds since the beginning of the run.
type Outcome struct {
	Number            int // in the order of arrival, over all stages
	Worker            int
	Sent, First, Done float64
	Reused, Loaded    int // prompt tokens at the start of the prefill: on the device, and from other tiers
}

// ErrTooLong is returned by Simulate and Compare if a request does not fit into an engine.
var ErrTooLong = errors.New("a request does not fit into an engine's memory")

// sim is a run.
type sim struct {
	Config
	now     micros
	queue   queue
	engines []*engine
	gpus    []*gpu // shared; nil: every engine has a GPU
	fleet   *fleet
	rng     *rand.Rand
	delays  *rand.Rand

	stage, next int    // the next arrival
	begin       micros // of the stage
	under, left int    // requests of the stage under way, and not done
	all         []*request
	late        []batch    // events in transit, the earliest first
	lost        []*request // of crashed engines, not sent again yet
	number      int        // number of arrived requests
	seen        []bool     // blocks of arrived requests
	half        int        // number of the request before the disturbance; -1: after the disturbance
	run         *Run
}

type batch struct {
	at     micros
	worker int
	events []events.Event
}

// Simulate runs an arm. Equal configurations give equal runs. It uses a single goroutine and ends early only with ctx.
func Simulate(ctx context.Context, cfg Config) (*Run, error) {
	s, err := newSim(cfg)
	if err != nil {
		return nil, err
	}
	if err := s.loop(ctx, cfg.Workload.requests()); err != nil {
		return nil, err
	}
	s.run.close(s)
	return s.run, nil
}

func newSim(cfg Config) (*sim, error) {
	s := &sim{Config: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x726f75746573696d)),
		delays: rand.New(rand.NewPCG(cfg.Seed, 0x64656c617973)), seen: make([]bool, len(cfg.Workload.names))}
	e := cfg.Workload.Engine
	switch {
	case cfg.Workers < 1 || cfg.Routers < 1:
		return nil, fmt.Errorf("%d workers and %d routers: the least number is 1", cfg.Workers, cfg.Routers)
	case e.BlockSize < 1 || e.MaxBatchedTokens < e.BlockSize || e.MaxRequests < 1 || !(e.Prefill > 0) || !(e.StepBase > 0):
		return nil, fmt.Errorf("an engine with %+v does not run", e)
	}
	way, err := cfg.Arm.way()
	if err != nil {
		return nil, err
	}
	var store *enginesim.Cache
	if e.Store > 0 {
		store = enginesim.NewCache(e.Store / e.BlockSize)
	}
	lag := after(cfg.EventLag)
	for w := range cfg.Workers {
		var publish func([]events.Event)
		if way.knows == knowsIndex {
			publish = func(evs []events.Event) {
				s.late = append(s.late, batch{s.now + lag, w, evs})
			}
		}
		s.engines = append(s.engines, newEngine(cfg.Workload.engine(w), cfg.Workload.names, store, publish))
	}
	if n := e.EnginesPerGPU; n > 1 {
		for range (cfg.Workers + n - 1) / n {
			s.gpus = append(s.gpus, &gpu{loss: e.ShareLoss})
		}
	}
	s.late = nil
	if s.fleet, err = newFleet(cfg, s.engines, s.rng); err != nil {
		return nil, err
	}
	total, warm := 0, 0
	for _, st := range cfg.Workload.Stages {
		total += len(st.Arrivals)
		if st.Warm {
			warm += len(st.Arrivals)
		}
		for _, a := range st.Arrivals {
			for _, e := range s.engines {
				if !e.fits(a.Prompt, a.Output) {
					return nil, fmt.Errorf("%w: %d + %d tokens", ErrTooLong, a.Prompt.Tokens, a.Output)
				}
			}
		}
	}
	s.half = warm + (total-warm)/2
	s.run = newRun(cfg)
	if err := s.changes(); err != nil {
		return nil, err
	}
	s.openStage()
	return s, nil
}

// loop runs until every request is done.
func (s *sim) loop(ctx context.Context, total int) error {
	for n := 0; ; n++ {
		if n%(1<<14) == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if s.Progress != nil {
				s.Progress(len(s.all)-s.under, total)
			}
		}
		arrival := s.arrival()
		if len(s.queue.events) == 0 && arrival == never {
			break
		}
		if len(s.queue.events) == 0 || arrival <= s.queue.events[0].at {
			s.now = arrival
			if err := s.arrive(); err != nil {
				return err
			}
			continue
		}
		ev := s.queue.pop()
		s.now = ev.at
		if err := ev.do(); err != nil {
			return err
		}
	}
	if len(s.lost) > 0 {
		return fmt.Errorf("%d requests found no worker until the end: a worker must join after the last has left", len(s.lost))
	}
	if len(s.all) != total || s.under != 0 {
		panic(fmt.Sprintf("routesim: %d of %d requests came, %d never ended", len(s.all), total, s.under))
	}
	return nil
}

// arrival returns the time of the next request, as far as known.
func (s *sim) arrival() micros {
	if s.stage == len(s.Workload.Stages) {
		return never
	}
	st := &s.Workload.Stages[s.stage]
	if s.next == len(st.Arrivals) || s.Workload.Clients > 0 && s.under >= s.Workload.Clients {
		return never
	}
	return max(s.now, s.begin+after(st.Arrivals[s.next].At))
}

// openStage begins the next stage with requests after the end of all earlier requests.
func (s *sim) openStage() {
	for s.stage < len(s.Workload.Stages) && len(s.Workload.Stages[s.stage].Arrivals) == 0 {
		s.stage++
	}
	if s.stage < len(s.Workload.Stages) {
		s.next, s.left = 0, len(s.Workload.Stages[s.stage].Arrivals)
	}
}

// arrive sends the next request to a router, and on to the chosen worker.
func (s *sim) arrive() error {
	a := &s.Workload.Stages[s.stage].Arrivals[s.next]
	if s.number == s.half {
		if err := s.disturb(); err != nil {
			return err
		}
	}
	r := &request{prompt: a.Prompt, output: a.Output, session: a.Session, number: s.number, stage: s.stage, sent: s.now}
	s.next++
	s.number++
	s.under++
	s.all = append(s.all, r)
	s.see(r)
	return s.send(r)
}

// repeatedShare is the least share of a prompt in earlier requests for a real prefix.
const repeatedShare = 0.25

// see records the blocks of a request, and whether earlier requests had a real prefix.
func (s *sim) see(r *request) {
	had := s.Workload.Engine.BlockSize * prefix(r.prompt.blocks, func(b block) bool { return s.seen[b] })
	r.repeats = float64(had) >= repeatedShare*float64(r.prompt.Tokens)
	for _, b := range r.prompt.blocks {
		s.seen[b] = true
	}
}

// send routes a request. If all workers are absent, the request waits for an arrival.
func (s *sim) send(r *request) error {
	if !s.staffed() {
		s.lost = append(s.lost, r)
		return nil
	}
	s.deliver()
	r.router = s.rng.IntN(len(s.fleet.routers))
	would := 0
	if !r.admitted {
		for _, e := range s.engines {
			if s.now >= e.downTill {
				would = max(would, e.would(r.prompt))
			}
		}
	}
	if err := s.fleet.choose(r, s.now); err != nil {
		return err
	}
	if e := s.engines[r.worker]; !r.admitted {
		r.best, r.chosen = would, e.would(r.prompt)
	}
	s.toEngine(r)
	s.copyHot()
	return nil
}

// toEngine sends a request to its worker.
func (s *sim) toEngine(r *request) {
	e := s.engines[r.worker]
	e.expect(r)
	if d := e.cfg.Delay; d > 0 {
		s.ofEngine(s.now+after(d*(0.5+s.delays.Float64())), r.worker, func() { s.arrived(r) })
		return
	}
	s.arrived(r)
}

// arrived adds a request to the queue of its engine.
func (s *sim) arrived(r *request) {
	s.engines[r.worker].queue(r)
	s.kick(r.worker)
}

// deliver applies the events that have reached the index.
func (s *sim) deliver() {
	n := 0
	for n < len(s.late) && s.late[n].at <= s.now {
		s.fleet.learn(s.late[n].worker, s.late[n].at, s.late[n].events)
		n++
	}
	s.late = s.late[n:]
}

// kick begins an engine's next step, if the engine is idle and has work.
func (s *sim) kick(w int) {
	e := s.engines[w]
	if e.busy || s.now < e.downTill {
		return
	}
	p, wake := e.begin(s.now)
	switch {
	case p.gpu == 0 && wake != never:
		s.ofEngine(wake, w, func() { s.kick(w) })
	case p.gpu > 0 && s.gpus == nil:
		s.stepEnds(s.now+max(p.host, p.gpu), w)
	case p.gpu > 0:
		g := s.gpus[w/s.Workload.Engine.EnginesPerGPU]
		g.start(s.now, w, p)
		s.plan(g)
	}
}

// ofEngine schedules an event of an engine. A crash of the engine cancels the event.
func (s *sim) ofEngine(at micros, w int, do func()) {
	e := s.engines[w]
	life := e.life
	s.queue.push(at, func() error {
		if e.life == life {
			do()
		}
		return nil
	})
}

// stepEnds schedules the end of an engine's step and the start of the next.
func (s *sim) stepEnds(at micros, w int) {
	s.ofEngine(at, w, func() {
		s.finish(w)
		s.kick(w)
	})
}

// plan plans the end of the next step on a shared GPU. The plan is void if another step starts before.
func (s *sim) plan(g *gpu) {
	at := g.next()
	if at == never {
		return
	}
	g.version++
	version := g.version
	s.queue.push(at, func() error {
		if g.version == version {
			for _, j := range g.finished(s.now) {
				s.stepEnds(j.end(s.now), j.worker)
			}
			s.plan(g)
		}
		return nil
	})
}

// finish ends an engine's step.
func (s *sim) finish(w int) {
	began, done := s.engines[w].finish(s.now)
	d := s.Workload.Engine.Reply
	if d == 0 {
		s.replied(began, nil, done)
		return
	}
	if len(began)+len(done) == 0 {
		return
	}
	var retries []int
	for _, r := range began {
		retries = append(retries, r.retries)
	}
	s.queue.push(s.now+after(d), func() error {
		s.replied(began, retries, done)
		return nil
	})
}

// replied reports first tokens and ends to the routers. A changed number of retries means that the request has lost its
// first token with the worker.
func (s *sim) replied(began []*request, retries []int, done []*request) {
	for i, r := range began {
		if retries == nil || r.retries == retries[i] {
			s.fleet.prefilled(r, s.now)
		}
	}
	s.ended(done)
}

// ended ends requests.
func (s *sim) ended(done []*request) {
	for _, r := range done {
		s.fleet.free(r, s.now)
		if r.copies {
			s.copied(r)
			continue
		}
		s.under--
		s.left--
		s.run.done(r)
		if s.Done != nil {
			s.Done(Outcome{r.number, r.worker, r.sent.seconds(), r.first.seconds(), r.done.seconds(), r.reused, r.loaded})
		}
	}
	if s.left == 0 && s.stage < len(s.Workload.Stages) && len(done) > 0 {
		s.stage++
		s.openStage()
		s.begin = s.now + after(1)
	}
}

// disturb applies the disturbance in the middle of the run.
func (s *sim) disturb() error {
	s.half = -1
	s.deliver()
	if s.Arm == ArmExactRestart || slices.Contains(s.Disturb, RestartRouters) {
		s.fleet.restartRouters()
	}
	if slices.Contains(s.Disturb, ResetCaches) {
		for _, e := range s.engines {
			e.resetCache()
		}
	}
	if !slices.Contains(s.Disturb, RestartEngine) {
		return nil
	}
	if err := s.crash(0); err != nil {
		return err
	}
	if len(s.engines) > 1 {
		s.engines[0].downTill = s.now + downFor
		s.queue.push(s.now+downFor, func() error { return s.change(&Change{Worker: 0, Up: true}) })
	}
	return s.resend()
}

// again resets a request, except for the time of sending and its matches.
func (r *request) again() {
	r.slots, r.computed, r.target, r.generated, r.owed, r.ready = nil, 0, 0, 0, 0, 0
	r.unnamed, r.decoding, r.booked = false, false, booking{}
	r.retries++
}
