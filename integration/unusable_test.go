package integration

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestWrongBlockSizeIsAProblem runs a shim with another block size than its engine, for a new model. All events of the
// engine are skipped, and the indexer's status has the problem with the remedy, until an engine with the size exists.
func TestWrongBlockSizeIsAProblem(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	endpoint, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	engine := simulated(t, endpoint, replay)
	harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", endpoint, "--replay", replay, "--worker",
		"sim", "--model", "m", "--block-size", "32")
	said := func() string {
		return strings.Join(harness.Status(t, x.NATS).Problems, "\n")
	}
	harness.Eventually(t, "the wrong block size is a problem", func() (bool, string) {
		now := said()
		return strings.Contains(now, "sim/0: ") &&
			strings.Contains(now, "blocks of 64 tokens, and blocks of 32 are expected") &&
			strings.Contains(now, "--block-size 64") && strings.Contains(now, "indexer models remove m"), now
	})
	engine.Kill()
	p := harness.Start(t, "worker-shim", "simulate", "--endpoint", endpoint, "--replay", replay, "--rate", "20",
		"--block-size", "32")
	p.WaitFor("simulated engine runs")
	harness.Eventually(t, "nothing is wrong with the size", func() (bool, string) {
		now := said()
		return !strings.Contains(now, "blocks of 32 are expected"), now
	})
}
