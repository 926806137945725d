package recording

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// processorTime is the time of this process on processors.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRecord measures a request of 8,000 tokens with end and report. The NATS server with the stream runs in this
// process. It reports the processor time of the whole process, the server included, as the share of a core at 10,000
// requests a second, and the bytes of a request in the stream. Off is the same loop without a recorder.
func BenchmarkRecord(b *testing.B) {
	ns := natskit.Namespace(b, 1)
	stream, err := ns.EnsureRecording(b.Context(), jetstream.RecordingConfig{MaxBytes: 1 << 30})
	if err != nil {
		b.Fatal(err)
	}
	tokens := countTo(8000)
	o := observed(b, "", tokens, events.Space{})
	ids := make([]string, 1<<10)
	for i := range ids {
		ids[i] = fmt.Sprintf("cmpl-%032x", i)
	}
	for _, on := range []bool{false, true} {
		b.Run(map[bool]string{false: "off", true: "on"}[on], func(b *testing.B) {
			r := newTest(b, stream, 512)
			ctx, cancel := context.WithCancel(b.Context())
			done := make(chan struct{})
			go func() { r.Run(ctx); close(done) }()
			before, err := stream.Info(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			began := processorTime(b)
			n := 0
			for b.Loop() {
				n++
				x := *o // as the node makes it for each request
				x.ID = ids[n%len(ids)]
				x.Time = time.Now().UnixMilli()
				if !on {
					continue
				}
				r.Request(&x)
				r.End(x.ID, End{Time: x.Time, Freed: true, Life: 900, FirstToken: 80, Blocks: 20})
				r.Report(x.ID, Report{Time: x.Time, Cached: 16})
				for r.Counts().Waiting > queueBytes/2 {
					time.Sleep(time.Millisecond)
				}
			}
			cancel()
			<-done
			used := processorTime(b) - began
			after, err := stream.Info(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			if c := r.Counts(); c.Dropped > 0 {
				b.Fatalf("%+v", c)
			}
			b.ReportMetric(100*10_000*used.Seconds()/float64(n), "%core@10k/s")
			b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(n), "B/request")
		})
	}
}
