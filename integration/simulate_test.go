package integration

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestSimulatedEngine runs the three programs as in a trial without a GPU, and probes the indexer.
func TestSimulatedEngine(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := harness.Start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--rate", "50", "--block-size", "64")
	at := engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", at[1], "--replay", at[2], "--worker", "sim",
		"--model", "m", "--block-size", "64")

	// All prompts of a generated trace begin with the same 512 tokens: the block with id 0.
	prompt := make([]uint32, 512)
	for i := range prompt {
		prompt[i] = uint32(i / 64)
	}
	x.WaitDepth(t, "m", prompt, "sim", 8)

	if r := harness.Run(t, "indexer", "probe", fmt.Sprintf("http://%s/readyz", x.HTTP)); r.Code != 0 ||
		r.Stdout+r.Stderr != "" {
		t.Errorf("probing a ready indexer ended with %d and %q, %q", r.Code, r.Stdout, r.Stderr)
	}
	if r := harness.Run(t, "indexer", "probe", fmt.Sprintf("http://%s/nowhere", x.HTTP)); r.Code != 1 ||
		r.Stderr == "" {
		t.Errorf("the probe of an unknown path ended with %d and %q", r.Code, r.Stderr)
	}
	if r := harness.Run(t, "indexer", "probe", "http://"+loopback.Reserve(t)); r.Code != 1 || r.Stderr == "" {
		t.Errorf("the probe of a closed port ended with %d and %q", r.Code, r.Stderr)
	}
}
