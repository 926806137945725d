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

// TestJSON: every command has --json with a form in the reference, except the long-running commands, which have a log.
func TestJSON(t *testing.T) {
	clitest.JSON(t, rootCommand, "worker-shim run", "worker-shim pods", "worker-shim simulate")
}
