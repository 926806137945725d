package funnel

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	span       = 10 * time.Second // of a bucket
	maxModels  = 64
	maxWorkers = 16 // named in one bucket for one cause
)

// other stands for workers that are not named, and models that are too many.
const other = "other"

type lostKey struct {
	step  api.FunnelStep
	cause api.FunnelCause
}

// workerTier is who lost something, and from which tier.
type workerTier struct {
	worker events.WorkerID
	tier   events.Tier
}

type lostBy struct {
	workerTier
	tokens uint64
	ages   float64 // microseconds, times tokens
}

// bucket is what was asked in one span of time. Its sums are lists, for they are few, and a map takes many times their
// memory: there are buckets for an hour of each model.
type bucket struct {
	from                                int64 // Unix time in spans
	requests, routed, reports           uint64
	asked, seen, held, selected, reused uint64
	reported                            uint64 // of selected: tokens of choices of which there is a report
	lost                                []lost
	decisions                           []decided
}

// lost are the tokens that a step has lost for one reason.
type lost struct {
	lostKey
	tokens uint64
	by     []lostBy // maxWorkers of them, and all others together
}

type decided struct {
	outcome string
	n       uint64
}

func (b *bucket) lose(l *loss) {
	k := lostKey{l.step, l.cause}
	of := slices.IndexFunc(b.lost, func(t lost) bool { return t.lostKey == k })
	if of < 0 {
		of = len(b.lost)
		b.lost = append(b.lost, lost{lostKey: k})
	}
	sum := &b.lost[of]
	sum.tokens += l.tokens
	if l.worker == "" {
		return
	}
	w := workerTier{l.worker, l.tier}
	find := func() int { return slices.IndexFunc(sum.by, func(by lostBy) bool { return by.workerTier == w }) }
	at := find()
	if at < 0 && len(sum.by) >= maxWorkers {
		w = workerTier{other, events.AllTiers}
		at = find()
	}
	if at < 0 {
		at = len(sum.by)
		sum.by = append(sum.by, lostBy{workerTier: w})
	}
	sum.by[at].tokens += l.tokens
	sum.by[at].ages += float64(l.age) * float64(l.tokens)
}

func (b *bucket) decide(outcome string) {
	for i := range b.decisions {
		if d := &b.decisions[i]; d.outcome == outcome {
			d.n++
			return
		}
	}
	b.decisions = append(b.decisions, decided{outcome, 1})
}

// Buckets are sums over time, by model. One goroutine at a time may use them.
type Buckets struct{ models map[string][]*bucket }

// at is the bucket of a moment, nil if it is too old, or there are too many models.
func (s *Buckets) at(model string, t time.Time) *bucket {
	from := t.UnixNano() / int64(span)
	list := s.models[model]
	if list == nil && len(s.models) >= maxModels {
		return nil
	}
	at, found := slices.BinarySearchFunc(list, from,
		func(b *bucket, from int64) int { return cmp.Compare(b.from, from) })
	if !found {
		if s.models == nil {
			s.models = map[string][]*bucket{}
		}
		b := &bucket{from: from}
		list = slices.Insert(list, at, b)
		if most := int(api.MaxFunnelSince/span) + 1; len(list) > most {
			if at == 0 {
				return nil
			}
			list = slices.Delete(list, 0, len(list)-most)
			at = slices.Index(list, b)
		}
		s.models[model] = list
	}
	return s.models[model][at]
}

// add counts a request. It is false if there is no room for its model.
func (s *Buckets) add(r *Request, part *share) bool {
	b := s.at(r.Model, r.At)
	if b == nil {
		return false
	}
	b.requests++
	if r.Routed {
		b.routed++
		b.decide(r.outcome())
	}
	b.asked += part.asked
	b.seen += part.seen
	b.held += part.held
	b.selected += part.selected
	for i := range part.lost {
		b.lose(&part.lost[i])
	}
	return true
}

// funnel sums up the buckets of a model since some moment.
func (s *Buckets) funnel(model string, since, now time.Time) *api.Funnel {
	f := &api.Funnel{Model: model, From: time.Unix(0, since.UnixNano()/int64(span)*int64(span)), To: now,
		Steps: []api.FunnelTokens{}, Decisions: map[string]uint64{}, Buckets: []api.FunnelBucket{}}
	for _, step := range steps {
		f.Steps = append(f.Steps, api.FunnelTokens{Step: step, Lost: []api.FunnelLoss{}})
	}
	type key struct {
		lostKey
		workerTier
	}
	workers := map[key]lostBy{}
	for _, b := range s.models[model] {
		if b.from < since.UnixNano()/int64(span) {
			continue
		}
		f.Requests += b.requests
		f.Routed += b.routed
		f.Reported += b.reports
		out := api.FunnelBucket{From: time.Unix(0, b.from*int64(span)).UTC(), Seconds: uint32(span / time.Second),
			Requests: b.requests, Asked: b.asked, Seen: b.seen, Held: b.held, Selected: b.selected, Reused: b.reused,
			Lost: map[api.FunnelCause]uint64{}}
		for i, n := range []uint64{b.asked, b.seen, b.held, b.selected, b.reused} {
			f.Steps[i].Tokens += n
		}
		lose := func(k lostKey, n uint64) {
			if n == 0 {
				return
			}
			out.Lost[k.cause] += n
			step := &f.Steps[slices.Index(steps, k.step)]
			at := slices.IndexFunc(step.Lost, func(l api.FunnelLoss) bool { return l.Cause == k.cause })
			if at < 0 {
				at = len(step.Lost)
				step.Lost = append(step.Lost, api.FunnelLoss{Cause: k.cause})
			}
			step.Lost[at].Tokens += n
		}
		for _, l := range b.lost {
			lose(l.lostKey, l.tokens)
			for _, by := range l.by {
				k := key{l.lostKey, by.workerTier}
				sum := workers[k]
				workers[k] = lostBy{by.workerTier, sum.tokens + by.tokens, sum.ages + by.ages}
			}
		}
		lose(lostKey{api.StepReused, api.CauseNotReported}, b.selected-b.reported)
		for _, d := range b.decisions {
			f.Decisions[d.outcome] += d.n
		}
		f.Buckets = append(f.Buckets, out)
	}
	for k, by := range workers {
		step := &f.Steps[slices.Index(steps, k.step)]
		l := &step.Lost[slices.IndexFunc(step.Lost, func(l api.FunnelLoss) bool { return l.Cause == k.cause })]
		w := api.FunnelWorker{Worker: k.worker, Tokens: by.tokens, AgeMS: uint64(by.ages / float64(by.tokens) / 1000)}
		if k.tier != events.AllTiers {
			w.Tier = k.tier.String()
		}
		l.Workers = append(l.Workers, w)
	}
	finish(f)
	return f
}

