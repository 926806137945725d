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

// Debug is the port for profiles of the running process, to examine its use of memory and time. It is closed by
// default, and accepts connections only from this host: profiles reveal the content of the work, and a profile slows
// the process down.
type Debug struct{ listen string }

// DebugFlag adds --debug-listen.
func DebugFlag(flags *pflag.FlagSet) *Debug {
	d := &Debug{}
	flags.StringVar(&d.listen, "debug-listen", "",
		"HOST:PORT on loopback for profiles of this process (Go's /debug/pprof/); port 0 takes a free one (default: none)")
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
			"--debug-listen %s is reachable from other hosts: listen on 127.0.0.1, and forward the port over ssh or "+
				"kubectl", d.listen)
	}
	return nil
}

// OnLoopback reports whether a host is localhost or a loopback address.
func OnLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// OwnHost reports whether a request's Host, with or without a port, is localhost or an address. With DNS rebinding, a
// web page can reach a port on loopback, but only under the page's own name.
func OwnHost(host string) bool {
	name := strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if alone, _, err := net.SplitHostPort(host); err == nil {
		name = alone
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return host == "" || net.ParseIP(name) != nil || name == "localhost" || strings.HasSuffix(name, ".localhost")
}

// Serve listens and serves until stop is called, if the port is enabled.
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
	return func() { _ = server.Close() }, nil // a request for a profile does not delay the end of the process
}

// debugHandler answers requests for localhost or an address. Other names are refused, as a protection against DNS
// rebinding.
func debugHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !OwnHost(r.Host) {
			http.Error(w, "use an address or localhost", http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}
