package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

// TTFT has times to the first token. The engines of the demonstration compute nothing, so package routesim simulates
// the same requests in virtual time, on engines with the constants of a measured vLLM.
type TTFT struct {
	Rate   float64   `json:"requests_per_s"`
	GPUs   int       `json:"gpus"`
	Arms   []ArmTTFT `json:"arms"`
	Reason string    `json:"not_simulated,omitempty"` // if Arms is empty
}

// ArmTTFT has the times of one way to choose workers.
type ArmTTFT struct {
	Arm string  `json:"arm"`
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
}

// compared are the compared ways to choose workers.
var compared = []struct {
	name string
	arm  routesim.Arm
}{{"kvatlas", "policy:kvatlas"}, {"sticky sessions", routesim.ArmSticky}, {"least load", routesim.ArmLeastLoad}}

// simulateTTFT simulates the requests at half of the rate that the fleet can serve.
func simulateTTFT(ctx context.Context, cfg Config) (*TTFT, error) {
	w, err := routesim.FromTrace("demo", cfg.Requests, cfg.BlockSize, 0)
	if err != nil {
		return &TTFT{Reason: err.Error()}, nil
	}
	w.Engine = routesim.VLLMOnH200()
	w.Engine.BlockSize, w.Engine.Capacity = cfg.BlockSize, cfg.Capacity*cfg.BlockSize
	per := w.Engine.EnginesPerGPU
	t := &TTFT{Rate: w.SaturatingRate(cfg.Engines) / float64(2*per), GPUs: (cfg.Engines + per - 1) / per}
	w = w.AtRate(t.Rate)
	for _, c := range compared {
		run, err := routesim.Simulate(ctx, routesim.Config{Workload: w, Arm: c.arm, Routers: 1, Workers: cfg.Engines,
			Seed: cfg.Seed, EventLag: 5e-3, Routing: routing.DefaultConfig()})
		if errors.Is(err, routesim.ErrTooLong) {
			return &TTFT{Reason: err.Error()}, nil
		}
		if err != nil {
			return nil, err
		}
		t.Arms = append(t.Arms, ArmTTFT{c.name, 1000 * run.Total.TTFTP50, 1000 * run.Total.TTFTP99})
	}
	return t, nil
}

// print writes the times with an explanation.
func (t *TTFT) print(w io.Writer, engines int) error {
	if len(t.Arms) == 0 {
		_, err := fmt.Fprintln(w, "\nThe times to the first token are not simulated:", t.Reason)
		return err
	}
	fmt.Fprintln(w)
	var rows [][]any
	for _, a := range t.Arms {
		rows = append(rows, []any{a.Arm, shortTime(a.P50), shortTime(a.P99)})
	}
	if err := cli.Table(w, []string{"time to first token, simulated", "p50", "p99"}, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, `
These times are simulated: the same requests, %.1f per second, on %d engines with the measured speed of vLLM, four
engines on one H200 GPU. kvatlas chooses a worker with the cached prompt, or another worker if this one is too busy.
Sticky sessions send a whole conversation to one worker, however busy it is. The least load ignores the caches, so
workers compute the same prompts again.
`, t.Rate, engines)
	return err
}

// shortTime formats milliseconds.
func shortTime(ms float64) string {
	if ms < 1000 {
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.2f s", (time.Duration(ms * float64(time.Millisecond))).Seconds())
}

// printNext writes three commands to try next. program is the executable of this process.
func printNext(w io.Writer, program string) error {
	name := "indexer"
	if strings.Contains(program, "go-build") { // go run
		name = "go run ./cmd/indexer"
	}
	_, err := fmt.Fprintf(w, `
Try next:
  %[1]s simulate --workload capacity-73 --rate 20 --routers 1,4 --arms sticky,llm-d,policy:kvatlas
      compares kvatlas with other routers, alone and in fours
  %[1]s serve
      runs an indexer, with a live page on http://127.0.0.1:8090
  %[1]s doctor
      in a second terminal, checks this installation and names each fault with its remedy
`, name)
	return err
}
