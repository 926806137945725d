package whatif

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/tools/routesim"
)

// Figures are of the second half of the requests. Times to the first token are in seconds, of the requests with a
// recorded time; 0: unknown.
type Figures struct {
	Workers        int     `json:"workers"`
	Requests       int     `json:"requests"`
	HitRate        float64 `json:"hit_rate"` // the share of reused prompt tokens
	TTFTMean       float64 `json:"ttft_mean_s"`
	TTFTP50        float64 `json:"ttft_p50_s"`
	TTFTP99        float64 `json:"ttft_p99_s"`
	RequestsPerS   float64 `json:"requests_per_s"` // from the first arrival to the last end; 0: unknown
	ComputedTokens int     `json:"computed_prompt_tokens"`
	WorkerHours    float64 `json:"worker_hours"` // of the recorded time
}

// Errors are the differences between a replay and the measurement.
type Errors struct {
	HitRate  float64  `json:"hit_rate"`            // a difference of shares
	TTFTMean *float64 `json:"ttft_mean,omitempty"` // relative; nil: unknown
	TTFTP50  *float64 `json:"ttft_p50,omitempty"`
	TTFTP99  *float64 `json:"ttft_p99,omitempty"`
}

// Report is the result of an analysis.
type Report struct {
	Model    string    `json:"model"`
	From     time.Time `json:"from"` // of the replayed requests
	To       time.Time `json:"to"`
	Measured Figures   `json:"measured"`

	// History has the recorded choices, Baseline the choices of the recorded policy on today's workers.
	History       Figures `json:"history"`
	HistoryError  Errors  `json:"history_error"`
	Baseline      Figures `json:"baseline"`
	BaselineError Errors  `json:"baseline_error"`

	// Changed is the replay with the changes. Expected has the measured hit rate plus the difference between Changed and
	// Baseline, and the measured times multiplied by Changed / Baseline. nil without changes.
	Changes  Changes  `json:"changes"`
	Changed  *Figures `json:"changed,omitempty"`
	Expected *Figures `json:"expected,omitempty"`

	Policy        routesim.Arm    `json:"policy"` // of Baseline
	ChangedPolicy routesim.Arm    `json:"changed_policy"`
	Workers       []Worker        `json:"workers"` // today's
	ChangedFleet  []Worker        `json:"changed_workers"`
	Engine        routesim.Engine `json:"engine"` // with the fitted constants
	Span          int             `json:"tokens_of_a_name"`
	Counts        Counts          `json:"counts"`
	Notes         []string        `json:"notes"` // for people: what is unknown
}

// reportedShare is the least share of requests with a report of the engine for figures from reports alone.
const reportedShare = 0.5

// counts returns the function that selects the requests for the hit rate: if most requests have reports of the engine,
// only these.
func (r *replays) counts() func(*request) bool {
	n := 0
	for _, x := range r.list[r.measured:] {
		if x.reported {
			n++
		}
	}
	only := float64(n) >= reportedShare*float64(len(r.list)-r.measured)
	return func(x *request) bool { return x.reported || !only }
}

// figures returns the figures of a replay.
func (r *replays) figures(out []outcome, workers int) Figures {
	begin := r.arrivals[r.measured].At
	return r.figuresOf(workers, func(i int) (reused int, ttft, end float64) {
		return out[i].reused, out[i].ttft, out[i].done - begin
	})
}

// measuredFigures returns the recorded figures.
func (r *replays) measuredFigures(workers int) Figures {
	begin, known := r.arrivals[r.measured].At, true
	f := r.figuresOf(workers, func(i int) (reused int, ttft, end float64) {
		x := r.list[i]
		known = known && x.life > 0
		return x.cached, float64(x.first) / 1000, r.arrivals[i].At - begin + float64(x.life)/1000
	})
	if !known {
		f.RequestsPerS = 0
	}
	return f
}

