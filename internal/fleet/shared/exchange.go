package shared

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// A node compares the digests in a writer's beat with the local digests. After a difference in an owner, the node
// requests a summary from the writer, and then the missing entries.

// beat publishes a digest of every owner for which this node writes. Earlier changes are sent first, so a node with all
// changes has the same digests.
func (m *Machine[E]) beat(leaves bool) {
	m.flushAll()
	b := &beat{ready: m.start.ready, ask: !m.start.ready && m.start.source == 0, leaves: leaves}
	for _, id := range slices.Sorted(maps.Keys(m.owners)) {
		if o := m.owners[id]; id == m.cfg.Origin || len(o.entries) > 0 && m.writer(id) == m.cfg.Origin {
			b.owners = append(b.owners, o.digest())
		}
	}
	m.Counts.Beats++
	m.send(0, appendBeat(appendHead(nil, kindBeat, m.cfg.Origin), b))
}

// answerBeat sends a digest of every owner to a starting node.
func (m *Machine[E]) answerBeat(to uint64) {
	b := &beat{ready: true, answer: true}
	for _, id := range slices.Sorted(maps.Keys(m.owners)) {
		b.owners = append(b.owners, m.owners[id].digest())
	}
	m.send(to, appendBeat(appendHead(nil, kindBeat, m.cfg.Origin), b))
}

func (o *owner) digest() digest {
	return digest{owner: o.id, last: o.last, missing: o.holes.size(), count: o.count, sum: o.sum}
}

// lacks reports whether one of the two nodes may lack something.
func (o *owner) lacks(d *digest) bool {
	return o.count != d.count || o.sum != d.sum || o.last < d.last || o.holes.size() > d.missing
}

// accepts reports whether a node is the writer of an owner.
func (m *Machine[E]) accepts(from, id uint64) bool {
	return from == id || id != m.cfg.Origin && !m.heardWithin(id, hush) && from == m.acting()
}

// applyBeat compares another node's digests with the local ones.
func (m *Machine[E]) applyBeat(from uint64, b *beat) {
	p := m.peers[from]
	p.ready = b.ready
	if b.ready {
		m.start.others = m.now
	}
	if b.leaves {
		delete(m.peers, from)
		return
	}
	if b.ask && m.start.ready && m.now-p.answered >= batchDelay {
		p.answered = m.now
		m.answerBeat(from)
	}
	if b.answer {
		m.startFrom(from, b.owners)
		return
	}
	if !m.start.ready {
		return
	}
	listed := make(map[uint64]bool, len(b.owners))
	for i := range b.owners {
		d := &b.owners[i]
		listed[d.owner] = true
		if m.owners[d.owner] == nil && (d.last == 0 || len(m.owners) >= maxOwners) {
			continue
		}
		if m.accepts(from, d.owner) && m.owner(d.owner).lacks(d) {
			m.requestDifference(from, d)
		}
	}
	if !b.ready {
		return
	}
	var gone []uint64 // owners without an entry on their writer
	for id, o := range m.owners {
		if o.count > 0 && !listed[id] && !m.heardWithin(id, 2*silence) && m.accepts(from, id) {
			gone = append(gone, id)
		}
	}
	slices.Sort(gone)
	for _, id := range gone {
		m.requestDifference(from, &digest{owner: id})
	}
}

// requestDifference requests a summary of an owner's entries from a node, if there is room for the answer now.
func (m *Machine[E]) requestDifference(from uint64, d *digest) {
	o := m.owners[d.owner]
	full := m.cfg.Entries > 0 && m.size >= m.cfg.Entries
	if m.now-m.askedSince >= exchangeGap {
		m.askedSince, m.askedRoom = m.now, 0
	}
	if m.now-o.asked < exchangeGap || full || m.askedRoom > 0 && m.askedRoom+d.count > askRoom {
		return
	}
	m.askedRoom += d.count
	m.Counts.Exchanges++
	m.requestSummary(from, o)
}

func (m *Machine[E]) requestSummary(from uint64, o *owner) {
	m.questions++
	o.asked, o.ask, o.whole = m.now, m.questions, false
	o.parts, o.wants = map[uint64]bool{}, map[uint64]bool{}
	b := msgp.AppendUint(msgp.AppendUint(appendHead(nil, kindAsk, m.cfg.Origin), o.id), o.ask)
	m.send(from, msgp.AppendBool(b, !m.start.ready && len(o.entries) == 0))
}

