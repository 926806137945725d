package pyenv

import (
	"context"
	"fmt"
	"io"
	"testing"
)

// vllmServer is the requirements file of a whole vLLM.
const vllmServer = "vllm-server.txt"

// FetchVLLM makes the environment of a complete vLLM for the CPU, unless present, and returns the interpreter. It needs
// gcc, 1 GB of downloads and 2.8 GB of disk. The output of pip goes to progress.
func FetchVLLM(progress io.Writer) (python string, err error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	requirements, err := requirementsFile(vllmServer)
	if err != nil {
		return "", err
	}
	return fetchEnvironment(progress, dir, requirements, func(ctx context.Context, python string) error {
		packages, err := run(ctx, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')")
		if err != nil {
			return err
		}
		if err := standIn(ctx, progress, string(packages)); err != nil {
			return fmt.Errorf("stand-ins for torch's CUDA libraries: %w", err)
		}
		// Compiled modules save a minute or two at every start of an engine. torch's own tests use the syntax of later
		// Pythons and are excluded.
		fmt.Fprintln(progress, "compiling all modules")
		_, err = run(ctx, python, "-m", "compileall", "-q", "-j", "0", "-x", "torch/testing/_internal",
			string(packages))
		return err
	})
}

// VLLM returns the interpreter of the environment from FetchVLLM.
func VLLM(t testing.TB) string {
	t.Helper()
	python, err := find(vllmServer, "go run ./integration/judges/vllm/fetch")
	if err != nil {
		t.Fatal(err)
	}
	return python
}
