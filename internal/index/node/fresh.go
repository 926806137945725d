package node

import (
	"context"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// freshness records the age of a partition's answers.
//
// A log read to its end a moment ago is current, unless it rejects writes. Shims then buffer new events, so the age
// counts from the last accepted message.
type freshness struct {
	readTo   time.Time // the last time with all messages of the log applied
	writable time.Time // the last time at which the log accepted messages
	refused  bool      // the log rejects messages now
}

// Times of staleness.
const (
	endsEvery = 500 * time.Millisecond // the minimum time between two reports of the log's end

	// justNow is the greatest age that counts as current. The server sends a message every second, and a reader reports
	// trouble after three seconds of silence.
	justNow = 3 * time.Second
)

// behindAfter is the time with unapplied messages after which a partition counts as far behind.
const behindAfter = 5 * time.Second

// ageCheck is the interval of the measurements of ages and lags.
const ageCheck = 250 * time.Millisecond

// watchAge measures until ctx ends how far partitions are behind, and whether queries must compute the age of an old
// partition.
func (n *Node) watchAge(ctx context.Context) {
	loop.Every(ctx, ageCheck, func(now time.Time) {
		aged := false
		for p := range n.parts {
			aged = n.tick(now, events.Partition(p)) || aged
		}
		n.aged.Store(aged)
	})
}

// tick measures how far a partition is behind its log, and reports whether the answers are old.
func (n *Node) tick(now time.Time, p events.Partition) (aged bool) {
	applied := n.applied(p)
	n.step(p, func(pt *partition) effects {
		aged = pt.age(now) > 0
		return pt.tick(now, applied)
	})
	return aged
}

// asOf returns the time that answers reflect; zero: unknown.
func (f *freshness) asOf() time.Time {
	if f.refused && f.writable.Before(f.readTo) {
		return f.writable
	}
	return f.readTo
}

// age returns the age of the answers in milliseconds; 0: current. began is the start of the node, the upper limit of
// the age.
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

// inWords formats an age in milliseconds.
func inWords(ms uint64) string {
	return (time.Duration(ms) * time.Millisecond).Round(time.Second).String()
}

// Warnings describes the gaps in the answers of a ready node, a line per gap: partitions that do not serve, are old, or
// need a resync. Warnings is safe for concurrent use.
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
			list = append(list, fmt.Sprintf("partition %d is %s: the workers are missing in answers of this node", p,
				state))
			continue
		case age > 0:
			list = append(list, fmt.Sprintf("partition %d: the state is %s old", p, inWords(age)))
		}
		if need {
			list = append(list, fmt.Sprintf("partition %d: resync needed; the workers may hold further blocks", p))
		}
	}
	return list
}

// lag measures how long messages of a log have been unapplied, by this process's clock alone.
type lag struct {
	target events.StreamSeq // the log's end at since; 0: all messages were applied
	since  time.Time
	took   time.Duration // the time until the previous target was reached
}

// unreachable is a target beyond every log.
const unreachable = ^events.StreamSeq(0)

// measure updates and returns the lag. An unreadable log may have any number of messages.
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
