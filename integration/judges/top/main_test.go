//go:build judges

package top

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
