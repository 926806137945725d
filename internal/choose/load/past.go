package load

import "github.com/kvatlas/kvatlas/internal/base/msgp"

// A node that starts gets the requests under way from a peer, its source. Of those that have ended it gets what the
// peer remembers: it asks for that, and the answer comes in parts of bounded size.

// recall asks a peer for past requests, or asks again.
func (r *Replica) recall(m *replica, from uint64) {
	if r.cfg.Past == nil {
		return
	}
	r.summary++
	m.recall, m.past = r.summary, map[uint64][]Request{}
	b := appendModel(appendHead(nil, kindRecall, r.cfg.Origin), m.Model)
	r.send(m.Model, from, msgp.AppendUint(msgp.AppendUint(b, from), m.recall))
}

// remember answers a question for past requests.
func (r *Replica) remember(m *replica, to, id uint64) {
	type part struct {
		n    int
		list []byte
	}
	parts, all := []part{{}}, 0
	if r.cfg.Past != nil {
		r.cfg.Past(m.Model, func(q *Request) bool {
			p := &parts[len(parts)-1]
			if p.n == maxEvents || len(p.list) >= batchBytes {
				parts = append(parts, part{})
				p = &parts[len(parts)-1]
			}
			before := len(p.list)
			p.n, p.list = p.n+1, appendPast(p.list, q)
			all += len(p.list) - before
			return all < pushBytes
		})
	}
	for i, p := range parts {
		b := appendModel(appendHead(nil, kindPast, r.cfg.Origin), m.Model)
		b = msgp.AppendArrayHead(appendPart(b, to, id, uint64(i), uint64(len(parts))), p.n)
		r.send(m.Model, to, append(b, p.list...))
	}
}

// recalled takes a part of an answer, and hands all of it on when it is whole.
func (r *Replica) recalled(m *replica, is *message) {
	if m.recall == 0 || is.id != m.recall {
		return
	}
	m.peer(is.from, r.now).exchanged = r.now
	if m.past[is.part] = is.past; uint64(len(m.past)) < is.parts {
		return
	}
	for i := range is.parts {
		for j := range m.past[i] {
			r.cfg.Recall(m.Model, &m.past[i][j])
			r.Counts.Recalled++
		}
	}
	m.recall, m.past = 0, nil
}
