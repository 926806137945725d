package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// usage is the used part of a limit, in bytes. A limit of 0 or less means no limit.
type usage struct {
	used, limit int64
	refused     error // the reason for rejected writes; nil: writes succeed, as far as the server reports
}

// filling reports whether 80 % of the limit is used, enough for a warning.
func (u usage) filling() bool { return u.limit > 0 && u.used >= u.limit/5*4 }

// full reports whether the limit is reached.
func (u usage) full() bool { return u.limit > 0 && u.used >= u.limit }

// snapshotDue reports whether a log needs a snapshot after this number of bytes since the last snapshot. A full log
// drops the oldest messages, even messages newer than the last snapshot. Two generations are kept, so a snapshot at
// each quarter of the limit leaves room for about two more quarters.
func (u usage) snapshotDue(bytes uint64) bool { return u.limit > 0 && bytes >= uint64(u.limit)/4 }

func (u usage) api() api.Usage {
	a := api.Usage{Bytes: u.used, Limit: max(u.limit, 0)}
	if u.refused != nil {
		a.Refused = u.refused.Error()
	}
	return a
}

// capacity holds the usage of the bucket and of the storage, common to all partitions.
type capacity struct {
	mu            sync.Mutex
	bucket, store usage
	bucketEpoch   jetstream.Epoch             // of the snapshot bucket; 0: unknown
	shut          []events.Partition          // the partitions whose log rejected the last write
	waiting       map[events.Partition]string // how shims wait for a log of shut; replaced as a whole, never modified
	asking        bool                        // requests to the shims are under way
	asked         time.Time                   // the time of the last requests
}

// watchCapacity measures the usage of the logs, the bucket and the storage until ctx ends.
func (n *Node) watchCapacity(ctx context.Context) {
	for ctx.Err() == nil {
		wait := n.cfg.CapacityCheck
		if n.measureCapacity(ctx) {
			wait /= 5
		}
		loop.Wait(ctx, wait)
	}
}

// measureCapacity measures once. A value stays unchanged if NATS does not respond. Missing streams are recreated.
// refused reports whether any of the places rejects writes.
func (n *Node) measureCapacity(ctx context.Context) (refused bool) {
	ctx, cancel := context.WithTimeout(ctx, 2*n.cfg.CapacityCheck+5*time.Second)
	defer cancel()
	note := func(place string, before, now usage) {
		refused = refused || now.refused != nil
		n.reportUsage(place, before, now)
	}
	var shut []events.Partition // partitions with logs that reject writes
	var full bool               // the storage is full
	replace := func(place string, at *usage, now usage) {
		n.capacity.mu.Lock()
		before := *at
		*at = now
		n.capacity.mu.Unlock()
		note(place, before, now)
	}
	if used, limit, err := n.cfg.Namespace.Conn().Store(ctx); err == nil {
		if limit <= 0 && n.cfg.StoreLimit != nil {
			limit = n.cfg.StoreLimit()
		}
		now := usage{used: used, limit: limit}
		full = now.full()
		replace("the storage of the NATS server", &n.capacity.store, now)
	}
	for _, p := range n.kept() {
		info, err := n.cfg.Namespace.StreamInfo(ctx, p)
		if errors.Is(err, jetstream.ErrNotFound) && n.cfg.Recreate != nil {
			n.reportRecreated(p, n.cfg.Recreate(ctx))
		}
		if err != nil {
			continue
		}
		asked := time.Now()
		writable := n.cfg.Namespace.Writable(ctx, p)
		now := usage{int64(info.Bytes), info.MaxBytes, refusal(writable)}
		takesNone := now.refused != nil || full
		var before usage
		n.step(p, func(pt *partition) effects {
			if k := pt.phase.data(); k != nil {
				before = k.usage
			}
			return pt.measured(asked, now, takesNone, writable == nil || takesNone)
		})
		note(fmt.Sprintf("the log of partition %d", p), before, now)
		if takesNone {
			shut = append(shut, p)
		}
	}
	n.askWaiting(ctx, shut)
	bucket, err := n.cfg.Snapshots.Usage(ctx)
	switch {
	case err == nil:
		n.noteBucket(bucket.Epoch)
		replace("the snapshot bucket", &n.capacity.bucket,
			usage{bucket.Bytes, bucket.Limit, refusal(n.cfg.Snapshots.Writable(ctx))})
	case errors.Is(err, jetstream.ErrNotFound) && n.cfg.RecreateSnapshots != nil:
		n.cfg.Snapshots.RecreateIfGone(ctx, n.cfg.RecreateSnapshots, n.cfg.Log, "snapshots")
	}
	return refused
}

// noteBucket makes a snapshot of each partition due if the bucket was recreated, because a new bucket lacks the earlier
// snapshots.
func (n *Node) noteBucket(epoch jetstream.Epoch) {
	n.capacity.mu.Lock()
	before := n.capacity.bucketEpoch
	n.capacity.bucketEpoch = epoch
	n.capacity.mu.Unlock()
	if before == 0 || before == epoch {
		return
	}
	for _, p := range n.kept() {
		n.step(p, (*partition).snapshotsLost)
	}
}

