// Package shimport serves the state of a shim's process over HTTP: /healthz, /readyz and /metrics.
package shimport

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Port is the HTTP port of a shim's process.
type Port struct {
	Listen   string // HOST:PORT; empty: the port is disabled
	Security *cli.HTTPSecurity
}

// Check checks the flags, and reads the files that they name. The error is a usage error.
func (p *Port) Check() error {
	if _, _, err := net.SplitHostPort(p.Listen); p.Listen != "" && err != nil {
		return cli.UsageErrorf("--http-listen %q is not HOST:PORT", p.Listen)
	}
	if p.Listen == "" {
		return p.Security.Unused("--http-listen")
	}
	if err := p.Security.Check(map[string]string{"--http-listen": p.Listen}); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	return nil
}

// Serve listens and serves until stop is called, if the port is enabled.
func (p *Port) Serve(f *host.Figures, log *slog.Logger) (stop func(), err error) {
	if p.Listen == "" {
		return func() {}, nil
	}
	tokens := p.Security.Tokens
	tokens.LogStart(log, p.Security.ClearText())
	end, err := web.Serve(web.Face{Listen: p.Listen, Flag: "--http-listen", What: "HTTP", Handler: p.handler(f),
		TLS: p.Security.TLS}, log)
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

// handler serves the state of the process without a token, as an indexer does. Metrics need a token. If the port has no
// tokens, metrics need an address or localhost as the host of the request.
func (p *Port) handler(f *host.Figures) http.Handler {
	tokens, scrape := p.Security.Tokens, metrics.NewShim(f.Sum)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := f.NotReady(); why != "" {
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
