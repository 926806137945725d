package registry

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Machine decides which leases have expired. It is stepped; one goroutine owns it. Times are those of one monotonic
// clock.
//
// Invariants:
//  1. A lease is due only if, for all of its length, its revision did not change, the watch was unbroken and the bucket
//     was seen to be writable at no longer intervals than [Machine.gap].
//  2. An expired record is due until it is gone, whoever marked it.
type Machine struct {
	entries map[events.RankKey]*entry
	fresh   map[events.RankKey]bool // seen since the watch began anew; nil once it is current
	missing map[events.RankKey]missing
	broken  bool // the watch is

	proved    bool          // since and confirmed are set
	since     time.Duration // from when on nothing speaks against what the watch has not shown
	confirmed time.Duration // the last moment at which the bucket is known to have been writable
}

type entry struct {
	record   Record
	revision uint64
	seen     time.Duration // when the revision was first seen
	next     time.Duration // not to be tried before
	unread   bool          // what was written over it cannot be read
}

// missing is a rank whose record has gone without a mark of deletion: somebody has ended it while nothing was heard, or
// somebody has emptied the bucket.
type missing struct {
	due   Due
	since time.Duration
}

// Due is a lease to be ended: marked as expired if it is held, and then cleared. One that is Unread is only forgotten
// here: what was written over it cannot be read, and may be a lease that others understand.
type Due struct {
	Record   Record
	Revision uint64
	Unread   bool
}

// NewMachine returns a machine that knows nobody.
func NewMachine() *Machine {
	return &Machine{entries: map[events.RankKey]*entry{}, missing: map[events.RankKey]missing{}}
}

// Anew tells that the watch begins: all keys will be told.
func (m *Machine) Anew() {
	m.fresh = map[events.RankKey]bool{}
	m.proved = false
}

// Broken tells that the bucket cannot be watched.
func (m *Machine) Broken() { m.proved, m.broken = false, true }

// Resumed tells that the bucket can be watched again.
func (m *Machine) Resumed() { m.broken = false }

// Missed tells that a record has gone without a mark of deletion, as Current returned.
func (m *Machine) Missed(r Record, revision uint64, now time.Duration) {
	m.missing[r.Key()] = missing{Due{Record: r, Revision: revision}, now}
}

// Ended tells that a lease which DueMissing has listed is ended.
func (m *Machine) Ended(key events.RankKey) { delete(m.missing, key) }

// DueMissing lists the leases to be ended of those whose records are missing: a shim that lives would have written
// again by now.
func (m *Machine) DueMissing(now time.Duration) (list []Due) {
	for _, e := range m.missing {
		if m.fresh == nil && !m.broken && now-e.since >= e.due.Record.Lease() {
			list = append(list, e.due)
		}
	}
	slices.SortFunc(list, func(a, b Due) int { return a.Record.Key().Compare(b.Record.Key()) })
	return list
}

// Current tells that all keys have been told since Anew, and returns those that are gone.
func (m *Machine) Current() (gone []events.RankKey) {
	for key := range m.entries {
		if !m.fresh[key] {
			gone = append(gone, key)
		}
	}
	m.fresh = nil
	for _, key := range gone {
		m.Gone(key)
	}
	return gone
}

// Seen tells a record at a revision. What was seen at that revision before keeps its age.
func (m *Machine) Seen(r Record, revision uint64, now time.Duration) {
	key := r.Key()
	delete(m.missing, key)
	if m.fresh != nil {
		m.fresh[key] = true
	}
	e := m.entries[key]
	if e == nil {
		e = &entry{}
		m.entries[key] = e
	}
	if e.revision != revision {
		e.revision, e.seen, e.next = revision, now, 0
	}
	e.record, e.unread = r, false
}

// Unread tells that a key has a record that cannot be read. The one before it is not renewed thereby.
func (m *Machine) Unread(key events.RankKey) {
	delete(m.missing, key)
	e := m.entries[key]
	if e == nil {
		return
	}
	if m.fresh != nil {
		m.fresh[key] = true
	}
	e.unread = true
}

// Gone tells that a key has no record any more.
func (m *Machine) Gone(key events.RankKey) {
	delete(m.missing, key)
	delete(m.entries, key)
}

// Proves reports whether the bucket is known to have been writable until now: then Age is valid.
func (m *Machine) Proves(now time.Duration) bool {
	return m.proved && m.fresh == nil && now-m.confirmed <= m.gap()
}

// Age returns for how long a record has not been renewed although the bucket was writable.
func (m *Machine) Age(key events.RankKey) time.Duration {
	if e := m.entries[key]; e != nil {
		return m.age(e)
	}
	return 0
}

func (m *Machine) age(e *entry) time.Duration { return m.confirmed - max(e.seen, m.since) }

// Every is how often the bucket is to be probed, and Due to be asked: eight times in the shortest lease; 0 while there
// are none.
func (m *Machine) Every() time.Duration {
	shortest := time.Duration(0)
	for _, e := range m.entries {
		if l := e.record.Lease(); shortest == 0 || l < shortest {
			shortest = l
		}
	}
	return min(shortest/8, 5*time.Second)
}

// gap is the longest time between two probes that still proves that renewing was possible all the while.
func (m *Machine) gap() time.Duration { return 3 * m.Every() }

// Probed tells that a write to the bucket, begun at sent, was acknowledged.
func (m *Machine) Probed(sent time.Duration) {
	if m.fresh != nil {
		return // the watch does not show all yet
	}
	if !m.proved || sent-m.confirmed > m.gap() {
		m.since = sent
	}
	m.proved, m.confirmed = true, sent
}

// Due lists the leases to be ended now, and does not name them again for a while. Those for which mine is false are
// left to others for half a lease, unless they are unread. It looks at all leases: 0.25 ms for 10,000 (BenchmarkDue),
// eight times in a lease, which at 30 s is less than a ten-thousandth of a processor.
func (m *Machine) Due(now time.Duration, mine func(events.RankKey) bool) (list []Due) {
	if !m.Proves(now) {
		return nil
	}
	gap := m.gap()
	for key, e := range m.entries {
		wait := e.record.Lease()
		if e.record.State == Expired {
			wait = 0
		}
		age := m.age(e)
		if now < e.next || age < wait || !e.unread && age < wait+e.record.Lease()/2 && !mine(key) {
			continue
		}
		e.next = now + gap
		list = append(list, Due{e.record, e.revision, e.unread})
	}
	slices.SortFunc(list, func(a, b Due) int { return a.Record.Key().Compare(b.Record.Key()) })
	return list
}
