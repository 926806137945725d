package server

import (
	"context"
	"io"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// recordingServer returns a server that only records, and the stream.
func recordingServer(tb testing.TB) (*Server, *jetstream.Recording) {
	tb.Helper()
	ns := natskit.Namespace(tb, 1)
	stream, err := ns.EnsureRecording(tb.Context(), jetstream.RecordingConfig{MaxBytes: 1 << 30})
	if err != nil {
		tb.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	s := &Server{Settings: Settings{ID: "n1", Recording: Recording{On: true, Span: 512}}, log: log}
	s.recorder, err = s.newRecorder(&store{recording: stream, secret: make([]byte, recording.SecretBytes)})
	if err != nil {
		tb.Fatal(err)
	}
	return s, stream
}

// choice is a routed request of 8,000 tokens.
func choice() *selection.Observed {
	return &selection.Observed{At: time.Now(), BlockSize: 16, Tokens: 8000, Sequence: make([]events.SeqHash, 500),
		Request: &api.SelectRequest{RequestID: "cmpl-0123456789abcdef0123456789abcdef", SessionID: "session",
			Query: api.Query{Model: "m"}},
		Out: &api.Selection{Worker: "w1", Rank: 1, Device: 3, Guessed: 5, Host: 2, Disk: 1, External: 4, L3: 6,
			Policy: "kvatlas", Candidates: 8, CachedTokens: 80, EffectivePrefillTokens: 7920, Booked: true, Complete: true},
		Chosen: &routing.Candidate{ActiveRequests: 7, ActivePrefillTokens: 8, ActiveBlocks: 9}}
}

// TestRecordChoice: a choice, a refused request and the ends of requests become records. Ends of other nodes' requests
// and of prefill workers do not.
func TestRecordChoice(t *testing.T) {
	t.Parallel()
	s, stream := recordingServer(t)
	s.recordChoice(choice())
	o := choice()
	o.Out, o.Chosen, o.Request.RequestID = nil, nil, "refused"
	s.recordChoice(o)
	id := choice().Request.RequestID
	for _, r := range []*load.Request{{ID: id}, {ID: id, Ended: true}, {ID: api.PrefillID(id), Own: true, Ended: true},
		{ID: id, Own: true, Ended: true, Freed: true, Life: 3 * time.Second, FirstToken: time.Second, Outputs: 2}} {
		s.recordEnd(load.Model{Name: "m"}, r)
	}
	s.recordReport(&api.Report{RequestID: id, CachedTokens: 64})
	s.recordAnswer(id, 61)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.recorder.Run(ctx)
	var list []*recording.Joined
	sum, err := recording.Read(t.Context(), stream, recording.Filter{}, func(q *recording.Joined) error {
		list = append(list, q)
		return nil
	})
	if err != nil || sum.Requests != 2 || sum.Ends != 1 || sum.Reports != 1 || sum.Answers != 1 || len(list) != 2 {
		t.Fatalf("%+v, %v, %d requests", sum, err, len(list))
	}
	q := list[0]
	want := recording.Place{Worker: "w1", Rank: 1, Device: 5, Guessed: 2, Host: 2, Disk: 5, Shared: 6, Requests: 7,
		PrefillTokens: 8, Blocks: 9}
	if q.Place != want || q.Life != 3000 ||
		q.Flags != recording.Booked|recording.Ended|recording.Reported|recording.Answered ||
		q.FirstToken != 1000 || q.Blocks != 2 || q.Report.Cached != 64 || q.Answer.Tokens != 61 ||
		q.Request.Cached != 80 || q.Computed != 7920 ||
		len(q.Names) != 16 {
		t.Errorf("%+v", q)
	}
	if q := list[1]; q.Flags != recording.Refused || q.Place != (recording.Place{}) {
		t.Errorf("refused: %+v", q)
	}
	st := s.recordingStatus()
	if st.Records != 5 || st.Stored != 5 || st.Dropped != 0 || st.WaitingBytes != 0 || st.Failing != "" {
		t.Errorf("%+v", st)
	}
}

// BenchmarkRecordRequest measures the hooks of a request: the choice, the end and the report, with the NATS server in
// this process. It reports the processor time of the process as the share of a core at 10,000 requests a second, and
// the bytes of a request in the stream. Off is the same loop with recording off.
func BenchmarkRecordRequest(b *testing.B) {
	on, stream := recordingServer(b)
	for _, s := range []*Server{{}, on} {
		name := "off"
		if s == on {
			name = "on"
		}
		b.Run(name, func(b *testing.B) {
			ctx, cancel := context.WithCancel(b.Context())
			done := make(chan struct{})
			if s.recorder != nil {
				go func() { s.recorder.Run(ctx); close(done) }()
			} else {
				close(done)
			}
			o, end := choice(), &load.Request{ID: choice().Request.RequestID, Own: true, Ended: true, Freed: true}
			report := &api.Report{RequestID: end.ID, CachedTokens: 64}
			before, err := stream.Info(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			began, n := processorTime(b), 0
			for b.Loop() {
				if hook := s.recordHook(); hook != nil {
					hook(o)
				}
				s.recordEnd(load.Model{Name: "m"}, end)
				s.recordReport(report)
				for n++; n%1000 == 0 && s.recorder != nil && s.recorder.Counts().Waiting > 4<<20; {
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
			b.ReportMetric(100*10_000*used.Seconds()/float64(n), "%core@10k/s")
			b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(n), "B/request")
			if s.recorder != nil && s.recorder.Counts().Dropped > 0 {
				b.Fatalf("%+v", s.recorder.Counts())
			}
		})
	}
}

// processorTime is the time of this process on processors.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
