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

// usage is how much of a bound is used, in bytes, and whether there can be more. A limit of 0 or less is none.
type usage struct {
	used, limit int64
	refused     error // why nothing can be written; nil if it can, as far as the server knows
}

// filling reports whether 80 % are used, which is worth a warning.
func (u usage) filling() bool { return u.limit > 0 && u.used >= u.limit/5*4 }

// full reports whether nothing is left of the bound.
func (u usage) full() bool { return u.limit > 0 && u.used >= u.limit }

// snapshotDue reports whether a log needs a snapshot when so many bytes came since the last one: at its limit the
// oldest messages go, whether a snapshot needs them or not. Two generations are kept, so that it has about two such
// quarters when snapshots are written.
func (u usage) snapshotDue(bytes uint64) bool { return u.limit > 0 && bytes >= uint64(u.limit)/4 }

func (u usage) api() api.Usage {
	a := api.Usage{Bytes: u.used, Limit: max(u.limit, 0)}
	if u.refused != nil {
		a.Refused = u.refused.Error()
	}
	return a
}

// capacity is how full the bucket and the storage are, which all partitions share.
type capacity struct {
	mu            sync.Mutex
	bucket, store usage
	bucketEpoch   jetstream.Epoch             // of the bucket for snapshots; 0: not known
	waiting       map[events.Partition]string // what shims wait for; replaced, never changed
	asking        bool                        // the shims are being asked
	asked         time.Time                   // when they were, last
}

// watchCapacity measures how full the log, the bucket and the storage are, until ctx ends.
func (n *Node) watchCapacity(ctx context.Context) {
	for ctx.Err() == nil {
		wait := n.cfg.CapacityCheck
		if n.measureCapacity(ctx) {
			wait /= 5
		}
		loop.Wait(ctx, wait)
	}
}

// measureCapacity measures once. What NATS does not answer stays as it was. A stream that does not exist is recreated.
// It reports whether something rejects writes.
func (n *Node) measureCapacity(ctx context.Context) (refused bool) {
	ctx, cancel := context.WithTimeout(ctx, 2*n.cfg.CapacityCheck+5*time.Second)
	defer cancel()
	tell := func(what string, before, now usage) {
		refused = refused || now.refused != nil
		n.reportUsage(what, before, now)
	}
	var shut []events.Partition // their logs reject writes
	var full bool               // the storage is full
	replace := func(what string, at *usage, now usage) {
		n.capacity.mu.Lock()
		before := *at
		*at = now
		n.capacity.mu.Unlock()
		tell(what, before, now)
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
		tell(fmt.Sprintf("the log of partition %d", p), before, now)
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

// noteBucket makes a snapshot of each partition due if the bucket is not the one that had the earlier snapshots.
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

// askWaitingEvery is how often the shims of a log that rejects writes are asked what they wait for.
const askWaitingEvery = 5 * time.Second

// askWaiting asks the shims of logs that reject writes, over core NATS, what they wait for: they cannot write it down.
func (n *Node) askWaiting(ctx context.Context, shut []events.Partition) {
	n.capacity.mu.Lock()
	defer n.capacity.mu.Unlock()
	if len(shut) == 0 {
		n.capacity.waiting = nil
		return
	}
	if n.capacity.asking || time.Since(n.capacity.asked) < askWaitingEvery {
		return
	}
	n.capacity.asking = true
	go func() {
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*askWaitingEvery)
		defer cancel()
		said := make([]string, len(shut))
		var all sync.WaitGroup
		for i, p := range shut {
			all.Go(func() {
				if shims, err := control.WhoAll(asking, n.cfg.Namespace, p); err == nil {
					said[i] = howTheyWait(shims)
				}
			})
		}
		all.Wait()
		n.capacity.mu.Lock()
		defer n.capacity.mu.Unlock()
		waiting := map[events.Partition]string{}
		for i, p := range shut {
			waiting[p] = said[i]
		}
		n.capacity.asking, n.capacity.asked, n.capacity.waiting = false, time.Now(), waiting
	}()
}

// howTheyWait says how many of a partition's shims wait for the log, since when, and why the first of them does; empty
// if none does.
func howTheyWait(shims []control.Shim) string {
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

// refusal is err if it says that there is no room, else nil: that NATS does not answer is reported elsewhere.
func refusal(err error) error {
	if errors.Is(err, jetstream.ErrFull) {
		return err
	}
	return nil
}

// capacityProblems says what is full, or nearly so, and what is wrong with the NATS server in this process: each once.
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
		restart = "; then restart the NATS server, which takes nothing more until then"
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
	said := func(r refusals) bool { // the server reports what its system said, as a refusal does
		_, system, _ := strings.Cut(r.first.Error(), jetstream.ErrFull.Error()+": ")
		return system != "" && strings.HasSuffix(unhealthy.Error(), system)
	}
	if unhealthy != nil && !slices.ContainsFunc(full.refused, said) {
		list = append(list, unhealthy.Error()+"; what to do: "+seeServer)
	}
	return list
}

// problem says why no snapshot could be written; nil if one could.
func (s *saveState) problem() error {
	if s.failed.IsZero() || errors.Is(s.err, context.Canceled) {
		return nil
	}
	return s.err
}
