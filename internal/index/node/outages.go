package node

import (
	"log/slog"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// outageWindow is how long partitions are gathered for one log line: when NATS goes away, none of them can be read.
const outageWindow = time.Second

// outages logs which partitions' logs cannot be read, and can be read again: one line for all of a window. Its methods
// may be called from any goroutine.
type outages struct {
	log *slog.Logger

	mu      sync.Mutex
	changed map[events.Partition]error // in this window, to the latest state; nil: it can be read again
	down    map[events.Partition]bool  // what the log lines so far say
}

func newOutages(log *slog.Logger) *outages {
	return &outages{log: log, changed: map[events.Partition]error{}, down: map[events.Partition]bool{}}
}

// note notes that a partition's log cannot be read, or, with a nil error, that it can be read again.
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
			"see that NATS answers and that more than half of its servers are up; queries are answered meanwhile")
	}
	if back > 0 {
		o.log.Info("the log can be read again", "partitions", back, "still_down", len(o.down))
	}
}
