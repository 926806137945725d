package harness

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// Eventually is [testkit.Eventually] for a condition with a description.
func Eventually(t testing.TB, what string, condition func() (bool, string)) {
	t.Helper()
	testkit.Eventually(t, what, condition)
}
