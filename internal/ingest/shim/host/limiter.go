package host

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// Limiter bounds the rate of the log lines about an event. The zero value sets no bound. A Limiter is safe for
// concurrent use.
type Limiter struct {
	Every time.Duration // least time between two lines

	last  atomic.Int64 // nanoseconds
	count atomic.Uint64
}

// Do calls log with the number of events since the last call of log, unless the last call was less than Every ago.
func (l *Limiter) Do(log func(times uint64)) {
	n := l.count.Add(1)
	now, last := time.Now().UnixNano(), l.last.Load()
	if now-last >= int64(l.Every) && l.last.CompareAndSwap(last, now) {
		l.count.Add(-n)
		log(n)
	}
}

// WarnTo logs a warning with the number of events since the last warning.
func (l *Limiter) WarnTo(log *slog.Logger, event string, args ...any) {
	l.Do(func(times uint64) { log.Warn(event, append(args, "times", times)...) })
}

// IgnoreEnd returns nil if ctx is done: the error is a consequence of the stop.
func IgnoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
