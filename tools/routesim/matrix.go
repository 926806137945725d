package routesim

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
)

// Matrix compares arms on every workload, at every load, with and without a host tier.
type Matrix struct {
	Workloads []MatrixWorkload
	Loads     []float64 // shares of [Workload.SaturatingRate]
	Hosts     []float64 // capacity of the host tier, in capacities of the device; 0: no host tier
	Arms      []Arm
	Seeds     int
	Routing   routing.Config
	Subject   Arm // the arm to judge against the other arms; "": none

	// Progress is called with the number of completed cells. It must be safe for concurrent use.
	Progress func(done, of int)
}

// MatrixWorkload makes a workload from a seed. Equal seeds give equal prompts.
type MatrixWorkload struct {
	Name  string
	Notes string // description for users
	make  func(seed uint64) Workload
	rated func(seed uint64, rate float64) Workload // nil: [Workload.AtRate]
}

// at returns the workload at a rate.
func (m *MatrixWorkload) at(seed uint64, rate float64) Workload {
	if m.rated != nil {
		return m.rated(seed, rate)
	}
	w := m.make(seed)
	return w.AtRate(rate)
}

// Cell has the arms on a workload at a load.
type Cell struct {
	Workload string    `json:"workload"`
	Load     float64   `json:"load"`
	Rate     float64   `json:"rate"` // requests per second, with the first seed
	Host     float64   `json:"host"`
	Arms     []CellArm `json:"arms"`
	Missed   []string  `json:"missed,omitempty"` // targets, of the subject
}

// CellArm has the medians of an arm over all seeds.
type CellArm struct {
	Arm      Arm     `json:"arm"`
	Reuse    float64 `json:"reuse"` // share of the prompt tokens
	TTFTMean float64 `json:"ttft_mean_ms"`
	// TTFTRepeats is the mean of requests with a real prefix; 0 if there are none.
	TTFTRepeats float64 `json:"ttft_mean_repeats_ms"`
	TTFTP50     float64 `json:"ttft_p50_ms"`
	TTFTP99     float64 `json:"ttft_p99_ms"`
}

// MatrixEngine returns the constants of a matrix's fleet: [Defaults] with quadratic attention, asynchronous scheduling
// and less memory, so that caches fill up within a short run.
func MatrixEngine() Engine {
	e := Defaults()
	e.Capacity, e.Attention, e.Delay, e.Ahead, e.ReservePrompt = 204_800, 2e-9, 5e-3, true, true
	return e
}

// matrixWorkers is the number of workers of a matrix, but for the published mixes.
const matrixWorkers = 4

// MatrixWorkloads returns the workloads of a matrix with the given number of requests. traces maps Mooncake's
// conversation, toolagent and synthetic to the requests of their files. Other workloads, and missing traces, are
// generated.
func MatrixWorkloads(requests int, traces map[string][]trace.Request) []MatrixWorkload {
	e := MatrixEngine()
	list := []MatrixWorkload{
		mooncake("conversation", requests, traces, func(seed uint64) Workload {
			reqs := trace.Generate(trace.Options{Seed: seed, Requests: requests, Clump: 2})
			w, err := FromTrace("conversation", reqs, e.BlockSize, 0)
			if err != nil {
				panic(fmt.Sprintf("routesim: a generated trace is no workload: %v", err))
			}
			return w
		}),
	}
	for _, x := range generated {
		own := func(seed uint64) Workload { return x.workload(seed, requests, e) }
		if x.name == "toolagent" || x.name == "synthetic" {
			list = append(list, mooncake(x.name, requests, traces, own))
		} else {
			list = append(list, MatrixWorkload{Name: x.name, Notes: "generated", make: own})
		}
	}
	mix := func(name string, at func(uint64, int, []float64) Workload) {
		rated := func(seed uint64, rate float64) Workload {
			w := at(seed, e.BlockSize, []float64{rate})
			w.Clients = 0 // an open loop, as in the other workloads
			w.identify()
			return w
		}
		list = append(list, MatrixWorkload{Name: name, Notes: "llm-d's mix", rated: rated,
			make: func(seed uint64) Workload { return rated(seed, 10) }})
	}
	mix("capacity-73", Capacity73)
	mix("capacity-37", Capacity37)
	return list
}