// sendSummary answers a request for an owner's entries with a summary, in parts of bounded size. A part is valid by
// itself.
func (m *Machine[E]) sendSummary(to uint64, x *message[E]) {
	o := m.owners[x.owner]
	if o == nil {
		o = &owner{id: x.owner}
	}
	m.flushAll()
	var all []live
	for seq := range o.entries {
		if hash, there := m.table.Hash(Key{o.id, seq}); there {
			all = append(all, live{seq, hash})
		}
	}
	slices.SortFunc(all, func(a, b live) int { return Key{Seq: a.seq}.Compare(Key{Seq: b.seq}) })
	if x.bodies {
		seqs := make([]uint64, len(all))
		for i, l := range all {
			seqs[i] = l.seq
		}
		m.sendEntries(to, o, seqs)
	}
	parts := summaryParts(all, o.holes)
	for i := range parts {
		s := &parts[i]
		s.owner, s.id, s.part, s.parts, s.top = o.id, x.id, uint64(i), uint64(len(parts)), o.last
		m.send(to, appendSummary(appendHead(nil, kindSummary, m.cfg.Origin), s))
	}
}

// summaryParts divides entries and holes into parts of at most partPoints of each.
func summaryParts(all []live, holes spans) (parts []summary) {
	for first := uint64(1); first <= maxSeq; {
		last := uint64(maxSeq)
		if len(all) > partPoints {
			last = all[partPoints-1].seq
		}
		if len(holes) > partPoints {
			last = min(last, holes[partPoints-1].last)
		}
		s := summary{first: first, last: last, holes: holes.intersect(spans{{first, last}})}
		for len(all) > 0 && all[0].seq <= last {
			s.live, all = append(s.live, all[0]), all[1:]
		}
		holes = holes[holes.from(last+1):]
		parts, first = append(parts, s), last+1
	}
	return parts
}

// merge applies a part of another node's summary. Local entries that ended on the sender end here. Entries that ended
// here, or never reached the sender, are proposed to the writer. Missing entries are requested.
func (m *Machine[E]) merge(from uint64, s *summary) {
	o := m.owners[s.owner]
	if o == nil || o.ask != s.id {
		return
	}
	o.touched = m.now
	writes := m.writer(o.id) == m.cfg.Origin
	there := map[uint64]uint64{}
	for _, l := range s.live {
		there[l.seq] = l.hash
	}
	for _, seq := range slices.Sorted(maps.Keys(o.entries)) {
		if _, has := there[seq]; !has && seq >= s.first && seq <= s.last {
			m.mergeMissing(o, from, s, seq, writes)
		}
	}
	var want []uint64
	var unknown spans // numbers of the sender's entries, unknown here
	for _, l := range s.live {
		k, e := Key{o.id, l.seq}, o.entries[l.seq]
		if e == nil && !o.isKnown(l.seq) {
			unknown.add(l.seq, l.seq)
			want = append(want, l.seq)
			continue
		}
		if e == nil && writes { // it has ended here
			m.enqueue(0, changeEnd, k)
			continue
		}
		hash, has := m.table.Hash(k)
		if has && hash != l.hash { // published here after the arrival of the entry
			want = append(want, l.seq)
			if !writes {
				m.propose(k, false)
			}
			continue
		}
		if writes {
			continue
		}
		if e == nil {
			e = m.insert(o, l.seq)
		}
		if o.publish(e, l.hash); has {
			delete(m.pending, k)
		} else {
			m.propose(k, false)
		}
	}
	m.markEnded(o, s, unknown)
	if len(want) > 0 {
		for _, seq := range want {
			o.wants[seq] = true
		}
		b := msgp.AppendUint(appendHead(nil, kindWant, m.cfg.Origin), o.id)
		m.send(from, appendNumbers(b, want))
	}
	o.parts[s.part] = true
	o.whole = uint64(len(o.parts)) == s.parts
}

// mergeMissing decides about a local entry that is missing in another node's summary.
func (m *Machine[E]) mergeMissing(o *owner, from uint64, s *summary, seq uint64, writes bool) {
	k := Key{o.id, seq}
	_, has := m.table.Hash(k)
	switch unknown := seq > s.top || s.holes.has(seq); {
	case unknown && from == o.id || unknown && writes: // created since, or the sender will request it
	case unknown && has:
		o.retract(o.entries[seq])
		m.propose(k, false)
	case unknown:
		m.remove(o, k)
	default:
		m.Counts.Healed++
		m.table.End(m.now, k)
		if writes {
			m.End(m.now, k, false)
		} else {
			m.remove(o, k)
		}
	}
}

// markEnded records numbers that were unknown here: numbers without a hole or an entry in the summary have ended.
func (m *Machine[E]) markEnded(o *owner, s *summary, unknown spans) {
	end := min(s.last, s.top)
	if o.extend(end); s.first > end {
		return
	}
	for _, p := range s.holes {
		unknown.add(p.first, p.last)
	}
	kept := o.holes.intersect(unknown)
	o.holes.cut(s.first, end)
	for _, p := range kept {
		o.holes.add(p.first, p.last)
	}
}

// wanted is a set of requested entries of an owner. Requests are collected for a moment, because many nodes may lack
// the same entries.
type wanted struct {
	due  time.Duration
	seqs map[uint64]bool
	by   map[uint64]bool
}

