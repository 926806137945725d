package load

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// Most tests of this package wait, so more tests run in parallel.
func TestMain(m *testing.M) { testkit.Main(m) }
