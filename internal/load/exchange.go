package load

import (
	"cmp"
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
	under := map[uint64][]live{}
	for key, r := range t.records {
		under[key.Origin] = append(under[key.Origin], live{key.Seq, r.digest})
	}
	for origin := range t.seen {
		part.origins = append(part.origins, origin)
	}
	slices.Sort(part.origins)
	for _, origin := range slices.Clone(part.origins) {
		lives := under[origin]
		slices.SortFunc(lives, func(a, b live) int { return cmp.Compare(a.seq, b.seq) })
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
		*in = incoming{s.id, map[uint64]bool{}, m.sent}
		for i := range s.parts {
			in.missing[i] = true
		}
		if s.reply && from == r.source {
			m.complete, m.want = false, map[Key]bool{}
		}
	}
	delete(in.missing, s.part)
	under := t.under(s)
	var origins []uint64
	for origin, list := range under {
		// The last first, so that what is seen grows at its end.
		slices.SortFunc(list, func(a, b *record) int { return cmp.Compare(b.key.Seq, a.key.Seq) })
		origins = append(origins, origin)
	}
	slices.Sort(origins)
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
		r.compareShare(m, from, &s.shares[i], under[s.shares[i].origin], push)
	}
	if s.part == 0 {
		for _, origin := range origins {
			if _, known := slices.BinarySearch(s.origins, origin); !known {
				for _, rec := range under[origin] {
					push(booked, rec)
				}
			}
		}
	}
	flush()
	m.touch(r.now)
	switch {
	case len(in.missing) > 0:
	case !s.reply:
		r.summarize(m, from, in)
	default: // the peer has had our summary and this is its answer: whatever it sent before is in it
		if r.asked == from {
			r.asked = 0
		}
		p.got.add(1, s.sent)
		if from == r.source {
			m.complete = true
			m.settle()
		}
	}
}

// under has what is under way of the numbers of each origin that a part of a summary is about.
func (t *Table) under(s *summary) map[uint64][]*record {
	about := map[uint64]span{}
	for i := range s.shares {
		h := &s.shares[i]
		p, known := about[h.origin]
		if !known {
			p.first = h.first
		}
		about[h.origin] = span{min(p.first, h.first), max(p.last, h.last)}
	}
	under := map[uint64][]*record{}
	for key, rec := range t.records {
		p, listed := about[key.Origin]
		if !listed && s.part == 0 {
			_, listed = slices.BinarySearch(s.origins, key.Origin)
			p = span{1, math.MaxUint64}
			listed = !listed
		}
		if listed && p.first <= key.Seq && key.Seq <= p.last {
			under[key.Origin] = append(under[key.Origin], rec)
		}
	}
	return under
}

func (r *Replica) compareShare(m *replica, from uint64, h *share, under []*record, push func(change, *record)) {
	t := m.table
	theirs := seen{spans: h.spans}
	for _, rec := range under {
		if rec.key.Seq < h.first || rec.key.Seq > h.last {
			continue
		}
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
