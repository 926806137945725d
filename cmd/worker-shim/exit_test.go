package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// TestExitStatus gives every command invalid arguments: the command exits with status 2 at once, and never waits for
// NATS.
func TestExitStatus(t *testing.T) {
	dir := t.TempDir()
	junk := filepath.Join(dir, "junk")
	if err := os.WriteFile(junk, []byte("what is this\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	absent := filepath.Join(dir, "absent")
	engine := []string{"run", "--engine", "tcp://127.0.0.1:5557", "--worker", "w", "--model", "m", "--block-size",
		"16"}
	fleet := []string{"run", "--source", "dynamo-nats", "--engine", "a.b", "--model", "m", "--block-size", "16",
		"--engine-nats", "nats://127.0.0.1:4"}
	store := []string{"run", "--source", "mooncake", "--engine", "tcp://127.0.0.1:5557", "--master", "m:9003"}
	with := func(args []string, more ...string) []string { return append(append([]string(nil), args...), more...) }
	cases := []struct {
		args []string
		want int
		text string
	}{
		{[]string{}, 0, ""}, {[]string{"run", "--help"}, 0, ""},
		{[]string{"nonsense"}, 2, "nonsense"}, {[]string{"run"}, 2, "--engine is missing"}, {with(engine, "extra"), 2,
			"extra"}, {with(engine, "--nonsense"), 2, "nonsense"},
		{with(engine, "--config", absent), 2, "absent"}, {with(engine, "--config", junk), 2,
			"junk"}, {with(engine, "--log-level", "loud"), 2, "loud"},
		{with(engine, "--engine", "ftp://x"), 2, "--engine"}, {with(engine, "--replay", "x"), 2,
			"--replay"}, {with(engine, "--source", "x"), 2, "--source"},
		{with(engine, "--block-size", "0"), 2, "--block-size"}, {with(engine, "--lease", "1ms"), 2,
			"--lease"}, {with(engine, "--queue-bytes", "1"), 2, "--queue-bytes"},
		{with(engine, "--on-unreadable", "stop"), 2, "--on-unreadable"}, {with(fleet, "--on-unreadable", "clear"), 2,
			"--on-unreadable"}, {with(engine, "--ranks", "0"), 2, "--ranks"},
		{with(engine, "--ranks", "70000"), 2, "--ranks"}, {with(engine, "--namespace", "NO"), 2, "--namespace"},
		{with(engine, "--l3-config", absent), 2, "absent"}, {with(engine, "--l3-config", junk), 2, "junk"},
		{with(engine, "--engine-http-load", "100ms"), 2, "--engine-http-load has no effect without --engine-http"},
		{with(engine, "--engine-http-check", "0"), 2, "--engine-http-check has no effect without --engine-http"},
		{with(engine, "--http-token-file", junk), 2, "--http-token-file has no effect without --http-listen"},
		{[]string{"pods", "--selector", "a=b", "--replica", "x"}, 2, "--replica has no effect without --share-as"},
		{with(engine, "--kv-groups", "full,swa"), 2, "--kv-groups"}, {with(engine, "--kv-groups", "window:8"), 2,
			"swa:TOKENS"}, {with(fleet, "--kv-groups", "full"), 2, "--kv-groups"},
		{with(engine, "--role", "both"), 2, "one role"}, {with(engine, "--topology", "eu-1"), 2, "DOMAIN=VALUE"},
		{with(engine, "--total-kv-blocks", "-1"), 2, "total-kv-blocks"}, {with(engine, "--taint", "a,,b"), 2, "taints[1]"},
		{with(fleet, "--serving-endpoint", "http://x"), 2, "--serving-endpoint"},
		{with(engine, "--nats", "nats://:::"), 2, "--nats"}, {with(engine, "--nats-creds", absent), 2,
			"absent"}, {with(engine, "--nats-creds", junk), 2, "junk"},
		{with(engine, "--nats-nkey", absent), 2, "absent"}, {with(engine, "--nats-ca", absent), 2,
			"absent"}, {with(engine, "--nats-ca", junk), 2, "junk"},
		{with(engine, "--nats-cert", junk, "--nats-key", junk), 2, "junk"}, {with(engine, "--master", "x:1"), 2,
			"--master"}, {with(engine, "--engine-nats", "x"), 2, "--engine-nats"},
		{with(engine, "--worker", strings.Repeat("x", 256)), 2, "--worker"}, {with(engine, "--model",
			strings.Repeat("x", 256)), 2, "--model"},
		{with(fleet, "--engine-nats", "nats://:::"), 2, "--engine-nats"}, {with(fleet, "--engine-nats-nkey", absent), 2,
			"absent"}, {with(fleet, "--engine-nats-ca", junk), 2, "junk"},
		{with(store, "--master", "nowhere"), 2, "--master"}, {with(store, "--replay", "tcp://x:1"), 2,
			"--replay"}, {with(store, "--nats-ca", junk), 2, "junk"},
		{with(fleet, "--engine-nats", "", "--source", "dynamo-zmq", "--engine", "http://root:geheim@etcd:2379"), 2,
			"--etcd-user and KVATLAS_ETCD_PASSWORD"},
		{with(engine, "--engine", "http://root:geheim@etcd:2379"), 2, "tcp or ipc"}, {with(fleet, "--engine-nats", "",
			"--source", "ndjson", "--engine", "http://root:geheim@etcd:2379"), 2, "neither"},
		{with(engine, "--engine-http", "http://root:geheim@engine:8000"), 2, "--engine-http"}, {with(engine,
			"--engine-http", "root:geheim@engine:8000"), 2, "--engine-http"},
		{with(engine, "--engine-http", "http://root:geheim@engine:%zz"), 2, "--engine-http"}, {with(engine,
			"--otlp-endpoint", "root:geheim@collector:4318"), 2, "--otlp-endpoint"},
		{[]string{"simulate", "--endpoint", "x"}, 2, "--endpoint"}, {[]string{"simulate", "--block-size", "7"}, 2,
			"--block-size"}, {[]string{"simulate", "--rate", "0"}, 2, "--rate"},
	}
	for _, c := range cases {
		if code, text := program(t, c.args...); code != c.want || !strings.Contains(text, c.text) ||
			strings.Contains(text, "geheim") {
			t.Errorf("%q ended with %d and %q, want %d and %q", c.args, code, text, c.want, c.text)
		}
	}
}

// program runs a command line in this process, and returns the exit status and the standard error.
func program(t *testing.T, args ...string) (code int, stderr string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stderr")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before := os.Stderr
	os.Stderr = f
	defer func() { os.Stderr = before }()
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(io.Discard)
	code = cli.Main(root)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return code, string(text)
}

// TestInstanceIsWorker: --instance is the earlier name of --worker.
func TestInstanceIsWorker(t *testing.T) {
	for _, name := range []string{"--worker", "--instance"} {
		f := runCommand().Flags()
		if err := f.Parse([]string{name, "w"}); err != nil {
			t.Fatal(err)
		}
		if got := f.Lookup("worker"); !got.Changed || got.Value.String() != "w" {
			t.Errorf("after %s w, --worker is %q", name, got.Value)
		}
	}
}
