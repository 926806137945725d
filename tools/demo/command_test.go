package demo

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/trace"
)

// TestProgress checks that the first report and every new stage are printed at once. Changes within a stage are printed
// after an interval.
func TestProgress(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		var out strings.Builder
		tell := progress(&out, terminal)
		tell(Progress{Stage: "one", Of: 7})
		if text := out.String(); !strings.Contains(text, "one") || !strings.Contains(text, "0 of 7 requests") ||
			strings.HasSuffix(text, "\n") == terminal {
			t.Errorf("terminal %v: at first %q", terminal, text)
		}
		for i := range 1000 {
			tell(Progress{Stage: "one", Requests: i, Of: 1000})
		}
		tell(Progress{Stage: "two"})
		if text := out.String(); strings.Count(text, "requests") > 100 || !strings.Contains(text, "two") {
			t.Errorf("terminal %v: %q", terminal, text)
		}
	}
}

// TestTTFT simulates the requests of the demonstration with each way to choose workers. kvatlas is faster than the
// least load at the median and than sticky sessions at the 99th percentile, and equal configurations give equal times.
func TestTTFT(t *testing.T) {
	cfg := Config{Requests: trace.Generate(trace.Options{Seed: 1, Requests: 1000, Clump: 1}), Engines: 8, BlockSize: 16,
		Capacity: 10_000, Seed: 1}
	first, err := simulateTTFT(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	again, err := simulateTTFT(t.Context(), cfg)
	if err != nil || !reflect.DeepEqual(first, again) || len(first.Arms) != 3 || first.GPUs != 2 {
		t.Fatalf("%+v, then %+v, %v", first, again, err)
	}
	if kvatlas, sticky, least := first.Arms[0], first.Arms[1], first.Arms[2]; kvatlas.P50 >= least.P50 ||
		kvatlas.P99 >= sticky.P99 || kvatlas.P50 <= 0 {
		t.Errorf("%+v", first.Arms)
	}
	var out strings.Builder
	if err := first.print(&out, cfg.Engines); err != nil || !strings.Contains(out.String(), "These times are simulated") {
		t.Errorf("%v\n%s", err, out.String())
	}
	cfg.Capacity = 100 // tokens: 1,600
	if small, err := simulateTTFT(t.Context(), cfg); err != nil || small.Arms != nil || small.Reason == "" {
		t.Errorf("engines that are too small: %+v, %v", small, err)
	}
}

// TestNext checks the names of the commands to try next: those of an installed program, and of a clone.
func TestNext(t *testing.T) {
	for program, want := range map[string]string{"/usr/local/bin/indexer": "\n  indexer serve\n",
		"/tmp/go-build123/b001/exe/indexer": "\n  go run ./cmd/indexer serve\n"} {
		var out strings.Builder
		if err := printNext(&out, program); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%s: %v\n%s", program, err, out.String())
		}
	}
}
