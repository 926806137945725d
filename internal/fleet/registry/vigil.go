package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// A running shim reports the end of the engine. If both are killed, only the lease shows the end, up to a whole lease
// later. So a node suspects a rank without a shim, and connects to the serving address of the suspect. A refused
// connection proves that the engine is gone, and the node ends the lease at once.
//
//	             the shim is away                  the address refuses, twice
//	trusted ───────────────────────▶ suspected ─────────────────────────────▶ lease ended
//	   ▲                                 │         or another worker has it
//	   └──── the shim is back ───────────┘
//
// A packet filter may refuse connections in place of the engine. So a refusal counts only if this node has connected to
// the address before. The first attempt follows the registration. Any other error proves nothing.
//
// A single loop serves all ranks of the node's partitions. It sends a message for each rank, without an answer by the
// shims: the NATS server reports the shims that are not connected.

const (
	vigilEvery = time.Second / 2
	vigilOften = 1000 // ranks; with more, every second look is left out, because a look sends a message for each rank

	vigilProbeTime = time.Second            // time limit of a connection attempt
	vigilRefused   = 150 * time.Millisecond // interval of the two refusals

	// Limits of the pause between attempts of the first connection to an address. The pause doubles.
	vigilPauseMin, vigilPauseMax = time.Second, 15 * time.Second

	vigilProbes = 256 // concurrent probes
)

// vigil is the state of the loop.
type vigil struct {
	slots  chan struct{} // limits the probes
	probes sync.WaitGroup

	mu      sync.Mutex
	rested  bool // the last look was left out
	looks   uint64
	places  map[string]*place         // by serving address
	present map[events.RankKey]string // holders of leases that were connected to NATS at the last look
}

// place is the state of a serving address for this node.
type place struct {
	state   placeState
	probing bool
	next    time.Duration // earliest time of the first connection
	pause   time.Duration
	look    uint64 // the last look with a rank at the address
}

type placeState uint8

const (
	placeNew      placeState = iota // no connection from this node yet
	placeAnswered                   // a connection succeeded
	placeBarred                     // --dial-allow does not permit it
)

// suspect is a rank with a serving address in this node's partitions.
type suspect struct {
	key       events.RankKey
	revision  uint64
	holder    string
	address   string
	watched   bool            // whether its shim must be searched on NATS
	why       string          // why its shim counts as away; empty: present
	successor events.WorkerID // another worker that has registered the address since; empty: none
}

func newVigil() vigil {
	return vigil{slots: make(chan struct{}, vigilProbes), places: map[string]*place{},
		present: map[events.RankKey]string{}}
}

// keepVigil checks all ranks of this node's partitions once.
func (r *Registry) keepVigil(ctx context.Context) {
	if r.cfg.Absent == nil {
		return
	}
	list := r.suspects()
	if r.vigil.rests(len(list)) {
		return
	}
	var ask []events.RankKey
	for i := range list {
		if list[i].watched {
			ask = append(ask, list[i].key)
		}
	}
	absent, err := r.cfg.Absent(ctx, ask)
	if err != nil {
		return // without NATS no lease can end
	}
	r.vigil.mark(list, absent)
	r.findTakers(list)
	for address, todo := range r.vigil.step(r.now(), list, vigilProbes-len(r.vigil.slots)) {
		r.endDead(ctx, todo.replaced)
		if todo.probe {
			r.vigil.probes.Go(func() { r.probePlace(ctx, address, todo.suspects) })
		}
	}
}

// rests reports whether a look at a number of ranks is left out.
func (v *vigil) rests(ranks int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.rested = ranks > vigilOften && !v.rested
	return v.rested
}

// addressOf returns the HOST:PORT of a rank's engine for requests, or "" if unknown. The caller holds r.mu.
func (r *Registry) addressOf(key events.RankKey, w *Worker) string {
	if o := r.operators.known[key.Instance]; o != nil && o.Change.Endpoint != "" {
		address, _ := dial.ServingAddress(o.Change.Endpoint)
		return address
	}
	return w.address
}

// suspects returns the ranks of this node's partitions with serving addresses, with the shim states in their records.
func (r *Registry) suspects() []suspect {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.current || r.down {
		return nil
	}
	list := make([]suspect, 0, len(r.workers))
	proves := r.machine.Proves(r.now())
	for key, w := range r.workers {
		address := r.addressOf(key, &w)
		if address == "" || w.Record.State != Held || !r.cfg.Mine(w.Partition) {
			continue
		}
		s := suspect{key: key, revision: w.Revision, holder: w.Record.Holder.ID, address: address}
		switch {
		case w.Record.Shim != nil && !w.Record.Shim.Stopped.IsZero():
			s.why = "its shim was stopped"
		case proves && r.machine.Age(key) > w.Record.Lease()/2:
			s.why = "its lease is not renewed"
		default:
			s.watched = w.Record.Control
		}
		list = append(list, s)
	}
	return list
}

