package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestOneVersion compares the versions in both programs, a node's status, its NATS service, the changes and the pages.
func TestOneVersion(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "CHANGELOG.md"))
	if err != nil {
		t.Fatal(err)
	}
	heading := regexp.MustCompile(`(?m)^## (v\d+\.\d+\.\d+)`).FindStringSubmatch(string(text))
	if heading == nil {
		t.Fatal("CHANGELOG.md names no version")
	}
	want := heading[1]
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
	if page, err := os.ReadFile(filepath.Join("..", "docs", "cluster.md")); err != nil {
		t.Error(err)
	} else {
		for _, v := range regexp.MustCompile(`\bv\d+\.\d+\.\d+`).FindAllString(string(page), -1) {
			if v != want {
				t.Errorf("docs/cluster.md shows %s, the version is %s", v, want)
			}
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
