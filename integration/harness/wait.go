package harness

import (
	"context"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// Eventually is [testkit.Eventually] for a condition with a description.
func Eventually(t testing.TB, what string, condition func() (bool, string)) {
	t.Helper()
	testkit.Eventually(t, what, condition)
}

// Context returns a context for the requests of a whole test. Its deadline is later than all limits of single waits, as
// a busy machine may need minutes for a step. The limit of a wait is that of [Eventually]. A client gives up a request
// without a deadline after 5 s.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*Patience)
	t.Cleanup(cancel)
	return ctx
}

// Load calls f with 0, 1, 2 and so on, at most 100 times a second, until the context ends. The pauses leave the
// processor to the tested programs.
func Load(ctx context.Context, f func(i int)) {
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		f(i)
		select {
		case <-pace.C:
		case <-ctx.Done():
		}
	}
}
