package affinity

import (
	"cmp"
	"slices"
	"time"
)

// Times of the protocol.
const (
	batchDelay  = time.Millisecond
	beatPeriod  = 500 * time.Millisecond // and up to beatJitter less, so that beats fall into no other rhythm
	beatJitter  = 100 * time.Millisecond
	exchangeGap = 400 * time.Millisecond // between two questions to one peer
	peerLife    = 5 * time.Second        // a node that was heard no later is there
	syncRound   = time.Second            // how long a peer has for its bindings
	aloneAfter  = 1500 * time.Millisecond
	syncMost    = 10 * time.Second // a node that starts does not wait for longer
	calmAfter   = 20 * time.Millisecond
	doubtMost   = 10 * time.Second        // that sums may differ while bindings change all the time
	silence     = 1100 * time.Millisecond // two beats: the node may have died, and its last messages reached some only
	reaperMost  = 30 * time.Second
)

const maxEntries = 256 // in a message

// protocol is what a machine knows of the others.
type protocol struct {
	peers    map[uint64]*peer
	batch    []wireBinding // that waits
	due      time.Duration // when it is to be sent
	sent     uint64        // messages of bindings
	out      [][]byte
	beats    uint64
	nextBeat time.Duration
	nextUse  time.Duration
	nextReap time.Duration

	began, others time.Duration // others: when a ready node was last heard
	ready         bool
	source        uint64 // whose bindings are waited for; 0: nobody's
	asked         time.Duration
	question      uint64       // the last one's number
	missing       map[int]bool // parts of the source's answer; nil: none has come
}

// peer is another node.
type peer struct {
	heard     time.Duration
	got       uint64 // the last of its messages of bindings that has come, or is not needed any more
	gap       bool   // one before was missed, or others may have missed one of a node that died
	silent    bool   // it was not heard for a while, and that was noted
	exchanged time.Duration
	agreed    time.Duration // when the sums were last equal, or compared
}

// Begin says that the machine begins to hear others now.
func (m *Machine) Begin(now time.Duration) {
	m.now, m.began, m.others, m.nextBeat, m.nextUse, m.nextReap = now, now, now, now, now, now
}

// Alone says that there is no other node: what there is is all.
func (m *Machine) Alone() { m.ready = true }

// Ready reports whether the bindings are those of the other nodes.
func (m *Machine) Ready() bool { return m.ready }

// Peers is how many other nodes were heard a moment ago.
func (m *Machine) Peers() int { return len(m.peers) }

// usePeriod is how long others may not know of a use.
func (m *Machine) usePeriod() time.Duration { return min(m.cfg.TTL/8, time.Second) }

// enqueue sends a binding to the others with the next batch.
func (m *Machine) enqueue(b *binding) {
	if len(m.batch) == 0 {
		m.due = m.now + batchDelay
	}
	m.batch = append(m.batch, toWire(b, m.now))
	if len(m.batch) >= maxEntries {
		m.flush()
	}
}

func (m *Machine) flush() {
	if len(m.batch) == 0 {
		return
	}
	m.sent++
	if len(m.peers) > 0 { // else who comes later finds by the sums that it lacks something
		m.send(&message{Kind: kindBindings, Sent: m.sent, Bindings: m.batch})
	}
	m.batch = nil
}

func (m *Machine) send(msg *message) {
	msg.From = m.cfg.Origin
	m.out = append(m.out, encode(msg))
	m.Counts.Sent++
}

// Wake is when Step is due if nothing happens before.
func (m *Machine) Wake() time.Duration {
	if len(m.out) > 0 {
		return m.now
	}
	wake := min(m.nextBeat, m.nextReap)
	if len(m.dirty)+len(m.leased) > 0 {
		wake = min(wake, m.nextUse)
	}
	if len(m.batch) > 0 {
		wake = min(wake, m.due)
	}
	return wake
}

// Step goes on to now and returns what is to be published.
func (m *Machine) Step(now time.Duration) [][]byte {
	m.now = now
	if now >= m.nextUse {
		m.nextUse = now + m.usePeriod()
		m.prolong()
	}
	if now >= m.nextReap {
		m.nextReap = now + min(m.cfg.TTL, reaperMost)
		m.reap()
	}
	if now >= m.nextBeat {
		m.beats++
		m.nextBeat = now + beatPeriod - time.Duration((m.cfg.Origin^m.beats*0x9e3779b97f4a7c15)>>33)%beatJitter
		for origin, p := range m.peers {
			if now-p.heard > peerLife {
				delete(m.peers, origin)
			} else if now-p.heard > silence && !p.silent {
				p.silent = true
				for _, other := range m.peers {
					other.gap = true
				}
			}
		}
		m.again()
		m.start()
		m.beat(0)
	}
	if len(m.batch) > 0 && now >= m.due {
		m.flush()
	}
	out := m.out
	m.out = nil
	return out
}

// Finish steps to the end: uses that others were not told of and what waits in the batch are due.
func (m *Machine) Finish(now time.Duration) [][]byte {
	out := m.Step(now)
	now += m.usePeriod()
	out = append(out, m.Step(now)...)
	return append(out, m.Step(now+batchDelay)...)
}

// again asks the source anew for what has not come, or for another source.
func (m *Machine) again() {
	if m.ready || m.source == 0 {
		return
	}
	p := m.peers[m.source]
	if p == nil || m.now-m.asked >= syncRound {
		m.source = 0
	} else if m.now-p.exchanged >= exchangeGap {
		m.missing = nil
		m.ask(m.source, p)
	}
}