// askWaitingEvery is the interval of the requests to shims of a log that rejects writes.
const askWaitingEvery = 5 * time.Second

// askWaiting requests the waits of shims whose log rejects writes. The requests use core NATS, since the shims cannot
// write to the log. The requests run in a separate goroutine.
func (n *Node) askWaiting(ctx context.Context, shut []events.Partition) {
	n.capacity.mu.Lock()
	defer n.capacity.mu.Unlock()
	n.capacity.shut = shut
	n.capacity.setWaiting(n.capacity.waiting)
	if len(shut) == 0 || n.capacity.asking || time.Since(n.capacity.asked) < askWaitingEvery {
		return
	}
	n.capacity.asking = true
	go func() {
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*askWaitingEvery)
		defer cancel()
		replies := make([]string, len(shut))
		var all sync.WaitGroup
		for i, p := range shut {
			all.Go(func() {
				if shims, err := control.ShimsOf(asking, n.cfg.Namespace, p); err == nil {
					replies[i] = waitingPhrase(shims)
				}
			})
		}
		all.Wait()
		n.capacity.mu.Lock()
		defer n.capacity.mu.Unlock()
		waiting := map[events.Partition]string{}
		for i, p := range shut {
			waiting[p] = replies[i]
		}
		n.capacity.asking, n.capacity.asked = false, time.Now()
		n.capacity.setWaiting(waiting)
	}()
}

// setWaiting sets how shims wait for the logs of c.shut. Other partitions are left out. mu is held.
func (c *capacity) setWaiting(waiting map[events.Partition]string) {
	c.waiting = nil
	for p, how := range waiting {
		if slices.Contains(c.shut, p) {
			if c.waiting == nil {
				c.waiting = map[events.Partition]string{}
			}
			c.waiting[p] = how
		}
	}
}

// waitingPhrase describes the shims of a partition that wait for the log: their number, and the key, start and reason
// of the shim with the longest wait. The result is empty if no shim waits.
func waitingPhrase(shims []control.Shim) string {
	var first *control.Shim
	count := 0
	for i := range shims {
		if w := shims[i].Waiting; w != nil {
			if count++; first == nil || w.Since.Before(first.Waiting.Since) {
				first = &shims[i]
			}
		}
	}
	if first == nil {
		return ""
	}
	return fmt.Sprintf("%d of %d shims wait, %s since %s: %s; what to do: %s",
		count, len(shims), first.Key(), first.Waiting.Since.UTC().Format(time.RFC3339), first.Waiting.Why,
		first.Waiting.Do)
}

// refusal returns err if err means a lack of room, else nil. Further errors, for example no response from NATS, are
// reported elsewhere.
func refusal(err error) error {
	if errors.Is(err, jetstream.ErrFull) {
		return err
	}
	return nil
}

// capacityProblems returns a problem for every place that is full or nearly full, and for the NATS server in this
// process. A cause appears once.
func (n *Node) capacityProblems() (list []string) {
	var full fullness
	n.capacity.mu.Lock()
	full.add("the storage of the NATS server", n.capacity.store)
	full.add("the snapshot bucket", n.capacity.bucket)
	waiting := n.capacity.waiting
	n.capacity.mu.Unlock()
	for _, p := range n.kept() {
		o := n.parts[p]
		o.mu.Lock()
		if k := o.phase.data(); k != nil {
			full.addLog(p, k.usage)
		}
		o.mu.Unlock()
	}
	restart := ""
	if n.cfg.Health == nil { // the server in this process is supervised
		restart = "; then restart the NATS server, which stays read-only until then"
	}
	list = full.lines(restart)
	for _, p := range n.kept() {
		if shims := waiting[p]; shims != "" {
			list = append(list, fmt.Sprintf("partition %d: %s", p, shims))
		}
	}
	if n.cfg.Health == nil {
		return list
	}
	unhealthy := n.cfg.Health()
	reported := func(r refusals) bool { // the health of the server contains the system's error, like a refusal
		_, system, _ := strings.Cut(r.first.Error(), jetstream.ErrFull.Error()+": ")
		return system != "" && strings.HasSuffix(unhealthy.Error(), system)
	}
	if unhealthy != nil && !slices.ContainsFunc(full.refused, reported) {
		list = append(list, unhealthy.Error()+"; what to do: "+seeServer)
	}
	return list
}

// ShimsWait reports whether the status has the waiting shims of a partition. It is safe for concurrent use.
func (n *Node) ShimsWait(p events.Partition) bool {
	n.capacity.mu.Lock()
	shims := n.capacity.waiting[p]
	n.capacity.mu.Unlock()
	return shims != "" && n.keeps(p)
}

// problem returns the error of the last snapshot; nil if the snapshot was written.
func (s *saveState) problem() error {
	if s.failed.IsZero() || errors.Is(s.err, context.Canceled) {
		return nil
	}
	return s.err
}
