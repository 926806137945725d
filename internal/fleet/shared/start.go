package shared

import (
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// Times of a node that starts.
const (
	sourceRound = time.Second             // how long the source may take
	aloneAfter  = 1500 * time.Millisecond // a node that hears no ready node begins with nothing
	startMost   = 10 * time.Second        // a node does not wait for longer
)

// starting is the state of a node until it is ready. The node asks all nodes for a beat, and gets the entries of all
// owners from the first one that answers, its source.
type starting struct {
	ready  bool
	began  time.Duration
	others time.Duration // when a ready node was last heard
	source uint64        // 0: there is none
	since  time.Duration // when the source answered
	owners []uint64      // of which the source has entries that may not have come

	recall uint64            // the question for memories that is not answered; 0: there is none
	parts  map[uint64][]item // of the answer
}

// Alone notes that there is no other node.
func (m *Machine[E]) Alone() { m.start.ready = true }

// Ready reports whether the entries are those of the other nodes.
func (m *Machine[E]) Ready() bool { return m.start.ready }

// startFrom takes the digests of a ready node that has answered.
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
			m.ask(from, o)
		}
	}
	m.askMemories()
}

// startAgain asks the source for what has not come, or for another source.
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
				m.ask(s.source, o)
			}
		}
		if s.recall != 0 {
			m.askMemories()
		}
	}
}

// complete reports whether the answer to the last question has come.
func (o *owner) complete() bool { return o.whole && len(o.wants) == 0 }

// startDone makes a node ready that has what it waits for.
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

// askMemories asks the source for its memories.
func (m *Machine[E]) askMemories() {
	if len(m.cfg.Memories) == 0 {
		return
	}
	m.questions++
	m.start.recall, m.start.parts = m.questions, map[uint64][]item{}
	m.send(m.start.source, msgp.AppendUint(appendHead(nil, kindRecall, m.cfg.Origin), m.questions))
}

// remind sends a node that starts the memories of this one, in parts of bounded size.
func (m *Machine[E]) remind(to, id uint64) {
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

// recalled takes a part of the source's memories, and hands them on when all parts have come.
func (m *Machine[E]) recalled(x *message[E]) {
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
