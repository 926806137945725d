//go:build judges

package fields

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
