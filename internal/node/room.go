package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// usage is how much of a bound is used, in bytes. A limit of 0 or less is none.
type usage struct{ used, limit int64 }

// filling reports whether people should be told: 80 % are used.
func (u usage) filling() bool { return u.limit > 0 && u.used >= u.limit/5*4 }

func (u usage) api() api.Usage { return api.Usage{Bytes: u.used, Limit: max(u.limit, 0)} }

// room is how full things are that all partitions share.
type room struct {
	mu            sync.Mutex
	bucket, store usage
}

// watchRoom looks at how full things are, until ctx ends.
func (n *Node) watchRoom(ctx context.Context) {
	tick := time.NewTicker(n.cfg.RoomCheck)
	defer tick.Stop()
	for ctx.Err() == nil {
		n.lookAtRoom(ctx)
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// lookAtRoom brings up to date what is known of room; what cannot be asked for now stays as it was. A stream that is not there is made.
func (n *Node) lookAtRoom(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*n.cfg.RoomCheck+5*time.Second)
	defer cancel()
	tell := func(what string, before, now usage) {
		if now.filling() && !before.filling() {
			n.cfg.Hooks.Filling(what, now.used, now.limit)
		}
	}
	for p := range n.parts {
		info, err := n.cfg.Namespace.StreamInfo(ctx, events.Partition(p))
		if errors.Is(err, jetstream.ErrNotFound) && n.cfg.Mend != nil {
			n.cfg.Hooks.Mended(events.Partition(p), n.cfg.Mend(ctx))
		}
		if err != nil {
			continue
		}
		now := usage{int64(info.Bytes), info.MaxBytes}
		var before usage
		n.set(events.Partition(p), func(s *standing) { before, s.log = s.log, now })
		tell(fmt.Sprintf("the log of partition %d", p), before, now)
	}
	used, limit, err := n.cfg.Snapshots.Usage(ctx)
	if err == nil {
		now := usage{used, limit}
		n.room.mu.Lock()
		before := n.room.bucket
		n.room.bucket = now
		n.room.mu.Unlock()
		tell("the snapshot bucket", before, now)
	}
	if used, limit, err := n.cfg.Namespace.Conn().Store(ctx); err == nil {
		if limit <= 0 {
			limit = n.cfg.StoreLimit
		}
		now := usage{used, limit}
		n.room.mu.Lock()
		before := n.room.store
		n.room.store = now
		n.room.mu.Unlock()
		tell("the storage of the NATS server", before, now)
	}
}

// roomProblems says what is full, or nearly so.
func (n *Node) roomProblems() (list []string) {
	say := func(u usage, format string, args ...any) {
		if u.filling() {
			list = append(list, fmt.Sprintf("%s is %d %% full (%d of %d bytes)", fmt.Sprintf(format, args...), 100*u.used/u.limit, u.used, u.limit))
		}
	}
	n.room.mu.Lock()
	say(n.room.store, "the storage of the NATS server")
	say(n.room.bucket, "the snapshot bucket")
	n.room.mu.Unlock()
	for p, s := range n.parts {
		s.mu.Lock()
		say(s.log, "the log of partition %d", p)
		s.mu.Unlock()
	}
	if n.cfg.Health != nil {
		if err := n.cfg.Health(); err != nil {
			list = append(list, err.Error())
		}
	}
	return list
}

// savingProblem says why no snapshot could be written. Called with s.mu held.
func (s *standing) savingProblem() error {
	if s.save.failed.IsZero() || errors.Is(s.save.err, context.Canceled) {
		return nil
	}
	return fmt.Errorf("its snapshot was not written and will be tried again: %w", s.save.err)
}
