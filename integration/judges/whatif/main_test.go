//go:build judges

package whatif

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
