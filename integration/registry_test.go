package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
)

// leased waits until a worker has a lease (or has none), and returns what is known of it.
func leased(t testing.TB, x *indexerProcess, worker string, want bool) (w api.WorkerInfo) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		for _, w = range ask[api.WorkerList](t, x.nats, "workers").Workers {
			if string(w.Instance) == worker && (w.Lease != nil) == want {
				return w
			}
		}
		if !want && ask[api.Status](t, x.nats, "status").Events["ended"] > 0 {
			return api.WorkerInfo{}
		}
	}
	t.Fatalf("%s: lease %v is not seen; last %+v", worker, want, w)
	return w
}

// TestLease: a shim that comes back in time takes up where it was; one that does not is cleared, once, though two indexers watch; and one that was only
// paused finds out and says again what its engine holds.
func TestLease(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	second := start(t, "indexer", "serve", "--nats", "nats://"+x.nats, "--http-listen", "127.0.0.1:0", "--node-id", "second")
	second.waitFor("msg=ready")
	e, other := simEngine(t), simEngine(t)
	shim := shimOf(t, e, x.nats, "w1", "--lease", "10m")
	prompt := tokens(1, 6*blockSize)
	serve(t, e, prompt[:2*blockSize])
	serve(t, other, prompt[:3*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 2)
	before := leased(t, x, "w1", true)
	if l := before.Lease; l.State != "held" || l.Expires.Sub(l.Renewed) != 10*time.Minute || l.PID != shim.cmd.Process.Pid {
		t.Errorf("the lease: %+v", l)
	}
	if r := run(t, "indexer", "workers", "--nats", x.nats); !strings.Contains(r.stdout, "LEASE AGE") || !strings.Contains(r.stdout, "EXPIRES") {
		t.Errorf("workers: %+v", r)
	}

	// Back in time.
	shim.kill()
	shim = shimOf(t, e, x.nats, "w1", "--lease", "10m")
	serve(t, e, prompt[:4*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 4)
	if now := leased(t, x, "w1", true); now.Incarnation != before.Incarnation {
		t.Errorf("incarnation %d became %d", before.Incarnation, now.Incarnation)
	}

	// Gone for good, with a lease that is soon over.
	const short, expired = "3s", "the lease had expired"
	shim.kill()
	shim = shimOf(t, e, x.nats, "w1", "--lease", short)
	shim.waitFor("msg=registered")
	paused := shimOf(t, other, x.nats, "w2", "--lease", short)
	x.waitDepth(t, "m", prompt, "w2", 3)
	leased(t, x, "w2", true)
	shim.kill()
	x.waitDepth(t, "m", prompt, "w1", 0)
	paused.cmd.Process.Signal(syscall.SIGSTOP)
	// Each lease expires once, unless a shim stood still before, and says so.
	ended := func() uint64 { return ask[api.Status](t, x.nats, "status").Events["ended"] }
	early := uint64(strings.Count(shim.saying()+paused.saying(), expired))
	eventually(t, "both workers are cleared", func() (bool, string) {
		n := ended()
		return n >= 2+early, fmt.Sprint(n)
	})
	cleared := strings.Count(x.saying(), "a worker is gone") + strings.Count(second.saying(), "a worker is gone")
	both := ended()
	if both != 2+early || cleared > int(both) {
		t.Errorf("%d incarnations were closed, %d times by an indexer that says so; %d leases had expired before", both, cleared, early)
	}

	// Back after all, though its engine says nothing: it looks for itself.
	said := strings.Count(paused.saying(), expired)
	paused.cmd.Process.Signal(syscall.SIGCONT)
	eventually(t, "the shim finds out", func() (bool, string) {
		return strings.Count(paused.saying(), expired) > said, paused.saying()
	})
	x.waitDepth(t, "m", prompt, "w2", 3)
	serve(t, other, prompt)
	x.waitDepth(t, "m", prompt, "w2", 6)
	again := shimOf(t, e, x.nats, "w1")
	x.waitDepth(t, "m", prompt, "w1", 4)
	again.waitFor("a new incarnation")
	eventually(t, "no lease has expired of which nobody says so", func() (bool, string) {
		late := strings.Count(paused.saying(), expired) - said - 1
		n := ended()
		return n == both+uint64(late), fmt.Sprintf("%d incarnations were closed in the end, %d before, and %d leases expired since", n, both, late)
	})
}
