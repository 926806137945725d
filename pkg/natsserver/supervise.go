package natsserver

import (
	"context"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// SuperviseHooks tell what [Server.Supervise] finds and does, from its goroutine. Each may be nil.
type SuperviseHooks struct {
	// it cannot do its work; without room on the disk it is left as it is until there is some
	Unhealthy func(why error, room bool)
	Recovered func()            // it can again
	Failed    func(err error)   // it could not be started anew; that is tried again
	Grown     func(bytes int64) // the disk has more room than there was: the bound on what is stored is this now
}

// The waits of Supervise.
const (
	superviseEvery = 5 * time.Second
	slowestRestart = time.Minute // between two restarts, if they do not help
)

// Supervise looks after the server until ctx ends, every few seconds.
//
// If it can no longer write it is started anew, once its disk has room: a restart on a full disk would help nothing,
// part everybody from the server, and truncates files that nats-server writes when it ends. Restarts that do not help
// become rarer.
//
// If nobody has set [Options.MaxStore] and the disk has more room than at the start, the bound grows, with
// nothing interrupted. It does not shrink: what others take from the disk meanwhile is seen in [Server.Limit].
func (s *Server) Supervise(ctx context.Context, h SuperviseHooks) {
	s.supervise(ctx, superviseEvery, h)
}

func (s *Server) supervise(ctx context.Context, every time.Duration, h SuperviseHooks) {
	hooks.Fill(&h)
	reported := "" // why it is unhealthy
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

// hasRoom reports whether a restart is worth it: a hundredth of the bound is free, at least 1 MiB and at most 64.
func (s *Server) hasRoom() bool {
	free, err := freeBytes(s.o.Dir)
	return err == nil && free >= min(max(s.MaxStore()/100, 1<<20), 64<<20)
}

// used is what all streams and buckets take, in bytes; false if the server does not run.
func (s *Server) used() (int64, bool) {
	info, err := s.current().Jsz(&server.JSzOptions{})
	if err != nil || info.Disabled {
		return 0, false
	}
	return int64(info.Store), true
}

// Limit is what all streams and buckets may take now: [Options.MaxStore], or what they take and what the disk has
// free, if that is less.
func (s *Server) Limit() int64 {
	limit := s.MaxStore()
	used, running := s.used()
	if free, err := freeBytes(s.o.Dir); err == nil && running {
		limit = min(limit, used+free)
	}
	return limit
}

// grow raises a bound that nobody has set if the disk has a quarter more than it, and returns the new one; 0 if it
// stays.
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
	if s.srv.ReloadOptions(opts) != nil { // tried again
		return 0
	}
	s.opts, s.o.MaxStore = opts, room
	return room
}
