package load

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// What other nodes say of requests. All of it may come twice, late, or in any order.

// join returns what two states of a request say together.
func (s state) join(o state) state {
	s.done, s.gone = s.done || o.done, s.gone || o.gone
	if compareMarks(o.mark, s.mark) > 0 {
		s.mark, s.runs = o.mark, o.runs
	}
	outs, changed := s.outs, false
	for _, c := range o.outs {
		at, ok := slices.BinarySearchFunc(outs, c.origin, compareOrigins)
		if ok && outs[at].n >= c.n {
			continue
		}
		if !changed {
			outs, changed = slices.Clone(outs), true
		}
		if ok {
			outs[at] = c
		} else {
			outs = slices.Insert(outs, at, c)
		}
	}
	s.outs = outs
	return s
}

func compareOrigins(o outCount, origin uint64) int { return cmp.Compare(o.origin, origin) }

func compareMarks(a, b mark) int {
	return cmp.Or(cmp.Compare(a.after, b.after), cmp.Compare(a.origin, b.origin), cmp.Compare(a.weight, b.weight))
}

func (s *state) equal(o *state) bool {
	return s.done == o.done && s.gone == o.gone && s.mark == o.mark && slices.Equal(s.outs, o.outs) &&
		slices.Equal(s.runs, o.runs)
}

// put takes a booking, or the state of one, from another node; the request has left to live.
func (t *Table) put(now time.Duration, e *event) {
	left := min(e.left, t.limits.Expiry)
	if r := t.records[e.key]; r != nil {
		if next := r.state.join(e.state); !next.equal(&r.state) {
			t.replace(now, r, next)
		}
		if deadline := now + left; deadline < r.deadline {
			r.deadline = deadline
			heap.Fix(&t.queue, r.due)
		}
		return
	}
	if t.seen[e.key.Origin].has(e.key.Seq) {
		t.Counts.Stray++
		return
	}
	if e.kind != booked { // the booking is late, or was lost
		t.Counts.Stray++
		t.suspect = true
		return
	}
	for r := t.ids[e.id]; r != nil; r = r.rival {
		if r.key.Origin != e.key.Origin {
			continue
		}
		// A node uses an id again only after it has seen the end of the request before.
		t.Counts.Superseded++
		if r.key.Seq > e.key.Seq {
			left = 0
		} else {
			t.remove(now, r)
		}
		break
	}
	if left <= 0 {
		t.seenOf(e.key.Origin, now).add(e.key.Seq, e.key.Seq)
		return
	}
	t.insert(now, &record{key: e.key, id: e.id, rank: e.rank, hashes: e.hashes, private: e.private, tokens: e.tokens,
		expected: e.expected, state: e.state, deadline: now + left})
}

// drop takes the end of a request from another node. A booking that arrives later stays out.
func (t *Table) drop(now time.Duration, key Key) {
	if r := t.records[key]; r != nil {
		t.freed(now, r)
		t.remove(now, r)
		return
	}
	t.seenOf(key.Origin, now).add(key.Seq, key.Seq)
}

// resolve ends requests whose id another request has too, of a lesser key, and still has after grace. The grace is for
// the news that the other one has ended.
func (t *Table) resolve(now, grace time.Duration) {
	var due []string
	for id, since := range t.rivals {
		if now-since >= grace {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		for head := t.ids[id]; head.rival != nil; {
			r := head.rival
			t.remove(now, r)
			t.Counts.Rivals++
			t.changed(freed, r)
		}
	}
}

// forget drops what was seen of origins that have no requests and were not heard of for so long that whatever they
// booked has expired everywhere.
func (t *Table) forget(now time.Duration) {
	for origin, s := range t.seen {
		if origin != t.origin && s.live == 0 && now-s.active > 2*t.limits.Expiry {
			delete(t.seen, origin)
		}
	}
}
