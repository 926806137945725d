package routesim

import (
	"math/rand/v2"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// conversation is a session of a generated workload.
type conversation struct {
	begin float64 // place in the run, from 0 to 1
	turns []turn
}

// turn is a request of a session.
type turn struct {
	pause  float64 // after the turn before, in shares of the run
	names  []events.BlockHash
	tokens int
	output int
}

// sessions describes a generated workload of conversations. Every number is the mean of a distribution unless noted.
type sessions struct {
	name         string
	prefixes     int     // system prompts; 0: none
	prefixTokens int     // of every system prompt, exact
	hot          float64 // share of the sessions with the first system prompt; other sessions are distributed evenly
	turns        float64 // geometric
	first, added int     // tokens of the first turn and of every further turn; exponential
	output       int     // exponential
	pause        float64 // between turns, in shares of the run; exponential
	churn        bool    // workers leave and join
}

// The generated workloads of a matrix. Toolagent and synthetic stand in for Mooncake's traces of the same names.
var generated = []sessions{
	{name: "toolagent", prefixes: 40, prefixTokens: 5632, hot: 0.15, turns: 1.6, first: 1500, added: 900, output: 180,
		pause: 0.02},
	{name: "synthetic", prefixes: 12, prefixTokens: 4096, turns: 3, first: 9000, added: 500, output: 150, pause: 0.05},
	{name: "agents", prefixes: 4, prefixTokens: 3072, turns: 18, first: 2500, added: 900, output: 120, pause: 0.012},
	{name: "single-turns", prefixes: 1, prefixTokens: 512, turns: 1, first: 3500, output: 250},
	{name: "hot-prefix", prefixes: 60, prefixTokens: 8192, hot: 0.6, turns: 1, first: 700, output: 200},
	{name: "churn", prefixes: 6, prefixTokens: 1024, turns: 5, first: 2500, added: 700, output: 200, pause: 0.06,
		churn: true},
}

// workload generates about so many requests.
func (x sessions) workload(seed uint64, requests int, e Engine) Workload {
	rng := rand.New(rand.NewPCG(seed, uint64(len(x.name))<<32|uint64(x.prefixTokens)))
	var list []conversation
	limit := e.Capacity / 3
	exp := func(mean int) int { return 1 + int(rng.ExpFloat64()*float64(mean)) }
	for n := 0; n < requests; {
		c := conversation{begin: rng.Float64()}
		id := mix(seed<<20 + uint64(len(list)) + 1)
		system := uint64(0)
		if x.prefixes > 0 && rng.Float64() >= x.hot {
			system = rng.Uint64N(uint64(x.prefixes))
		}
		tokens := x.prefixTokens + exp(x.first)
		for {
			t := turn{pause: rng.ExpFloat64() * x.pause, output: min(exp(x.output), 4*x.output), tokens: min(tokens, limit)}
			for b := range t.tokens / e.BlockSize {
				of := id
				if (b+1)*e.BlockSize <= x.prefixTokens {
					of = mix(seed<<20 ^ (system+1)<<48)
				}
				t.names = append(t.names, events.BlockHash(mix(of+uint64(b))|1))
			}
			c.turns = append(c.turns, t)
			n++
			if tokens += t.output + exp(x.added); tokens >= limit || rng.Float64() >= 1-1/x.turns {
				break
			}
		}
		list = append(list, c)
	}
	w := arrange(x.name, list, rng, e)
	if x.churn {
		end := w.Duration()
		w.Changes = []Change{{0.25 * end, matrixWorkers - 1, true}, {0.4 * end, 0, false}, {0.6 * end, 0, true},
			{0.8 * end, 1, false}}
	}
	return w
}

// arrange orders the turns of all sessions by time. A rate is set by [Workload.AtRate].
func arrange(name string, list []conversation, rng *rand.Rand, e Engine) Workload {
	st := Stage{Rate: 1}
	for i, c := range list {
		at := c.begin
		for j, t := range c.turns {
			if j > 0 {
				at += t.pause
			}
			st.Arrivals = append(st.Arrivals, Arrival{At: at, Prompt: &Prompt{Tokens: t.tokens, Names: t.names},
				Output: t.output, Session: uint64(i) + 1})
		}
	}
	slices.SortStableFunc(st.Arrivals, func(a, b Arrival) int {
		if a.At < b.At {
			return -1
		} else if a.At > b.At {
			return 1
		}
		return 0
	})
	// Conversations that begin near the end have later turns after the end, so the run ends where arrivals become rare.
	end := st.Arrivals[len(st.Arrivals)*19/20].At
	st.Arrivals = st.Arrivals[:len(st.Arrivals)*19/20]
	for i := range st.Arrivals {
		st.Arrivals[i].At *= float64(len(st.Arrivals)) / end
	}
	w := Workload{Name: name, Stages: []Stage{st}, Engine: e, Workers: matrixWorkers, PrefillLoadScale: 1}
	w.number()
	return w
}

// AtRate returns a workload of a single stage with another rate in requests per second. Prompts and their order stay.
// Changes of the fleet stay at their share of the run.
func (w Workload) AtRate(rate float64) Workload {
	st := w.Stages[0]
	st.Arrivals = slices.Clone(st.Arrivals)
	x := st.Rate / rate
	for i := range st.Arrivals {
		st.Arrivals[i].At *= x
	}
	st.Rate = rate
	w.Stages = []Stage{st}
	w.Changes = slices.Clone(w.Changes)
	for i := range w.Changes {
		w.Changes[i].At *= x
	}
	return w
}

// Duration is when the last request of the first stage comes, in seconds.
func (w *Workload) Duration() float64 {
	a := w.Stages[0].Arrivals
	return a[len(a)-1].At
}

// SaturatingRate estimates the requests per second that the fleet can serve with the reuse of a single cache of the
// fleet's memory. The estimate divides the GPU time of all requests by the average number of present workers.
func (w *Workload) SaturatingRate(workers int) float64 {
	e := &w.Engine
	b := Bound(w, workers)
	total, requests := 0.0, 0
	for _, st := range w.Stages {
		for _, a := range st.Arrivals {
			tokens := float64(a.Prompt.Tokens)
			own := tokens * (1 - b.LRU)
			total += own/e.Prefill + own*(tokens-own/2)*e.Attention
			total += float64(a.Output) * (e.StepPerRequest + tokens*e.StepPerToken)
			requests++
		}
	}
	speed := 0.0
	for i := range workers {
		x := w.present(i)
		if n := len(w.Speeds); n > 0 {
			x *= w.Speeds[i%n]
		}
		speed += x
	}
	return float64(requests) * speed / total
}

// present returns the share of the run in which a worker is present.
func (w *Workload) present(worker int) float64 {
	end, since, sum, first := w.Duration(), 0.0, 0.0, true
	up := true
	for _, c := range w.Changes {
		if c.Worker != worker {
			continue
		}
		if first {
			first, up = false, !c.Up // a worker with a join as the first change was absent before
		}
		if up {
			sum += c.At - since
		}
		up, since = c.Up, c.At
	}
	if up {
		sum += end - since
	}
	return sum / end
}

// fit sets the engine of a workload and removes requests that need more than half of the memory.
func (w *Workload) fit(e Engine) {
	w.Engine = e
	st := &w.Stages[0]
	st.Arrivals = slices.DeleteFunc(st.Arrivals, func(a Arrival) bool { return a.Prompt.Tokens+a.Output > e.Capacity/2 })
}

// SingleTurns keeps the first request of every session.
func (w *Workload) SingleTurns() {
	seen := map[uint64]bool{}
	for i := range w.Stages {
		w.Stages[i].Arrivals = slices.DeleteFunc(w.Stages[i].Arrivals, func(a Arrival) bool {
			again := a.Session != 0 && seen[a.Session]
			seen[a.Session] = true
			return again
		})
	}
}

// setOutput sets the length of all answers.
func (w *Workload) setOutput(tokens int) {
	for i := range w.Stages {
		for j := range w.Stages[i].Arrivals {
			w.Stages[i].Arrivals[j].Output = tokens
		}
	}
}
