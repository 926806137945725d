package shimport

import (
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// port returns the HTTP port of a shim with arguments.
func port(t *testing.T, args ...string) (*Port, error) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	p := &Port{Security: cli.HTTPSecurityFlags(flags, "HTTP")}
	flags.StringVar(&p.Listen, "http-listen", "", "")
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return p, p.Check()
}

func TestHTTPPortIsGuarded(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"--http-listen=:0", "--http-listen=x", "--http-cert=x"} {
		if _, err := port(t, bad); err == nil {
			t.Errorf("%s is accepted", bad)
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
		port                     *Port
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
		c.port.handler(&host.Figures{}).ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("%+v: %d %s", c, w.Code, w.Body)
		}
	}
}

// TestHTTPPortStops: the port stops serving, once.
func TestHTTPPortStops(t *testing.T) {
	p, err := port(t, "--http-listen=127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop, err := p.Serve(new(host.Figures), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stop()
}
