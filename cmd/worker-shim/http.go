package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// httpPort is where this process tells how it is: /healthz, /readyz, /metrics.
type httpPort struct {
	listen   string
	security *cli.HTTPSecurity
}

func httpFlags(f *pflag.FlagSet) *httpPort {
	p := &httpPort{}
	f.StringVar(&p.listen, "http-listen", "",
		"HOST:PORT where this process tells how it is: /metrics for Prometheus, /healthz, /readyz; port 0 takes a free one (default: nowhere)")
	p.security = cli.HTTPSecurityFlags(f, "HTTP")
	return p
}

func (p *httpPort) check() error {
	if _, _, err := net.SplitHostPort(p.listen); p.listen != "" && err != nil {
		return cli.UsageErrorf("--http-listen %q is not HOST:PORT", p.listen)
	}
	if err := p.security.Check(map[string]string{"--http-listen": p.listen}); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	return nil
}

// serve listens and serves until stop is called, if that was asked for.
func (p *httpPort) serve(f *fleetFigures, log *slog.Logger) (stop func(), err error) {
	if p.listen == "" {
		return func() {}, nil
	}
	tokens := p.security.Tokens
	tokens.LogStart(log, p.security.ClearText())
	end, err := web.Serve(web.Face{Listen: p.listen, Flag: "--http-listen", What: "HTTP", Handler: p.handler(f)},
		p.security.TLS, log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() { tokens.Watch(ctx, tokens.LogChanges(log)) })
	return func() {
		cancel()
		watching.Wait()
		end()
	}, nil
}

// handler lets anybody ask whether the process is well, as an indexer does. Metrics are for who brings the token; where
// there is none, for who asks for an address or localhost.
func (p *httpPort) handler(f *fleetFigures) http.Handler {
	tokens, scrape := p.security.Tokens, metrics.NewShim(f.figures)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := f.notReady(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		failure := tokens.Check(r.Header.Get("Authorization"), rights.Read, "Authorization: Bearer ...")
		switch {
		case failure != nil:
			if failure.Code == api.CodeUnauthorized {
				w.Header().Set("WWW-Authenticate", `Bearer realm="kvatlas"`)
			}
			http.Error(w, failure.Message, failure.Code.HTTPStatus())
		case tokens == nil && !cli.OwnHost(r.Host):
			http.Error(w, "ask for an address or localhost, or give --http-token-file", http.StatusForbidden)
		default:
			scrape.ServeHTTP(w, r)
		}
	})
	return mux
}

// fleetFigures are what this process knows of its ranks. Any goroutine may use it.
type fleetFigures struct {
	queueMost  int  // bytes, of a rank
	mayBeEmpty bool // the process is ready without a rank
	tracer     *tracing.Tracer

	mu    sync.Mutex
	ranks map[*watcher]*rankFigures
	past  rankFigures // of ranks that are shimmed no more, or anew
}

type rankFigures struct {
	counts  shim.Counts
	queued  int
	skipped events.SkipCounts
	state   shim.State
	refused bool
	crowded uint64 // batches that the log has refused
}

// of calls change with what is known of a rank.
func (f *fleetFigures) of(w *watcher, change func(*rankFigures)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ranks == nil {
		f.ranks = map[*watcher]*rankFigures{}
	}
	if f.ranks[w] == nil {
		f.ranks[w] = &rankFigures{state: shim.State{CatchingUp: true}}
	}
	change(f.ranks[w])
}

// foreign counts a message of an engine that is not served.
func (f *fleetFigures) foreign() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.past.counts.Foreign++
}

// end says that a rank is shimmed no more. What it has counted stays.
func (f *fleetFigures) end(w *watcher) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.ranks[w]; r != nil {
		f.past.add(r)
		delete(f.ranks, w)
	}
}

// add adds what only grows.
func (r *rankFigures) add(o *rankFigures) {
	a, b := &r.counts, &o.counts
	a.Taken, a.Events, a.Blocks, a.Messages = a.Taken+b.Taken, a.Events+b.Events, a.Blocks+b.Blocks, a.Messages+b.Messages
	a.Undecodable, a.Overtaken, a.Gaps = a.Undecodable+b.Undecodable, a.Overtaken+b.Overtaken, a.Gaps+b.Gaps
	a.Restarts, a.Departures, a.Resyncs = a.Restarts+b.Restarts, a.Departures+b.Departures, a.Resyncs+b.Resyncs
	a.Snapshots, a.JoinedLate = a.Snapshots+b.Snapshots, a.JoinedLate+b.JoinedLate
	a.Corrections, a.Unreadable = a.Corrections+b.Corrections, a.Unreadable+b.Unreadable
	a.Foreign += b.Foreign
	r.crowded += o.crowded
	for i, n := range o.skipped {
		r.skipped[i] += n
	}
}

// figures sums up all ranks.
func (f *fleetFigures) figures() *metrics.ShimFigures {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum := f.past
	out := &metrics.ShimFigures{Spans: f.tracer.Counts(), Skipped: map[string]uint64{},
		QueueMost: f.queueMost * len(f.ranks), Ranks: map[string]uint64{"connected": 0, "silent": 0, "gone": 0,
			"asleep": 0, "unknown": 0}}
	for _, r := range f.ranks {
		sum.add(r)
		out.Ranks[cmp.Or(string(r.state.Engine), "unknown")]++
		out.QueueBytes += r.queued
		if r.state.CatchingUp {
			out.CatchingUp++
		}
		if r.refused {
			out.Refused++
		}
	}
	c := &sum.counts
	out.Messages, out.Events, out.Blocks, out.Published = c.Taken, c.Events, c.Blocks, c.Messages
	out.Incidents = map[string]uint64{"undecodable": c.Undecodable, "overtaken": c.Overtaken, "gap": c.Gaps,
		"restart": c.Restarts, "departure": c.Departures, "resync": c.Resyncs, "snapshot": c.Snapshots,
		"joined_late": c.JoinedLate, "correction": c.Corrections, "log_unreadable": c.Unreadable,
		"batch_refused": sum.crowded, "foreign": c.Foreign}
	for reason, n := range sum.skipped {
		out.Skipped[events.Skip(reason).String()] = n
	}
	return out
}

// notReady is why this process does not do its work now; empty: it does.
func (f *fleetFigures) notReady() string {
	sum := f.figures()
	n := uint64(0)
	for _, of := range sum.Ranks {
		n += of
	}
	switch {
	case n == 0 && !f.mayBeEmpty:
		return "no rank is shimmed yet"
	case sum.Refused > 0:
		return fmt.Sprintf("the log does not take the events of %d of %d ranks; they wait", sum.Refused, n)
	case sum.CatchingUp > 0:
		return fmt.Sprintf("%d of %d ranks are catching up", sum.CatchingUp, n)
	}
	return ""
}
