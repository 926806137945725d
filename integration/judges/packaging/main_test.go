//go:build judges

package packaging

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