// collectWants records a request for entries.
func (m *Machine[E]) collectWants(from uint64, x *message[E]) {
	if m.owners[x.owner] == nil {
		return
	}
	w := m.wanted[x.owner]
	if w == nil {
		w = &wanted{due: m.now + gatherDelay, seqs: map[uint64]bool{}, by: map[uint64]bool{}}
		m.wanted[x.owner] = w
	}
	w.by[from] = true
	for _, seq := range x.wants {
		w.seqs[seq] = true
	}
}

// sendWanted sends requested entries: to all nodes if a quarter of the nodes has requested them.
func (m *Machine[E]) sendWanted(id uint64, w *wanted) {
	o := m.owners[id]
	if o == nil {
		return
	}
	seqs, by := slices.Sorted(maps.Keys(w.seqs)), slices.Sorted(maps.Keys(w.by))
	m.flushAll()
	if len(by) > 1 && 4*len(by) >= len(m.peers) {
		by = []uint64{0}
	}
	for _, to := range by {
		m.sendEntries(to, o, seqs)
	}
}

// sendEntries sends entries of an owner at once, or their ends.
func (m *Machine[E]) sendEntries(to uint64, o *owner, seqs []uint64) {
	b, room := &batch{}, answerBytes
	for _, seq := range seqs {
		k, kind := Key{o.id, seq}, uint64(changeWhole)
		if _, has := m.table.Hash(k); !has {
			if kind = changeEnd; !o.isKnown(seq) {
				continue
			}
		}
		m.Counts.Pushed++
		before := len(b.data)
		b.data = m.appendChange(b.data, kind, k)
		b.n++
		if room -= len(b.data) - before; room <= 0 {
			break
		}
		if b.n >= maxChanges || len(b.data) >= batchBytes {
			m.sendChanges(to, kindPublished, b)
		}
	}
	if b.n > 0 {
		m.sendChanges(to, kindPublished, b)
	}
}

func (m *Machine[E]) appendChange(b []byte, kind uint64, k Key) []byte {
	b = msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, kind), k.Owner), k.Seq)
	if kind == changeEnd {
		return b
	}
	return m.table.Append(b, m.now, k, kind == changeWhole)
}

// sendChanges sends a batch and empties it.
func (m *Machine[E]) sendChanges(to, kind uint64, b *batch) {
	data := appendHead(make([]byte, 0, len(b.data)+32), kind, m.cfg.Origin)
	m.send(to, append(msgp.AppendArrayHead(data, b.n), b.data...))
	b.n, b.data = 0, b.data[:0]
}

// Prepare decodes a message of another node, without the lock, and returns the steps to apply. Call every step with the
// lock. A message with many changes has several steps, so that readers of the table run in between.
func (m *Machine[E]) Prepare(data []byte) (steps []func(now time.Duration)) {
	const atOnce = 8
	x, err := m.decode(data)
	if err != nil {
		return []func(time.Duration){func(now time.Duration) { m.unread(err) }}
	}
	for ; len(x.changes) > atOnce; x.changes = x.changes[atOnce:] {
		part := &message[E]{kind: x.kind, from: x.from, changes: x.changes[:atOnce]}
		steps = append(steps, func(now time.Duration) { m.accept(now, part) })
	}
	return append(steps, func(now time.Duration) {
		m.Counts.Received++
		m.accept(now, x)
	})
}

// Receive applies a message of another node.
func (m *Machine[E]) Receive(now time.Duration, data []byte) {
	for _, step := range m.Prepare(data) {
		step(now)
	}
}

func (m *Machine[E]) unread(err error) {
	if err == errVersion {
		m.Counts.OtherVersion++
	} else {
		m.Counts.Malformed++
	}
}

// accept applies a message of another node.
func (m *Machine[E]) accept(now time.Duration, x *message[E]) {
	if x.from == m.cfg.Origin {
		return
	}
	m.now = now
	p := m.peers[x.from]
	if p == nil {
		if len(m.peers) >= maxOwners {
			m.Counts.Dropped++
			return
		}
		p = &peer{answered: math.MinInt64 / 2}
		m.peers[x.from] = p
	}
	p.heard = now
	switch x.kind {
	case kindPublished, kindProposed:
		for i := range x.changes {
			m.applyChange(x.from, &x.changes[i], x.kind == kindProposed)
		}
	case kindBeat:
		m.applyBeat(x.from, &x.beat)
	case kindAsk:
		m.sendSummary(x.from, x)
	case kindSummary:
		m.merge(x.from, &x.summary)
	case kindWant:
		m.collectWants(x.from, x)
	case kindRecall:
		m.sendMemories(x.from, x.id)
	case kindMemory:
		m.applyMemories(x)
	}
	m.startDone()
}