// start looks whether a node that starts has what it waits for.
func (m *Machine) start() {
	switch {
	case m.ready:
	case m.missing != nil && len(m.missing) == 0, m.now-m.others >= aloneAfter:
		m.ready = true
	case m.now-m.began >= syncMost:
		m.ready = true
		m.Counts.Unsynced++
	}
}

// beat says what this node has, to all; if it answers one that has asked it names it.
func (m *Machine) beat(answers uint64) {
	m.reap()
	m.flush() // so that who hears this in order has heard of all that this node has done
	m.send(&message{Kind: kindBeat, Ready: m.ready, Ask: !m.ready && m.source == 0, To: answers, Calm: m.calm(m.learnt),
		Count: len(m.bindings), Sum: m.sum(), Sent: m.sent})
}

func (m *Machine) sum() (sum uint64) {
	for _, s := range m.sums {
		sum += s
	}
	return sum
}

// calm reports whether something was a moment ago.
func (m *Machine) calm(last time.Duration) bool { return m.now-last >= calmAfter }

// Receive takes what another node has published. The error is for counters: there is nothing to do.
func (m *Machine) Receive(now time.Duration, data []byte) error {
	m.now = now
	msg, err := decode(data)
	if err != nil {
		m.Counts.Malformed++
		return err
	}
	if msg.From == m.cfg.Origin {
		return nil
	}
	m.Counts.Received++
	p := m.peers[msg.From]
	if p == nil {
		p = &peer{exchanged: now - exchangeGap, agreed: now, gap: true} // what it has sent before was missed
		m.peers[msg.From] = p
	}
	p.heard, p.silent = now, false
	switch msg.Kind {
	case kindBindings:
		if msg.Sent > p.got+1 {
			p.gap = true
		}
		p.got = max(p.got, msg.Sent)
		m.take(msg.Bindings)
	case kindBeat:
		m.heard(msg, p)
	case kindQuestion:
		if msg.To == m.cfg.Origin {
			m.answer(msg)
		}
	case kindAnswer:
		if n := m.take(msg.Bindings); msg.To == m.cfg.Origin {
			m.Counts.Healed += uint64(n)
			m.answered(msg)
		}
	}
	return nil
}

// take joins bindings and returns how many were news.
func (m *Machine) take(list []wireBinding) (news int) {
	for i := range list {
		o := list[i].binding()
		if m.join(&o, time.Duration(list[i].LeftMS)*time.Millisecond) {
			m.learnt = m.now
			news++
		}
	}
	return news
}

// heard compares another node's bindings with ours.
func (m *Machine) heard(msg *message, p *peer) {
	if msg.Ask && m.ready {
		m.beat(msg.From)
	}
	if msg.Ready {
		m.others = m.now
	}
	m.reap()
	equal := msg.Count == len(m.bindings) && msg.Sum == m.sum()
	if equal {
		p.agreed, p.gap, p.got = m.now, false, max(p.got, msg.Sent)
		m.ready = m.ready || msg.Ready
	}
	switch {
	case !m.ready && m.source == 0 && msg.Ready && msg.To == m.cfg.Origin:
		m.source, m.asked, m.missing = msg.From, m.now, nil
		m.ask(msg.From, p)
		p.got, p.gap = msg.Sent, false // what it sent before is in its answer
	case m.ready != msg.Ready || m.now-p.exchanged < exchangeGap: // who starts asks one that is ready for all
	case p.gap || p.got < msg.Sent || !equal && msg.Calm && m.calm(m.changed) || m.now-p.agreed >= doubtMost:
		m.Counts.Exchanges++
		p.agreed, p.gap, p.got = m.now, false, max(p.got, msg.Sent)
		m.ask(msg.From, p)
	}
}

// ask asks a peer for the parts whose sums are others than here.
func (m *Machine) ask(to uint64, p *peer) {
	p.exchanged = m.now
	m.question++
	m.send(&message{Kind: kindQuestion, To: to, Question: m.question, Sums: m.sums[:]})
}

// answer sends what is in the parts that differ.
func (m *Machine) answer(msg *message) {
	m.flush()
	m.reap()
	var differ []*binding
	for key, b := range m.bindings {
		if part := key.part(); len(msg.Sums) != parts || msg.Sums[part] != m.sums[part] {
			differ = append(differ, b)
		}
	}
	// ordered by part, so that a lost message is of a few parts
	slices.SortFunc(differ, func(a, b *binding) int { return cmp.Compare(a.key.part(), b.key.part()) })
	list := make([]wireBinding, len(differ))
	for i, b := range differ {
		list[i] = toWire(b, m.now)
	}
	n := max((len(list)+maxEntries-1)/maxEntries, 1)
	for i := range n {
		m.send(&message{Kind: kindAnswer, To: msg.From, Question: msg.Question, Part: i, Parts: n,
			Bindings: list[i*maxEntries : min((i+1)*maxEntries, len(list))]})
	}
}

// answered notes a part of the source's answer.
func (m *Machine) answered(msg *message) {
	if m.ready || msg.From != m.source || msg.Question != m.question {
		return
	}
	if m.missing == nil {
		m.missing = map[int]bool{}
		for i := range msg.Parts {
			m.missing[i] = true
		}
	}
	delete(m.missing, msg.Part)
	m.start()
}
