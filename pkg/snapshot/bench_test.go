package snapshot

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// nowhere is a Sink that discards the image.
type nowhere struct{}

func (nowhere) Run(*events.Run) error             { return nil }
func (nowhere) Rank(int, *events.RankImage) error { return nil }

func benchImages(b *testing.B, bench func(b *testing.B, im *image)) {
	for _, c := range []struct {
		name string
		make func() *synth
	}{
		{"conversations", func() *synth { return conversations(64, 55_000) }},
		{"shared by all", func() *synth { return sharedByAll(256, 101, 310) }},
		{"holey", func() *synth { return holey(64, 90_000) }},
		{"private", func() *synth { return private(64, 101, 310) }},
		{"short", func() *synth { return shortRuns(64, 10_000) }},
	} {
		b.Run(c.name, func(b *testing.B) { bench(b, c.make().im) })
	}
}

// shortRuns returns an image with runs of four blocks.
func shortRuns(workers, each int) *synth {
	s := newSynth(workers)
	for range each / 4 {
		for w := range workers {
			addHolding(s.run(4, nil), w, 4)
		}
	}
	return s
}

func report(b *testing.B, m *Manifest) {
	b.SetBytes(int64(m.Counts.Bytes))
	b.ReportMetric(float64(m.Counts.Bytes)/float64(m.Counts.Holdings), "B/holding")
	b.ReportMetric(float64(m.Counts.Holdings)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mholdings/s")
	b.ReportMetric(float64(m.Counts.Runs), "runs")
}

// BenchmarkWrite measures a first snapshot, without the bucket.
func BenchmarkWrite(b *testing.B) {
	benchImages(b, func(b *testing.B, im *image) { benchWrite(b, im, nil, &WritePlan{Partition: 3, Generation: 1}) })
}

// BenchmarkWriteUnchanged measures a snapshot of an unchanged image.
func BenchmarkWriteUnchanged(b *testing.B) {
	benchImages(b, func(b *testing.B, im *image) {
		s := newStore()
		s.write(b, im, 1)
		plan, err := PlanWrite(s.bucket(), s.log, 1)
		if err != nil {
			b.Fatal(err)
		}
		benchWrite(b, im, s.index, plan)
	})
}

func benchWrite(b *testing.B, im *image, index *RunIndex, plan *WritePlan) {
	b.ReportAllocs()
	var m *Manifest
	for b.Loop() {
		w, err := NewWriter(config(im, 1), plan, index, func(string, []byte) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		im.writeTo(b, w)
		if m, _, err = w.Close(); err != nil {
			b.Fatal(err)
		}
	}
	report(b, m)
}

// BenchmarkRead measures a restore, without the fetches and the index.
func BenchmarkRead(b *testing.B) {
	benchImages(b, func(b *testing.B, im *image) {
		s := newStore()
		s.write(b, im, 1)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Read(s.m, s.fetch, func([]RankState) (Sink, error) { return nowhere{}, nil }); err != nil {
				b.Fatal(err)
			}
		}
		report(b, s.m)
	})
}
