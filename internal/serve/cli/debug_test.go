package cli

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestDebugRefusesOtherHosts(t *testing.T) {
	for listen, ok := range map[string]bool{
		"": true, "127.0.0.1:0": true, "[::1]:6060": true, "localhost:6060": true,
		":6060": false, "0.0.0.0:6060": false, "10.0.0.1:6060": false, "example.org:6060": false, "localhost": false,
	} {
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		d := DebugFlag(flags)
		if err := flags.Set("debug-listen", listen); err != nil {
			t.Fatal(err)
		}
		err := d.Check()
		if (err == nil) != ok {
			t.Errorf("--debug-listen %q: %v", listen, err)
		}
	}
	for host, want := range map[string]int{
		"127.0.0.1:6060": 200, "localhost": 200, "[::1]:6060": 200, "rebound.example:6060": 403, "169.254.169.254": 200,
	} {
		for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/cmdline"} {
			r := httptest.NewRequest("GET", path, nil)
			r.Host = host
			w := httptest.NewRecorder()
			if debugHandler().ServeHTTP(w, r); w.Code != want {
				t.Errorf("%s of %s: %d, want %d", path, host, w.Code, want)
			}
		}
	}
	r := httptest.NewRequest("POST", "/debug/pprof/symbol", nil)
	r.Host = "localhost"
	w := httptest.NewRecorder()
	if debugHandler().ServeHTTP(w, r); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
}

func TestDebugServes(t *testing.T) {
	var log strings.Builder
	none, err := (&Debug{}).Serve(slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil || log.Len() > 0 {
		t.Fatalf("served without --debug-listen: %v, %s", err, log.String())
	}
	none()
	stop, err := (&Debug{listen: "127.0.0.1:0"}).Serve(slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	_, rest, _ := strings.Cut(log.String(), "listen=")
	address, _, _ := strings.Cut(rest, " ")
	reply, err := http.Get("http://" + address + "/debug/pprof/goroutine?debug=1")
	if err != nil || reply.StatusCode != 200 {
		t.Fatalf("%v, %v", reply, err)
	}
	reply.Body.Close()
}
