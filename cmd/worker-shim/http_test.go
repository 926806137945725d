package main

import (
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// port is the HTTP port of a shim that was told args.
func port(t *testing.T, args ...string) (*httpPort, error) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	p := httpFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return p, p.check()
}

func TestHTTPPortIsGuarded(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"--http-listen=:0", "--http-listen=x", "--http-cert=x"} {
		if _, err := port(t, bad); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
	open, err := port(t, "--http-listen=127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guarded, err := port(t, "--http-listen=:0", "--http-token-file="+token)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		port                     *httpPort
		host, path, bearer, verb string
		status                   int
	}{
		{open, "127.0.0.1:1", "/metrics", "", "GET", 200},
		{open, "evil.example", "/metrics", "", "GET", 403},
		{open, "127.0.0.1:1", "/metrics", "", "POST", 405},
		{open, "127.0.0.1:1", "/other", "", "GET", 404},
		{guarded, "h", "/metrics", "", "GET", 401},
		{guarded, "h", "/metrics", "wrong", "GET", 401},
		{guarded, "h", "/metrics", "0123456789abcdef", "GET", 200},
		{guarded, "h", "/healthz", "", "GET", 200},
		{guarded, "h", "/readyz", "", "GET", 503},
	} {
		r := httptest.NewRequest(c.verb, "http://"+c.host+c.path, nil)
		if c.bearer != "" {
			r.Header.Set("Authorization", "Bearer "+c.bearer)
		}
		w := httptest.NewRecorder()
		c.port.handler(&fleetFigures{}).ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("%+v: %d %s", c, w.Code, w.Body)
		}
	}
}

// Figures are of all ranks, and what was counted of a rank that begins anew stays.
func TestFleetFigures(t *testing.T) {
	f := &fleetFigures{queueMost: 100}
	is := func(want string) {
		t.Helper()
		if got := f.notReady(); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("not ready: %q, want %q", got, want)
		}
	}
	is("no rank")
	a, b := &watcher{}, &watcher{}
	f.of(a, func(r *rankFigures) { r.counts.Taken, r.counts.Gaps, r.queued = 5, 1, 7 })
	is("1 of 1 ranks are catching up")
	f.of(a, func(r *rankFigures) { r.state = shim.State{Engine: api.EngineConnected} })
	is("")
	f.of(b, func(r *rankFigures) {
		r.counts.Taken, r.queued, r.refused, r.skipped[0] = 10, 8, true, 3
		r.state = shim.State{Engine: api.EngineSilent}
	})
	is("the log does not take the events of 1 of 2 ranks")
	got := f.figures()
	if got.Messages != 15 || got.QueueBytes != 15 || got.QueueMost != 200 || got.Ranks["connected"] != 1 ||
		got.Ranks["silent"] != 1 || got.Incidents["gap"] != 1 || got.Skipped[events.Skip(0).String()] != 3 {
		t.Errorf("got %+v", got)
	}
	f.end(b)
	if got := f.figures(); got.Messages != 15 || got.QueueBytes != 7 || got.Ranks["silent"] != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// TestHTTPPortStops: the port stops serving, once.
func TestHTTPPortStops(t *testing.T) {
	p, err := port(t, "--http-listen=127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop, err := p.serve(new(fleetFigures), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stop()
}
