package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// mark is a part of every hostile name, to check that a command prints the name.
const mark = "evil"

// hostile returns a name that clears the terminal, sets the title, forges a line, reverses the text and hides a part.
func hostile(of string) string {
	return mark + of + "\x1b[2J\x1b]0;owned\a\n" + of + "  ready\r\u009b31m\u202e\u2028\u0085\u200b\x7f'; id #"
}

// TestHostileNames registers workers and models with names that attack terminals, and runs all commands that print
// names. No control character is printed, and no line begins with forged text.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx := t.Context()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	worker, model := events.WorkerID(hostile("w")), hostile("m")
	c := harness.Client(t, ns.Conn(), "default", client.Options{})
	if _, err := c.RegisterWorker(ctx, &api.WorkerRegistration{Instance: worker, Model: model, BlockSize: 16,
		WorkerSpec: api.WorkerSpec{Endpoint: "http://127.0.0.1:1", Events: api.EventsNone, Taints: []string{hostile("t")},
			TopologyDomains: map[string]string{hostile("d"): hostile("z")}}}); err != nil {
		t.Fatal(err)
	}
	hasher, err := events.NewHasher(16, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	tokens := harness.Tokens(1, 32)
	harness.PublishAs(t, ctx, ns, worker, &events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: 16,
		Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Locals: hasher.Hash(nil, tokens),
			Blocks: []events.BlockHash{1, 2}}}})
	harness.Eventually(t, "the worker's blocks are in the index", func() (bool, string) {
		a, err := c.Find(ctx, &api.Query{Model: model, Tokens: tokens})
		return err == nil && len(a.Workers) == 1 && a.Workers[0].Device == 2, fmt.Sprintf("%+v %v", a, err)
	})
	yes := true
	if _, err := c.ChangeWorker(ctx, &api.WorkerChange{Instance: worker, Drain: &yes, Why: hostile("why")}); err != nil {
		t.Fatal(err)
	}
	prompt := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(prompt, []byte(harness.JSONList(tokens)), 0o600); err != nil {
		t.Fatal(err)
	}
	ask := []string{"--model", model, "--tokens-file", prompt}
	named := 0
	for _, words := range [][]string{
		{"workers"}, {"status"}, {"status", "--node", hostile("n")}, {"status", "--all"}, {"cluster"}, {"loads"},
		append([]string{"query", "--explain", "--with-endpoint"}, ask...),
		append([]string{"query", "--endpoint", hostile("e")}, ask...),
		append([]string{"select", "--explain"}, ask...),
		append([]string{"select", "--session", hostile("s"), "--pin", string(worker)}, ask...),
		{"query", "--model", hostile("other"), "--tokens", "1"}, {"select", "--model", hostile("other"), "--tokens", "1"},
		{"query", "--model", model, "--tokens", hostile("number")}, {"funnel", "--model", model},
		{"funnel", "--model", hostile("other")}, {"doctor"}, {"top", "--once", "--interval", "10ms"}, {"verify"},
		{"snapshot", "list"}, {"snapshot"}, {"dump"}, {"resync", string(worker)}, {"resync", hostile("other")},
		{"workers", "undrain", string(worker)}, {"workers", "drain", string(worker)},
		{"workers", "drain", hostile("other")}, {"workers", "change", string(worker), "--role", "decode"},
		{"workers", "register", hostile("new"), "--model", model, "--block-size", "16"},
		{"workers", "register", hostile("new"), "--model", model, "--block-size", "32"},
		{"models", "remove", model}, {"workers", "clear", string(worker)}, {"workers", "remove", string(worker)},
		{"workers", "remove", hostile("new")}, {"workers", hostile("command")}, {"import", hostile("file"), "--model", model,
			"--block-size", "16"}, {"status", "--namespace", hostile("space")}, {"probe", "http://" + hostile("host")},
		{"tokenizer", "check", "--model", model}, {hostile("command")}, {"status", "--" + hostile("flag")},
	} {
		args := slices.Clone(words)
		if words[0] != "probe" && !strings.Contains(words[0], mark) {
			args = append(args, "--nats", "nats://"+x.NATS)
		}
		r := harness.Run(t, "indexer", args...)
		out := r.Stdout + r.Stderr
		if words[0] == "dump" {
			out = r.Stderr // the standard output is JSON for programs
		}
		if strings.Contains(out, mark) {
			named++
		}
		for line := range strings.Lines(out) {
			if at := strings.IndexFunc(line, obeyed); at >= 0 || !utf8.ValidString(line) {
				t.Errorf("indexer %q prints %q", words, line)
			}
			if name := strings.TrimLeft(line, "wmtdezn"); strings.HasPrefix(name, "  ready") {
				t.Errorf("indexer %q prints a line of a name: %q", words, line)
			}
		}
	}
	if named < 25 {
		t.Errorf("only %d commands print a name", named)
	}
	x.Stop()
	for line := range strings.Lines(x.Said()) {
		if strings.ContainsFunc(line, obeyed) || !utf8.ValidString(line) {
			t.Errorf("indexer serve logs %q", line)
		}
	}
}

// obeyed reports whether a terminal interprets the character.
func obeyed(r rune) bool {
	return r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 || r >= 0x200b && r <= 0x200f || r >= 0x2028 && r <= 0x202e ||
		r >= 0x2060 && r <= 0x206f || r == 0xfeff
}
