package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// offered returns the words that shell completion offers for the last word of a command line.
func offered(t *testing.T, args ...string) (words []string) {
	t.Helper()
	r := harness.Run(t, "indexer", append([]string{"__complete"}, args...)...)
	if r.Code != 0 || strings.Contains(r.Stderr, "rror") || strings.Contains(r.Stderr, "NATS") {
		t.Errorf("completion of %q: %+v", args, r)
	}
	for line := range strings.Lines(r.Stdout) {
		word, _, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		if !strings.HasPrefix(word, ":") { // the directive for the shell
			words = append(words, word)
		}
	}
	return words
}

// TestCompletion checks that shell completion offers the workers, models, nodes and sessions of a running cluster, over
// NATS and HTTP and with a settings file. A name that a shell would execute is not offered. Without a cluster,
// completion offers and prints nothing.
func TestCompletion(t *testing.T) {
	t.Parallel()
	routing := filepath.Join(t.TempDir(), "routing.yaml")
	if err := os.WriteFile(routing, []byte("session_affinity: {ttl_secs: 3600}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "node-1", "--routing-config", routing)
	over := "http://" + x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	for _, worker := range []string{"w1", "w2", "x3", "$(reboot)", "-f", "two words"} {
		r := harness.Run(t, "indexer", "workers", "register", "--model", "m-of-"+worker, "--block-size", "16", "--nats",
			x.NATS, "--", worker)
		if r.Code != 0 {
			t.Fatalf("%q: %+v", worker, r)
		}
	}
	harness.Eventually(t, "the workers are listed", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
		return len(list) == 6, fmt.Sprintf("%+v", list)
	})
	if r := harness.Run(t, "indexer", "select", "--model", "m-of-w1", "--tokens",
		harness.CommaList(harness.Tokens(1, 16)), "--session", "chat-17", "--book", "r1", "--nats", x.NATS); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	file := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(file, []byte("nats: "+x.NATS+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, source := range [][]string{{"--nats", x.NATS}, {"--http", over}, {"--config", file}} {
		for _, c := range []struct {
			words string // before the completed word, which follows the last blank
			want  []string
		}{
			{"workers drain ", []string{"w1", "w2", "x3"}},
			{"workers drain w", []string{"w1", "w2"}},
			{"workers drain w1 ", nil},
			{"select --worker w", []string{"w1", "w2"}},
			{"select --model ", []string{"m-of--f", "m-of-w1", "m-of-w2", "m-of-x3"}},
			{"status --node ", []string{"node-1"}},
			{"sessions end ", []string{"chat-17"}},
			{"models remove m-of-w", []string{"m-of-w1", "m-of-w2"}},
		} {
			words := strings.Split(c.words, " ")
			if source[0] == "--http" && words[0] == "models" {
				continue // a command that needs NATS
			}
			at := slices.IndexFunc(words, func(word string) bool { return strings.HasPrefix(word, "-") })
			if at < 0 {
				at = len(words) - 1
			}
			got := offered(t, slices.Concat(words[:at], source, words[at:])...)
			if !slices.Equal(got, c.want) {
				t.Errorf("%q with %v: offered %q, want %q", c.words, source, got, c.want)
			}
		}
	}
	for _, args := range [][]string{{"--nats", loopback.Reserve(t)}, {"--http", "http://" + loopback.Reserve(t)},
		{"--namespace", "NO"}, {"--config", filepath.Join(t.TempDir(), "absent")}} {
		if got := offered(t, slices.Concat([]string{"workers", "drain"}, args, []string{""})...); got != nil {
			t.Errorf("%q: offered %q", args, got)
		}
	}
}
