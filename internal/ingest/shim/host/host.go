package host

import (
	"cmp"
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Rank configures the shim of a rank of an engine.
type Rank struct {
	Record registry.Record // the record for the registration

	// Decoder reads the engine's messages. nil means that Config.Decoder reads the messages, or that Config.Feed has
	// decoded frames.
	Decoder *events.Decoder

	// Config has the addresses of the engine and the limits of the shim. Run sets Identity, Log, Control, Keep and
	// Observer, and Decoder if the rank has one.
	Config shim.Config
}

// Env is the surroundings of a rank's shim.
type Env struct {
	Namespace *jetstream.Namespace

	// Claim excludes a second shim of the rank. Claim returns no server if no request can reach this shim. nil:
	// [shim.Claim], which does not wait.
	Claim func(ctx context.Context) (*shim.ControlServer, error)

	Reconnects *Reconnects // renews the lease when NATS is back; nil: at the due time only
	Observer   Observer    // nil: [Unobserved]

	// Prepared, if not nil, is called before the shim runs. Prepared may change the shim's settings.
	Prepared func(*shim.Report, *shim.Config)

	// Ended, if not nil, is called with the result of the shim while the rank is still claimed.
	Ended func(error)
}

// Observer receives the events of a rank, after the report. The methods must not block. The goroutines of [shim.Run]
// call the methods. Run calls Refused in place of LogFailed.
type Observer interface {
	shim.Observer
	registry.LeaseObserver

	// Examine returns the decoder to use in place of an examiner, or the examiner.
	Examine(*shim.Examiner) shim.Decoder

	// Found is called when the shim has detected the engine's format.
	Found(e events.Engine, why string)

	// Unusable is called with an error when the sizes of the engine's blocks and of the rank differ, and with nil when
	// the sizes are equal again. Unusable returns the remedy. skip keeps the finding out of the report.
	Unusable(err error, size uint32) (remedy string, skip bool)

	// OtherRank is called when the engine names another rank; see [shim.Examiner].
	OtherRank(rank events.Rank, skipped bool)

	// Denied is called if the NATS server does not permit the lease. The result true lets the rank run without a lease.
	// With false, the error ends Run.
	Denied(error) bool

	Refused(err error, first bool)   // the log accepts no events; first: the log did before
	Crowded(err error, changed bool) // the log refuses batches, or (nil) accepts batches; changed: the record differs
	LogResumed()                     // the log accepts events again; called before Stepped
}

// Unobserved ignores all events. Types embed Unobserved to implement a part of [Observer].
type Unobserved struct {
	shim.Unobserved
	registry.UnobservedLease
}

func (Unobserved) Examine(x *shim.Examiner) shim.Decoder { return x }
func (Unobserved) Found(events.Engine, string)           {}
func (Unobserved) Unusable(error, uint32) (string, bool) { return "", false }
func (Unobserved) OtherRank(events.Rank, bool)           {}
func (Unobserved) Denied(error) bool                     { return false }
func (Unobserved) Refused(error, bool)                   {}
func (Unobserved) Crowded(error, bool)                   {}
func (Unobserved) LogResumed()                           {}

// Run shims a rank until ctx ends or the shim cannot go on.
func Run(ctx context.Context, r Rank, env Env) error {
	o := cmp.Or[Observer](env.Observer, Unobserved{})
	key := r.Record.Key()
	cfg := r.Config
	if env.Claim == nil {
		env.Claim = func(ctx context.Context) (*shim.ControlServer, error) {
			return shim.Claim(ctx, env.Namespace, key, cfg.Replay != "")
		}
	}
	server, err := env.Claim(ctx)
	if err != nil {
		return err
	}
	if server != nil {
		defer server.Close()
	}
	report, err := shim.NewReport(env.Namespace, r.Record, o, server)
	if err != nil {
		return err
	}
	if r.Decoder != nil {
		x := examiner(r.Decoder, report, o)
		x.Rank = key.Rank
		cfg.Decoder = o.Examine(x)
	}
	observer := reporting{Observer: o, report: report}
	cfg.Identity = shim.Identity{Model: r.Record.Model, BlockSize: r.Record.BlockSize}
	cfg.Log = shim.NewStreamLog(env.Namespace, key, observer.LogFailed).OnCrowded(func(err error) {
		o.Crowded(err, report.LogCrowded(err))
	})
	cfg.Control = server
	cfg.Keep = func(ctx context.Context, lost func()) error {
		defer env.Reconnects.Notify(report.Renew)()
		err := report.Keep(ctx, lost)
		if errors.Is(err, jetstream.ErrDenied) && o.Denied(err) {
			return nil
		}
		return err
	}
	cfg.Observer = observer
	if env.Prepared != nil {
		env.Prepared(report, &cfg)
	}
	err = shim.Run(ctx, cfg)
	if env.Ended != nil {
		env.Ended(err)
	}
	return err
}

// examiner returns a decoder with reports of findings.
func examiner(d *events.Decoder, report *shim.Report, o Observer) *shim.Examiner {
	return &shim.Examiner{
		Decoder: d,
		Found: func(e events.Engine, why string) {
			report.Speaks(e)
			o.Found(e, why)
		},
		Unusable: func(err error, size uint32) {
			if remedy, skip := o.Unusable(err, size); !skip {
				report.Unusable(err, remedy)
			}
		},
		OtherRank: o.OtherRank,
	}
}

// reporting enters the events of a shim into the report, and calls the observer.
type reporting struct {
	Observer
	report *shim.Report
}

func (r reporting) LogFailed(err error) { r.Refused(err, r.report.LogFailed(err)) }

func (r reporting) Several(engines string) {
	r.report.Several(engines)
	r.Observer.Several(engines)
}

func (r reporting) Unserved(why string) {
	r.report.Unserved(why)
	r.Observer.Unserved(why)
}

func (r reporting) StateChanged(s shim.State) {
	r.report.SetState(s)
	r.Observer.StateChanged(s)
}

func (r reporting) Stepped(c shim.Counts, queued int) {
	if r.report.Stepped(c) {
		r.LogResumed()
	}
	r.Observer.Stepped(c, queued)
}
