package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/dial"
	"github.com/kvatlas/kvatlas/internal/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// A shim that lives tells when its engine ends. If both are killed, only the lease tells, up to its whole length later.
// So a node suspects a rank whose shim is away, and connects to the serving address of the suspect. A refused connection
// proves that the engine is gone: the node ends the lease at once.
//
//	             the shim is away                  the address refuses, twice
//	trusted ───────────────────────▶ suspected ─────────────────────────────▶ lease ended
//	   ▲                                 │         or another worker has it
//	   └──── the shim is back ───────────┘
//
// A packet filter may refuse in place of the engine. So a refusal counts only if this node has connected to the address
// before, which it tries when the address is registered. Any other error proves nothing.
//
// One loop serves all ranks of the partitions that the node writes for. It sends one message for each of them, which
// the shims do not answer: the NATS server says whose shim is not connected.

const (
	vigilEvery = time.Second

	vigilProbeTime = time.Second            // bounds one attempt to connect
	vigilRefused   = 150 * time.Millisecond // between the two refusals

	// The pause between two attempts to connect to a new address for the first time: it doubles between these.
	vigilPauseMin, vigilPauseMax = time.Second, 15 * time.Second

	vigilProbes = 64 // at once
)

// vigil is the state of the loop.
type vigil struct {
	slots chan struct{} // bounds the probes

	mu      sync.Mutex
	places  map[string]*place            // by serving address
	present map[events.RankKey]holderKey // the shims that were connected to NATS when they were looked for
}

type holderKey string

// place is a serving address, as this node has found it.
type place struct {
	state   placeState
	probing bool
	next    time.Duration // of a first connection: not to be tried before
	pause   time.Duration
}

type placeState uint8

const (
	placeNew      placeState = iota // this node has not connected to it so far
	placeAnswered                   // it has
	placeBarred                     // --dial-allow does not permit it
)

// suspect is a rank with a serving address, and why its shim is taken to be away; empty: it is not.
type suspect struct {
	due     Due
	address string
	why     string
	taken   events.WorkerID // another worker that has registered the address since; empty: none
}

func newVigil() vigil {
	return vigil{slots: make(chan struct{}, vigilProbes), places: map[string]*place{},
		present: map[events.RankKey]holderKey{}}
}

// keepVigil looks once at all ranks that this node is responsible for.
func (r *Registry) keepVigil(ctx context.Context) {
	if r.cfg.Absent == nil {
		return
	}
	list, ask := r.suspects()
	looking, cancel := context.WithTimeout(ctx, vigilEvery)
	absent, err := r.cfg.Absent(looking, ask)
	cancel()
	if err == nil {
		r.vigil.mark(list, ask, absent)
	}
	for address, of := range r.vigil.step(r.now(), list) {
		if of.taken != nil {
			r.endDead(ctx, of.taken)
		}
		if of.probe {
			go r.probePlace(ctx, address, of.suspects)
		}
	}
}

// suspects lists the ranks with serving addresses that this node is responsible for, with what their records say of
// their shims, and those of them whose shims are to be looked for on NATS.
func (r *Registry) suspects() (list []suspect, ask []events.RankKey) {
	type owner struct {
		of    events.WorkerID
		since time.Time
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.current || r.down {
		return nil, nil
	}
	newest := map[[2]string]owner{} // by address and model
	proves := r.machine.Proves(r.now())
	for key, w := range r.workers {
		address := w.address
		if o := r.operators.known[key.Instance]; o != nil && o.Change.Endpoint != "" {
			address, _ = dial.ServingAddress(o.Change.Endpoint)
		}
		if address == "" || w.Record.State != Held {
			continue
		}
		at := [2]string{address, w.Record.Model}
		if o := newest[at]; o.of == "" || w.Record.Holder.Since.After(o.since) {
			newest[at] = owner{key.Instance, w.Record.Holder.Since}
		}
		if !r.cfg.Mine(w.Partition) {
			continue
		}
		s := suspect{due: Due{Record: w.Record, Revision: w.Revision}, address: address}
		switch {
		case w.Record.Shim != nil && !w.Record.Shim.Stopped.IsZero():
			s.why = "its shim was stopped"
		case proves && r.machine.Age(key) > w.Record.Lease()/2:
			s.why = "its lease is not renewed"
		}
		if s.why == "" && w.Record.Control {
			ask = append(ask, key)
		}
		list = append(list, s)
	}
	for i := range list {
		s := &list[i]
		if o := newest[[2]string{s.address, s.due.Record.Model}]; o.of != s.due.Record.Instance &&
			o.since.After(s.due.Record.Holder.Since) {
			s.taken = o.of
		}
	}
	return list, ask
}

// mark makes suspects of ranks whose shims have left NATS: they were connected earlier and are absent now.
func (v *vigil) mark(list []suspect, asked, absent []events.RankKey) {
	away := map[events.RankKey]bool{}
	for _, key := range absent {
		away[key] = true
	}
	was := map[events.RankKey]bool{}
	for _, key := range asked {
		was[key] = true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	present := map[events.RankKey]holderKey{}
	for i := range list {
		record := &list[i].due.Record
		key, holder := record.Key(), holderKey(record.Holder.ID)
		switch {
		case !was[key]:
		case !away[key]:
			present[key] = holder
		case v.present[key] == holder:
			present[key] = holder
			list[i].why = "its shim has left NATS"
		}
	}
	v.present = present
}

// vigilStep is what is to be done about a serving address.
type vigilStep struct {
	probe    bool
	suspects []suspect // to be ended if the address refuses
	taken    []suspect // to be ended at once
}

// step returns what is to be done about each address.
func (v *vigil) step(now time.Duration, list []suspect) map[string]vigilStep {
	v.mu.Lock()
	defer v.mu.Unlock()
	steps := map[string]vigilStep{}
	for _, s := range list {
		p := v.places[s.address]
		if p == nil {
			p = &place{}
			v.places[s.address] = p
		}
		of, seen := steps[s.address]
		switch {
		case s.why != "" && s.taken != "":
			s.why = fmt.Sprintf("%s, and worker %s has its serving address %s now", s.why, s.taken, s.address)
			of.taken = append(of.taken, s)
		case s.why != "":
			of.suspects = append(of.suspects, s)
			of.probe = of.probe || p.state == placeAnswered && !p.probing
		}
		if !seen && p.state == placeNew && !p.probing && now >= p.next {
			of.probe = true
		}
		steps[s.address] = of
	}
	for address, p := range v.places {
		of, used := steps[address]
		if !used && !p.probing {
			delete(v.places, address)
		}
		p.probing = p.probing || of.probe
	}
	return steps
}

// probePlace connects to a serving address, and ends the leases of suspects if it refuses.
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

// probed takes the result of a probe. It reports true if it proves that the engine at the address is gone.
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

// endDead ends the leases of ranks whose engines are gone. A lease that was renewed meanwhile stays.
func (r *Registry) endDead(ctx context.Context, list []suspect) {
	for _, s := range list {
		d, state := s.due, ShimState{}
		if d.Record.Shim != nil {
			state = *d.Record.Shim
		}
		state.Engine, state.Why, state.Since = api.EngineGone, s.why, time.Now().UTC().Truncate(time.Millisecond)
		d.Record.Shim = &state
		r.endLater(ctx, d, r.end)
	}
}
