package source

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestSourceWatch: a state of silence or of a missing connection is reported after --silence, until the state ends. A
// shorter state is not reported.
func TestSourceWatch(t *testing.T) {
	const after = 30 * time.Second
	gone := errors.New("connection\nrefused")
	for name, c := range map[string]struct {
		do   func(*watch)
		want string
	}{
		"silent, and then heard": {func(w *watch) {
			time.Sleep(after + silenceEvery + time.Second)
			w.received()
		}, "silent, silent, end"},
		"heard in time": {func(w *watch) {
			time.Sleep(after - time.Second)
			w.received()
		}, ""},
		"unreachable from the start, then silent, then heard": {func(w *watch) {
			w.unreached("a", gone, "do a")
			time.Sleep(after + time.Second)
			w.reached("a")
			time.Sleep(after + time.Second)
			w.received()
		}, `a: connection\nrefused (do a), end, silent, end`},
		"heard, lost, reached": {func(w *watch) {
			w.received()
			time.Sleep(time.Hour)
			w.unreached("b", gone, "do b")
			time.Sleep(after + time.Second)
			w.reached("b")
		}, `b: connection\nrefused (do b), end`},
		"lost for a moment, again and again": {func(w *watch) {
			w.received()
			for range 10 {
				w.unreached("b", gone, "do b")
				time.Sleep(after - time.Second)
				w.reached("b")
				time.Sleep(time.Second)
			}
		}, ""},
		"two parts, of which the first comes back first": {func(w *watch) {
			w.received()
			w.unreached("a", gone, "do a")
			w.unreached("b", gone, "do b")
			time.Sleep(after + time.Second)
			w.reached("a")
			time.Sleep(silenceEvery)
			w.reached("b")
			w.reached("b")
		}, `a: connection\nrefused (do a), b: connection\nrefused (do b), end`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var reports []string
				w := &watch{after: after, changed: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler),
					source: api.QuietSource{Source: "s", Engine: "e", Advice: "idle"},
					send: func(q api.QuietSource) error {
						if err := q.Check(); err != nil {
							t.Error(err)
						}
						switch {
						case q.Spoke:
							reports = append(reports, "end")
						case q.Failure == "":
							reports = append(reports, "silent")
						default:
							reports = append(reports, q.Failure+" ("+q.Advice+")")
						}
						return nil
					}}
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() {
					w.run(ctx)
					close(done)
				}()
				c.do(w)
				synctest.Wait()
				time.Sleep(2 * after) // nothing follows
				stop()
				<-done
				if got := strings.Join(reports, ", "); got != c.want {
					t.Errorf("reports %q, want %q", got, c.want)
				}
			})
		})
	}
}

// TestSourceTexts: a report holds the error of a failed connection, shortened if necessary.
func TestSourceTexts(t *testing.T) {
	w := &watch{source: api.QuietSource{Source: "s", Engine: "e"}}
	w.unreached("part", errors.New(strings.Repeat("ü\x00", 5000)), "advice")
	state, report := w.state()
	if err := report.Check(); state != unreachable || err != nil ||
		!strings.HasPrefix(report.Failure, "part: ü\\x00ü") {
		t.Errorf("state %v, %v, %.40q", state, err, report.Failure)
	}
	w.reached("part")
	if state, report := w.state(); state != silent || !reflect.DeepEqual(report, w.source) {
		t.Errorf("state %v, %+v", state, report)
	}
}
