package routesim

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// measuredFile is a measurement of this project, documented in docs/measurements/2026-11-gpu.md: the requests, their
// arrivals and the figures of every arm.
//
//go:embed measured/h200.json.gz
var measuredFile []byte

// Measured is a run of real engines with the workload.
type Measured struct {
	BlockTokens  int       `json:"block_tokens"`  // of a hash id
	OutputTokens int       `json:"output_tokens"` // of each request
	Gaps         []float64 `json:"gaps"`          // between arrivals, at one request per second
	Requests     [][]int   `json:"requests"`      // session, tokens, then runs of hash ids: first id and length

	// Alone are requests in sequence: prompt tokens, cached tokens, TTFT and end-to-end time in ms.
	Alone [][4]float64  `json:"alone"`
	Arms  []MeasuredArm `json:"arms"`
}

// MeasuredArm has the figures of an arm at a rate.
type MeasuredArm struct {
	Arm      Arm     `json:"arm"`
	Workers  string  `json:"workers,omitempty"` // the worker of each request, a digit each
	Rate     float64 `json:"rate"`              // requests per second
	Requests int     `json:"requests"`
	Reuse    float64 `json:"reuse"` // share of the prompt tokens
	TTFTMean float64 `json:"ttft_mean_ms"`
	TTFTP50  float64 `json:"ttft_p50_ms"`
	TTFTP90  float64 `json:"ttft_p90_ms"`
	TTFTP99  float64 `json:"ttft_p99_ms"`
	E2EP50   float64 `json:"e2e_p50_ms"`
	E2EP99   float64 `json:"e2e_p99_ms"`
}

// MeasuredH200 returns the run of four vLLM servers on a single NVIDIA H200.
var MeasuredH200 = sync.OnceValue(func() *Measured {
	var m Measured
	r, err := gzip.NewReader(bytes.NewReader(measuredFile))
	if err == nil {
		err = json.NewDecoder(r).Decode(&m)
	}
	if err != nil {
		panic(fmt.Sprintf("routesim: the embedded measurement is damaged: %v", err))
	}
	return &m
})

// Workload returns the first requests of the run, at a rate in requests per second.
func (m *Measured) Workload(rate float64, requests int) Workload {
	e := VLLMOnH200()
	per := uint64(m.BlockTokens / e.BlockSize)
	st := Stage{Rate: rate}
	at := 0.0
	w := Workload{Name: "measured-h200", Engine: e, Workers: 4, PrefillLoadScale: 1}
	for i, r := range m.Requests[:min(requests, len(m.Requests))] {
		p := &Prompt{Tokens: r[1]}
		for runs := r[2:]; len(runs) > 0; runs = runs[2:] {
			for id := range uint64(runs[1]) {
				for b := range per {
					name := (uint64(runs[0])+id)*per + b
					p.Names = append(p.Names, events.BlockHash(mix(name+1)|1))
				}
			}
		}
		p.Names = p.Names[:min(len(p.Names), p.Tokens/e.BlockSize)]
		st.Arrivals = append(st.Arrivals, Arrival{At: at, Prompt: p, Output: m.OutputTokens, Session: uint64(r[0]) + 1})
		at += m.Gaps[i] / rate
	}
	w.Stages = []Stage{st}
	w.number()
	return w
}

// VLLMOnH200 returns the constants of a vLLM server in a group of four on a single NVIDIA H200, with a model of the
// shape of Llama 3.2 3B. DESIGN.md describes the fit.
func VLLMOnH200() Engine {
	return Engine{BlockSize: 16, Capacity: 4499 * 16, MaxBatchedTokens: 8192, MaxRequests: 128, Prefill: 98_200,
		StepBase: 2.6e-3, StepPerRequest: 36e-6, StepPerToken: 9e-9, Attention: 0.39e-9, PrefillHost: 20e-3,
		Delay: 3e-3, Reply: 7e-3, Ahead: true, ReservePrompt: true, EnginesPerGPU: 4, ShareLoss: 0.09,
		HostDelay: 1e-3, HostRate: 190_000, PullDelay: 27e-3, PullRate: 235_000}
}

// Config returns the simulation of an arm of the run. With recorded, every request goes to the recorded worker. The
// arms random and sticky always follow the record, because they do not depend on the state of the fleet.
func (m *Measured) Config(x *MeasuredArm, seed uint64, recorded bool) Config {
	w := m.Workload(x.Rate, x.Requests)
	if recorded || x.Arm == ArmRandom || x.Arm == ArmSticky {
		placed := make([]int, len(x.Workers))
		for i, digit := range x.Workers {
			placed[i] = int(digit - '0')
		}
		w.Placed = map[Arm][]int{x.Arm: placed}
	}
	return Config{Workload: w, Arm: x.Arm, Routers: 1, Workers: w.Workers, Seed: seed, EventLag: 1e-3,
		Routing: routing.DefaultConfig()}
}

// Compared is an arm of a measured run beside the simulation.
type Compared struct {
	Measured MeasuredArm `json:"measured"`
	Recorded MeasuredArm `json:"simulated_with_recorded_choices"`
	Own      MeasuredArm `json:"simulated_with_own_choices"`
}

// Compare simulates all arms of the run. Figures are medians over the seeds.
func (m *Measured) Compare(ctx context.Context, seeds int) ([]Compared, error) {
	var list []Compared
	for _, x := range m.Arms {
		c := Compared{Measured: x}
		for _, recorded := range []bool{true, false} {
			f, err := m.simulate(ctx, &x, seeds, recorded)
			if err != nil {
				return nil, err
			}
			if recorded {
				c.Recorded = f
			} else {
				c.Own = f
			}
		}
		c.Measured.Workers = ""
		list = append(list, c)
	}
	return list, nil
}

// simulate returns the medians over seeds. A seed changes the delays of requests and the ties.
func (m *Measured) simulate(ctx context.Context, x *MeasuredArm, seeds int, recorded bool) (MeasuredArm, error) {
	var list []Figures
	for seed := range uint64(seeds) {
		run, err := Simulate(ctx, m.Config(x, seed+1, recorded))
		if err != nil {
			return MeasuredArm{}, err
		}
		list = append(list, run.Total)
	}
	ms := func(of func(*Figures) float64) float64 { return 1000 * median(list, of) }
	return MeasuredArm{Arm: x.Arm, Rate: x.Rate, Requests: x.Requests,
		Reuse:    median(list, func(f *Figures) float64 { return f.HitRate }),
		TTFTMean: ms(func(f *Figures) float64 { return f.TTFTMean }),
		TTFTP50:  ms(func(f *Figures) float64 { return f.TTFTP50 }),
		TTFTP90:  ms(func(f *Figures) float64 { return f.TTFTP90 }),
		TTFTP99:  ms(func(f *Figures) float64 { return f.TTFTP99 }),
		E2EP50:   ms(func(f *Figures) float64 { return f.E2EP50 }),
		E2EP99:   ms(func(f *Figures) float64 { return f.E2EP99 })}, nil
}

// median returns the median of a figure.
func median(list []Figures, of func(*Figures) float64) float64 {
	var values []float64
	for i := range list {
		values = append(values, of(&list[i]))
	}
	slices.Sort(values)
	return (values[len(values)/2] + values[(len(values)-1)/2]) / 2
}
