package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestLease checks leases. A shim that returns in time continues. A late shim's rank is cleared once, although two
// indexers watch. A paused shim detects the clear and publishes the engine's blocks again.
func TestLease(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	second := harness.Start(t, "indexer", "serve", "--nats", "nats://"+x.NATS, "--http-listen", "127.0.0.1:0",
		"--node-id", "second")
	second.WaitFor("msg=ready")
	e, other := harness.StartSimEngine(t), harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, e, x.NATS, "w1", "--lease", "10m")
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
	harness.ServePrompt(t, other, prompt[:3*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 2)
	before := harness.WaitLease(t, x, "w1", true)
	if l := before.Lease; l.State != "held" || l.Expires.Sub(l.Renewed) != 10*time.Minute ||
		l.PID != shim.Cmd.Process.Pid {
		t.Errorf("the lease: %+v", l)
	}
	if r := harness.Run(t, "indexer", "workers", "--nats", x.NATS); !strings.Contains(r.Stdout, "LEASE AGE") ||
		!strings.Contains(r.Stdout, "EXPIRES") {
		t.Errorf("workers: %+v", r)
	}

	// Back in time.
	shim.Kill()
	shim = harness.StartSimShim(t, e, x.NATS, "w1", "--lease", "10m")
	harness.ServePrompt(t, e, prompt[:4*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 4)
	if now := harness.WaitLease(t, x, "w1", true); now.Incarnation != before.Incarnation {
		t.Errorf("incarnation %d became %d", before.Incarnation, now.Incarnation)
	}

	// A permanent end, with a short lease.
	const short, expired = "3s", "the lease had expired"
	shim.Kill()
	shim = harness.StartSimShim(t, e, x.NATS, "w1", "--lease", short)
	shim.WaitFor("msg=registered")
	paused := harness.StartSimShim(t, other, x.NATS, "w2", "--lease", short)
	x.WaitDepth(t, "m", prompt, "w2", 3)
	harness.WaitLease(t, x, "w2", true)
	shim.Kill()
	x.WaitDepth(t, "m", prompt, "w1", 0)
	paused.Cmd.Process.Signal(syscall.SIGSTOP)
	// A lease expires once, except for pauses of a shim, which the shim logs.
	ended := func() uint64 { return harness.Status(t, x.NATS).Events["ended"] }
	early := uint64(strings.Count(shim.Said()+paused.Said(), expired))
	harness.Eventually(t, "both workers are cleared", func() (bool, string) {
		n := ended()
		return n >= 2+early, fmt.Sprint(n)
	})
	both := ended()
	if both != 2+early {
		t.Errorf("%d incarnations were closed; %d leases had expired before", both, early)
	}

	// The shim resumes with a silent engine, and checks the log itself.
	said := strings.Count(paused.Said(), expired)
	paused.Cmd.Process.Signal(syscall.SIGCONT)
	harness.Eventually(t, "the shim finds out", func() (bool, string) {
		return strings.Count(paused.Said(), expired) > said, paused.Said()
	})
	x.WaitDepth(t, "m", prompt, "w2", 3)
	harness.ServePrompt(t, other, prompt)
	x.WaitDepth(t, "m", prompt, "w2", 6)
	again := harness.StartSimShim(t, e, x.NATS, "w1")
	x.WaitDepth(t, "m", prompt, "w1", 4)
	again.WaitFor("a new incarnation")
	harness.Eventually(t, "every expired lease is logged", func() (bool, string) {
		late := strings.Count(paused.Said(), expired) - said - 1
		n := ended()
		return n == both+uint64(late), fmt.Sprintf(
			"%d incarnations were closed in the end, %d before, and %d leases expired since", n, both, late)
	})
}
