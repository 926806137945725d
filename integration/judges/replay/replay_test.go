//go:build judges

package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/kvatlas/kvatlas/tools/routesim"
	"github.com/kvatlas/kvatlas/tools/trace"
)

var traceFile = flag.String("replay.trace", "", "trace in Mooncake's format; default: a generated trace of the same shape")

const (
	workers   = 8
	blockSize = 64
)

// point is how much memory a worker has, in blocks, and how fast requests come, by the trace's own rate.
type point struct {
	Blocks int     `json:"blocks"`
	Speed  float64 `json:"speed"`
}

// outcome is the result of an arm at a point. Times are in ms.
type outcome struct {
	Point    int     `json:"point"`
	Arm      string  `json:"arm"`
	Reuse    float64 `json:"reuse"`
	TTFTMean float64 `json:"ttft_mean"`
	TTFTP90  float64 `json:"ttft_p90"`
	Output   float64 `json:"output"`
	Requests int     `json:"requests"`
}

// arms are the arms of both simulators. Dynamo's TTL does not expire in an offline replay: 0.05 s and 10⁶ s give the
// same result. So the TTL here must not expire either.
var arms = []struct {
	ours   routesim.Arm
	theirs any
}{
	{routesim.ArmRoundRobin, nil},
	{routesim.ArmApproxTTL, map[string]any{"use_kv_events": false, "router_approximate_cache_policy": "ttl"}},
	{routesim.ArmApproxLRU, map[string]any{"use_kv_events": false, "router_approximate_cache_policy": "lru"}},
	{routesim.ArmExactShared, map[string]any{"use_kv_events": true}},
}

// TestArmsComeInTheSameOrder checks that arms with different results in Dynamo's replay have the same order here, and
// that the reuse is equal.
func TestArmsComeInTheSameOrder(t *testing.T) {
	points := []point{{4802, 1}, {24_000, 1}, {24_000, 3}}
	file := *traceFile
	if file == "" {
		file = filepath.Join(t.TempDir(), "trace.jsonl")
		f, err := os.Create(file)
		if err == nil {
			err = trace.Write(f, trace.Generate(trace.Options{Seed: 1, Requests: 3000}))
		}
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	} else {
		points = append(points, point{96_000, 1}, point{96_000, 4}, point{4802, 4})
	}
	reqs, err := trace.ReadFile(file, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, theirs := range dynamo(t, file, points) {
		p := points[i]
		t.Logf("%d blocks a worker, %g times the trace's rate", p.Blocks, p.Speed)
		t.Logf("  %-14s %-19s %-23s %-23s %s", "Dynamo | ours", "reuse", "TTFT mean, ms", "TTFT p90, ms", "output tok/s")
		ours := make([]outcome, len(arms))
		for k, arm := range arms {
			ours[k] = simulate(t, reqs, p, arm.ours)
			a, b := theirs[k], ours[k]
			t.Logf("  %-14s %.4f | %.4f  %9.0f | %9.0f  %9.0f | %9.0f  %.0f | %.0f", arm.ours, a.Reuse, b.Reuse, a.TTFTMean,
				b.TTFTMean, a.TTFTP90, b.TTFTP90, a.Output, b.Output)
			if a.Requests != len(reqs) || b.Requests != len(reqs) {
				t.Errorf("%s: %d and %d requests ended, of %d", arm.ours, a.Requests, b.Requests, len(reqs))
			}
			// Under overload the constants of the engines decide. Below, routing determines the reuse.
			if overloaded := a.TTFTMean > 10_000; !overloaded && math.Abs(a.Reuse-b.Reuse) > 0.02 {
				t.Errorf("%s: Dynamo reuses %.4f, routesim %.4f", arm.ours, a.Reuse, b.Reuse)
			}
		}
		for j := range arms {
			for k := range j {
				what := fmt.Sprintf("%s and %s", arms[k].ours, arms[j].ours)
				if d := theirs[j].Reuse - theirs[k].Reuse; math.Abs(d) > 0.02 && d*(ours[j].Reuse-ours[k].Reuse) <= 0 {
					t.Errorf("%s: reuse %.4f and %.4f with Dynamo, %.4f and %.4f here", what, theirs[k].Reuse, theirs[j].Reuse,
						ours[k].Reuse, ours[j].Reuse)
				}
				d := theirs[j].TTFTMean - theirs[k].TTFTMean
				if math.Abs(d) > 0.1*theirs[k].TTFTMean && d*(ours[j].TTFTMean-ours[k].TTFTMean) <= 0 {
					t.Errorf("%s: TTFT %.0f and %.0f ms with Dynamo, %.0f and %.0f here", what, theirs[k].TTFTMean,
						theirs[j].TTFTMean, ours[k].TTFTMean, ours[j].TTFTMean)
				}
			}
		}
		if theirs[0].Reuse > theirs[3].Reuse-0.02 {
			t.Errorf("round robin reuses %.4f, exact knowledge %.4f: the difference is too small", theirs[0].Reuse,
				theirs[3].Reuse)
		}
	}
}

// simulate runs an arm in routesim. The engine's constants approximate the mocker: a prompt of 12,000 tokens needs
// about 250 ms, and a step needs 6 ms in an empty engine and another 40 ms in a full engine.
func simulate(t *testing.T, reqs []trace.Request, p point, arm routesim.Arm) outcome {
	w, err := routesim.FromTrace("trace", reqs, blockSize, 0)
	if err == nil {
		w, err = routesim.FromTrace("trace", reqs, blockSize, w.Stages[0].Rate*p.Speed)
	}
	if err != nil {
		t.Fatal(err)
	}
	e := &w.Engine
	e.Capacity = p.Blocks * blockSize
	e.Prefill, e.StepBase, e.StepPerRequest, e.StepPerToken = 48_000, 5.74e-3, 0, 40e-3/float64(e.Capacity)
	r, err := routesim.Simulate(t.Context(), routesim.Config{Workload: w, Arm: arm, Routers: 1, Workers: workers, Seed: 1,
		Routing: routing.DefaultConfig(), TTL: 1e6})
	if err != nil {
		t.Fatal(err)
	}
	f := &r.Total
	return outcome{Arm: string(arm), Reuse: f.HitRate, TTFTMean: 1000 * f.TTFTMean, TTFTP90: 1000 * f.TTFTP90,
		Output: f.OutputPerS, Requests: f.Requests}
}

// dynamo returns the results of Dynamo's replay, by point and arm.
func dynamo(t *testing.T, file string, points []point) [][]outcome {
	theirs := map[string]any{}
	for _, a := range arms {
		theirs[string(a.ours)] = a.theirs
	}
	options, err := json.Marshal(map[string]any{"workers": workers, "block_size": blockSize, "points": points,
		"arms": theirs})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), pyenv.PythonWith(t, "dynamo.txt"), pyenv.Script(t, "replay.py"), file,
		string(options))
	cmd.Env = append(os.Environ(), "DYN_LOG=error")
	var said bytes.Buffer
	cmd.Stderr = &said
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &said)
	}
	all := make([][]outcome, len(points))
	for i := range all {
		all[i] = make([]outcome, len(arms))
	}
	n := 0
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if !strings.HasPrefix(lines.Text(), "{") {
			continue
		}
		var o outcome
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			t.Fatal(err)
		}
		for k, a := range arms {
			if o.Arm == string(a.ours) {
				all[o.Point][k] = o
				n++
			}
		}
	}
	if n != len(points)*len(arms) {
		t.Fatalf("%d answers: %s", n, text)
	}
	return all
}
