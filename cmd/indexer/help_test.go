package main

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/serve/launch"
)

// TestServeHelp: every flag of serve belongs to a section, except --help, and the first section has the flags of most
// deployments.
func TestServeHelp(t *testing.T) {
	cmd := serveCommand()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Annotations["kvatlas_section"] == nil && !f.Hidden && f.Name != "help" {
			t.Errorf("--%s belongs to no section", f.Name)
		}
	})
	first := serveSections(&launch.Process{})[0]
	if n := len(first.Names); n < 10 || n > 15 || !strings.HasPrefix(first.Title, "Important") {
		t.Errorf("the first section is %q with %d flags", first.Title, n)
	}
}
