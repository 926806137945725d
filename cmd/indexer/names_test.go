package main

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/serve/cli/clitest"
)

// TestOldNames: the old names of flags and commands work with a warning.
func TestOldNames(t *testing.T) {
	got := clitest.OldNames(t, rootCommand)
	for _, name := range []string{"indexer auth example", "indexer forget", "indexer load", "indexer serve --replicas",
		"indexer serve --replication", "indexer serve --max-parked", "indexer serve --park-for",
		"indexer serve --max-remembered", "indexer serve --remember-for", "indexer bench select --replication"} {
		if !slices.Contains(got, name) {
			t.Errorf("%s is not accepted", name)
		}
	}
}
