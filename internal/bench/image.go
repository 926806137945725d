package bench

import (
	"runtime"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// stepBlocks is how much of an image is taken in one step, between which a writer applies events.
const stepBlocks = 8192

// memorySink keeps an image. An index gives a sink slices that nobody else has; so there is nothing to copy.
type memorySink struct {
	runs  []events.Run
	ranks []events.RankImage
	bytes int64
}

func (m *memorySink) Run(run *events.Run) error {
	m.runs = append(m.runs, *run)
	m.bytes += 16 + 16*int64(len(run.Locals))
	for i := range run.Holdings {
		h := &run.Holdings[i]
		m.bytes += 8 + 8*int64(len(h.Bits)) + 8*int64(len(h.Copies)) + 12*int64(len(h.Names)) + 16*int64(len(h.Also))
	}
	return nil
}

func (m *memorySink) Rank(_ int, image *events.RankImage) error {
	m.ranks = append(m.ranks, *image)
	m.bytes += 24 * int64(len(image.Remembered))
	return nil
}

func (b *run) snapshot() error {
	b.o.Writers = 1
	f := b.fleet()
	b.applyAll(f, 0, b.c.Len())
	x := f.shards[0]
	runtime.GC()

	im := &Image{StepBlocks: stepBlocks}
	b.report.Image = im
	sink := &memorySink{}
	start := time.Now()
	if _, err := x.StartExport(f.ids).Step(1<<60, sink); err != nil {
		return err
	}
	im.Export = ms(time.Since(start))
	for _, n := range x.Stats().Holdings {
		b.report.Holdings += n
	}
	im.Runs, im.BytesPerHolding = len(sink.runs), float64(sink.bytes)/float64(max(1, b.report.Holdings))

	longest := time.Duration(0)
	timed := func(f func()) {
		start := time.Now()
		f()
		longest = max(longest, time.Since(start))
	}
	var e *radix.Export
	timed(func() { e = x.StartExport(f.ids) })
	again := &memorySink{}
	for done := false; !done && b.ctx.Err() == nil; {
		var err error
		timed(func() { done, err = e.Step(stepBlocks, again) })
		if err != nil {
			return err
		}
	}
	e.Close()
	again = nil
	im.LongestStep = ms(longest)

	runtime.GC()
	y := radix.New(b.o.Index)
	var ids []radix.RankID
	for range f.ids {
		ids = append(ids, y.AddRank(0))
	}
	start = time.Now()
	imp := y.StartImport(ids)
	blocks := 0
	for i := range sink.runs {
		blocks += len(sink.runs[i].Locals)
	}
	imp.Expect(blocks)
	for i := range sink.runs {
		if err := imp.Run(&sink.runs[i]); err != nil {
			return err
		}
	}
	for i := range sink.ranks {
		if err := imp.Rank(i, &sink.ranks[i]); err != nil {
			return err
		}
	}
	if err := imp.Finish(); err != nil {
		return err
	}
	im.Import = ms(time.Since(start))
	im.Same = true
	for i := range ids {
		im.Same = im.Same && x.Checksum(f.ids[i]) == y.Checksum(ids[i])
	}

	var clears []time.Duration
	for _, id := range f.ids {
		start := time.Now()
		x.Apply(id, 0, []events.Event{{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonOperator}})
		clears = append(clears, time.Since(start))
	}
	slices.Sort(clears)
	im.ClearP50, im.ClearMax = ms(clears[len(clears)/2]), ms(clears[len(clears)-1])
	return b.ctx.Err()
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
