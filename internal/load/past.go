package load

import (
	"maps"
	"math"
	"slices"
	"time"
)

// A request that had ended before a node heard of it weighs nothing there, but another node's watcher may remember it,
// and hand it on. A node lacks such requests when it starts; when another was not heard for a while; and when it learns
// that numbers were given out of which it has never had a booking: then it asks who gave them out, or, if that node is
// gone, everybody. Questions and answers are heard by all, and an answer serves all who lack the same.

// lack is what a peer may remember and this node has not heard of.
type lack struct {
	since   time.Duration // when the oldest of them was booked at the earliest, by this node's clock
	began   time.Duration
	asked   time.Duration   // by this node, or another one
	asker   uint64          // which one
	id      uint64          // its question
	missing map[uint64]bool // parts of the answer; nil: none has come
}

const (
	lateMost = 10 * time.Second                  // by which a beat may come later than what its node had booked before
	forever  = math.MaxUint32 * time.Millisecond // an age that no request has
)

// hear notes that a node is there.
func (r *Replica) hear(from uint64) {
	o := r.peers[from]
	if o == nil {
		o = &other{absent: true, lost: r.left[from]}
		r.peers[from] = o
		delete(r.left, from)
	} else if o.silent && !o.absent {
		o.absent, o.lost = true, o.heard
	}
	o.heard, o.silent = r.now, false
}

// meet says what a node lacks that hears another one again, or for the first time. Who starts has nothing for others,
// and asks one of them for all that is older than itself.
func (r *Replica) meet(from uint64, ready bool) {
	o := r.peers[from]
	if !o.absent || !r.ready {
		return
	}
	o.absent = false
	if ready {
		for _, m := range r.models {
			r.lack(m, from, r.now-max(o.lost, r.began)+lateMost)
		}
	}
}

// miss notes of which requests nothing but their end was heard.
func (r *Replica) miss(m *replica) {
	for _, booker := range slices.Sorted(maps.Keys(m.table.missed)) {
		age := time.Duration(forever)
		if p := m.peers[booker]; p != nil && p.whole > 0 {
			age = r.now - p.whole + lateMost
		}
		if r.peers[booker] != nil {
			r.lack(m, booker, age)
			continue
		}
		for other := range r.peers {
			r.lack(m, other, age)
		}
	}
	clear(m.table.missed)
}

// lack has a peer asked, with the next beat, for requests of at most an age.
func (r *Replica) lack(m *replica, from uint64, age time.Duration) {
	if r.cfg.Past == nil || from == r.cfg.Origin {
		return
	}
	l := &lack{since: r.now - min(age, forever), began: r.now, asked: r.now - exchangeGap}
	if before := m.lacks[from]; before != nil {
		l.since, l.asked = min(l.since, before.since), before.asked
	}
	m.lacks[from] = l
}

// recall asks for what is lacking, or asks again.
func (r *Replica) recall(m *replica) {
	for _, from := range slices.Sorted(maps.Keys(m.lacks)) {
		l := m.lacks[from]
		if r.now-l.began >= syncMost { // nobody remembers it, or it is of a version that does not know the question
			delete(m.lacks, from)
			continue
		}
		if r.peers[from] == nil || r.now-l.asked < exchangeGap {
			continue
		}
		r.summary++
		l.asked, l.asker, l.id, l.missing = r.now, r.cfg.Origin, r.summary, nil
		q := recall{from, l.id, min(r.now-l.since, forever)}
		r.send(m.Model, appendRecall(appendModel(appendHead(nil, kindRecall, r.cfg.Origin), m.Model), &q))
	}
}

// asked takes a question: to this node, or to one that it would ask itself.
func (r *Replica) asked(m *replica, from uint64, q *recall) {
	if q.to == r.cfg.Origin {
		r.remember(m, from, q)
	} else if l := m.lacks[q.to]; l != nil && q.age >= r.now-l.since && r.now-l.asked >= exchangeGap {
		l.asked, l.asker, l.id, l.missing = r.now, from, q.id, nil
	}
}

// remember answers a question with what is remembered here, in parts of bounded size.
func (r *Replica) remember(m *replica, to uint64, q *recall) {
	type part struct {
		n    int
		list []byte
	}
	parts, all := []part{{}}, 0
	if r.cfg.Past != nil {
		r.cfg.Past(m.Model, q.age, func(past *Request) bool {
			p := &parts[len(parts)-1]
			if p.n == maxEvents || len(p.list) >= batchBytes {
				parts = append(parts, part{})
				p = &parts[len(parts)-1]
			}
			before := len(p.list)
			p.list = appendPastRequest(p.list, past)
			p.n++
			all += len(p.list) - before
			return all < pushBytes
		})
	}
	var lacks []recall
	for from, l := range m.lacks {
		lacks = append(lacks, recall{to: from, age: min(r.now-l.since, forever)})
	}
	for i, p := range parts {
		b := appendModel(appendHead(make([]byte, 0, len(p.list)+600), kindPast, r.cfg.Origin), m.Model)
		head := past{recall: recall{to: to, id: q.id}, part: uint64(i), parts: uint64(len(parts)),
			lacks: lacks}
		r.send(m.Model, appendPast(b, &head, p.n, p.list))
	}
}

// recalled takes a part of an answer, if it is of use here.
func (r *Replica) recalled(m *replica, from uint64, p *past) {
	l := m.lacks[from]
	if l == nil || l.asker != p.to || l.id != p.id {
		return
	}
	if l.missing == nil {
		l.missing = map[uint64]bool{}
		for i := range p.parts {
			l.missing[i] = true
		}
	}
	if r.cfg.Watch != nil && l.missing[p.part] {
		for i := range p.list {
			r.cfg.Watch(m.Model, &p.list[i])
		}
		r.Counts.Recalled += uint64(len(p.list))
	}
	if from == r.source && !m.inherited { // what this node would have had of the source if it had asked later
		for _, of := range p.lacks {
			r.lack(m, of.to, of.age)
		}
	}
	if delete(l.missing, p.part); len(l.missing) == 0 {
		delete(m.lacks, from)
		m.inherited = m.inherited || from == r.source
	}
}
