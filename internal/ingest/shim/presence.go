package shim

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// OnRefused is what follows when an engine's connection has ended and its own ports refuse.
type OnRefused uint8

const (
	ClearOnRefused OnRefused = iota // its process is gone, and what died with it is cleared
	KeepOnRefused                   // nothing: where a proxy stands before the engine, it is the proxy that refuses
)

// ParseOnRefused reads a setting: clear or keep.
func ParseOnRefused(text string) (OnRefused, error) {
	switch text {
	case "clear":
		return ClearOnRefused, nil
	case "keep":
		return KeepOnRefused, nil
	}
	return 0, fmt.Errorf("%q is neither clear nor keep", text)
}

// State is how it stands with a shim and its engine. [Run] sets Engine, Since, Why, CatchingUp and Quiet; [Report] and
// the lease set the other fields. For CatchingUp see [Machine.CatchingUp].
type State = registry.ShimState

// presence decides how it stands with an engine. It is stepped: it starts nothing, waits for nothing and reads no
// clock. Run owns it.
//
//	           connection ends,          all ports refuse, twice in a row;
//	           or no answer              or silent for goneAfter
//	connected ─────────────────▶ silent ─────────────────────────────────▶ gone
//	    ▲                          │                                         │
//	    └──────────────────────────┴─────────── connected again, or heard ◀──┘
//
// An engine that is connected may report over HTTP that it sleeps: then it is asleep until it reports that it is awake,
// or until its connection ends.
//
// An engine that is killed takes its listening sockets along: its host answers each attempt to connect with a refusal.
// A process that hangs, a host that is down or a link that is cut refuse nothing, and prove nothing.
type presence struct {
	onRefused   OnRefused
	silentAfter time.Duration // without a connection
	goneAfter   time.Duration // of silence; 0: never

	conns    int
	answers  bool      // the replay socket has answered before
	sign     time.Time // the last sign of life; at first, when the watch began
	state    State
	probes   int // since the last connection ended
	refusals int // in a row
}

// refusalsProve is how often in a row all ports must refuse: a listening socket that is exchanged for another may
// refuse once.
const refusalsProve = 2

// The pauses before a probe: between refusals, and else, doubling.
const (
	probeRefused = 150 * time.Millisecond
	probeFirst   = 50 * time.Millisecond
	probeMost    = 5 * time.Second
)

func (p *presence) opened(now time.Time) {
	p.conns++
	p.connected(now)
}

// connected tells that the engine shows signs of life.
func (p *presence) connected(now time.Time) {
	p.sign, p.probes, p.refusals = now, 0, 0
	if p.state.Engine != api.EngineConnected && p.state.Engine != api.EngineAsleep {
		p.state = State{Engine: api.EngineConnected, Since: now}
	}
}

// slept tells whether the engine reports that it sleeps.
func (p *presence) slept(asleep bool, now time.Time) {
	switch {
	case asleep && p.state.Engine == api.EngineConnected:
		p.state = State{Engine: api.EngineAsleep, Since: now, Why: "it reports that it sleeps"}
	case !asleep && p.state.Engine == api.EngineAsleep:
		p.state = State{Engine: api.EngineConnected, Since: now}
	}
}

func (p *presence) closed(err error, now time.Time) {
	if p.conns = max(p.conns-1, 0); p.conns > 0 {
		return
	}
	p.slept(false, now) // whoever is connected next may be awake
	p.probes, p.refusals = 0, 0
	if !errors.Is(err, zmtp.ErrSilent) {
		p.sign = now
		return
	}
	if last := now.Add(-p.silentAfter); last.After(p.sign) {
		p.sign = last // until then it answered heartbeats
	}
	p.silent("it answers no heartbeats")
}

func (p *presence) heard(now time.Time) {
	if p.conns > 0 {
		p.connected(now)
	}
}

// replayed tells that the replay socket has answered.
func (p *presence) replayed(now time.Time) {
	p.answers = true
	p.heard(now)
}

// mute tells that the replay socket took a question and said nothing. One that has never answered is no engine's, and
// says nothing of it.
func (p *presence) mute() {
	if p.answers && (p.state.Engine == api.EngineConnected || p.state.Engine == api.EngineAsleep) {
		p.silent("its replay socket does not answer")
	}
}

func (p *presence) silent(why string) {
	p.state = State{Engine: api.EngineSilent, Since: p.sign, Why: why}
}

// wantsProbe says in what time the engine's ports are to be probed; ok is false if they are not.
func (p *presence) wantsProbe() (in time.Duration, ok bool) {
	switch {
	case p.conns > 0 || p.state.Engine == api.EngineGone || p.onRefused == KeepOnRefused:
		return 0, false
	case p.refusals > 0:
		return probeRefused, true
	}
	return min(probeFirst<<min(p.probes, 16), probeMost), true
}

// probed tells what a probe found: whether each port refused. It reports true if the engine is gone with that.
func (p *presence) probed(refused bool, now time.Time) (gone bool) {
	if _, ok := p.wantsProbe(); !ok {
		return false
	}
	p.probes++
	if !refused {
		p.refusals = 0
		return false
	}
	if p.refusals++; p.refusals < refusalsProve {
		return false
	}
	p.state = State{Engine: api.EngineGone, Since: now, Why: "its ports refuse connections"}
	return true
}

// expectEnd tells that the engine is likely to end now: the pauses before probes begin anew.
func (p *presence) expectEnd() { p.probes = 0 }

// deadline is when a tick will change something, if nothing happens before; ok is false if none will.
func (p *presence) deadline() (at time.Time, ok bool) {
	switch {
	case p.state.Engine == api.EngineSilent && p.goneAfter > 0:
		return p.state.Since.Add(p.goneAfter), true
	case p.state.Engine != api.EngineSilent && p.state.Engine != api.EngineGone && p.conns == 0:
		return p.sign.Add(p.silentAfter), true
	}
	return time.Time{}, false
}

// tick tells that time has passed. It reports true if the engine counts as gone with that.
func (p *presence) tick(now time.Time) (gone bool) {
	if at, ok := p.deadline(); !ok || at.After(now) {
		return false
	}
	if p.state.Engine != api.EngineSilent {
		p.silent("there is no connection to it")
		return false
	}
	p.state = State{Engine: api.EngineGone, Since: now, Why: fmt.Sprintf("silent for %v", p.goneAfter)}
	return true
}
