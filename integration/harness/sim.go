package harness

import (
	"context"
	"testing"

	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// BlockSize is the block size of most tests, in tokens.
const BlockSize = 16

// StartSimEngine starts a simulated engine that runs until the end of the test. The ports are reserved, so that the
// engine can restart.
func StartSimEngine(t testing.TB) *enginesim.Engine {
	t.Helper()
	ports := loopback.ReserveRow(t, 2)
	e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: BlockSize, Capacity: 1000,
		Endpoint: "tcp://" + ports[0], Replay: "tcp://" + ports[1]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Crash)
	return e
}

// StartSimShim starts a shim beside a simulated engine.
func StartSimShim(t testing.TB, e *enginesim.Engine, nats, instance string, args ...string) *Process {
	t.Helper()
	return Start(t, "worker-shim", append([]string{"run", "--engine", e.Endpoint(), "--replay", e.Replay(),
		"--worker", instance,
		"--model", "m", "--block-size", "16", "--nats", nats}, args...)...)
}

// ServePrompt serves a prompt on a simulated engine, which then holds the blocks.
func ServePrompt(t testing.TB, e *enginesim.Engine, prompt []uint32) {
	t.Helper()
	if _, err := e.Serve(prompt, nil); err != nil {
		t.Fatal(err)
	}
}
