package main

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli/clitest"
)

// TestOldNames: the old names of flags work with a warning.
func TestOldNames(t *testing.T) {
	got := clitest.OldNames(t, rootCommand)
	for _, name := range []string{"worker-shim run --instance", "worker-shim pods --instance", "worker-shim pods --pool"} {
		if !slices.Contains(got, name) {
			t.Errorf("%s is not accepted", name)
		}
	}
}
