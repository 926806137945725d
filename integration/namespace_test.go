package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestNamespaceDelete checks that exactly the whole namespace is deleted: not in a dry run, not while an indexer or a
// shim runs, and not with another namespace with the same prefix.
func TestNamespaceDelete(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	serve := func(ns string) *harness.Process {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--namespace", ns, "--partitions", "2", "--http-listen", "")
		p.WaitFor("msg=ready")
		return p
	}
	first, other := serve("a"), serve("a-2")
	other.Stop()
	engine := harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, engine, nats, "w1", "--namespace", "a")
	shim.WaitFor("msg=registered")
	command := func(args ...string) harness.Result {
		of := []string{"namespace", "delete", "--nats", nats, "--namespace", "a"}
		return harness.Run(t, "indexer", append(of, args...)...)
	}
	admin := adminOf(t, jetstream.ConnOptions{URLs: []string{"nats://" + nats}})
	streams := func() string {
		names := []string{}
		for _, name := range admin.call("STREAM.NAMES", nil)["streams"].([]any) {
			names = append(names, name.(string))
		}
		return strings.Join(names, " ")
	}
	const own = "KV_EVENTS_a_0 KV_EVENTS_a_1 KV_kvatlas_a KV_kvatlas_a_nodes KV_kvatlas_a_snap KV_kvatlas_a_workers"
	there := func(when string, want bool) {
		t.Helper()
		all := " " + streams() + " "
		for _, name := range strings.Fields(own) {
			if strings.Contains(all, " "+name+" ") != want {
				t.Errorf("%s: %s is among %s: %t", when, name, all, !want)
			}
			if name = strings.Replace(name, "_a", "_a-2", 1); !strings.Contains(all, " "+name+" ") {
				t.Errorf("%s: %s is not among %s", when, name, all)
			}
		}
	}
	for _, args := range [][]string{nil, {"--dry-run"}, {"--json"}} {
		r := command(args...)
		for _, name := range strings.Fields(own) {
			if r.Code != 0 || !strings.Contains(r.Stdout, name) {
				t.Errorf("dry run %v without %s: %+v", args, name, r)
			}
		}
	}
	if r := command("--yes", "--dry-run"); r.Code != 2 {
		t.Errorf("both flags: %+v", r)
	}
	if r := command("--yes"); r.Code != 1 || !strings.Contains(r.Stderr, "stop all indexers and shims") {
		t.Errorf("with an indexer: %+v", r)
	}
	first.Stop()
	if r := command("--yes"); r.Code != 1 || !strings.Contains(r.Stderr, "w1/0") {
		t.Errorf("with a shim: %+v", r)
	}
	there("refused", true)
	shim.Stop()
	if r := command("--yes", "--json"); r.Code != 0 || !strings.Contains(r.Stdout, `"deleted": true`) {
		t.Errorf("deleted: %+v", r)
	}
	there("deleted", false)
	if r := command("--yes"); r.Code != 1 || !strings.Contains(r.Stderr, `namespace "a" has no stream`) {
		t.Errorf("the second time: %+v", r)
	}
}

// TestKeysNeedNoFurtherFlags checks that a program with a key of a ring needs no inbox prefix and, with the key's
// settings file, no namespace. The error for a missing value names the flag.
func TestKeysNeedNoFurtherFlags(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"standalone", "jwt"} {
		m := startMatrix(t, kind, nil)
		if err := m.ring.Save(); err != nil {
			t.Fatal(err)
		}
		grants, err := m.ring.Grants("a")
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range grants {
			if err := m.ring.WriteSettings("a", "nats://"+m.addr, &g); err != nil {
				t.Fatal(err)
			}
		}
		flag, file := m.login(readerUser)
		settings := strings.TrimSuffix(strings.TrimSuffix(file, ".nk"), ".creds") + ".yaml"
		elsewhere := filepath.Join(t.TempDir(), "copy")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(elsewhere, text, 0o600); err != nil {
			t.Fatal(err)
		}
		key := []string{"--nats", m.addr, flag, file}
		copied := []string{"--nats", m.addr, flag, elsewhere, "--namespace", "a"}
		for name, c := range map[string]struct {
			args []string
			code int
			says string
		}{
			"a key":                   {append(key, "--namespace", "a"), 0, ""},
			"settings":                {[]string{"--config", settings}, 0, ""},
			"a key of another folder": {copied, map[string]int{"standalone": 1}[kind], "--nats-inbox-prefix"},
			"an inbox that is not its own": {append(copied, "--nats-inbox-prefix", "_INBOX_other"), 1,
				"--nats-inbox-prefix"},
			"the wrong namespace": {key, 1, `--namespace the namespace of this key, if that is not "default"`},
		} {
			r := harness.Run(t, "indexer", append([]string{"workers"}, c.args...)...)
			if r.Code != c.code || r.Code != 0 && !strings.Contains(r.Stderr, c.says) {
				t.Errorf("%s, %s: %+v, want %d with %q", kind, name, r, c.code, c.says)
			}
		}
	}
}
