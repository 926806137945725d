//go:build judges

package engines

import (
	"encoding/json"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestSGLangAdapterNames compares the Python client's names of pages with the names that SGLang's own event recorder
// publishes, for adapters, salts, extra keys and pairs, in both formats.
func TestSGLangAdapterNames(t *testing.T) {
	t.Parallel()
	for _, pinned := range []string{"sglang==0.5.22", "sglang==0.5.23"} {
		c := exec.Command(pyenv.PythonWith(t, "engines.txt"), pyenv.Script(t, "sglang_adapters.py"),
			pyenv.Wheel(t, pinned), strconv.FormatUint(*judgeFirst, 10), "3000")
		c.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
		c.Stderr = os.Stderr
		out, err := c.Output()
		var n struct {
			Cases, Adapters, Named int
			LikeBase               int `json:"like_base"`
		}
		if err == nil {
			err = json.Unmarshal(out, &n)
		}
		if err != nil || n.Cases != 3000 || n.Adapters < 1000 {
			t.Fatalf("%s: %s %v", pinned, out, err)
		}
		t.Logf("%s: %+v", pinned, n)
		// In the default format of 0.5.22, and only there, an adapter's pages look like the base model's.
		if n.Named+n.LikeBase != n.Adapters || (n.LikeBase > 0) != (pinned == "sglang==0.5.22") {
			t.Errorf("%s: %+v", pinned, n)
		}
	}
}