// findTakers finds workers of the same model with later registrations of the suspects' addresses.
func (r *Registry) findTakers(list []suspect) {
	of := map[string][]*suspect{}
	for i := range list {
		if s := &list[i]; s.why != "" {
			of[s.address] = append(of[s.address], s)
		}
	}
	if len(of) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, w := range r.workers {
		for _, s := range of[r.addressOf(key, &w)] {
			old, known := r.workers[s.key]
			if known && key.Instance != s.key.Instance && w.Record.State == Held && w.Record.Model == old.Record.Model &&
				w.Record.Holder.Since.After(old.Record.Holder.Since) {
				s.successor = key.Instance
			}
		}
	}
}

// mark marks ranks as suspects if their shims have left NATS: they were connected earlier and are absent now.
func (v *vigil) mark(list []suspect, absent []events.RankKey) {
	away := map[events.RankKey]bool{}
	for _, key := range absent {
		away[key] = true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.present) > 2*len(list)+16 { // most entries are outdated
		clear(v.present)
	}
	for i := range list {
		switch s := &list[i]; {
		case !s.watched:
		case !away[s.key]:
			if v.present[s.key] != s.holder {
				v.present[s.key] = s.holder
			}
		case v.present[s.key] == s.holder:
			s.why = "its shim has left NATS"
		}
	}
}

// vigilStep has the actions for a serving address.
type vigilStep struct {
	probe    bool
	suspects []suspect // to end if the address refuses
	replaced []suspect // to end at once
}

// step returns the actions for addresses; most need none. step probes at most room new addresses.
func (v *vigil) step(now time.Duration, list []suspect, room int) map[string]*vigilStep {
	v.mu.Lock()
	defer v.mu.Unlock()
	steps := map[string]*vigilStep{}
	v.looks++
	for _, s := range list {
		p := v.places[s.address]
		if p == nil {
			p = &place{}
			v.places[s.address] = p
		}
		p.look = v.looks
		fresh := p.state == placeNew && !p.probing && now >= p.next && room > 0
		if s.why == "" && !fresh {
			continue
		}
		todo := steps[s.address]
		if todo == nil {
			todo = &vigilStep{probe: fresh}
			if steps[s.address] = todo; fresh {
				room--
			}
		}
		switch {
		case s.why != "" && s.successor != "":
			s.why = fmt.Sprintf("%s, and worker %s has its serving address %s now", s.why, s.successor, s.address)
			todo.replaced = append(todo.replaced, s)
		case s.why != "":
			todo.suspects = append(todo.suspects, s)
			todo.probe = todo.probe || p.state == placeAnswered && !p.probing
		}
	}
	for address, todo := range steps {
		p := v.places[address]
		p.probing = p.probing || todo.probe
	}
	for address, p := range v.places {
		if p.look != v.looks && !p.probing {
			delete(v.places, address)
		}
	}
	return steps
}

// probePlace connects to a serving address, and ends the leases of suspects after a refusal.
func (r *Registry) probePlace(ctx context.Context, address string, list []suspect) {
	v := &r.vigil
	select {
	case v.slots <- struct{}{}:
		defer func() { <-v.slots }()
	case <-ctx.Done():
		return
	}
	err := dial.Probe(ctx, r.cfg.Screen.Rule, address, vigilProbeTime)
	if dial.Refuses(err) && loop.Wait(ctx, vigilRefused) {
		err = dial.Probe(ctx, r.cfg.Screen.Rule, address, vigilProbeTime)
	}
	if ctx.Err() != nil || !v.probed(address, err, r.now()) {
		return
	}
	for i := range list {
		list[i].why = fmt.Sprintf("%s, and its serving address %s refuses connections", list[i].why, address)
	}
	r.endDead(ctx, list)
}

// probed records the result of a probe. probed returns true if the engine at the address is certainly gone.
func (v *vigil) probed(address string, err error, now time.Duration) (gone bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.places[address]
	p.probing = false
	switch {
	case err == nil:
		p.state = placeAnswered
	case errors.Is(err, dial.ErrDenied):
		p.state = placeBarred
	case p.state == placeNew:
		p.pause = min(max(2*p.pause, vigilPauseMin), vigilPauseMax)
		p.next = now + p.pause
	default:
		return dial.Refuses(err)
	}
	return false
}

// endDead ends the leases of ranks with gone engines. A renewed lease stays.
func (r *Registry) endDead(ctx context.Context, list []suspect) {
	for _, s := range list {
		w, known := r.Worker(s.key)
		if !known || w.Revision != s.revision {
			continue
		}
		state := ShimState{}
		if w.Record.Shim != nil {
			state = *w.Record.Shim
		}
		state.Engine, state.Why, state.Since = api.EngineGone, s.why, time.Now().UTC().Truncate(time.Millisecond)
		w.Record.Shim = &state
		r.endLater(ctx, Due{Record: w.Record, Revision: w.Revision}, r.end)
	}
}
