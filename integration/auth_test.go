package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/loopback"
)

// TestPermissionsAreEnough runs every program on a NATS server with the accounts that indexer auth example prints, in two namespaces: each
// does its work, and sees nothing of the other.
func TestPermissionsAreEnough(t *testing.T) {
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	example := run(t, "indexer", "auth", "example", "--namespace", "red", "--namespace", "blue", "--shim", "w1", "--keys", keys)
	if example.code != 0 {
		t.Fatal(example.stderr)
	}
	if again := run(t, "indexer", "auth", "example", "--namespace", "red", "--keys", keys); again.code != 1 || !strings.Contains(again.stderr, "red-node.nk") {
		t.Errorf("keys that are there: ended with %d and %q", again.code, again.stderr)
	}
	for _, name := range []string{"red-node", "red-reader", "red-shim-w1", "blue-node"} {
		info, err := os.Stat(filepath.Join(keys, name+".nk"))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatal(name, info, err)
		}
	}
	addr := loopback.Reserve(t)
	config := filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q }\n%s", addr, filepath.Join(dir, "data"), example.stdout)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, "nats-server", "-c", config).waitFor(`Server is ready`)

	as := func(namespace, user, inbox string) []string {
		return []string{"--nats", addr, "--namespace", namespace, "--nats-nkey", filepath.Join(keys, namespace+"-"+user+".nk"), "--nats-inbox-prefix", inbox}
	}
	prompt := make([]string, 512)
	for i := range prompt {
		prompt[i] = fmt.Sprint(i / 64)
	}
	engine := start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--rate", "50", "--block-size", "64")
	at := engine.waitFor(`endpoint=(\S+) replay=(\S+)`)
	for _, namespace := range []string{"red", "blue"} {
		start(t, "indexer", append(as(namespace, "node", "_INBOX_node"), "serve", "--http-listen", "", "--snapshot-interval", "1s")...).waitFor(`msg=ready`)
	}
	runShim := func() *process {
		return start(t, "worker-shim", append(as("red", "shim-w1", "_INBOX_shim-w1"), "run", "--engine", at[1], "--replay", at[2], "--instance", "w1", "--model", "m", "--block-size", "64")...)
	}
	shim := runShim() // nothing of its own is in the log: a node tells it that snapshots know nothing either

	query := func(namespace string) ran {
		return run(t, "indexer", append(as(namespace, "reader", "_INBOX_reader"), "query", "--model", "m", "--tokens", strings.Join(prompt, ","))...)
	}
	eventually(t, "the shim's worker holds the prompt", func() (bool, string) {
		r := query("red")
		return r.code == 0 && strings.Contains(r.stdout, "w1"), r.stdout + r.stderr
	})
	if r := query("blue"); r.code != 1 || !strings.Contains(r.stderr, "unknown_model") || strings.Contains(r.stdout+r.stderr, "w1") {
		t.Errorf("the other namespace answers %d, %q, %q", r.code, r.stdout, r.stderr)
	}
	if r := run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "snapshot", "now")...); r.code != 1 || !strings.Contains(strings.ToLower(r.stderr), "permission") {
		t.Errorf("a reader that asks for a snapshot: %d, %q", r.code, r.stderr)
	}
	if r := run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "forget", "w1")...); r.code != 1 || !strings.Contains(strings.ToLower(r.stderr), "permission") {
		t.Errorf("a reader that has a worker forgotten: %d, %q", r.code, r.stderr)
	}
	wrong := as("blue", "node", "_INBOX_node")
	wrong[3] = "red"
	if r := run(t, "indexer", append(wrong, "snapshot", "list")...); r.code == 0 {
		t.Errorf("a node of one namespace lists the other's snapshots: %q", r.stdout)
	}
	eventually(t, "a snapshot is written", func() (bool, string) {
		r := run(t, "indexer", append(as("red", "node", "_INBOX_node"), "snapshot", "list", "--json")...)
		return r.code == 0 && strings.Contains(r.stdout, `"generation": `), r.stdout + r.stderr
	})
	// The shim goes on where it was, with what it may read.
	worker := func() (w api.WorkerInfo) {
		r := run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "workers", "--json")...)
		var list api.WorkerList
		if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || len(list.Workers) != 1 {
			t.Fatal(err, r.stdout, r.stderr)
		}
		return list.Workers[0]
	}
	shim.stop()
	before := worker()
	next := runShim()
	next.waitFor(`msg=registered`)
	eventually(t, "the worker's next shim publishes", func() (bool, string) {
		w := worker()
		return w.LastEvent > before.LastEvent, fmt.Sprintf("%+v", w)
	})
	if after := worker(); after.Incarnation != before.Incarnation {
		t.Errorf("before %+v, after %+v", before, after)
	}
	for _, s := range []*process{shim, next} {
		if said := s.saying(); strings.Contains(strings.ToLower(said), "violation") {
			t.Errorf("the shim was refused something:\n%s", said)
		}
	}
	shim = next
	if r := run(t, "indexer", append(as("red", "node", "_INBOX_node"), "forget", "w1")...); r.code != 1 || !strings.Contains(r.stderr, "a shim serves w1/0") {
		t.Errorf("a node's key, while the shim lives: %d, %q", r.code, r.stderr)
	}
	shim.stop()
	if r := run(t, "indexer", append(as("red", "node", "_INBOX_node"), "forget", "w1")...); r.code != 0 || !strings.Contains(r.stdout, "forgotten, at") {
		t.Errorf("a node's key: %d, %q, %q", r.code, r.stdout, r.stderr)
	}
}

// eventually waits until something is so; so tells, with what was seen.
func eventually(t testing.TB, what string, so func() (bool, string)) {
	t.Helper()
	var seen string
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var ok bool
		if ok, seen = so(); ok {
			return
		}
	}
	t.Fatalf("not so: %s; seen last: %s", what, seen)
}
