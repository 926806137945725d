package load

import (
	"container/heap"
	"slices"
	"time"
)

// put merges a booking of another node, or a later state of the booking. It returns false if the request has ended.
func (t *Table) put(now time.Duration, e *event) bool {
	left := min(e.left, t.limits.Expiry)
	if r := t.records[e.key]; r != nil {
		if next := r.state.join(e.state); !next.equal(&r.state) {
			t.replace(now, r, next)
		}
		if deadline := now + left; deadline < r.deadline && e.extended == r.extended {
			r.deadline = deadline
			heap.Fix(&t.queue, r.due)
		}
		return true
	}
	for r := t.ids[e.id]; r != nil; r = r.rival {
		if r.key.Owner != e.key.Owner {
			continue
		}
		// A node uses an id again only after the end of the earlier request.
		t.Counts.Superseded++
		if r.key.Seq > e.key.Seq {
			return false
		}
		t.remove(now, r)
		t.changed(outlive, r)
		break
	}
	if left <= 0 {
		return false
	}
	t.insert(now, &record{key: e.key, id: e.id, rank: e.rank, hashes: e.hashes, private: e.private, tokens: e.tokens,
		expected: e.expected, state: e.state, deadline: now + left})
	return true
}

// drop ends a request that has ended on another node.
func (t *Table) drop(now time.Duration, key Key) {
	if r := t.records[key]; r != nil {
		t.freed(now, r)
		t.remove(now, r)
	}
}

// resolve ends requests that have shared an id with a request of a lesser key for at least grace. During grace, the end
// of the request with the lesser key may arrive. Only the writer of a request ends it.
func (t *Table) resolve(now, grace time.Duration, writes func(Key) bool) {
	var due []string
	for id, since := range t.rivals {
		if now-since >= grace {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		for r := t.ids[id].rival; r != nil; {
			next := r.rival
			if writes(r.key) {
				t.remove(now, r)
				t.Counts.Rivals++
				t.changed(freed, r)
			}
			r = next
		}
	}
}
