package funnel

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	span       = 10 * time.Second // width of a bucket
	fine       = 60               // the newest spans, each with a separate bucket
	wide       = 6                // spans in an older bucket
	hour       = int64(api.MaxFunnelSince / span)
	maxModels  = 64
	maxWorkers = 16 // workers with a name, in one bucket for one cause
)

// The label for workers without a name, and for models above the limit.
const other = "other"

type lostKey struct {
	step  api.FunnelStep
	cause api.FunnelCause
}

// workerTier is the worker that lost tokens, and the tier of the loss.
type workerTier struct {
	worker events.WorkerID
	tier   events.Tier
}

type lostBy struct {
	workerTier
	tokens uint64
	ages   float64 // microseconds, weighted by tokens
}

// bucket contains the sums of a time span. The sums are lists, because a map with few entries would use many times the
// memory: every model has buckets for an hour.
type bucket struct {
	from, spans                         int64 // Unix time in spans, and the width: 1, or wide from a full minute on
	requests, routed, reports           uint64
	asked, seen, held, selected, reused uint64
	reported                            uint64 // part of selected: tokens of choices with a report
	lost                                []lost
	decisions                           []decided

	tenants map[*tenants.Slot]*tenants.Use // nil: none
}

// lost contains the tokens lost in a step for one reason.
type lost struct {
	lostKey
	tokens uint64
	by     []lostBy // at most maxWorkers workers, and an entry for the rest
}

type decided struct {
	outcome string
	n       uint64
}

func (b *bucket) lose(l *loss) {
	sum := b.lostFor(lostKey{l.step, l.cause})
	sum.tokens += l.tokens
	if l.worker != "" {
		sum.add(lostBy{workerTier{l.worker, l.tier}, l.tokens, float64(l.age) * float64(l.tokens)})
	}
}

// lostFor returns the loss for a reason. The pointer is valid until the next call.
func (b *bucket) lostFor(k lostKey) *lost {
	at := slices.IndexFunc(b.lost, func(t lost) bool { return t.lostKey == k })
	if at < 0 {
		at = len(b.lost)
		b.lost = append(b.lost, lost{lostKey: k})
	}
	return &b.lost[at]
}

func (l *lost) add(by lostBy) {
	find := func() int {
		return slices.IndexFunc(l.by, func(x lostBy) bool { return x.workerTier == by.workerTier })
	}
	at := find()
	if at < 0 && len(l.by) >= maxWorkers {
		by.workerTier = workerTier{other, events.AllTiers}
		at = find()
	}
	if at < 0 {
		l.by = append(l.by, by)
		return
	}
	l.by[at].tokens += by.tokens
	l.by[at].ages += by.ages
}

func (b *bucket) decide(outcome string, n uint64) {
	for i := range b.decisions {
		if d := &b.decisions[i]; d.outcome == outcome {
			d.n += n
			return
		}
	}
	b.decisions = append(b.decisions, decided{outcome, n})
}

// join adds the sums of another bucket.
func (b *bucket) join(o *bucket) {
	b.requests, b.routed, b.reports = b.requests+o.requests, b.routed+o.routed, b.reports+o.reports
	b.asked, b.seen, b.held = b.asked+o.asked, b.seen+o.seen, b.held+o.held
	b.selected, b.reused, b.reported = b.selected+o.selected, b.reused+o.reused, b.reported+o.reported
	for i := range o.lost {
		sum := b.lostFor(o.lost[i].lostKey)
		sum.tokens += o.lost[i].tokens
		for _, by := range o.lost[i].by {
			sum.add(by)
		}
	}
	for _, d := range o.decisions {
		b.decide(d.outcome, d.n)
	}
	for slot, use := range o.tenants {
		b.useOf(slot).Add(use)
	}
}

// Buckets are sums over time, by model: of spans, and of full minutes for times older than ten minutes, as in a
// round-robin database. Only one goroutine at a time may use Buckets.
type Buckets struct{ models map[string][]*bucket }

// search finds the bucket of a time in spans, or the index for a new bucket.
func search(list []*bucket, moment int64) (at int, found bool) {
	return slices.BinarySearchFunc(list, moment, func(b *bucket, moment int64) int {
		if b.from <= moment && moment < b.from+b.spans {
			return 0
		}
		return cmp.Compare(b.from, moment)
	})
}

// bucketAt returns the bucket of a time. It returns nil if the time is too old, or if there are too many models.
func (s *Buckets) bucketAt(model string, t time.Time) *bucket {
	moment := t.UnixNano() / int64(span)
	list := s.models[model]
	if list == nil && len(s.models) >= maxModels {
		return nil
	}
	at, found := search(list, moment)
	if !found {
		if s.models == nil {
			s.models = map[string][]*bucket{}
		}
		list = consolidate(slices.Insert(list, at, &bucket{from: moment, spans: 1}))
		s.models[model] = list
		if at, found = search(list, moment); !found {
			return nil
		}
	}
	return list[at]
}

