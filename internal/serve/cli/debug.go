package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Debug is the port on which a running process shows its own profiles, for people who look for where memory or time
// goes. It is closed unless it is asked for, and takes connections from this host alone: profiles tell what the process
// works on, and making one slows it down.
type Debug struct{ listen string }

// DebugFlag adds --debug-listen.
func DebugFlag(flags *pflag.FlagSet) *Debug {
	d := &Debug{}
	flags.StringVar(&d.listen, "debug-listen", "",
		"HOST:PORT on loopback where this process shows profiles of itself (Go's /debug/pprof/); port 0 takes a free one (default: none)")
	return d
}

// Check refuses an address that is not on loopback.
func (d *Debug) Check() error {
	if d.listen == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(d.listen)
	switch {
	case err != nil:
		return UsageErrorf("--debug-listen %q is not HOST:PORT", d.listen)
	case !OnLoopback(host):
		return UsageErrorf(
			"--debug-listen %s can be reached from other hosts: listen on 127.0.0.1, and forward the port over ssh or kubectl", d.listen)
	}
	return nil
}

// OnLoopback reports whether a host is this one by localhost or an address of loopback.
func OnLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// OwnHost reports whether a request's Host, with or without a port, is a name that nobody else can make lead to this
// process: localhost, or an address. A web page can ask a port on loopback by a name of its own.
func OwnHost(host string) bool {
	name := strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if alone, _, err := net.SplitHostPort(host); err == nil {
		name = alone
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return host == "" || net.ParseIP(name) != nil || name == "localhost" || strings.HasSuffix(name, ".localhost")
}

// Serve listens and serves until stop is called, if that was asked for.
func (d *Debug) Serve(log *slog.Logger) (stop func(), err error) {
	if d.listen == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", d.listen)
	if err != nil {
		return nil, fmt.Errorf("--debug-listen: %w", err)
	}
	server := &http.Server{Handler: debugHandler(), ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("profiles are no longer served", "error", err)
		}
	}()
	log.Info("profiles are served", "listen", l.Addr().String(), "path", "/debug/pprof/")
	return func() { _ = server.Close() }, nil // nobody waits for a profile of a process that ends
}

// debugHandler answers requests for this host by name or address: a web page whose own name was pointed at loopback
// gets nothing.
func debugHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !OwnHost(r.Host) {
			http.Error(w, "ask for an address or localhost", http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}
