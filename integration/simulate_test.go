package integration

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/internal/loopback"
)

// TestSimulatedEngine runs the three programs as someone would who tries kvatlas without a GPU, and probes the indexer.
func TestSimulatedEngine(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	engine := start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--rate", "50", "--block-size", "64")
	at := engine.waitFor(`endpoint=(\S+) replay=(\S+)`)
	start(t, "worker-shim", "run", "--nats", x.nats, "--engine", at[1], "--replay", at[2], "--instance", "sim", "--model", "m", "--block-size", "64")

	// All prompts of a generated trace begin with the same 512 tokens: the block with id 0.
	prompt := make([]uint32, 512)
	for i := range prompt {
		prompt[i] = uint32(i / 64)
	}
	x.waitDepth(t, "m", prompt, "sim", 8)

	if r := run(t, "indexer", "probe", fmt.Sprintf("http://%s/readyz", x.http)); r.code != 0 || r.stdout+r.stderr != "" {
		t.Errorf("probing a ready indexer ended with %d and %q, %q", r.code, r.stdout, r.stderr)
	}
	if r := run(t, "indexer", "probe", fmt.Sprintf("http://%s/nowhere", x.http)); r.code != 1 || r.stderr == "" {
		t.Errorf("probing a path that is not there ended with %d and %q", r.code, r.stderr)
	}
	if r := run(t, "indexer", "probe", "http://"+loopback.Reserve(t)); r.code != 1 || r.stderr == "" {
		t.Errorf("probing where nobody listens ended with %d and %q", r.code, r.stderr)
	}
}
