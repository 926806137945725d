package natsserver

import (
	"context"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// SuperviseHooks report the events of [Server.Supervise], from the goroutine of Supervise. A nil hook is ignored.
type SuperviseHooks struct {
	// the server cannot write; without room on the disk, Supervise waits for room
	Unhealthy func(why error, room bool)
	Recovered func()            // the server works again
	Failed    func(err error)   // a restart failed; Supervise retries
	Grown     func(bytes int64) // the limit of the store has grown to bytes, because the disk has more room
}

// Intervals of Supervise.
const (
	superviseEvery = 5 * time.Second
	slowestRestart = time.Minute // longest interval between restarts without success
)

// Supervise checks the server every few seconds until ctx is done.
//
// It restarts a server that cannot write as soon as the disk has room. On a full disk, a restart would not help: it
// would disconnect all clients, and truncate files that nats-server writes at the end. Restarts without success become
// rarer.
//
// If [Options.MaxStore] has the default and the disk has more room than at the start, Supervise raises the limit
// without an interruption. It never lowers the limit. [Server.Limit] includes the disk space that other programs use.
func (s *Server) Supervise(ctx context.Context, h SuperviseHooks) {
	s.supervise(ctx, superviseEvery, h)
}

func (s *Server) supervise(ctx context.Context, every time.Duration, h SuperviseHooks) {
	hooks.Fill(&h)
	reported := "" // the reported health error
	var last time.Time
	recovered := func() {
		if reported != "" {
			h.Recovered()
		}
		reported = ""
	}
	for pause := every; loop.Wait(ctx, every); {
		why := s.Health()
		if why == nil {
			recovered()
			if bytes := s.grow(); bytes > 0 {
				h.Grown(bytes)
			}
			continue
		}
		room := s.hasRoom()
		if text := why.Error(); text != reported {
			h.Unhealthy(why, room)
			reported = text
		}
		if !room || time.Since(last) < pause {
			continue
		}
		if pause = every; !last.IsZero() && time.Since(last) < slowestRestart {
			pause = min(2*time.Since(last), slowestRestart)
		}
		last = time.Now()
		err := s.Restart(ctx)
		if err == nil && s.Health() == nil {
			recovered()
		}
		if err != nil && ctx.Err() == nil {
			h.Failed(err)
		}
	}
}

// hasRoom reports whether a restart helps: a hundredth of the limit is free, at least 1 MiB and at most 64 MiB.
func (s *Server) hasRoom() bool {
	free, err := freeBytes(s.o.Dir)
	return err == nil && free >= min(max(s.MaxStore()/100, 1<<20), 64<<20)
}

// used returns the size of all streams and buckets, in bytes. It returns false if the server does not run.
func (s *Server) used() (int64, bool) {
	info, err := s.current().Jsz(&server.JSzOptions{})
	if err != nil || info.Disabled {
		return 0, false
	}
	return int64(info.Store), true
}

// Limit returns the current maximum size of all streams and buckets: [Options.MaxStore], or the used and free bytes if
// the sum is smaller.
func (s *Server) Limit() int64 {
	limit := s.MaxStore()
	used, running := s.used()
	if free, err := freeBytes(s.o.Dir); err == nil && running {
		limit = min(limit, used+free)
	}
	return limit
}

// grow raises a default limit if used and free space exceed it by a quarter. It returns the new limit, or 0 without a
// change.
func (s *Server) grow() int64 {
	used, running := s.used()
	free, err := freeBytes(s.o.Dir)
	s.mu.Lock()
	defer s.mu.Unlock()
	room := used + free/10*9
	if !s.bound || err != nil || !running || s.stopped || room/5*4 < s.o.MaxStore {
		return 0
	}
	opts := s.opts.Clone()
	opts.JetStreamMaxStore = room
	if s.srv.ReloadOptions(opts) != nil { // the next check retries
		return 0
	}
	s.opts, s.o.MaxStore = opts, room
	return room
}
