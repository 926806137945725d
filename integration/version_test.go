package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestOneVersion compares the versions in both programs, a node's status and its NATS service.
func TestOneVersion(t *testing.T) {
	t.Parallel()
	var first struct{ Version string }
	r := harness.Run(t, "indexer", "version", "--json")
	if err := json.Unmarshal([]byte(r.Stdout), &first); err != nil {
		t.Fatalf("indexer version --json: %+v, %v", r, err)
	}
	want := first.Version
	if want != cli.Release && want != cli.Version() { // a release at its tag, otherwise a development build, as this test
		t.Errorf("the version is %s, neither %s nor %s", want, cli.Release, cli.Version())
	}
	for _, name := range []string{"indexer", "worker-shim"} {
		if r := harness.Run(t, name, "--version"); r.Code != 0 || r.Stdout != name+" version "+want+"\n" {
			t.Errorf("%s --version: %+v", name, r)
		}
		if r := harness.Run(t, name, "version"); r.Code != 0 || !strings.HasPrefix(r.Stdout, name+" "+want+", ") ||
			strings.Count(r.Stdout, "\n") != 1 {
			t.Errorf("%s version: %+v", name, r)
		}
		var said struct{ Version, Go string }
		r := harness.Run(t, name, "version", "--json")
		if err := json.Unmarshal([]byte(r.Stdout), &said); err != nil || said.Version != want || said.Go == "" {
			t.Errorf("%s version --json: %+v, %v", name, r, err)
		}
	}
	x := harness.StartIndexer(t, t.TempDir(), "")
	if status := harness.Status(t, x.NATS); status.Version != want {
		t.Errorf("the status has %q", status.Version)
	}
	conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: []string{"nats://" + x.NATS}, Core: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, service := range []string{"kvatlas-indexer", "kvatlas-node", "kvatlas-own"} {
		var said struct{ Version string }
		harness.Eventually(t, "the service "+service+" says its version", func() (bool, string) {
			reply, err := conn.NATS().Request("$SRV.INFO."+service, nil, time.Second)
			return err == nil && json.Unmarshal(reply.Data, &said) == nil, ""
		})
		if "v"+said.Version != want {
			t.Errorf("the service %s has version %q", service, said.Version)
		}
	}
}

// TestChanges checks that the newest release of CHANGELOG.md is cli.Release, that each release has at most ten lines of
// news and a part about the upgrade, and that the upgrade of the newest one has at most twelve lines, with the details
// in docs/upgrade.md.
func TestChanges(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "CHANGELOG.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, all, _ := strings.Cut(string(text), "\n## ")
	releases := strings.Split(all, "\n## ")
	if !strings.HasPrefix(releases[0], cli.Release+", ") || len(releases) < 2 {
		t.Errorf("the first heading is %.30q of %d releases, the last release is %s", releases[0], len(releases), cli.Release)
	}
	for i, release := range releases {
		name, _, _ := strings.Cut(release, "\n")
		news, upgrade, found := strings.Cut(release, "\n### Before you upgrade\n")
		if n := strings.Count(news, "\n- "); n == 0 || n > 10 || strings.Count(news, "\n  ") > 0 || !found {
			t.Errorf("%s has %d lines of news, and a part about the upgrade: %v", name, n, found)
		}
		n := strings.Count(upgrade, "\n- ")
		if i == 0 && (n > 12 || !strings.Contains(upgrade, "(docs/upgrade.md#from-04-to-05)")) {
			t.Errorf("%s: the upgrade has %d lines, or no details in docs/upgrade.md", name, n)
		}
	}
	page, err := os.ReadFile(filepath.Join("..", "docs", "upgrade.md"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(strings.Fields(string(page))); n > 1200 {
		t.Errorf("docs/upgrade.md has %d words", n)
	}
}
