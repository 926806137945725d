package gateway

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// stalled is a stream with messages and then a pause until the end.
type stalled struct {
	script
	ended chan struct{}
}

func (s *stalled) Recv() (*extprocv3.ProcessingRequest, error) {
	if len(s.send) == 0 {
		<-s.ended
		return nil, io.EOF
	}
	return s.script.Recv()
}

// running counts the reports of progress, by request.
type running struct {
	*world
	reports sync.Map // request id → *atomic.Int64
}

func (r *running) Progress(_ context.Context, ref *api.RequestRef) error {
	n, _ := r.reports.LoadOrStore(ref.RequestID, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	return nil
}

// TestOpenStreamCounts: the service reports progress of a request four times in an expiry while the stream is open,
// before the answer too. It reports nothing after the end, or of a worker that does not answer.
func TestOpenStreamCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &running{world: newWorld()}
		cfg := r.world.config()
		cfg.Bookings, cfg.Expiry = r, 4*time.Second
		send := []string{"headers buffered", `body {"model":"m","prompt":[1,2,3]}`, "pause 10500ms", "response 10.0.0.3:80",
			"response-body x", "pause 19500ms", "response-body end"}
		if err := New(cfg).Process(&script{t: t, w: r.world, send: send}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		var got []int64
		for _, id := range []string{"r1", "r2"} {
			for long, short := range r.ids {
				if n, some := r.reports.Load(long); short == id && some {
					got = append(got, n.(*atomic.Int64).Load())
				}
			}
		}
		if want := []int64{10, 19}; !slices.Equal(got, want) {
			t.Errorf("reports of the chosen worker's booking and of the answering worker's: %v, want %v", got, want)
		}
	})
}

// TestSlowUploads: stalled bodies make room for others.
func TestSlowUploads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		cfg := w.config()
		cfg.MaxBodies = 1 << 20
		s := New(cfg)
		ended := make(chan struct{})
		defer close(ended)
		done := make(chan *world, 4)
		for range cap(done) {
			of := newWorld()
			send := []string{"headers duplex", "body " + strings.Repeat("x", 250_000)}
			slow := &stalled{script{t: t, w: of, send: send}, ended}
			go func() {
				if err := s.Process(slow); err != nil {
					t.Error(err)
				}
				done <- of
			}()
		}
		time.Sleep(2 * time.Second)
		body := `{"model":"m","prompt":"` + strings.Repeat("y", 200_000) + `"}`
		send := []string{"headers duplex", "body " + body + " end"}
		if err := s.Process(&script{t: t, w: w, send: send}); err != nil || !strings.HasPrefix(w.log[0], "select ") {
			t.Errorf("another request: %.200q, %v", w.log, err)
		}
		if of := <-done; len(of.log) != 1 || !strings.HasPrefix(of.log[0], "<- status 408") {
			t.Errorf("a stalled request: %.200q", of.log)
		}
	})
}

// canceled is a stream that the proxy cancels after the last message.
type canceled struct {
	script
	ctx    context.Context
	cancel context.CancelFunc
	deaf   bool // the proxy cancels before it receives the choice
}

func (c *canceled) Context() context.Context { return c.ctx }

func (c *canceled) Recv() (*extprocv3.ProcessingRequest, error) {
	if len(c.send) == 0 {
		c.cancel()
	}
	if c.ctx.Err() != nil {
		return nil, status.FromContextError(c.ctx.Err()).Err()
	}
	return c.script.Recv()
}

func (c *canceled) Send(r *extprocv3.ProcessingResponse) error {
	if c.deaf {
		c.cancel()
		return status.FromContextError(c.ctx.Err()).Err()
	}
	return c.script.Send(r)
}

// TestCanceledStreams: a stream that is canceled after the choice ends without an error, and its request is freed. A
// stream that is canceled before the choice ends with the error of its context.
func TestCanceledStreams(t *testing.T) {
	const body = `body {"model":"m","prompt":"x"} end`
	for _, c := range []struct {
		name string
		send []string
		deaf bool
		want codes.Code
	}{
		{"before the body", []string{"headers duplex"}, false, codes.Canceled},
		{"before the choice arrives", []string{"headers duplex", body}, true, codes.Canceled},
		{"after the choice", []string{"headers duplex", body}, false, codes.OK},
		{"in the answer", []string{"headers duplex", body, "response", "response-body data"}, false, codes.OK},
		{"after a refusal", []string{"headers duplex", `body {"model":1} end`}, false, codes.OK},
	} {
		w := newWorld()
		s := &canceled{script: script{t: t, w: w, send: c.send}, deaf: c.deaf}
		s.ctx, s.cancel = context.WithCancel(t.Context())
		if err := New(w.config()).Process(s); status.Code(err) != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		log := strings.Join(w.log, "\n")
		if strings.Contains(log, "select ") != strings.Contains(log, "free ") {
			t.Errorf("%s: the booking stays: %s", c.name, log)
		}
	}
}
