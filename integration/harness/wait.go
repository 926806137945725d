package harness

import (
	"context"
	"testing"

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
