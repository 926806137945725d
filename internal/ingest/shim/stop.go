package shim

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Kubernetes and other supervisors stop an engine and its shim together. A shim that ended at once would leave a dead
// engine registered until its lease expires. So the shim stays until its engine is gone, and records that:
//
//	          Stop is closed              the engine is gone, and the log has all
//	running ────────────────▶ stopping ──────────────────────────────────────────▶ Run returns nil
//	                              └──────────── ctx ends ─────────────────────────▶ Run returns nil, ctx.Err is set
//
// An engine that drains closes its HTTP port while its process still runs and its event port is open. So the shim also
// watches the serving address. A refusal counts if the address accepted before, or if the shim stops.

// stopping is the state of a stop and of the serving address. Run's loop owns it.
type stopping struct {
	requested <-chan struct{} // nil once the stop has begun
	begun     bool
	served    chan bool // whether the serving address refuses, at every change; from watchServing
}

// The pauses between two connections to the serving address: while the address accepts, before its first acceptance,
// and during a stop.
const (
	servedEvery    = 500 * time.Millisecond
	servedBefore   = 2 * time.Second
	servedStopping = 100 * time.Millisecond
)

// beginStop begins to wait for the engine's end.
func (r *runner) beginStop() {
	r.stopping.requested, r.stopping.begun = nil, true
	r.watching.presence.expectEnd()
}

// watchServing sends whether the serving address refuses connections, at every change, until ctx ends. Other errors are
// ignored.
func (r *runner) watchServing(ctx context.Context) {
	refusals, accepted, reported, stopping := 0, false, false, false
	for stop := r.cfg.Stop; ctx.Err() == nil; {
		err := dial.Probe(ctx, r.cfg.Sockets.Rule, r.cfg.Serving, probeTimeout)
		if refusals++; !dial.Refuses(err) {
			refusals = 0
		}
		accepted = accepted || err == nil
		counts := err == nil || refusals >= refusalsProve && accepted
		if refuses := err != nil; counts && refuses != reported {
			select {
			case r.stopping.served <- refuses:
				reported = refuses
			case <-ctx.Done():
			}
		}
		pause := servedEvery
		switch {
		case refusals > 0 && refusals < refusalsProve:
			pause = probeRefused
		case stopping:
			pause = servedStopping
		case !accepted:
			pause = servedBefore
		}
		select {
		case <-time.After(pause):
		case <-stop:
			stop, stopping, accepted = nil, true, true // from now on every refusal counts
		case <-ctx.Done():
		}
	}
}

// reportServed reports whether the serving address refuses.
func (r *runner) reportServed(refuses bool) {
	why := ""
	if refuses {
		why = "its serving address " + r.cfg.Serving + " refuses connections"
	}
	r.cfg.Observer.Unserved(why)
}

// hasStopped reports whether a stop is requested and the machine has published all events of a gone engine.
func (r *runner) hasStopped() bool {
	return r.stopping.begun && r.watching.presence.state.Engine == api.EngineGone && !r.machine.Busy()
}
