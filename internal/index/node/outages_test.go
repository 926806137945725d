package node

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestOutagesAreOneLine: a failure of NATS makes one line for all partitions, and so does its return.
func TestOutagesAreOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		o := newOutages(slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey || a.Key == "what_to_do" {
					return slog.Attr{}
				}
				return a
			},
		})))
		gone := errors.New("gone")
		for p := range events.Partition(64) {
			o.note(p, gone)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(2 * outageWindow)
		for p := range events.Partition(63) {
			o.note(p, nil)
		}
		o.note(64, gone) // back before the end of the window
		o.note(64, nil)
		time.Sleep(2 * outageWindow)
		const want = `level=WARN msg="the log cannot be read" partitions=64 error=gone
level=INFO msg="the log can be read again" partitions=63 still_down=1
`
		synctest.Wait()
		if said.String() != want {
			t.Errorf("logged\n%swant\n%s", said.String(), want)
		}
	})
}
