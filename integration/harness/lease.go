package harness

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// WaitLease waits until a worker has a lease, or none, and returns the worker.
func WaitLease(t testing.TB, x *Indexer, worker string, want bool) (w api.WorkerInfo) {
	t.Helper()
	Eventually(t, fmt.Sprintf("%s has a lease: %v", worker, want), func() (bool, string) {
		for _, w = range IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers {
			if string(w.Instance) == worker && (w.Lease != nil) == want {
				return true, ""
			}
		}
		seen := fmt.Sprintf("%+v", w)
		w = api.WorkerInfo{}
		return !want && Status(t, x.NATS).Events["ended"] > 0, seen
	})
	return w
}
