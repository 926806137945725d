package shim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Report holds a rank's lease, and reports the state of the shim in the lease's record and on the rank's control
// server. It is safe for concurrent use.
type Report struct {
	lease  *registry.Lease
	server *ControlServer

	mu       sync.Mutex
	state    registry.ShimState
	waits    bool   // the log refused events, and has accepted none since
	crowded  int    // consecutive refused batches
	messages uint64 // number of messages in the log at the last Stepped
}

// NewReport prepares a rank's lease: the record reports that the shim is catching up. server may be nil.
func NewReport(ns *jetstream.Namespace, record registry.Record, observer registry.LeaseObserver,
	server *ControlServer) (*Report, error) {
	r := &Report{server: server, state: registry.ShimState{CatchingUp: true}}
	record.Shim = &registry.ShimState{CatchingUp: true} // earlier messages of the engine are not in the log yet
	record.Control = server != nil
	var err error
	if r.lease, err = registry.NewLease(ns, record, observer); err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	return r, nil
}

// Keep holds the lease, for [Config].Keep. The error wraps ErrFenced after a takeover by another shim.
func (r *Report) Keep(ctx context.Context, lost func()) error {
	err := r.lease.Keep(ctx, lost)
	if errors.Is(err, registry.ErrTaken) {
		return fmt.Errorf("%w: %w", ErrFenced, err)
	}
	return err
}

// End ends the lease of a gone engine. stopped reports a stop request of the shim. Keep's context must be done.
func (r *Report) End(ctx context.Context, stopped bool) error { return r.lease.End(ctx, stopped) }

// Leave records in the lease that the shim stops while its engine continues. Keep's context must be done.
func (r *Report) Leave(ctx context.Context) error { return r.lease.Leave(ctx) }

// Renew has the lease renewed soon.
func (r *Report) Renew() { r.lease.Renew() }

// SetNames sets the further accepted names of the model and the LoRA adapters. It returns the number of invalid names,
// which are omitted.
func (r *Report) SetNames(names, adapters []string) (left int) {
	return r.lease.SetNames(names, adapters)
}

// SetStore sets the rank's configuration of a shared store from the engine.
func (r *Report) SetStore(c *hicache.Config) { r.lease.SetStore(c) }

// SetState sets the state of the shim and its engine.
func (r *Report) SetState(s State) {
	r.change(func(has *registry.ShimState) {
		s.Refused, s.Unusable, s.Speaks, s.Slowed = has.Refused, has.Unusable, has.Speaks, has.Slowed
		s.Several, s.Unserved = has.Several, has.Unserved
		*has = s
	})
}

// Speaks sets the detected kind of the engine.
func (r *Report) Speaks(e events.Engine) {
	r.change(func(has *registry.ShimState) { has.Speaks = strings.ToLower(e.String()) })
}

// Several sets the description of several publishing engines; empty: a single engine publishes.
func (r *Report) Several(what string) {
	r.change(func(has *registry.ShimState) {
		if has.Several = ""; what != "" {
			has.Several = fmt.Sprintf("%s; what to do: %s", what, SeveralAdvice)
		}
	})
}

// SeveralAdvice is the remedy for several engines at the socket of a single engine.
const SeveralAdvice = "give each engine a shim and a port of its own; or, if their topics are kv@IP:PORT@MODEL, start " +
	"one worker-shim run --listen without --worker, which makes each topic a worker"

// Unusable sets the reason for skipping the engine's events; nil: no reason.
func (r *Report) Unusable(why error, do string) {
	r.change(func(has *registry.ShimState) {
		if has.Unusable = ""; why != nil {
			has.Unusable = fmt.Sprintf("%v; what to do: %s", why, do)
		}
	})
}

// Unserved sets the reason for which the engine accepts no requests; empty: no reason.
func (r *Report) Unserved(why string) {
	r.change(func(has *registry.ShimState) { has.Unserved = why })
}

// LogFailed sets the reason for which the log refuses events, until Stepped shows accepted events. It reports whether
// this is the first failure.
func (r *Report) LogFailed(err error) (first bool) {
	r.change(func(has *registry.ShimState) {
		if first = !r.waits; !first {
			return
		}
		do := LogAdvice(err)
		r.waits = true
		r.server.Wait(&control.Waiting{Since: time.Now().UTC(), Why: err.Error(), Do: do})
		has.Refused = fmt.Sprintf("%v; what to do: %s", err, do)
	})
	return first
}

// crowdedFor is the number of consecutive refused batches after which the shim reports the slowdown: about a second.
// Many shims that publish at the same moment cause refused batches for milliseconds.
const crowdedFor = 4

