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

// Report holds a rank's lease, and says in its record and by the rank's control server how the shim is doing. Any
// goroutine may call its methods.
type Report struct {
	lease  *registry.Lease
	server *ControlServer

	mu       sync.Mutex
	state    registry.ShimState
	waits    bool   // the log did not take events, and has taken none since
	crowded  int    // times in a row that the log has refused a batch
	messages uint64 // that the log had taken at the last Stepped
}

// NewReport prepares a rank's lease: its record says that the shim is catching up. server may be nil.
func NewReport(ns *jetstream.Namespace, record registry.Record, observer registry.LeaseObserver,
	server *ControlServer) (*Report, error) {
	r := &Report{server: server, state: registry.ShimState{CatchingUp: true}}
	record.Shim = &registry.ShimState{CatchingUp: true} // what the engine said before is not known yet
	record.Control = server != nil
	var err error
	if r.lease, err = registry.NewLease(ns, record, observer); err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	return r, nil
}

// Keep holds the lease, for [Config].Keep. If another shim has taken it over the error is ErrFenced.
func (r *Report) Keep(ctx context.Context, lost func()) error {
	err := r.lease.Keep(ctx, lost)
	if errors.Is(err, registry.ErrTaken) {
		return fmt.Errorf("%w: %w", ErrFenced, err)
	}
	return err
}

// End ends the lease, for an engine that is gone. stopped reports that the shim was told to stop. Keep's context must
// be done.
func (r *Report) End(ctx context.Context, stopped bool) error { return r.lease.End(ctx, stopped) }

// Leave notes in the lease that the shim stops and its engine runs on. Keep's context must be done.
func (r *Report) Leave(ctx context.Context) error { return r.lease.Leave(ctx) }

// Renew has the lease renewed soon.
func (r *Report) Renew() { r.lease.Renew() }

// SetNames changes which further names of the model the engine accepts, and which LoRA adapters it has. It returns how
// many it leaves out since no worker can have them.
func (r *Report) SetNames(names, adapters []string) (left int) {
	return r.lease.SetNames(names, adapters)
}

// SetStore says how the rank uses a shared store, which was learned of its engine.
func (r *Report) SetStore(c *hicache.Config) { r.lease.SetStore(c) }

// SetState says how it stands with the shim and its engine.
func (r *Report) SetState(s State) {
	r.change(func(has *registry.ShimState) {
		s.Refused, s.Unusable, s.Speaks, s.Slowed = has.Refused, has.Unusable, has.Speaks, has.Slowed
		s.Several, s.Unserved = has.Several, has.Unserved
		*has = s
	})
}

// Speaks says how the engine speaks, which was found out.
func (r *Report) Speaks(e events.Engine) {
	r.change(func(has *registry.ShimState) { has.Speaks = strings.ToLower(e.String()) })
}

// Several says that several engines publish where the shim expects one; empty: one does.
func (r *Report) Several(what string) {
	r.change(func(has *registry.ShimState) {
		if has.Several = ""; what != "" {
			has.Several = fmt.Sprintf("%s; what to do: %s", what, SeveralAdvice)
		}
	})
}

// SeveralAdvice is what to do about several engines that publish where a shim expects one.
const SeveralAdvice = "give each engine a shim and a port of its own; or, if their topics are kv@IP:PORT@MODEL, start " +
	"one worker-shim run --listen without --worker, which makes each topic a worker"

// Unusable says why what the engine announces is passed over; nil: it is not.
func (r *Report) Unusable(why error, do string) {
	r.change(func(has *registry.ShimState) {
		if has.Unusable = ""; why != nil {
			has.Unusable = fmt.Sprintf("%v; what to do: %s", why, do)
		}
	})
}

// Unserved reports why the engine accepts no requests any more; empty: it may accept them.
func (r *Report) Unserved(why string) {
	r.change(func(has *registry.ShimState) { has.Unserved = why })
}

// LogFailed says why the log does not take events, until Stepped shows that it takes them again. It reports true for
// the first failure.
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

// crowdedFor is the number of refused batches in a row after which the shim reports that it is slowed down: about a
// second. Many shims that publish at the same moment refuse each other batches for milliseconds.
const crowdedFor = 4

// LogCrowded notes that the log has refused a batch because too many are open; nil: it has accepted one again. It
// reports true if the record says something else from now on.
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

// CrowdedAdvice is what to do about a log that refuses batches because too many are open.
const CrowdedAdvice = "find the client that leaves batches open, by the NATS advisories " +
	"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.>, and revoke its key; if so many shims publish at once, raise " +
	"jetstream.limits.batch.max_inflight_per_stream of the NATS servers"

// Stepped looks at whether the log takes events, and reports true if it does again.
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

// LogAdvice is what to do about a log that takes nothing.
func LogAdvice(err error) string {
	switch {
	case errors.Is(err, jetstream.ErrFull):
		return "make room on the NATS server's disk, or raise its limits (of the server in an indexer: --store-bytes); " +
			"the events wait here, and then in the engine"
	case errors.Is(err, jetstream.ErrDenied):
		return "permit this shim's NATS user to publish its events: indexer auth shows what a shim needs"
	case errors.Is(err, jetstream.ErrNotFound):
		return "see that an indexer runs: it makes the log's streams"
	}
	return "see that the NATS servers run, have room on their disks and a JetStream quorum: indexer status says what is " +
		"wrong; the events wait here, and then in the engine"
}

// Examiner is a decoder that says what it finds out about its engine. The functions must not be nil.
type Examiner struct {
	*events.Decoder
	Found func(e events.Engine, why string) // which engine it is, where that was left open

	// Unusable is called at the end of a message with an error and the size of the engine's blocks (0: not announced) if
	// all device blocks so far have another size than the decoder's. It is called with nil when that ends: with the first
	// block of the decoder's size, or a new engine.
	Unusable func(err error, size uint32)

	// Rank is the rank that is shimmed. OtherRank reports that the engine names another one. If skipped is set, its
	// events are skipped.
	Rank      events.Rank
	OtherRank func(rank events.Rank, skipped bool)
	ranks     ranks

	engine   events.Engine // which was found
	unusable bool          // Unusable was called with an error last
}

// Begin decodes the first part of a message, and looks at what was found out.
func (x *Examiner) Begin(payload []byte) (msg events.Message, more bool, err error) {
	msg, more, err = x.Decoder.Begin(payload)
	if msg.HasRank {
		msg.Events, more = x.ofRank(msg, more)
	}
	x.look(more)
	return msg, more, err
}

// Continue decodes the next part, and looks at what was found out.
func (x *Examiner) Continue() (part []events.Event, more bool) {
	part, more = x.Decoder.Continue()
	x.look(more)
	return part, more
}

// look reports what has changed. more is set within a message: an engine announces the groups of a step together, and
// only one of them may have blocks of the decoder's size.
func (x *Examiner) look(more bool) {
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

// Reset forgets what was learned of an engine process.
func (x *Examiner) Reset() {
	x.Decoder.Reset()
	x.judge()
	x.ranks = ranks{}
}
