package host

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Rank is an engine's rank.
type Rank struct {
	Record registry.Record // as it is registered

	// Decoder reads the engine's messages. nil: Config.Decoder reads them, or the frames of Config.Feed were read
	// already.
	Decoder *events.Decoder

	// Config says where the engine is and what bounds the shim. Run sets Identity, Log, Control, Keep and Hooks, and
	// Decoder if the rank has one.
	Config shim.Config
}

// Env is the surroundings of a rank's shim.
type Env struct {
	Namespace *jetstream.Namespace

	// Claim makes sure that no other shim serves the rank. It returns no server if nobody can send requests to this
	// shim. nil: [shim.Claim], which does not wait.
	Claim func(ctx context.Context) (*shim.ControlServer, error)

	Lease      registry.LeaseHooks
	Reconnects *Reconnects // renews the lease when NATS is back; nil: the lease is renewed when it is due
	Watch      Watch
}

// Watch is the functions that are called with what happens to a rank, after its report. Each may be nil. They must not
// block. The goroutines of [shim.Run] call them.
type Watch struct {
	// Prepared is called before the shim runs. It may change the shim's settings.
	Prepared func(*shim.Report, *shim.Config)

	// Ended is called with the result of the shim while the rank is still claimed.
	Ended func(error)

	// Examine returns the decoder to use in place of an examiner. nil: the examiner itself.
	Examine func(*shim.Examiner) shim.Decoder

	// Found is called when it is known how the engine speaks.
	Found func(e events.Engine, why string)

	// Unusable is called when the engine's blocks have another size than the rank's, and with nil when they no longer
	// have. It returns the remedy. skip keeps the finding out of the report.
	Unusable func(err error, size uint32) (remedy string, skip bool)

	// OtherRank is called when the engine names another rank; see [shim.Examiner].
	OtherRank func(rank events.Rank, skipped bool)

	// Denied is called if the NATS server does not permit the lease: the rank goes without. nil: the error ends Run.
	Denied func(error)

	Refused func(err error, first bool)   // the log takes no events; first: it did before
	Crowded func(err error, changed bool) // the log refuses batches, or (nil) accepts them; changed: the record differs

	// Stepped is called after each step. again: the log takes events again.
	Stepped func(c shim.Counts, queued int, again bool)

	// Shim has the other hooks of the shim. Its LogFailed and Stepped are not used.
	Shim shim.Hooks
}

// Run shims a rank until ctx ends or the shim cannot go on.
func Run(ctx context.Context, r Rank, env Env) error {
	w := &env.Watch
	examine, denied := w.Examine, w.Denied
	hooks.Fill(w)
	hooks.Fill(&w.Shim)
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
	report, err := shim.NewReport(env.Namespace, r.Record, env.Lease, server)
	if err != nil {
		return err
	}
	if r.Decoder != nil {
		x := examiner(r.Decoder, report, w)
		x.Rank = key.Rank
		if cfg.Decoder = shim.Decoder(x); examine != nil {
			cfg.Decoder = examine(x)
		}
	}
	refused := func(err error) { w.Refused(err, report.LogFailed(err)) }
	cfg.Identity = shim.Identity{Model: r.Record.Model, BlockSize: r.Record.BlockSize}
	cfg.Log = shim.NewStreamLog(env.Namespace, key, refused).OnCrowded(func(err error) {
		w.Crowded(err, report.LogCrowded(err))
	})
	cfg.Control = server
	cfg.Keep = func(ctx context.Context, lost func()) error {
		defer env.Reconnects.Notify(report.Renew)()
		err := report.Keep(ctx, lost)
		if denied != nil && errors.Is(err, jetstream.ErrDenied) {
			denied(err)
			return nil
		}
		return err
	}
	cfg.Hooks = reporting(report, w, refused)
	w.Prepared(report, &cfg)
	err = shim.Run(ctx, cfg)
	w.Ended(err)
	return err
}

// examiner returns the decoder whose findings are reported.
func examiner(d *events.Decoder, report *shim.Report, w *Watch) *shim.Examiner {
	return &shim.Examiner{
		Decoder: d,
		Found: func(e events.Engine, why string) {
			report.Speaks(e)
			w.Found(e, why)
		},
		Unusable: func(err error, size uint32) {
			if remedy, skip := w.Unusable(err, size); !skip {
				report.Unusable(err, remedy)
			}
		},
		OtherRank: w.OtherRank,
	}
}

// reporting returns the watch's hooks, with the report's calls before them.
func reporting(report *shim.Report, w *Watch, refused func(error)) shim.Hooks {
	h := w.Shim
	h.LogFailed = refused
	h.Several = func(what string) {
		report.Several(what)
		w.Shim.Several(what)
	}
	h.Unserved = func(why string) {
		report.Unserved(why)
		w.Shim.Unserved(why)
	}
	h.StateChanged = func(s shim.State) {
		report.SetState(s)
		w.Shim.StateChanged(s)
	}
	h.Stepped = func(c shim.Counts, queued int) { w.Stepped(c, queued, report.Stepped(c)) }
	return h
}
