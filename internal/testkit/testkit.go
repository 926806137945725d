package testkit

import (
	"flag"
	"os"
	"sync"
	"testing"
	"time"
)

// Patience is the longest wait of a test. It is long, because a machine may be slow.
const Patience = 4 * time.Minute

// Eventually waits until a condition holds, and fails the test after [Patience]. A condition may also return a
// description of the state; the failure prints the last description. The pauses between checks grow to 50 ms plus three
// times the duration of a check, at most 2 s, so that conditions that run programs use less of the processor.
// Eventually must run in the goroutine of the test.
func Eventually[C func() bool | func() (bool, string)](t testing.TB, what string, condition C) {
	t.Helper()
	holds, seen := false, ""
	check := func() bool {
		switch c := any(condition).(type) {
		case func() bool:
			holds = c()
		case func() (bool, string):
			holds, seen = c()
		}
		return holds
	}
	deadline := time.Now().Add(Patience)
	for pause, begun := time.Millisecond, time.Now(); !check(); pause, begun = 2*pause, time.Now() {
		rest := min(3*time.Since(begun), 2*time.Second)
		if pause = min(max(pause, rest), 50*time.Millisecond+rest); time.Now().After(deadline) {
			if seen != "" {
				seen = "; last seen: " + seen
			}
			t.Fatalf("timeout: %s%s", what, seen)
		}
		time.Sleep(pause)
	}
}

// Group runs the subtests of a parallel test concurrently, in the slot of the test. The test defers Wait. Subtests with
// t.Parallel would start after all other tests of the package, and the longest of them would run alone at the end.
type Group struct{ sync.WaitGroup }

// Run starts a subtest.
func (g *Group) Run(t *testing.T, name string, test func(*testing.T)) {
	g.Go(func() { t.Run(name, test) })
}

// Whole is true if the variable KVATLAS_TEST_WHOLE is set: random tests and simulations have their whole size, as in
// .ci/daily and make explore. The race detector ignores it.
var Whole = !Race && os.Getenv("KVATLAS_TEST_WHOLE") != ""

// Rounds returns the number of rounds of a random test: n if [Whole] is true, otherwise a quarter of n. Six rounds or
// fewer stay, because a seed often selects a variant. Under the race detector it returns an eighth of n, and at least
// 1: the detector slows tests without concurrent goroutines about tenfold and finds no race.
func Rounds(n int) int {
	switch {
	case Race:
		return max(1, n/8)
	case Whole:
		return n
	}
	return max(min(n, 6), n/4)
}

// Sequential skips a test under the race detector. The test is long and has one goroutine, or runs a concurrent
// function that a shorter test covers.
func Sequential(t testing.TB) {
	t.Helper()
	if Race {
		t.Skip("skipped under the race detector: the test is sequential")
	}
}

// Main runs sixteen parallel tests at a time, and four under the race detector, unless the flag -parallel is given.
// TestMain calls Main in packages with many tests that wait for servers and clocks.
func Main(m *testing.M) {
	Parallel()
	os.Exit(m.Run())
}

// Parallel is the part of [Main] for a TestMain with further steps.
func Parallel() {
	most := "16"
	if Race {
		most = "4" // tests use many times the processor time
	}
	if err := flag.Set("test.parallel", most); err != nil {
		panic(err)
	}
}
