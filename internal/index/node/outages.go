package node

import (
	"log/slog"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// outageWindow is the time over which partitions are collected for one log line, because a failure of NATS affects all
// partitions.
const outageWindow = time.Second

// outages logs the partitions with logs that became unreadable or readable again, a line per window. Any goroutine may
// call the methods.
type outages struct {
	log *slog.Logger

	mu      sync.Mutex
	changed map[events.Partition]error // in this window, to the latest state; nil: readable again
	down    map[events.Partition]bool  // the state in the log lines so far
}

func newOutages(log *slog.Logger) *outages {
	return &outages{log: log, changed: map[events.Partition]error{}, down: map[events.Partition]bool{}}
}

// note records that a partition's log is unreadable, or, with a nil error, readable again.
func (o *outages) note(p events.Partition, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.changed) == 0 {
		time.AfterFunc(outageWindow, o.flush)
	}
	o.changed[p] = err
}

func (o *outages) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	lost, back := 0, 0
	var why error
	for p, err := range o.changed {
		switch {
		case err != nil && !o.down[p]:
			o.down[p], why = true, err
			lost++
		case err == nil && o.down[p]:
			delete(o.down, p)
			back++
		}
	}
	clear(o.changed)
	if lost > 0 {
		o.log.Warn("the log cannot be read", "partitions", lost, "error", why, "what_to_do",
			"check that NATS responds and that more than half of the NATS servers run; the node still answers queries")
	}
	if back > 0 {
		o.log.Info("the log can be read again", "partitions", back, "still_down", len(o.down))
	}
}
