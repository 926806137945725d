package harness

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// WaitLease waits until a worker has a lease (or has none), and returns what is known of it.
func WaitLease(t testing.TB, x *Indexer, worker string, want bool) (w api.WorkerInfo) {
	t.Helper()
	for deadline := time.Now().Add(Patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		for _, w = range IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers {
			if string(w.Instance) == worker && (w.Lease != nil) == want {
				return w
			}
		}
		if !want && Status(t, x.NATS).Events["ended"] > 0 {
			return api.WorkerInfo{}
		}
	}
	t.Fatalf("%s: lease %v is not seen; last %+v", worker, want, w)
	return w
}
