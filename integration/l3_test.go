package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// TestSharedFolderInAnswers tests the whole path with the folder of SGLang's file backend. An answer has the stored
// blocks after a worker's own prefix, by the engine's rules, and names the obstacles.
func TestSharedFolderInAnswers(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	config := hicache.SGLang{Backend: "file", PageSize: harness.BlockSize, TPSize: 2, PPSize: 1, ModelName: "org/m",
		Directory: folder, PrefetchThreshold: 4 * harness.BlockSize}
	wrong := config
	wrong.PageSize = 2 * harness.BlockSize
	x := harness.StartIndexer(t, t.TempDir(), "",
		"--l3-config", harness.WriteStores(t, map[string]hicache.Config{"m": {SGLang: &config},
			"other": {SGLang: &wrong}}))
	engine := harness.StartSimEngine(t)
	idle := harness.StartSimEngine(t)
	harness.StartSimShim(t, engine, x.NATS, "w1")
	harness.StartSimShim(t, idle, x.NATS, "w2")
	prompt := harness.Tokens(500, 20*harness.BlockSize)
	harness.ServePrompt(t, engine, prompt[:6*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 6)
	harness.ServePrompt(t, idle, harness.Tokens(90000, harness.BlockSize))
	x.WaitDepth(t, "m", harness.Tokens(90000, harness.BlockSize), "w2", 1)

	keys := config.FileKeys(config.PageHashes(nil, prompt, hicache.Space{}))
	put := func(from, to int) {
		for _, key := range keys.Keys[from*keys.PerPage : to*keys.PerPage] {
			if err := os.WriteFile(filepath.Join(folder, key+".bin"), []byte("page"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(0, 3)
	put(6, 12)
	put(13, 20)
	// a rank's part of a page
	if err := os.Remove(filepath.Join(folder, keys.Keys[14*keys.PerPage+1]+".bin")); err != nil {
		t.Fatal(err)
	}
	var a api.Answer
	var failure *api.Error
	ask := func(args ...string) {
		t.Helper()
		if a, failure = x.Query(t, append([]string{"--model", "m"}, args...)...); failure != nil {
			t.Fatal(failure)
		}
	}
	// Replies of the store from the time of the wait are cached for a moment.
	for first := true; first || fmt.Sprint(a.L3.Ranges) != "[[0 3] [6 12] [13 14] [15 20]]"; first = false {
		ask("--tokens", harness.CommaList(prompt), "--l3", "all")
		if a.L3.Status != api.L3OK {
			t.Fatalf("the store: %+v", a.L3)
		}
	}
	if a.L3.Total != 15 || a.L3.FromStart != 0 || len(a.Workers) != 1 || a.Workers[0].L3 != 6 ||
		a.Workers[0].L3Stop != string(hicache.BeyondMissing) {
		t.Fatalf("the answer is %+v", a)
	}
	put(3, 6)
	for first := true; first || a.L3.Total != 18; first = false {
		ask("--tokens", harness.CommaList(prompt), "--l3", "all")
	}
	if len(a.Workers) != 2 || a.Workers[0].Instance != "w1" || a.Workers[1].L3 != 12 || a.L3.FromStart != 12 {
		t.Fatalf("an empty worker loads from the start: %+v", a)
	}
	if ask("--tokens", harness.CommaList(prompt)); len(a.Workers) != 2 || a.Workers[0].L3 != 6 || a.Workers[1].L3 != 12 ||
		a.L3.Status != api.L3OK || a.L3.FromStart != 12 {
		t.Fatalf("the rules for loading: %+v", a)
	}
	ask("--tokens", harness.CommaList(prompt), "--l3", "beyond", "--worker", "w1")
	if len(a.Workers) != 1 || a.Workers[0].L3 != 6 || a.L3.Ranges[0][0] != 6 {
		t.Fatalf("beyond: %+v", a)
	}
	for _, c := range []struct {
		args   []string
		status api.L3Status
		reason string
	}{
		{[]string{"--hashes", "5"}, api.L3Unavailable, "hashes"},
		{[]string{"--tokens", harness.CommaList(prompt), "--lora", "x"}, api.L3Unavailable, "adapter"},
		{[]string{"--tokens", harness.CommaList(prompt), "--l3", "off"}, api.L3NotConfigured, "excludes the store"},
	} {
		if ask(c.args...); a.L3.Status != c.status || !strings.Contains(a.L3.Reason, c.reason) || a.L3.Total != 0 {
			t.Errorf("%.40v: %+v", c.args, a.L3)
		}
	}
	if ask("--tokens", harness.CommaList(prompt), "--cache-salt", "x"); a.L3.Status != api.L3OK || a.L3.Total != 0 {
		t.Errorf("another tenant's: %+v", a.L3)
	}
	if _, failure := x.Query(t, "--model", "m", "--tokens", "1", "--l3", "perhaps"); failure == nil ||
		failure.Code != api.CodeMalformed {
		t.Errorf("l3 perhaps: %v", failure)
	}
}
