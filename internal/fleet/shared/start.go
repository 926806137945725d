package shared

import (
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// Times of a starting node.
const (
	sourceRound = time.Second             // longest time of a source
	aloneAfter  = 1500 * time.Millisecond // without a ready node, the node starts empty after this time
	startMost   = 10 * time.Second        // longest start
)

// starting is the state of a node until it is ready. The node requests a beat from all nodes. The first answering node
// is the source for the entries of all owners.
type starting struct {
	ready  bool
	began  time.Duration
	others time.Duration // last message of a ready node
	source uint64        // 0: none
	since  time.Duration // time of the source's answer
	owners []uint64      // owners with possibly missing entries of the source

	recall uint64            // the unanswered request for memories; 0: none
	parts  map[uint64][]item // of the answer
}

// Alone marks that no other node exists.
func (m *Machine[E]) Alone() { m.start.ready = true }

// Ready reports whether the table has the entries of the other nodes.
func (m *Machine[E]) Ready() bool { return m.start.ready }

// startFrom handles the digests of an answering ready node.
func (m *Machine[E]) startFrom(from uint64, list []digest) {
	s := &m.start
	if s.ready || s.source != 0 {
		return
	}
	s.source, s.since, s.owners = from, m.now, nil
	for i := range list {
		d := &list[i]
		if d.owner == m.cfg.Origin || m.owners[d.owner] == nil && len(m.owners) >= maxOwners {
			continue
		}
		if o := m.owner(d.owner); o.lacks(d) {
			s.owners = append(s.owners, d.owner)
			m.requestSummary(from, o)
		}
	}
	m.requestMemories()
}

// startAgain requests missing entries from the source again, or selects another source.
func (m *Machine[E]) startAgain() {
	s := &m.start
	m.startDone()
	switch {
	case s.ready || s.source == 0:
	case m.now-s.since >= sourceRound:
		s.source, s.owners = 0, nil
	default:
		for _, id := range s.owners {
			if o := m.owners[id]; !o.complete() && m.now-o.asked >= exchangeGap {
				m.requestSummary(s.source, o)
			}
		}
		if s.recall != 0 {
			m.requestMemories()
		}
	}
}

// complete reports whether the last request is completely answered.
func (o *owner) complete() bool { return o.whole && len(o.wants) == 0 }

// startDone makes a node ready after the arrival of everything requested.
func (m *Machine[E]) startDone() {
	s := &m.start
	if s.ready {
		return
	}
	done := s.source != 0 && (s.recall == 0 || m.now-s.since >= sourceRound-beatPeriod)
	for _, id := range s.owners {
		done = done && m.owners[id].complete()
	}
	switch {
	case done, m.now-s.others >= aloneAfter:
		s.ready = true
	case m.now-s.began >= startMost:
		s.ready = true
		m.Counts.Unsynced++
	}
}

// requestMemories requests the memories of the source.
func (m *Machine[E]) requestMemories() {
	if len(m.cfg.Memories) == 0 {
		return
	}
	m.questions++
	m.start.recall, m.start.parts = m.questions, map[uint64][]item{}
	m.send(m.start.source, msgp.AppendUint(appendHead(nil, kindRecall, m.cfg.Origin), m.questions))
}

// sendMemories sends this node's memories to a starting node, in parts of bounded size.
func (m *Machine[E]) sendMemories(to, id uint64) {
	type part struct {
		n    int
		data []byte
	}
	parts, room := []part{{}}, answerBytes
	for i, memory := range m.cfg.Memories {
		memory.Each(func(data []byte) bool {
			p := &parts[len(parts)-1]
			if p.n == maxChanges || len(p.data) >= batchBytes {
				parts = append(parts, part{})
				p = &parts[len(parts)-1]
			}
			p.n++
			p.data = msgp.AppendBinHead(msgp.AppendUint(p.data, uint64(i)), len(data))
			p.data = append(p.data, data...)
			room -= len(data)
			return room > 0
		})
	}
	for i, p := range parts {
		b := appendPart(appendHead(nil, kindMemory, m.cfg.Origin), id, uint64(i), uint64(len(parts)))
		m.send(to, append(msgp.AppendArrayHead(b, 2*p.n), p.data...))
	}
}

// applyMemories handles a part of the source's memories, and applies all parts after the last one.
func (m *Machine[E]) applyMemories(x *message[E]) {
	s := &m.start
	if s.recall == 0 || x.id != s.recall {
		return
	}
	if s.parts[x.part] = x.items; uint64(len(s.parts)) < x.parts {
		return
	}
	for i := range x.parts {
		for _, it := range s.parts[i] {
			m.cfg.Memories[it.memory].Take(it.data)
			m.Counts.Recalled++
		}
	}
	s.recall, s.parts = 0, nil
}