func (r *replays) figuresOf(workers int, of func(int) (reused int, ttft, end float64)) Figures {
	f := Figures{Workers: workers}
	counts, tokens, counted, reusedTokens := r.counts(), 0, 0, 0
	var times []float64
	last := 0.0
	for i := r.measured; i < len(r.list); i++ {
		x := r.list[i]
		reused, ttft, end := of(i)
		f.Requests++
		last = max(last, end)
		if tokens += x.tokens; counts(x) {
			counted, reusedTokens = counted+x.tokens, reusedTokens+reused
		}
		if x.first > 0 {
			times = append(times, ttft)
		}
	}
	f.HitRate = float64(reusedTokens) / float64(max(1, counted))
	f.ComputedTokens = int((1 - f.HitRate) * float64(tokens))
	f.RequestsPerS = float64(f.Requests) / max(1e-3, last)
	if len(times) >= leastLatency {
		f.TTFTMean, f.TTFTP50, f.TTFTP99 = mean(times), quantile(times, 0.5), quantile(times, 0.99)
	}
	span := r.arrivals[len(r.arrivals)-1].At - r.arrivals[r.measured].At
	f.WorkerHours = float64(workers) * span / 3600
	return f
}

// medians returns the median of each figure.
func medians(list []Figures) Figures {
	f := list[0]
	of := func(get func(*Figures) float64) float64 {
		var values []float64
		for i := range list {
			values = append(values, get(&list[i]))
		}
		slices.Sort(values)
		return (values[len(values)/2] + values[(len(values)-1)/2]) / 2
	}
	f.HitRate = of(func(x *Figures) float64 { return x.HitRate })
	f.TTFTMean = of(func(x *Figures) float64 { return x.TTFTMean })
	f.TTFTP50 = of(func(x *Figures) float64 { return x.TTFTP50 })
	f.TTFTP99 = of(func(x *Figures) float64 { return x.TTFTP99 })
	f.RequestsPerS = of(func(x *Figures) float64 { return x.RequestsPerS })
	f.ComputedTokens = int(of(func(x *Figures) float64 { return float64(x.ComputedTokens) }))
	return f
}

func errorOf(replay, measured *Figures) Errors {
	relative := func(a, b float64) *float64 {
		if b == 0 {
			return nil
		}
		x := a/b - 1
		return &x
	}
	return Errors{replay.HitRate - measured.HitRate, relative(replay.TTFTMean, measured.TTFTMean),
		relative(replay.TTFTP50, measured.TTFTP50), relative(replay.TTFTP99, measured.TTFTP99)}
}

// expected returns the measured figures with the effect between two replays: a difference of hit rates, a factor of
// times and throughput.
func expected(measured, baseline, changed *Figures) *Figures {
	f := *changed
	scale := func(m, b, c float64) float64 {
		if b == 0 {
			return 0
		}
		return m * c / b
	}
	f.HitRate = min(1, max(0, measured.HitRate+changed.HitRate-baseline.HitRate))
	f.TTFTMean = scale(measured.TTFTMean, baseline.TTFTMean, changed.TTFTMean)
	f.TTFTP50 = scale(measured.TTFTP50, baseline.TTFTP50, changed.TTFTP50)
	f.TTFTP99 = scale(measured.TTFTP99, baseline.TTFTP99, changed.TTFTP99)
	f.RequestsPerS = scale(measured.RequestsPerS, baseline.RequestsPerS, changed.RequestsPerS)
	if tokens := float64(changed.ComputedTokens) / max(1e-9, 1-changed.HitRate); changed.HitRate < 1 {
		f.ComputedTokens = int((1 - f.HitRate) * tokens)
	}
	return &f
}

// report returns the report without figures.
func (r *replays) report(today, changed *Fleet, policy, other routesim.Arm) *Report {
	first, last := r.list[0], r.list[len(r.list)-1]
	rep := &Report{Model: r.o.Input.model, From: first.since(), To: last.since(), Changes: r.o.Changes, Policy: policy,
		ChangedPolicy: other, Workers: today.Workers, ChangedFleet: changed.Workers, Span: first.span,
		Counts: r.o.Input.Counts, Engine: r.engine}
	shown := r.workload(0, 1, today).Engine
	rep.Engine.Capacity, rep.Engine.Host = shown.Capacity, shown.Host
	if !r.o.Changes.none() {
		rep.Changed = &Figures{}
	}
	r.notes(rep, today)
	return rep
}