// LogCrowded records a refused batch because of too many open batches; nil: a batch was accepted again. It reports
// whether the record has changed.
func (r *Report) LogCrowded(err error) (changed bool) {
	r.mu.Lock()
	before := r.crowded
	if r.crowded++; err == nil {
		r.crowded = 0
	}
	changed = r.crowded == crowdedFor || err == nil && before >= crowdedFor
	r.mu.Unlock()
	if changed {
		r.change(func(has *registry.ShimState) {
			if has.Slowed = ""; err != nil {
				has.Slowed = fmt.Sprintf("%v; what to do: %s", err, CrowdedAdvice)
			}
		})
	}
	return changed
}

// CrowdedAdvice is the remedy for a log that refuses batches because of too many open batches.
const CrowdedAdvice = "find the client that leaves batches open, by the NATS advisories " +
	"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.>, and revoke its key; if so many shims publish at once, raise " +
	"jetstream.limits.batch.max_inflight_per_stream of the NATS servers"

// Stepped checks whether the log accepts events, and reports true if it accepts them again.
func (r *Report) Stepped(c Counts) (again bool) {
	r.mu.Lock()
	again = r.waits && c.Messages > r.messages
	r.messages = c.Messages
	r.mu.Unlock()
	if again {
		r.change(func(has *registry.ShimState) {
			r.waits = false
			r.server.Wait(nil)
			has.Refused = ""
		})
	}
	return again
}

func (r *Report) change(f func(*registry.ShimState)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.state)
	r.lease.SetState(r.state)
}

// LogAdvice returns the remedy for a log that accepts no events.
func LogAdvice(err error) string {
	switch {
	case errors.Is(err, jetstream.ErrFull):
		return "make room on the NATS server's disk, or raise its limits (of the server in an indexer: --store-bytes); " +
			"the events wait here, and then in the engine"
	case errors.Is(err, jetstream.ErrDenied):
		return "permit this shim's NATS user to publish the worker's events: indexer auth shows the permissions of a shim"
	case errors.Is(err, jetstream.ErrNotFound):
		return "check that an indexer runs: it makes the log's streams"
	}
	return "check that the NATS servers run, and have room on their disks and a JetStream quorum: indexer status shows what " +
		"is wrong; the events wait here, and then in the engine"
}

// Examiner is a decoder that reports findings about its engine. The functions must not be nil.
type Examiner struct {
	*events.Decoder
	Found func(e events.Engine, why string) // the detected engine, if the configuration does not name an engine

	// Unusable is called at the end of a message if all device blocks so far have another size than the decoder's, with
	// the size of the engine's blocks (0: not announced). It is called with nil at the end of this state: at the first
	// block of the decoder's size, or for a new engine.
	Unusable func(err error, size uint32)

	// Rank is the rank of the shim. OtherRank is called if the engine names another rank. If skipped is set, its events
	// are skipped.
	Rank      events.Rank
	OtherRank func(rank events.Rank, skipped bool)
	ranks     ranks

	engine   events.Engine // the detected engine
	unusable bool          // Unusable was called with an error last
}

// Begin decodes the first part of a message, and reports findings.
func (x *Examiner) Begin(payload []byte) (msg events.Message, more bool, err error) {
	msg, more, err = x.Decoder.Begin(payload)
	if msg.HasRank {
		msg.Events, more = x.ofRank(msg, more)
	}
	x.reportFindings(more)
	return msg, more, err
}

// Continue decodes the next part, and reports findings.
func (x *Examiner) Continue() (part []events.Event, more bool) {
	part, more = x.Decoder.Continue()
	x.reportFindings(more)
	return part, more
}

// reportFindings reports changed findings. more is set within a message: an engine announces the groups of a step
// together, and only a single group may have blocks of the decoder's size.
func (x *Examiner) reportFindings(more bool) {
	if e, why := x.Engine(); why != "" && e != x.engine {
		x.engine = e
		x.Found(e, why)
	}
	if !more {
		x.judge()
	}
}

// judge calls Unusable if the diagnosis begins or ends.
func (x *Examiner) judge() {
	wrong, is := errors.AsType[*events.BlockSizeError](x.Diagnosis())
	switch {
	case is == x.unusable:
	case is:
		x.Unusable(wrong, wrong.Got)
	default:
		x.Unusable(nil, 0)
	}
	x.unusable = is
}

// Reset drops the state of an engine process.
func (x *Examiner) Reset() {
	x.Decoder.Reset()
	x.judge()
	x.ranks = ranks{}
}
