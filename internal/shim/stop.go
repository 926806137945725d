package shim

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/dial"
	"github.com/kvatlas/kvatlas/internal/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Kubernetes and other supervisors stop an engine and its shim together. A shim that ended at once would leave a dead
// engine registered until its lease expires. So the shim stays until its engine is gone, and records that:
//
//	          Stop is closed              the engine is gone, and the log has all
//	running ────────────────▶ stopping ──────────────────────────────────────────▶ Run returns nil
//	                              └──────────── ctx ends ─────────────────────────▶ Run returns nil, ctx.Err is set
//
// An HTTP server that drains refuses connections while its process still runs. So a stopping shim also watches the
// serving address.

// stopping is the state of a stop. Run's loop owns it.
type stopping struct {
	requested <-chan struct{} // nil once the stop has begun
	begun     bool
	served    chan bool // whether the serving address refuses; of watchServing
	refuses   bool      // as reported
}

// servedEvery is the pause between two connections to the serving address.
const servedEvery = 200 * time.Millisecond

// beginStop begins to wait for the engine's end.
func (r *runner) beginStop(ctx context.Context) {
	r.stopping.requested, r.stopping.begun = nil, true
	r.watching.presence.expectEnd()
	if r.cfg.Serving != "" {
		go r.watchServing(ctx)
	}
}

// watchServing sends whether the serving address refuses connections, until ctx ends. An error of another kind says
// nothing.
func (r *runner) watchServing(ctx context.Context) {
	refusals := 0
	for ctx.Err() == nil {
		err := dial.Probe(ctx, r.cfg.Sockets.Rule, r.cfg.Serving, probeTimeout)
		if refusals++; !dial.Refuses(err) {
			refusals = 0
		}
		if err == nil || refusals >= refusalsProve {
			select {
			case r.stopping.served <- err != nil:
			case <-ctx.Done():
			}
		}
		loop.Wait(ctx, servedEvery)
	}
}

// reportServed reports a change of whether the serving address refuses.
func (r *runner) reportServed(refuses bool) {
	if refuses == r.stopping.refuses {
		return
	}
	r.stopping.refuses = refuses
	why := ""
	if refuses {
		why = "its serving address " + r.cfg.Serving + " refuses connections"
	}
	r.cfg.Hooks.Unserved(why)
}

// hasStopped reports whether the shim is to stop and the machine has all of an engine that is gone.
func (r *runner) hasStopped() bool {
	return r.stopping.begun && r.watching.presence.state.Engine == api.EngineGone && !r.machine.Busy()
}
