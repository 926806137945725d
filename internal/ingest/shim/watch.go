package shim

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// delayedAfter is after how long in the air a flight is late.
const delayedAfter = 500 * time.Millisecond

// probeTimeout is the time limit of a connection to a probed port.
const probeTimeout = 2 * time.Second

// watching has the timers and goroutines of a presence. Run's loop owns it.
type watching struct {
	presence presence
	reported State      // to the hook
	ports    []string   // of the engine's own
	rule     *dial.Rule // the rule for the addresses
	tick     *time.Timer

	delayed *time.Timer // runs while a flight is in the air

	quiet   *time.Timer // ends when a silent engine counts as quiet
	quietAt time.Time   // end of the timer; zero before the first connection
	spoke   bool        // the engine has published a message

	probing bool
	probed  chan bool // whether all ports refused

	knocking context.CancelFunc // nil if the replay socket is not waited for
	answered chan struct{}      // the replay socket accepts connections again
}

func newWatching(cfg *Config, now time.Time) watching {
	w := watching{
		presence: presence{onRefused: cfg.OnRefused, silentAfter: cfg.SilentAfter, goneAfter: cfg.GoneAfter, sign: now},
		rule:     cfg.Sockets.Rule,
		tick:     time.NewTimer(time.Hour),
		delayed:  time.NewTimer(time.Hour),
		quiet:    time.NewTimer(time.Hour),
		probed:   make(chan bool, 1),
		answered: make(chan struct{}, 1),
	}
	if cfg.Feed != nil {
		w.expect(now, cfg.QuietAfter)
	}
	if !cfg.Listen {
		w.ports = append(w.ports, cfg.Engine)
	}
	if cfg.Replay != "" {
		w.ports = append(w.ports, cfg.Replay)
	}
	return w
}

// watch starts due probes of the engine's ports, and reports the engine's state. The loop calls it before waiting.
func (r *runner) watch(ctx context.Context) {
	if r.cfg.Feed == nil {
		r.watchEngine(ctx)
	}
	now := r.watching.presence.state
	now.CatchingUp, now.Quiet = r.machine.CatchingUp(), r.isQuiet()
	if now != r.watching.reported {
		r.watching.reported = now
		r.cfg.Observer.StateChanged(now)
	}
}

// expect starts the wait for the engine's first message, at the first connection.
func (w *watching) expect(now time.Time, within time.Duration) {
	if w.quietAt.IsZero() {
		w.quietAt = now.Add(within)
		w.quiet.Reset(within)
	}
}

// DefaultQuietAfter is the default of [Config].QuietAfter.
const DefaultQuietAfter = 30 * time.Second

// isQuiet reports whether the engine has been connected for too long without a message. After the first message a pause
// is normal: an engine without requests publishes nothing. An engine without a connection is silent or gone.
func (r *runner) isQuiet() bool {
	w := &r.watching
	w.spoke = w.spoke || r.machine.Counts().Taken > 0 || r.machine.Taken().Known
	return !w.spoke && !w.quietAt.IsZero() && !time.Now().Before(w.quietAt)
}

func (r *runner) watchEngine(ctx context.Context) {
	w := &r.watching
	if in, ok := w.presence.wantsProbe(); ok && !w.probing && len(w.ports) > 0 {
		w.probing = true
		go w.probe(ctx, in, r.stopping.requested)
	}
	w.tick.Stop()
	if at, ok := w.presence.deadline(); ok {
		w.tick.Reset(time.Until(at))
	}
}

// probe finds out, after a pause, whether all of the engine's ports refuse. The begin of a stop ends the pause.
func (w *watching) probe(ctx context.Context, in time.Duration, stop <-chan struct{}) {
	pause := time.NewTimer(in)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-stop:
	case <-ctx.Done():
		return
	}
	refused := true
	for _, port := range w.ports {
		err := zmtp.Probe(ctx, port, probeTimeout, w.rule)
		if refused = err != nil && zmtp.Refuses(err); !refused {
			break
		}
	}
	w.probed <- refused // the channel has room: a single probe runs at a time
}

func (r *runner) afterProbe(refused bool) {
	r.watching.probing = false
	if r.watching.presence.probed(refused, time.Now()) {
		r.engineGone()
	}
}

// engineGone clears the memory of the engine's process.
func (r *runner) engineGone() {
	r.retry.Stop()
	r.watching.stopKnocking()
	r.replay.end()
	r.snapshot.end()
	r.machine.Gone()
}

// SleepReport is an engine's reply about sleep. Asked is the time of the request.
type SleepReport struct {
	Asked  time.Time
	Asleep bool
}

// sleepReported processes an engine's reply about sleep. A message since the request may be of an engine that has woken
// up: then the next reply decides.
func (r *runner) sleepReported(s SleepReport) {
	r.watching.presence.slept(s.Asleep, time.Now())
	if s.Asleep && r.takenAt.Before(s.Asked) {
		r.machine.Asleep()
	}
}

// knock waits until the refusing replay socket accepts connections, so that a request is sent as soon as possible.
func (r *runner) knock(ctx context.Context) {
	w := &r.watching
	if w.knocking != nil {
		return
	}
	ctx, w.knocking = context.WithCancel(ctx)
	go func() {
		for zmtp.Probe(ctx, r.cfg.Replay, probeTimeout, w.rule) != nil && ctx.Err() == nil {
			sleep(ctx, r.cfg.RetryReachable)
		}
		if ctx.Err() == nil {
			loop.Wake(w.answered)
		}
	}()
}

func (w *watching) stopKnocking() {
	if w.knocking == nil {
		return
	}
	w.knocking()
	w.knocking = nil
}

// dialNow has the live socket dialled at once, if there is no connection.
func (r *runner) dialNow() {
	if r.sub != nil && !r.cfg.Listen && r.watching.presence.conns == 0 {
		r.sub.DialNow()
	}
}

// revive begins a new incarnation for an engine that counted as gone and publishes on its old connection.
func (r *runner) revive(now time.Time) {
	if p := &r.watching.presence; p.state.Engine == api.EngineGone {
		p.connected(now)
		r.machine.Connected()
	}
}
