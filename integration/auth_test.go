package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestPermissionsAreEnough runs every program on a NATS server with the accounts that indexer auth create prints, in
// two namespaces. All programs must work, without access to the other namespace.
func TestPermissionsAreEnough(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	example := harness.Run(t, "indexer", "auth", "create", "--namespace", "red", "--namespace", "blue", "--shim", "w1",
		"--keys", keys)
	if example.Code != 0 {
		t.Fatal(example.Stderr)
	}
	if again := harness.Run(t, "indexer", "auth", "create", "--namespace", "red", "--keys", keys); again.Code != 1 ||
		!strings.Contains(again.Stderr, "roster.json") {
		t.Errorf("existing keys: ended with %d and %q", again.Code, again.Stderr)
	}
	for _, name := range []string{"red-node", "red-reader", "red-shim-w1", "blue-node"} {
		info, err := os.Stat(filepath.Join(keys, name+".nk"))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatal(name, info, err)
		}
	}
	addr := loopback.Reserve(t)
	config := filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 64GB }\n%s", addr,
		filepath.Join(dir, "data"), example.Stdout)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)

	as := func(namespace, user, inbox string) []string {
		return []string{"--nats", addr, "--namespace", namespace, "--nats-nkey", filepath.Join(keys, namespace+"-"+user+
			".nk"), "--nats-inbox-prefix", inbox}
	}
	prompt := make([]string, 512)
	for i := range prompt {
		prompt[i] = fmt.Sprint(i / 64)
	}
	engine := harness.Start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--rate", "50", "--block-size", "64")
	at := engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	for _, namespace := range []string{"red", "blue"} {
		harness.Start(t, "indexer", append(as(namespace, "node", "_INBOX_node"), "serve", "--http-listen", "",
			"--snapshot-interval", "1s")...).WaitFor(`msg=ready`)
	}
	runShim := func() *harness.Process {
		return harness.Start(t, "worker-shim", append(as("red", "shim-w1", "_INBOX_shim-w1"), "run", "--engine", at[1],
			"--replay", at[2], "--worker", "w1", "--model", "m", "--block-size", "64")...)
	}
	shim := runShim() // the log has no message of the shim: a node replies that snapshots have none either

	query := func(namespace string) harness.Result {
		return harness.Run(t, "indexer", append(as(namespace, "reader", "_INBOX_reader"), "query", "--model", "m",
			"--tokens", strings.Join(prompt, ","))...)
	}
	harness.Eventually(t, "the shim's worker holds the prompt", func() (bool, string) {
		r := query("red")
		return r.Code == 0 && strings.Contains(r.Stdout, "w1"), r.Stdout + r.Stderr
	})
	if r := query("blue"); r.Code != 1 || !strings.Contains(r.Stderr, "unknown_model") ||
		strings.Contains(r.Stdout+r.Stderr, "w1") {
		t.Errorf("the other namespace answers %d, %q, %q", r.Code, r.Stdout, r.Stderr)
	}
	if r := harness.Run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "snapshot",
		"now")...); r.Code != 1 || !strings.Contains(strings.ToLower(r.Stderr), "permission") {
		t.Errorf("a reader requests a snapshot: %d, %q", r.Code, r.Stderr)
	}
	if r := harness.Run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "workers", "clear",
		"w1")...); r.Code != 1 || !strings.Contains(strings.ToLower(r.Stderr), "permission") {
		t.Errorf("a reader clears a worker: %d, %q", r.Code, r.Stderr)
	}
	wrong := as("blue", "node", "_INBOX_node")
	wrong[3] = "red"
	if r := harness.Run(t, "indexer", append(wrong, "snapshot", "list")...); r.Code == 0 {
		t.Errorf("a node of one namespace lists the other's snapshots: %q", r.Stdout)
	}
	harness.Eventually(t, "a snapshot is written", func() (bool, string) {
		r := harness.Run(t, "indexer", append(as("red", "node", "_INBOX_node"), "snapshot", "list", "--json")...)
		return r.Code == 0 && strings.Contains(r.Stdout, `"generation": `), r.Stdout + r.Stderr
	})
	// The shim continues after its last message, within its permissions.
	worker := func() (w api.WorkerInfo) {
		r := harness.Run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "workers", "--json")...)
		var list api.WorkerList
		if err := json.Unmarshal([]byte(r.Stdout), &list); err != nil || len(list.Workers) != 1 {
			t.Fatal(err, r.Stdout, r.Stderr)
		}
		return list.Workers[0]
	}
	shim.Stop()
	before := worker()
	next := runShim()
	next.WaitFor(`msg=registered`)
	harness.Eventually(t, "the worker's next shim publishes", func() (bool, string) {
		w := worker()
		return w.LastEvent > before.LastEvent, fmt.Sprintf("%+v", w)
	})
	if after := worker(); after.Incarnation != before.Incarnation {
		t.Errorf("before %+v, after %+v", before, after)
	}
	// Operators may change workers; readers may not.
	if r := harness.Run(t, "indexer", append(as("red", "operator", "_INBOX_operator"), "workers", "drain",
		"w1")...); r.Code != 0 || !strings.Contains(r.Stdout, "draining") {
		t.Errorf("an operator drains a worker: %+v", r)
	}
	if r := harness.Run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "workers", "undrain",
		"w1")...); r.Code != 1 || !strings.Contains(strings.ToLower(r.Stderr), "permission") {
		t.Errorf("a reader undrains a worker: %+v", r)
	}
	for _, s := range []*harness.Process{shim, next} {
		if said := s.Said(); strings.Contains(strings.ToLower(said), "violation") {
			t.Errorf("the shim lacks a permission:\n%s", said)
		}
	}
	shim = next
	if r := harness.Run(t, "indexer", append(as("red", "node", "_INBOX_node"), "workers", "clear",
		"w1")...); r.Code != 1 || !strings.Contains(r.Stderr, "a shim serves w1/0") {
		t.Errorf("a node's key, while the shim lives: %d, %q", r.Code, r.Stderr)
	}
	shim.Stop()
	if r := harness.Run(t, "indexer", append(as("red", "node", "_INBOX_node"), "workers", "clear",
		"w1")...); r.Code != 0 || !strings.Contains(r.Stdout, "cleared, at") {
		t.Errorf("a node's key: %d, %q, %q", r.Code, r.Stdout, r.Stderr)
	}
	// The node detects the end of a shim in another account, and ends the lease of a dead address.
	shim = runShim()
	shim.WaitFor(`msg=registered`)
	serving, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer serving.Close()
	if r := harness.Run(t, "indexer", append(as("red", "operator", "_INBOX_operator"), "workers", "change", "--endpoint",
		"http://"+serving.Addr().String(), "w1")...); r.Code != 0 {
		t.Fatalf("an operator changes the address: %+v", r)
	}
	if c, err := serving.Accept(); err != nil { // the node has seen the shim and the address
		t.Fatal(err)
	} else {
		c.Close()
	}
	serving.Close()
	shim.Kill()
	harness.Eventually(t, "the worker is gone", func() (bool, string) {
		r := harness.Run(t, "indexer", append(as("red", "reader", "_INBOX_reader"), "workers", "--json")...)
		var list api.WorkerList
		err := json.Unmarshal([]byte(r.Stdout), &list)
		return err == nil && !slices.ContainsFunc(list.Workers, func(w api.WorkerInfo) bool { return w.Lease != nil }),
			r.Stdout + r.Stderr
	})
}
