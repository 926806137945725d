package bench

import (
	"runtime"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// stepBlocks is the number of blocks in a step of an image. The writer applies events between steps.
const stepBlocks = 8192

// memorySink stores an image without a copy. The index does not reuse the slices that a sink receives.
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
	m.bytes += 24 * int64(len(image.Tombstones))
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
	im.LongestStep = ms(longest)
	checksums := make([]uint64, len(f.ids))
	for i, id := range f.ids {
		checksums[i] = x.Checksum(id)
	}
	b.clears(f, im)

	again, x, f.shards = nil, nil, nil // as after a restart, the memory of the index before is free again
	runtime.GC()
	y := radix.New(b.o.Index)
	var ids []radix.RankID
	for range f.ids {
		ids = append(ids, y.AddRank(0, 16))
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
	for i, id := range ids {
		im.Same = im.Same && y.Checksum(id) == checksums[i]
	}
	return b.ctx.Err()
}

// clears clears all ranks in sequence.
func (b *run) clears(f *fleet, im *Image) {
	var took []time.Duration
	for _, id := range f.ids {
		start := time.Now()
		f.shards[0].Apply(id, 0, []events.Event{{Kind: events.Cleared, Tier: events.AllTiers,
			Reason: events.ReasonOperator}})
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	im.ClearP50, im.ClearMax = ms(took[len(took)/2]), ms(took[len(took)-1])
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
