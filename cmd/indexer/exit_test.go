package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	ports "github.com/kvatlas/kvatlas/tools/loopback"
)

// TestExitStatus runs every command with invalid arguments, for status 2 with and without NATS, and with valid
// arguments without a server, for status 1.
func TestExitStatus(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	absent, junk, empty := filepath.Join(dir, "absent"), file("junk", "what is this\n"), file("empty", "")
	nobody := ports.Reserve(t)
	serves := httptest.NewServer(http.NotFoundHandler())
	defer serves.Close()
	nats := "nats://" + nobody
	long := strings.Repeat("x", 256)
	query := []string{"query", "--nats", nats, "--timeout", "100ms", "--model", "m"}
	with := func(args []string, more ...string) []string { return append(append([]string(nil), args...), more...) }
	asks := [][]string{
		with(query, "--tokens", "1"), {"workers"}, {"status"}, {"cluster"}, {"snapshot", "now"},
		{"top", "--once"}, {"snapshot",
			"list"}, {"snapshot", "verify"}, {"resync", "--worker", "w"},
		{"workers", "clear", "w"}, {"models", "remove", "m"}, {"dump"},
		{"import", "--model", "m", "--block-size", "16", empty},
	}
	for i := 1; i < len(asks); i++ {
		asks[i] = append(asks[i], "--nats", nats, "--timeout", "100ms")
	}
	type given struct {
		args []string
		want int
		said string
	}
	cases := []given{
		{[]string{}, 0, ""}, {[]string{"--help"}, 0, ""}, {[]string{"auth", "create", "--keys",
			filepath.Join(dir, "keys")}, 0, ""},
		// valid, but impossible twice
		{[]string{"auth", "create", "--keys", filepath.Join(dir, "keys")}, 1, "roster.json"},
		{[]string{"probe", "http://" + nobody + "/healthz"}, 1, "refused"},
		{[]string{"serve", "--nats", nats, "--nats-wait", "0s"}, 1, "not available"},

		{[]string{"nonsense"}, 2, "nonsense"}, {[]string{"snapshot", "nonsense"}, 2,
			"nonsense"}, {[]string{"workers", "extra"}, 2, "extra"},
		{[]string{"top", "--sort", "size"}, 2, `"size" is not a column; the columns are worker, state`},
		{[]string{"top", "--interval", "0s"}, 2, "--interval"},
		{[]string{"status", "--config", absent}, 2, "absent"}, {[]string{"status", "--config", junk}, 2, "junk"},
		{with(query), 2, "--tokens"}, {with(query, "--tokens", "1,x"), 2, `"x"`}, {with(query, "--tokens-file", absent),
			2, "absent"}, {with(query, "--tokens-file", junk), 2, "what"},
		{with(query, "--hashes", "1", "--lora", "a"), 2, "lora"}, {with(query, "--tokens", "1", "--l3", "perhaps"), 2,
			"perhaps"},
		{[]string{"import", absent, "--model", "m", "--block-size", "16", "--nats", nats}, 2,
			"absent"}, {[]string{"import", junk}, 2, "--model"},
		{[]string{"workers", "change", "w", "--topology", "eu"}, 2, "DOMAIN=VALUE"},
		{[]string{"workers", "register", "w", "--model", "m"}, 2, "block_size"},
		{[]string{"workers", "rank-for-removal"}, 2, "--model is required"},
		{[]string{"resync"}, 2, "--partition"}, {[]string{"forget"}, 2, "worker"},
		{[]string{"workers", "clear"}, 2, "accepts 1 arg"}, {[]string{"models", "remove"}, 2, "accepts 1 arg"},
		{[]string{"probe", "ftp://x"}, 2,
			"ftp"}, {[]string{"probe", "http://x", "--timeout", "0s"}, 2, "--timeout"},
		{[]string{"probe", "ftp://u:geheim@x"}, 2, "ftp"}, {[]string{"probe", "http://u:geheim@x:%zz"}, 2, "cannot be read"},
		{[]string{"probe", "http://u:geheim@" + serves.Listener.Addr().String()}, 1, "404"},
		{[]string{"serve", "--nats-config", absent}, 2, "absent"}, {[]string{"serve", "--nats-config",
			file("conf", "listen: nonsense")}, 2, "conf"},
		{[]string{"serve", "--l3-config", absent}, 2, "absent"}, {[]string{"serve", "--l3-config", junk}, 2,
			"junk"}, {[]string{"serve", "--http-token-file", empty}, 2, "short"},
		{[]string{"serve", "--http-cert", junk, "--http-key", junk}, 2,
			"--http-cert"}, {[]string{"serve", "--namespace", "NO"}, 2, "--namespace"},
		{[]string{"serve", "--pending-for", "-1s", "--max-pending-bytes", "-1"}, 2,
			"--max-pending-bytes -1 is negative"},
		{[]string{"serve", "--record-bytes", "16777216"}, 2,
			"--record-bytes has no effect without --record: give --record, or omit --record-bytes"},
		{[]string{"serve", "--record-age", "1h", "--record-span", "64"}, 2, "--record-span has no effect without --record"},
		{[]string{"serve", "--kv-source-tiers", "device+host"}, 2, "no effect without --kv-source-tokens"},
		{[]string{"serve", "--request-templates"}, 2, "no effect without --tokenizers"},
		{[]string{"serve", "--trace-sample", "0.5"}, 2, "--trace-sample has no effect without --otlp-endpoint"},
		{[]string{"serve", "--pending-for", "-1s"}, 2, "--pending-for -1s is negative"},
		{[]string{"serve", "--nats", nats, "--nats-wait", "0s", "--request-expiry", "1194h"}, 2,
			"--request-expiry 1194h0m0s is more than 1193h2m47.295s"},
		{[]string{"auth", "create", "--keys", filepath.Join(dir, "more"), "--shim", long}, 2, "256"},
		{[]string{"demo", "--trace", absent}, 2, "absent"}, {[]string{"demo", "--trace", junk}, 2,
			"line 1"}, {[]string{"demo", "--trace", empty}, 2, "two"},
		{[]string{"bench", "index", "--corpus", absent}, 2, "absent"}, {[]string{"bench", "index", "--corpus", junk}, 2,
			"corpus"}, {[]string{"bench", "index", "--corpus", dir}, 2, "--corpus"},
		{[]string{"bench", "durable", "--corpus", absent}, 2, "absent"}, {[]string{"bench", "durable", "--corpus",
			junk}, 2, "corpus"}, {[]string{"bench", "durable", "--corpus", junk, "--partitions", "0"}, 2,
			"--partitions"},
		{[]string{"bench", "corpus", "--out", filepath.Join(dir, "out"), "--trace", absent}, 2,
			"absent"}, {[]string{"bench", "corpus", "--out", filepath.Join(dir, "out"), "--trace", junk}, 2, "line 1"},
		{[]string{"bench", "corpus", "--out", filepath.Join(dir, "out"), "--trace", empty}, 2,
			"no request"}, {[]string{"bench", "cluster", "--workers", "-1"}, 2, "workers"},
	}
	for _, args := range asks {
		cases = append(cases, given{args, 1, "no NATS server answers"}, given{with(args, "--namespace", "NO"), 2,
			"--namespace"}, given{with(args, "--timeout", "0s"), 2, "--timeout"},
			given{with(args, "--nats", "nats://:::"), 2, "--nats"}, given{with(args, "--nats-creds", absent), 2,
				"absent"}, given{with(args, "--nats-creds", junk), 2, "junk"},
			given{with(args, "--nats-nkey", junk), 2, "junk"}, given{with(args, "--nats-ca", junk), 2,
				"junk"}, given{with(args, "--nats-cert", junk), 2, "go together"},
			given{with(args, "--nats-cert", junk, "--nats-key", junk), 2, "junk"}, given{with(args, "--nonsense"), 2,
				"nonsense"})
	}
	for _, c := range cases {
		code, said := program(t, c.args...)
		if code != c.want || !strings.Contains(said, c.said) || strings.Contains(said, "geheim") {
			t.Errorf("%q ended with %d and printed %q, want %d and %q", c.args, code, said, c.want, c.said)
		}
	}
}

// program runs a command line in this process, and returns the exit status and the standard error.
func program(t *testing.T, args ...string) (code int, said string) {
	t.Helper()
	code, _, said = programOutput(t, args...)
	return code, said
}

// programOutput runs a command line in this process, and returns the exit status, the standard output and the standard
// error.
func programOutput(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	out, said := open("stdout"), open("stderr")
	defer out.Close()
	defer said.Close()
	beforeOut, beforeErr := os.Stdout, os.Stderr
	os.Stdout, os.Stderr = out, said
	defer func() { os.Stdout, os.Stderr = beforeOut, beforeErr }()
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(out)
	code = cli.Main(root)
	read := func(f *os.File) string {
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	return code, read(out), read(said)
}
