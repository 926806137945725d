package integration

import (
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/loopback"
)

// firstPrompt is how all prompts of a simulated engine begin that has blocks of 64 tokens: the trace's block 0, eight of the engine's.
func firstPrompt() []uint32 {
	prompt := make([]uint32, 512)
	for i := range prompt {
		prompt[i] = uint32(i / 64)
	}
	return prompt
}

// simulated runs a simulated engine at fixed endpoints, as a process of its own.
func simulated(t *testing.T, endpoint, replay string) *harness.Process {
	t.Helper()
	p := harness.Start(t, "worker-shim", "simulate", "--endpoint", endpoint, "--replay", replay, "--rate", "20", "--block-size", "64")
	p.WaitFor("simulated engine runs")
	return p
}

// TestEngineIsKilled kills an engine beside a shim that lives: it is credited with nothing, though its lease goes on, until it is back.
func TestEngineIsKilled(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	endpoint, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	engine := simulated(t, endpoint, replay)
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", endpoint, "--replay", replay, "--instance", "sim", "--model", "m", "--block-size", "64")
	x.WaitDepth(t, "m", firstPrompt(), "sim", 8)
	first := harness.WaitLease(t, x, "sim", true).Incarnation
	engine.Kill()
	shim.WaitFor(`the engine is gone.*why="its ports refuse`)
	x.WaitDepth(t, "m", firstPrompt(), "sim", 0)
	if w := harness.WaitLease(t, x, "sim", true); w.Blocks.Device != 0 || w.Lease.State != "held" {
		t.Errorf("of a worker whose engine is gone the indexer says %+v", w)
	}
	simulated(t, endpoint, replay)
	x.WaitDepth(t, "m", firstPrompt(), "sim", 8)
	if now := harness.WaitLease(t, x, "sim", true).Incarnation; now <= first {
		t.Errorf("incarnation %d follows incarnation %d", now, first)
	}
}

// TestEngineHangs stops an engine's process. That proves nothing: it is said, with advice, and its blocks stay, unless --engine-gone-after has passed; and when it
// goes on all of it is known again, since it is the same life.
func TestEngineHangs(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	endpoint, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	engine := simulated(t, endpoint, replay)
	args := []string{"run", "--nats", x.NATS, "--engine", endpoint, "--replay", replay, "--model", "m", "--block-size", "64", "--engine-silent-after", "1s"}
	waits := harness.Start(t, "worker-shim", append(args, "--instance", "waits")...)
	clears := harness.Start(t, "worker-shim", append(args, "--instance", "clears", "--engine-gone-after", "2s")...)
	for _, w := range []string{"waits", "clears"} {
		x.WaitDepth(t, "m", firstPrompt(), w, 8)
	}
	engine.Cmd.Process.Signal(syscall.SIGSTOP)
	clears.WaitFor(`the engine is gone.*why="silent for 2s"`)
	waits.WaitFor(`the engine is silent.*whether its process hangs or is stopped.*nothing is cleared`)
	x.WaitDepth(t, "m", firstPrompt(), "clears", 0)
	x.WaitDepth(t, "m", firstPrompt(), "waits", 8)
	engine.Cmd.Process.Signal(syscall.SIGCONT)
	x.WaitDepth(t, "m", firstPrompt(), "clears", 8)
	x.WaitDepth(t, "m", firstPrompt(), "waits", 8)
}
