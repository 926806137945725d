//go:build judges

package docs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestMain also is the program vllm of a reader, a link to this program.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "vllm" {
		serveEngine(os.Args[1:])
		return
	}
	harness.MainOf(m, 4)
}