var steps = []api.FunnelStep{api.StepAsked, api.StepSeen, api.StepHeld, api.StepSelected, api.StepReused}

// finish sorts, reckons shares and leaves out what is beyond the bound of workers.
func finish(f *api.Funnel) {
	asked := float64(max(1, f.Steps[0].Tokens))
	for i := range f.Steps {
		step := &f.Steps[i]
		step.Share = float64(step.Tokens) / asked
		for j := range step.Lost {
			l := &step.Lost[j]
			l.Share = float64(l.Tokens) / asked
			slices.SortFunc(l.Workers, func(a, b api.FunnelWorker) int {
				return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Tier, b.Tier))
			})
			if len(l.Workers) > maxWorkers {
				rest := api.FunnelWorker{Worker: other}
				for _, w := range l.Workers[maxWorkers-1:] {
					rest = joinWorkers(rest, w)
				}
				l.Workers = append(l.Workers[:maxWorkers-1], rest)
			}
		}
		slices.SortFunc(step.Lost, func(a, b api.FunnelLoss) int {
			return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Cause, b.Cause))
		})
	}
}

// joinWorkers adds up; names are the first's.
func joinWorkers(a, b api.FunnelWorker) api.FunnelWorker {
	all := a.Tokens + b.Tokens
	a.AgeMS = uint64((float64(a.AgeMS)*float64(a.Tokens) + float64(b.AgeMS)*float64(b.Tokens)) / float64(max(1, all)))
	a.Tokens = all
	return a
}

// Merge adds a node's part to that of others.
func Merge(f, part *api.Funnel) {
	if part.From.Before(f.From) {
		f.From = part.From
	}
	if part.To.After(f.To) {
		f.To = part.To
	}
	f.Requests, f.Routed, f.Reported = f.Requests+part.Requests, f.Routed+part.Routed, f.Reported+part.Reported
	for i := range min(len(f.Steps), len(part.Steps)) {
		to, from := &f.Steps[i], &part.Steps[i]
		to.Tokens += from.Tokens
		for _, l := range from.Lost {
			at := slices.IndexFunc(to.Lost, func(x api.FunnelLoss) bool { return x.Cause == l.Cause })
			if at < 0 {
				to.Lost = append(to.Lost, l)
				continue
			}
			sum := &to.Lost[at]
			sum.Tokens += l.Tokens
			for _, w := range l.Workers {
				same := func(x api.FunnelWorker) bool { return x.Worker == w.Worker && x.Tier == w.Tier }
				if i := slices.IndexFunc(sum.Workers, same); i >= 0 {
					sum.Workers[i] = joinWorkers(sum.Workers[i], w)
				} else {
					sum.Workers = append(sum.Workers, w)
				}
			}
		}
	}
	for outcome, n := range part.Decisions {
		f.Decisions[outcome] += n
	}
	for _, b := range part.Buckets {
		at, found := slices.BinarySearchFunc(f.Buckets, b,
			func(a, b api.FunnelBucket) int { return a.From.Compare(b.From) })
		if !found {
			b.Lost = maps.Clone(b.Lost)
			f.Buckets = slices.Insert(f.Buckets, at, b)
			continue
		}
		to := &f.Buckets[at]
		to.Requests += b.Requests
		to.Asked, to.Seen, to.Held = to.Asked+b.Asked, to.Seen+b.Seen, to.Held+b.Held
		to.Selected, to.Reused = to.Selected+b.Selected, to.Reused+b.Reused
		for cause, n := range b.Lost {
			if to.Lost == nil {
				to.Lost = map[api.FunnelCause]uint64{}
			}
			to.Lost[cause] += n
		}
	}
	f.Nodes = append(f.Nodes, part.Nodes...)
	slices.SortFunc(f.Nodes, func(a, b api.FunnelNode) int { return cmp.Compare(a.Node, b.Node) })
	f.Missing = append(f.Missing, part.Missing...)
	finish(f)
}
