package shim

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// OnRefused is the reaction to refusing ports after the end of an engine's connection.
type OnRefused uint8

const (
	ClearOnRefused OnRefused = iota // the process is gone, and its memory is cleared
	KeepOnRefused                   // no reaction, for a proxy before the engine, which may refuse by itself
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

// State is the state of a shim and its engine. [Run] sets Engine, Since, Why, CatchingUp and Quiet; [Report] and the
// lease set the other fields. For CatchingUp see [Machine.CatchingUp].
type State = registry.ShimState

// presence decides the state of an engine. It is stepped: it starts no goroutine, does not block and reads no clock.
// Run owns it.
//
//	           connection ends,          all ports refuse, twice in a row;
//	           or no answer              or silent for goneAfter
//	connected ─────────────────▶ silent ─────────────────────────────────▶ gone
//	    ▲                          │                                         │
//	    └──────────────────────────┴── connected again, or a new message ◀───┘
//
// A connected engine may report over HTTP that it sleeps. Then the state is asleep until the engine reports that it is
// awake, or until the connection ends.
//
// A killed engine loses its listening sockets: its host refuses all connections. A hanging process, a dead host or a
// broken link refuses no connection, so it proves nothing.
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

// refusalsProve is the number of consecutive refusals of all ports that prove the end, because a replaced listening
// socket may refuse once.
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

// connected records a sign of life of the engine.
func (p *presence) connected(now time.Time) {
	p.sign, p.probes, p.refusals = now, 0, 0
	if p.state.Engine != api.EngineConnected && p.state.Engine != api.EngineAsleep {
		p.state = State{Engine: api.EngineConnected, Since: now}
	}
}

// slept records the engine's report about sleep.
func (p *presence) slept(asleep bool, now time.Time) {
	switch {
	case asleep && p.state.Engine == api.EngineConnected:
		p.state = State{Engine: api.EngineAsleep, Since: now, Why: "the engine reports that it sleeps"}
	case !asleep && p.state.Engine == api.EngineAsleep:
		p.state = State{Engine: api.EngineConnected, Since: now}
	}
}

func (p *presence) closed(err error, now time.Time) {
	if p.conns = max(p.conns-1, 0); p.conns > 0 {
		return
	}
	p.slept(false, now) // the next connection may be an awake engine
	p.probes, p.refusals = 0, 0
	if !errors.Is(err, zmtp.ErrSilent) {
		p.sign = now
		return
	}
	if last := now.Add(-p.silentAfter); last.After(p.sign) {
		p.sign = last // the last answered heartbeat
	}
	p.silent("no reply to heartbeats")
}

// received records a message of the engine.
func (p *presence) received(now time.Time) {
	if p.conns > 0 {
		p.connected(now)
	}
}

// replayed records a reply of the replay socket.
func (p *presence) replayed(now time.Time) {
	p.answers = true
	p.received(now)
}

// mute records a missing reply of the replay socket. A socket that has never replied may not be an engine's, and is
// ignored.
func (p *presence) mute() {
	if p.answers && (p.state.Engine == api.EngineConnected || p.state.Engine == api.EngineAsleep) {
		p.silent("its replay socket does not reply")
	}
}

func (p *presence) silent(why string) {
	p.state = State{Engine: api.EngineSilent, Since: p.sign, Why: why}
}

// wantsProbe returns the time until the next probe of the engine's ports; ok is false without a due probe.
func (p *presence) wantsProbe() (in time.Duration, ok bool) {
	switch {
	case p.conns > 0 || p.state.Engine == api.EngineGone || p.onRefused == KeepOnRefused:
		return 0, false
	case p.refusals > 0:
		return probeRefused, true
	}
	return min(probeFirst<<min(p.probes, 16), probeMost), true
}

// probed records the result of a probe: whether all ports refused. It reports whether the engine counts as gone now.
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

// expectEnd restarts the pauses between probes, because the engine probably ends now.
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

// tick records the passage of time. It reports whether the engine counts as gone now.
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