// identify gives all requests of a prompt the same session id: a prompt of the mixes is a user.
func (w *Workload) identify() {
	ids := map[*Prompt]uint64{}
	for i := range w.Stages {
		for j := range w.Stages[i].Arrivals {
			a := &w.Stages[i].Arrivals[j]
			if ids[a.Prompt] == 0 {
				ids[a.Prompt] = uint64(len(ids)) + 1
			}
			a.Session = ids[a.Prompt]
		}
	}
}

// mooncake returns a workload of sessions from a trace, or a generated workload without a trace.
func mooncake(name string, requests int, traces map[string][]trace.Request, own func(uint64) Workload) MatrixWorkload {
	if len(traces[name]) < 2 {
		shape := func(seed uint64) Workload {
			w := own(seed)
			w.fit(MatrixEngine())
			w.Workers = matrixWorkers
			return w
		}
		return MatrixWorkload{Name: name, Notes: "generated in the shape of Mooncake's trace", make: shape}
	}
	whole := sync.OnceValue(func() Workload {
		w, err := FromTrace(name, traces[name], MatrixEngine().BlockSize, 0)
		if err != nil {
			panic(fmt.Sprintf("routesim: a valid trace gives no workload: %v", err))
		}
		w.fit(MatrixEngine())
		w.Workers = matrixWorkers
		return w
	})
	return MatrixWorkload{Name: name, Notes: "sessions of Mooncake's trace", make: func(seed uint64) Workload {
		return whole().draw(seed, requests)
	}}
}

// draw keeps all requests of randomly chosen sessions, up to the number of requests. An excerpt of the same length
// would cut most sessions.
func (w Workload) draw(seed uint64, requests int) Workload {
	st := w.Stages[0]
	turns := map[uint64]int{}
	var order []uint64
	for _, a := range st.Arrivals {
		if turns[a.Session]++; turns[a.Session] == 1 {
			order = append(order, a.Session)
		}
	}
	rng := rand.New(rand.NewPCG(seed, 0x64726177))
	rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	drawn, n := map[uint64]bool{}, 0
	for _, session := range order {
		if n >= requests {
			break
		}
		drawn[session] = true
		n += turns[session]
	}
	st.Arrivals = slices.DeleteFunc(slices.Clone(st.Arrivals), func(a Arrival) bool { return !drawn[a.Session] })
	w.Stages = []Stage{st}
	st.Rate = float64(len(st.Arrivals)) / max(1e-3, w.Duration())
	w.Stages[0] = st
	return w
}

// Run runs all cells, several at a time.
func (m *Matrix) Run(ctx context.Context) ([]Cell, error) {
	var cells []Cell
	var of []*MatrixWorkload
	for i := range m.Workloads {
		for _, host := range m.Hosts {
			for _, load := range m.Loads {
				cells = append(cells, Cell{Workload: m.Workloads[i].Name, Load: load, Host: host})
				of = append(of, &m.Workloads[i])
			}
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	var lock sync.Mutex
	next, done := 0, 0
	for range runtime.GOMAXPROCS(0) {
		running.Go(func() {
			for {
				lock.Lock()
				i := next
				next++
				lock.Unlock()
				if i >= len(cells) || ctx.Err() != nil {
					return
				}
				if err := m.cell(ctx, of[i], &cells[i]); err != nil {
					cancel(err)
					return
				}
				lock.Lock()
				done++
				n := done
				lock.Unlock()
				if m.Progress != nil {
					m.Progress(n, len(cells))
				}
			}
		})
	}
	running.Wait()
	return cells, context.Cause(ctx)
}

// cell runs all arms with all seeds.
func (m *Matrix) cell(ctx context.Context, of *MatrixWorkload, c *Cell) error {
	figures := make([][]Figures, len(m.Arms))
	for seed := uint64(1); seed <= uint64(m.Seeds); seed++ {
		w := of.make(seed)
		rate := c.Load * w.SaturatingRate(w.Workers)
		if w = of.at(seed, rate); seed == 1 {
			c.Rate = rate
		}
		w.Engine.Host = int(c.Host * float64(w.Engine.Capacity))
		for i, arm := range m.Arms {
			run, err := Simulate(ctx, Config{Workload: w, Arm: arm, Routers: 1, Workers: w.Workers, Seed: seed,
				EventLag: 1e-3, Routing: m.Routing})
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.Workload, arm, err)
			}
			figures[i] = append(figures[i], run.Total)
		}
	}
	for i, arm := range m.Arms {
		list := figures[i]
		c.Arms = append(c.Arms, CellArm{arm, median(list, func(f *Figures) float64 { return f.HitRate }),
			1000 * median(list, func(f *Figures) float64 { return f.TTFTMean }),
			1000 * median(list, func(f *Figures) float64 { return f.TTFTRepeats }),
			1000 * median(list, func(f *Figures) float64 { return f.TTFTP50 }),
			1000 * median(list, func(f *Figures) float64 { return f.TTFTP99 })})
	}
	c.judge(m.Subject)
	return nil
}

