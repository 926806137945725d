package node

import (
	"context"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// freshness is how old what a partition's answers reflect may be.
//
// A log that was read to its end a moment ago is current, unless it rejects writes: then shims buffer what engines have
// announced since, and the log is as old as the last time at which it was known to take messages.
type freshness struct {
	readTo   time.Time // when the log was last known to have nothing that is not applied
	writable time.Time // when it was last known to take messages
	refused  bool      // it takes none now
}

// Times of staleness.
const (
	endsEvery = 500 * time.Millisecond // the least time between two proofs of having read to the end

	// justNow is the age up to which what is known counts as current. The server sends something every second; after
	// three seconds of silence a reader reports trouble.
	justNow = 3 * time.Second
)

// behindAfter is for how long messages of the log may be not applied before a partition counts as far behind.
const behindAfter = 5 * time.Second

// ageCheck is how often ages and lags are measured.
const ageCheck = 250 * time.Millisecond

// watchAge measures how far partitions are behind, and whether anything is old enough that queries must compute its
// age, until ctx ends.
func (n *Node) watchAge(ctx context.Context) {
	loop.Every(ctx, ageCheck, func(now time.Time) {
		aged := false
		for p := range n.parts {
			aged = n.tick(now, events.Partition(p)) || aged
		}
		n.aged.Store(aged)
	})
}

// tick measures how far a partition is behind its log, and reports whether what is known of it is old.
func (n *Node) tick(now time.Time, p events.Partition) (aged bool) {
	applied := n.applied(p)
	n.step(p, func(pt *partition) effects {
		aged = pt.age(now) > 0
		return pt.tick(now, applied)
	})
	return aged
}

// asOf is the time that answers reflect; zero: not known.
func (f *freshness) asOf() time.Time {
	if f.refused && f.writable.Before(f.readTo) {
		return f.writable
	}
	return f.readTo
}

// age is how old what is known is, in milliseconds; 0: it is current. began is when the node started; before that
// nothing was known.
func (f *freshness) age(now, began time.Time) uint64 {
	if d := min(now.Sub(f.asOf()), now.Sub(began)); d > justNow {
		return uint64(d.Milliseconds())
	}
	return 0
}

func (f *freshness) measured(at time.Time, refused bool) {
	if f.refused = refused; !refused {
		f.writable = at
	}
}

// inWords is an age for people.
func inWords(ms uint64) string {
	return (time.Duration(ms) * time.Millisecond).Round(time.Second).String()
}

// Warnings say for people, a line each, what answers lack though the node is ready: partitions that do not serve, of
// which what is known is old, or that need a resync. Any goroutine may call it.
func (n *Node) Warnings() (list []string) {
	now := time.Now()
	for p, o := range n.parts {
		o.mu.Lock()
		age, need, state := o.age(now), o.need() != nil, o.phase.state()
		o.mu.Unlock()
		switch {
		case state == api.PartitionAbsent:
			continue
		case !state.Serves():
			list = append(list, fmt.Sprintf("partition %d is %s: its workers are missing in answers of this node", p,
				state))
			continue
		case age > 0:
			list = append(list, fmt.Sprintf("partition %d: what is known of it is %s old", p, inWords(age)))
		}
		if need {
			list = append(list, fmt.Sprintf("partition %d: resync needed; its workers may hold more than is known", p))
		}
	}
	return list
}

// lag measures for how long messages of a log have not been applied, by this process's clock alone.
type lag struct {
	target events.StreamSeq // the log's end at since; 0: all of it was applied
	since  time.Time
	took   time.Duration // how long it was until the target before was reached
}

// unreachable is a target beyond every log.
const unreachable = ^events.StreamSeq(0)

// measure updates the lag, and returns it. A log that cannot be read may have any messages.
func (l *lag) measure(now time.Time, applied, last events.StreamSeq, unreadable bool) time.Duration {
	if unreadable {
		last = unreachable
	}
	switch {
	case applied >= last:
		*l = lag{}
		return 0
	case l.target == 0:
		l.target, l.since = last, now
	case applied >= l.target:
		l.took = now.Sub(l.since)
		l.target, l.since = last, now
	}
	return max(l.took, now.Sub(l.since))
}
