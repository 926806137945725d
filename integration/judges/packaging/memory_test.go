//go:build judges

package packaging

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// shimResident is the resident memory of a shim under the load in docs/measurements/2026-11-scale.md, in KiB.
const shimResident = 16 << 10

var residentLine = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// resident returns the resident memory of a process, in KiB.
func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(residentLine.FindStringSubmatch(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestShimMemory runs a release build of worker-shim beside an engine with 4,000 blocks. Five requests a second store
// 300 blocks each and evict the same number. After every five requests, the engine waits until the index has the
// blocks, so a slow machine collects no backlog. The median of the resident memory, from ten seconds after the start,
// must be at most shimResident.
func TestShimMemory(t *testing.T) {
	dir := t.TempDir()
	run(t, root, []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", dir+"/",
		"./cmd/worker-shim")
	x := harness.StartIndexer(t, t.TempDir(), "")
	e, err := enginesim.Start(t.Context(), enginesim.Config{BlockSize: harness.BlockSize, Capacity: 4000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	shim := harness.Start(t, filepath.Join(dir, "worker-shim"), "run", "--engine", e.Endpoint(), "--replay", e.Replay(),
		"--worker", "w", "--model", "m", "--block-size", "16", "--nats", x.NATS)
	begun := time.Now()
	pace := time.NewTicker(time.Second / 5)
	defer pace.Stop()
	var samples []int
	for first := 0; len(samples) < 30; {
		for range 5 {
			<-pace.C
			prompt := harness.Tokens(first, 300*harness.BlockSize)
			first += len(prompt)
			harness.ServePrompt(t, e, prompt)
		}
		x.WaitDepth(t, "m", harness.Tokens(first-300*harness.BlockSize, 300*harness.BlockSize), "w", 300)
		if time.Since(begun) > 10*time.Second {
			samples = append(samples, resident(t, shim.Cmd.Process.Pid))
		}
	}
	median := slices.Sorted(slices.Values(samples))[len(samples)/2]
	t.Logf("resident: %d KiB in the median of %d", median, samples)
	if median > shimResident {
		t.Errorf("a shim under load has %d KiB of resident memory, more than %d", median, shimResident)
	}
}