// consolidate joins buckets that are older than the fine range, and deletes buckets older than an hour.
func consolidate(list []*bucket) []*bucket {
	newest := list[len(list)-1].from
	minutes := (newest - fine) / wide * wide // the end of the joined range
	kept := list[:0]
	for _, b := range list {
		if b.from+b.spans <= newest-hour {
			continue
		}
		if b.spans == 1 && b.from < minutes {
			from := b.from / wide * wide
			if last := len(kept) - 1; last < 0 || kept[last].from != from || kept[last].spans != wide {
				kept = append(kept, &bucket{from: from, spans: wide})
			}
			kept[len(kept)-1].join(b)
			continue
		}
		kept = append(kept, b)
	}
	clear(list[len(kept):])
	return kept
}

// add counts a request. It returns false at the limit of models.
func (s *Buckets) add(r *Request, part *share) bool {
	b := s.bucketAt(r.Model, r.At)
	if b == nil {
		return false
	}
	b.requests++
	if r.Routed {
		b.routed++
		b.decide(r.outcome(), 1)
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

// firstSpan returns the first span of a window.
func firstSpan(since, now time.Time) int64 {
	first := since.UnixNano() / int64(span)
	if first < now.UnixNano()/int64(span)-fine {
		first -= first % wide // all nodes begin with a full minute, independent of the joins
	}
	return first
}

// funnel sums the buckets of a model from a span on.
func (s *Buckets) funnel(model string, first int64, now time.Time) *api.Funnel {
	f := &api.Funnel{Model: model, From: time.Unix(0, first*int64(span)), To: now,
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
		if b.from < first {
			continue
		}
		f.Requests += b.requests
		f.Routed += b.routed
		f.Reported += b.reports
		out := api.FunnelBucket{From: time.Unix(0, b.from*int64(span)).UTC(),
			Seconds: uint32(b.spans * int64(span/time.Second)), Requests: b.requests,
			Reported: b.reports, Asked: b.asked, Seen: b.seen, Held: b.held, Selected: b.selected, Reused: b.reused,
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

// finish sorts the funnel, computes the shares and removes workers above the limit.
func finish(f *api.Funnel) {
	asked := float64(max(1, f.Steps[0].Tokens))
	for i := range f.Steps {
		step := &f.Steps[i]
		step.NotReported = step.Step == api.StepReused && f.Reported == 0
		if step.Share = nil; !step.NotReported {
			share := float64(step.Tokens) / asked
			step.Share = &share
		}
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

// joinWorkers adds two entries. Names come from the first.
func joinWorkers(a, b api.FunnelWorker) api.FunnelWorker {
	all := a.Tokens + b.Tokens
	a.AgeMS = uint64((float64(a.AgeMS)*float64(a.Tokens) + float64(b.AgeMS)*float64(b.Tokens)) / float64(max(1, all)))
	a.Tokens = all
	return a
}

// Merge adds the part of another node.
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
	f.Buckets = mergeBuckets(f.Buckets, part.Buckets)
	f.Nodes = append(f.Nodes, part.Nodes...)
	slices.SortFunc(f.Nodes, func(a, b api.FunnelNode) int { return cmp.Compare(a.Node, b.Node) })
	f.Missing = append(f.Missing, part.Missing...)
	finish(f)
}

// mergeBuckets merges two lists by time. A full minute absorbs the spans of the same minute.
func mergeBuckets(a, b []api.FunnelBucket) []api.FunnelBucket {
	all := append(slices.Clone(a), b...)
	slices.SortStableFunc(all, func(x, y api.FunnelBucket) int {
		return cmp.Or(x.From.Compare(y.From), cmp.Compare(y.Seconds, x.Seconds)) // the wider bucket first
	})
	merged := all[:0]
	for _, x := range all {
		last := len(merged) - 1
		if last < 0 || !x.From.Before(merged[last].From.Add(time.Duration(merged[last].Seconds)*time.Second)) {
			x.Lost = maps.Clone(x.Lost)
			merged = append(merged, x)
			continue
		}
		to := &merged[last]
		to.Requests, to.Reported = to.Requests+x.Requests, to.Reported+x.Reported
		to.Asked, to.Seen, to.Held = to.Asked+x.Asked, to.Seen+x.Seen, to.Held+x.Held
		to.Selected, to.Reused = to.Selected+x.Selected, to.Reused+x.Reused
		for cause, n := range x.Lost {
			if to.Lost == nil {
				to.Lost = map[api.FunnelCause]uint64{}
			}
			to.Lost[cause] += n
		}
	}
	return merged
}
