package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli/clitest"
	"github.com/kvatlas/kvatlas/internal/serve/launch"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// TestJSON: every command has --json with a form in the reference. serve and lameduck have a log (--log-format json)
// and no result.
func TestJSON(t *testing.T) { clitest.JSON(t, rootCommand, "indexer serve", "indexer lameduck") }

// TestJSONOutputs: commands without requests to indexers print JSON, also after a failure of a probe.
func TestJSONOutputs(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	var created, printed upkeep.KeysResult
	decode := func(want int, to any, args ...string) {
		t.Helper()
		code, out, said := programOutput(t, append(args, "--json")...)
		if err := json.Unmarshal([]byte(out), to); err != nil || code != want {
			t.Errorf("%q: status %d, %v\n%s%s", args, code, err, out, said)
		}
	}
	decode(0, &created, "auth", "create", "--shim", "w1", "--keys", keys)
	decode(0, &printed, "auth", "print", "--keys", keys)
	if !strings.HasPrefix(created.Config, "accounts {") || len(created.Users) < 5 || printed.Config != created.Config ||
		!slices.Equal(printed.Users, created.Users) {
		t.Errorf("created %+v, printed %+v", created, printed)
	}
	answers := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/good" {
			http.Error(w, "restoring", http.StatusServiceUnavailable)
		}
	}))
	defer answers.Close()
	var good, bad upkeep.Probed
	decode(0, &good, "probe", answers.URL+"/good")
	decode(1, &bad, "probe", answers.URL+"/bad")
	if good.Status != 200 || bad.Status != 503 || bad.Text != "restoring" {
		t.Errorf("%+v, %+v", good, bad)
	}
	var counts corpus.Header
	decode(0, &counts, "bench", "corpus", "--requests", "20", "--workers", "2", "--out", filepath.Join(t.TempDir(), "c"))
	if counts.Workers != 2 || counts.Queries != 20 {
		t.Errorf("%+v", counts)
	}
}

// TestServeHelp: every flag of serve belongs to a section, except --help, and the first section has the flags of most
// deployments.
func TestServeHelp(t *testing.T) {
	cmd := serveCommand()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Annotations["kvatlas_section"] == nil && !f.Hidden && f.Name != "help" {
			t.Errorf("--%s belongs to no section", f.Name)
		}
	})
	first := serveSections(&launch.Process{})[0]
	if n := len(first.Names); n < 10 || n > 15 || !strings.HasPrefix(first.Title, "Important") {
		t.Errorf("the first section is %q with %d flags", first.Title, n)
	}
}
