package natsserver

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Intervals of Supervise.
const (
	superviseEvery = 5 * time.Second
	slowestRestart = time.Minute // longest interval between restarts without success
)

// Supervise checks the server every few seconds until ctx is done.
//
// It restarts a server that fails two checks in succession, as soon as the disk has room. On a full disk, a restart
// would not help: it would disconnect all clients, and truncate files that nats-server writes at the end. Restarts
// without success become rarer.
//
// If [Options.MaxStore] has the default and the disk has more room than at the start, Supervise raises the limit
// without an interruption. It never lowers the limit. [Server.Limit] includes the disk space that other programs use.
func (s *Server) Supervise(ctx context.Context, log *slog.Logger) {
	s.supervise(ctx, superviseEvery, s.Health, log)
}

func (s *Server) supervise(ctx context.Context, every time.Duration, health func() error, log *slog.Logger) {
	reported := "" // the reported health error
	var last time.Time
	failed := 0 // checks in succession
	recovered := func() {
		if reported != "" {
			log.Info("the NATS server in this process has recovered")
		}
		reported = ""
	}
	for pause := every; loop.Wait(ctx, every); {
		why := health()
		if why == nil {
			failed = 0
			recovered()
			if bytes := s.grow(); bytes > 0 {
				log.Info("the disk has more room; the NATS server may take more of it", "bytes", bytes)
			}
			continue
		}
		if failed++; failed == 1 {
			continue // a restart breaks all connections, so an error of a moment does not cause it
		}
		room := s.hasRoom()
		if text := why.Error(); text != reported {
			reported = text
			if room {
				log.Error("the NATS server in this process is unhealthy; it is restarted", "error", why, "what_to_do",
					"see the error; if it comes again, look at the disk of --data")
			} else {
				log.Error("the NATS server in this process is unhealthy; it is restarted when its disk has room",
					"error", why, "what_to_do", "make room on the disk of --data, or give --store-bytes more")
			}
		}
		if !room || time.Since(last) < pause {
			continue
		}
		if pause = every; !last.IsZero() && time.Since(last) < slowestRestart {
			pause = min(2*time.Since(last), slowestRestart)
		}
		last = time.Now()
		err := s.Restart(ctx)
		if err == nil && health() == nil {
			recovered()
		}
		if err != nil && ctx.Err() == nil {
			log.Error("cannot restart the NATS server; the restart is retried", "error", err, "what_to_do",
				"see the error; look at the disk of --data and at --nats-listen's port")
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
