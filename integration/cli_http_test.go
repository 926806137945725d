package integration

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestCommandsOverHTTP checks that all query commands use HTTP with --http and without --nats, or during an outage of
// NATS. A prompt too large for NATS also goes over HTTP.
func TestCommandsOverHTTP(t *testing.T) {
	t.Parallel()
	addr := loopback.Reserve(t)
	_, port, _ := net.SplitHostPort(addr)
	nats := harness.Start(t, "nats-server", "-js", "-sd", t.TempDir(), "-a", "127.0.0.1", "-p", port)
	nats.WaitFor("Server is ready")
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.Start(t, "indexer", "serve", "--nats", addr, "--partitions", "2", "--http-listen",
		"127.0.0.1:0", "--http-token-file", token)
	over := []string{"--http", "http://" + x.WaitFor(`HTTP is served" listen=(\S+)`)[1], "--http-token-file", token}
	x.WaitFor("msg=ready")
	engine := harness.StartSimEngine(t)
	harness.StartSimShim(t, engine, addr, "w1")
	prompt := harness.Tokens(1, 4*harness.BlockSize)
	harness.ServePrompt(t, engine, prompt)
	tokens := harness.CommaList(prompt)
	harness.Eventually(t, "the prompt is in the index", func() (bool, string) {
		r := harness.Run(t, "indexer", "query", "--nats", addr, "--model", "m", "--tokens", tokens, "--json")
		return strings.Contains(r.Stdout, `"device": 4`), r.Stdout + r.Stderr
	})

	large := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(large, []byte(harness.CommaList(harness.Tokens(1, 400_000))), 0o600); err != nil {
		t.Fatal(err)
	}
	query := []string{"query", "--nats", addr, "--model", "m", "--tokens-file", large, "--json"}
	if r := harness.Run(t, "indexer", query...); !strings.Contains(r.Stdout, `"too_large"`) {
		t.Errorf("a large prompt over NATS: %d %.200s %s", r.Code, r.Stdout, r.Stderr)
	}
	if r := harness.Run(t, "indexer", append(query, over...)...); r.Code != 0 ||
		!strings.Contains(r.Stdout, `"complete": true`) {
		t.Errorf("a large prompt: %d %.200s %s", r.Code, r.Stdout, r.Stderr)
	}

	commands := [][]string{
		{"query", "--model", "m", "--tokens", tokens, "--json"}, {"select", "--model", "m", "--tokens", tokens, "--json"},
		{"loads", "--model", "m", "--json"}, {"funnel", "--model", "m", "--json"}, {"workers", "--json"},
		{"workers", "undrain", "w1", "--json"}, {"status", "--json"}, {"status", "--verify", "--json"}, {"cluster", "--json"},
		{"top", "--once", "--interval", "1ms"}, {"doctor", "--json"},
	}
	check := func(when string, args, command []string, writable bool) {
		t.Helper()
		r := harness.Run(t, "indexer", append(append([]string{}, command...), args...)...)
		var refused api.ErrorBody
		_ = json.Unmarshal([]byte(r.Stdout), &refused)
		if command[0] == "workers" && len(command) > 2 && !writable {
			if refused.Error == nil || refused.Error.Code == "" { // changes need NATS
				t.Errorf("%s, %v: %+v", when, command, r)
			}
			return
		}
		if r.Stdout == "" || refused.Error != nil || r.Code == 2 {
			t.Errorf("%s, %v: %+v", when, command, r)
		}
		if command[0] == "doctor" && !strings.Contains(r.Stderr, "1 node") {
			t.Errorf("%s: the doctor asks no node:\n%s", when, r.Stderr)
		}
	}
	for _, command := range commands {
		check("with --http alone", over, command, true)
	}
	// The funnel has none of these queries, and reports no share without reports.
	r := harness.Run(t, "indexer", append([]string{"funnel", "--model", "m", "--json"}, over...)...)
	var funnel api.Funnel
	if err := json.Unmarshal([]byte(r.Stdout), &funnel); err != nil || funnel.Requests != 0 || len(funnel.Steps) != 5 ||
		!funnel.Steps[4].NotReported || !strings.Contains(r.Stdout, `"share": null`) {
		t.Errorf("the funnel: %+v, %v", r, err)
	}
	r = harness.Run(t, "indexer", append([]string{"workers", "--namespace", "other"}, over...)...)
	if r.Code != 2 || !strings.Contains(r.Stderr, `serves namespace "default"`) {
		t.Errorf("another namespace: %+v", r)
	}
	for args, says := range map[string]string{
		"--http ftp://h:1":                    "is not an http:// or https:// URL",
		"--http-token-file " + token:          "need --http",
		"--http http://h:1 --http-ca /":       "--http-ca",
		"--http https://h --http-ca " + token: "has no certificate",
	} {
		if r := harness.Run(t, "indexer", append([]string{"workers"}, strings.Fields(args)...)...); r.Code != 2 ||
			!strings.Contains(r.Stderr, says) {
			t.Errorf("%s: %+v", args, r)
		}
	}

	nats.Kill()
	away := append([]string{"--nats", addr}, over...)
	for _, command := range commands {
		check("without NATS", away, command, false)
	}
	r = harness.Run(t, "indexer", append([]string{"workers"}, away...)...)
	if !strings.Contains(r.Stderr, "does not answer; the request goes to "+over[1]+" over HTTP") ||
		!strings.Contains(r.Stdout, "w1") {
		t.Errorf("without NATS: %+v", r)
	}
	if r := harness.Run(t, "indexer", "workers", "--nats", addr); r.Code != 1 ||
		!strings.Contains(r.Stderr, "--http URL") {
		t.Errorf("without --http: %+v", r)
	}
}
