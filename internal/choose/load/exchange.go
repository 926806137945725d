package load

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"sort"
)

// Two nodes whose tables of a model differ exchange summaries, and send each other what is missing.

// summarize sends a peer what a table has and has seen: as the answer to a summary of the peer's, or, if that is nil,
// to be answered.
func (r *Replica) summarize(m *replica, to uint64, answered *incoming) {
	m.peer(to, r.now).exchanged = r.now
	sent := uint64(0)
	if answered != nil {
		sent = answered.sent
	}
	parts := m.table.summary()
	r.summary++
	for i := range parts {
		p := &parts[i]
		p.to, p.id, p.part, p.parts, p.reply, p.sent = to, r.summary, uint64(i), uint64(len(parts)), answered != nil, sent
		b := appendModel(appendHead(nil, kindSummary, r.cfg.Origin), m.Model)
		r.send(m.Model, to, appendSummary(b, p))
	}
	// A node that starts compares with a second one before it believes what others have heard.
	if o := r.peers[to]; answered != nil && !answered.cut && len(answered.versions) > 0 && o != nil && !o.starts {
		b := appendModel(appendHead(nil, kindVersions, r.cfg.Origin), m.Model)
		r.send(m.Model, to, appendVersions(b, to, r.summary, answered.versions))
	}
}

// versions returns up to which message of events of each node, but for one, this node has all: a version vector.
func (m *replica) versions(but uint64) (list []version) {
	for origin, p := range m.peers {
		if spans := p.got.spans; origin != but && len(spans) > 0 && spans[0].first == 1 {
			list = append(list, version{origin, spans[0].last})
		}
	}
	slices.SortFunc(list, func(a, b version) int { return cmp.Compare(a.origin, b.origin) })
	return list
}

// advance notes that messages are not needed any more that a peer had before it answered a summary: what they changed
// is in the answer, and in what the peer sent with it.
func (r *Replica) advance(m *replica, p *peer) {
	for _, v := range p.versions {
		if r.peers[v.origin] != nil {
			m.peer(v.origin, r.now).got.add(1, v.number)
		}
	}
	p.versions, p.versionsOf = nil, 0
}

// learn takes a peer's version vector, which belongs to an answer of the peer: it counts when all of that has come.
func (r *Replica) learn(m *replica, from, id uint64, list []version) {
	p := m.peer(from, r.now)
	p.versions, p.versionsOf = list, id
	if in := &p.in[1]; in.id == id && len(in.missing) == 0 {
		r.advance(m, p)
	}
}

// summary is what a table has and has seen, in parts of bounded size. Each part holds by itself.
func (t *Table) summary() (parts []summary) {
	part, points := summary{}, 0
	finish := func(h *share, last uint64) {
		h.last = last
		part.shares = append(part.shares, *h)
		*h = share{origin: h.origin, first: last + 1}
		if points >= partPoints {
			parts, part, points = append(parts, part), summary{}, 0
		}
	}
	for origin := range t.seen {
		part.origins = append(part.origins, origin)
	}
	slices.Sort(part.origins)
	for _, origin := range slices.Clone(part.origins) {
		under := t.seen[origin].underWay(1, math.MaxUint64)
		lives := make([]live, len(under))
		for i, r := range under {
			lives[i] = live{r.key.Seq, r.digest}
		}
		h := share{origin: origin, first: 1}
		for _, p := range t.seen[origin].spans {
			for {
				n := sort.Search(len(lives), func(i int) bool { return lives[i].seq > p.last })
				n = min(n, partPoints-points)
				h.live, lives, points = append(h.live, lives[:n]...), lives[n:], points+n
				if len(lives) == 0 || lives[0].seq > p.last {
					break
				}
				end := lives[0].seq - 1 // the part is full
				if p.first <= end {
					h.spans = append(h.spans, span{p.first, end})
				}
				finish(&h, end)
				p.first = end + 1
			}
			h.spans, points = append(h.spans, p), points+1
			if points >= partPoints {
				finish(&h, p.last)
			}
		}
		finish(&h, math.MaxUint64)
	}
	return append(parts, part)
}

