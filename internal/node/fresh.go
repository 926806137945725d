package node

import (
	"context"
	"fmt"
	"time"
)

// freshness is how old what a partition's answers reflect may be.
//
// A log that was read to its end a moment ago is of now, unless it takes nothing: then shims hold what engines have
// said since, and the log is as old as the last time at which it was known to take messages.
type freshness struct {
	readTo   time.Time // when the log was last known to have nothing that is not applied
	writable time.Time // when it was last known to take messages
	refused  bool      // it takes none now
}

// Times of staleness.
const (
	endsEvery = 500 * time.Millisecond // the least time between two proofs of having read to the end

	// justNow is the age up to which what is known counts as of now. The server speaks once a second; three seconds of
	// silence are what a reader takes for trouble.
	justNow = 3 * time.Second
)

// ageCheck is how often the node looks whether something has become old.
const ageCheck = 250 * time.Millisecond

// watchAge tells queries whether they need to look how old anything is, until ctx ends.
func (n *Node) watchAge(ctx context.Context) {
	tick := time.NewTicker(ageCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			aged := false
			for _, s := range n.parts {
				s.mu.Lock()
				aged = aged || s.taken && s.fresh.age(now, n.started) > 0
				s.mu.Unlock()
			}
			n.aged.Store(aged)
		}
	}
}

// asOf is the time that answers are of; zero: not known.
func (f *freshness) asOf() time.Time {
	if f.refused && f.writable.Before(f.readTo) {
		return f.writable
	}
	return f.readTo
}

// age is how old what is known is, in milliseconds; 0: it is of now. began is when the node did, before which nothing
// was known.
func (f *freshness) age(now, began time.Time) uint64 {
	at := f.asOf()
	if at.Before(began) {
		at = began
	}
	if d := now.Sub(at); d > justNow {
		return uint64(d.Milliseconds())
	}
	return 0
}

// room tells whether the log took messages, at a time.
func (f *freshness) room(at time.Time, refused bool) {
	if f.refused = refused; !refused {
		f.writable = at
	}
}

// inWords is an age for people.
func inWords(ms uint64) string {
	return (time.Duration(ms) * time.Millisecond).Round(time.Second).String()
}

// Notes say for people, a line each, what answers lack though the node is ready: partitions that do not serve, of which
// what is known is old, or that need a resync. Any goroutine may call it.
func (n *Node) Notes() (list []string) {
	now := time.Now()
	for p, s := range n.parts {
		s.mu.Lock()
		age, need, taken, state := s.fresh.age(now, n.started), s.need != nil, s.taken, s.state
		s.mu.Unlock()
		switch {
		case !taken:
			continue
		case !serves(state):
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