// The targets of the subject: TTFT at most these multiples of the best rival's, and reuse at least the reuse of sticky
// sessions minus this share. Oracles are not rivals.
const (
	targetMean  = 1.02
	targetP99   = 1.05
	targetReuse = 0.01

	// The mean of requests with a real prefix is at most this multiple of the mean of the policy dynamo with default
	// weights.
	targetDefault = 0.75
	defaultArm    = Arm("dynamo-1-1")
)

// judge lists the missed targets of the subject.
func (c *Cell) judge(subject Arm) {
	i := slices.IndexFunc(c.Arms, func(a CellArm) bool { return a.Arm == subject })
	if i < 0 {
		return
	}
	own := c.Arms[i]
	mean, p99 := CellArm{TTFTMean: math.Inf(1)}, CellArm{TTFTP99: math.Inf(1)}
	for _, a := range c.Arms {
		if a.Arm == subject || a.Arm == ArmOracle || a.Arm == ArmOracleGreedy {
			continue
		}
		if a.TTFTMean < mean.TTFTMean {
			mean = a
		}
		if a.TTFTP99 < p99.TTFTP99 {
			p99 = a
		}
		if a.Arm == ArmSticky && own.Reuse < a.Reuse-targetReuse {
			c.Missed = append(c.Missed, fmt.Sprintf("reuse %.1f%%: %s has %.1f%%", 100*own.Reuse, a.Arm, 100*a.Reuse))
		}
		if a.Arm == defaultArm && own.TTFTRepeats > targetDefault*a.TTFTRepeats {
			c.Missed = append(c.Missed, fmt.Sprintf("mean with a prefix %.0f ms is less than 25%% below %s with %.0f ms",
				own.TTFTRepeats, a.Arm, a.TTFTRepeats))
		}
	}
	if own.TTFTMean > targetMean*mean.TTFTMean {
		c.Missed = append(c.Missed, fmt.Sprintf("mean %.0f ms: %s has %.0f ms", own.TTFTMean, mean.Arm, mean.TTFTMean))
	}
	if own.TTFTP99 > targetP99*p99.TTFTP99 {
		c.Missed = append(c.Missed, fmt.Sprintf("p99 %.0f ms: %s has %.0f ms", own.TTFTP99, p99.Arm, p99.TTFTP99))
	}
}

// Markdown writes a table for every cell, and the missed targets.
func (m *Matrix) Markdown(w io.Writer, cells []Cell) error {
	var b strings.Builder
	missed := 0
	for i := range cells {
		c := &cells[i]
		of := slices.IndexFunc(m.Workloads, func(x MatrixWorkload) bool { return x.Name == c.Workload })
		fmt.Fprintf(&b, "## %s, load %v, ", c.Workload, c.Load)
		if c.Host > 0 {
			fmt.Fprintf(&b, "host tier of %v × the device\n\n", c.Host)
		} else {
			b.WriteString("no host tier\n\n")
		}
		fmt.Fprintf(&b, "%s; %.2f requests/s; medians of %d seeds.\n\n", m.Workloads[of].Notes, c.Rate, m.Seeds)
		b.WriteString("| arm | reuse | TTFT mean, ms | p50 | p99 |\n|---|---|---|---|---|\n")
		for _, a := range c.Arms {
			fmt.Fprintf(&b, "| %s | %.1f%% | %.0f | %.0f | %.0f |\n", a.Arm, 100*a.Reuse, a.TTFTMean, a.TTFTP50, a.TTFTP99)
		}
		b.WriteString("\n")
		for _, what := range c.Missed {
			fmt.Fprintf(&b, "- %s misses a target: %s\n", m.Subject, what)
		}
		if c.Missed != nil {
			missed++
			b.WriteString("\n")
		}
	}
	if m.Subject != "" {
		fmt.Fprintf(&b, "%s misses a target in %d of %d cells.\n", m.Subject, missed, len(cells))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