// compare takes a part of a peer's summary: what the peer has seen the end of ends here, and what the peer lacks is
// sent, to all nodes, or to the peer alone while it starts. When all parts have come the peer gets our summary, and
// does the same.
func (r *Replica) compare(m *replica, from uint64, s *summary) {
	t := m.table
	r.flush(m)
	p := m.peer(from, r.now)
	p.exchanged = r.now
	in := &p.in[0]
	if s.reply {
		in = &p.in[1]
	}
	if in.id != s.id {
		*in = incoming{id: s.id, missing: map[uint64]bool{}, sent: m.sent}
		if !s.reply {
			in.versions = m.versions(from)
		}
		for i := range s.parts {
			in.missing[i] = true
		}
		if s.reply && from == r.source {
			m.complete, m.want = false, map[Key]bool{}
		}
	}
	delete(in.missing, s.part)
	room := pushBytes
	starts := r.peers[from].starts
	var direct []byte // events for a node that starts: the others have them, and it asks until all have come
	n := 0
	flush := func() {
		if n > 0 {
			b := appendModel(appendHead(nil, kindEvents, r.cfg.Origin), m.Model)
			r.send(m.Model, from, appendEvents(b, 0, n, direct))
			direct, n = direct[:0], 0
		}
	}
	push := func(kind change, rec *record) {
		if room <= 0 {
			in.cut = true
			return
		}
		r.Counts.Pushed++
		if !starts {
			before := len(m.batch)
			r.enqueue(m, kind, rec)
			room -= max(len(m.batch)-before, 8*len(rec.hashes))
			return
		}
		before := len(direct)
		direct = appendEvent(direct, kind, rec, rec.deadline-r.now)
		room -= len(direct) - before
		if n++; n >= maxEvents || len(direct) >= batchBytes {
			flush()
		}
	}
	for i := range s.shares {
		r.compareShare(m, from, &s.shares[i], push)
	}
	if s.part == 0 {
		for _, origin := range slices.Sorted(maps.Keys(t.seen)) {
			if _, known := slices.BinarySearch(s.origins, origin); !known {
				for _, rec := range r.comparable(m, origin, 1, math.MaxUint64) {
					push(booked, rec)
				}
			}
		}
	}
	flush()
	m.touch(r.now)
	m.used = r.now
	switch {
	case len(in.missing) > 0:
	case !s.reply:
		r.summarize(m, from, in)
	default: // the peer has had our summary and this is its answer: whatever it sent before is in it
		if r.asked == from {
			r.asked = 0
		}
		p.got.add(1, s.sent)
		if p.versionsOf == s.id {
			r.advance(m, p)
		}
		if from == r.source {
			m.complete = true
			m.settle()
		}
	}
}

// comparable returns what is under way of the numbers of an origin that a share is about. The last come first, so that
// what is seen grows at its end.
func (r *Replica) comparable(m *replica, origin, first, last uint64) []*record {
	list := slices.Clone(m.table.seen[origin].underWay(first, last))
	slices.Reverse(list)
	r.Counts.Compared += uint64(len(list))
	return list
}

func (r *Replica) compareShare(m *replica, from uint64, h *share, push func(change, *record)) {
	t := m.table
	theirs := seen{spans: h.spans}
	for _, rec := range r.comparable(m, h.origin, h.first, h.last) {
		at, ok := slices.BinarySearchFunc(h.live, rec.key.Seq, func(l live, seq uint64) int {
			return cmp.Compare(l.seq, seq)
		})
		switch {
		case ok && h.live[at].digest != rec.digest:
			push(updated, rec)
		case ok:
		case theirs.has(rec.key.Seq):
			t.remove(r.now, rec)
			r.Counts.Healed++
		default:
			push(booked, rec)
		}
	}
	ours := t.seen[h.origin]
	if ours == nil {
		if len(h.live) == 0 && h.origin != from {
			return // nobody is missed: see Table.forget
		}
		ours = t.seenOf(h.origin, r.now)
	}
	// All that the peer has seen has been seen here, but for what it has and we have not: that is still to come.
	lives := h.live
	for _, p := range h.spans {
		next := p.first
		for len(lives) > 0 && lives[0].seq <= p.last {
			key := Key{h.origin, lives[0].seq}
			lives = lives[1:]
			if ours.has(key.Seq) {
				continue
			}
			ours.add(next, key.Seq-1)
			next = key.Seq + 1
			if m.waiting && from == r.source {
				m.want[key] = true
			}
		}
		ours.add(next, p.last)
	}
}
