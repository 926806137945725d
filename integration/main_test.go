package integration

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

func TestMain(m *testing.M) { harness.MainOf(m, 12) }
