package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
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
	case !onLoopback(host):
		return UsageErrorf(
			"--debug-listen %s can be reached from other hosts: listen on 127.0.0.1, and forward the port over ssh or kubectl", d.listen)
	}
	return nil
}

// onLoopback reports whether a host, of an address or of a request, is this one by a name that nobody else can give a
// meaning.
func onLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
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
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		if !onLoopback(host) {
			http.Error(w, "ask for 127.0.0.1 or localhost", http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}
