package server

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// Most tests of this package wait.
func TestMain(m *testing.M) { testkit.Main(m) }
