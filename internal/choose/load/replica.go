package load

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Model names a table: a model's name and a routing group, each of at most 255 bytes; the usual group is empty.
type Model struct{ Name, Group string }

// usualModels is how many tables there may be by default.
const usualModels = 256

// ReplicaConfig is one node's.
type ReplicaConfig struct {
	Origin uint64 // of this session of this node: random, not 0
	Limits Limits
	Models int // how many tables there may be; 0: 256

	// Watch is told of every request, whichever node booked it; nil: nobody is. It must not call back.
	Watch func(Model, *Request)

	// Past yields what is remembered of requests that have ended, with their ages, the latest first: the Recall of a node
	// that starts is told of as many as go into 16 MiB. nil: nothing is remembered, and nothing asked for.
	Past   func(of Model, yield func(*Request) bool)
	Recall func(Model, *Request)
}

// Times of the protocol.
const (
	batchDelay  = time.Millisecond
	batchPeers  = 16 // so many of them add a millisecond to the least time between two batches
	beatPeriod  = 500 * time.Millisecond
	exchangeGap = 400 * time.Millisecond  // between two exchanges with one peer about one model
	rivalGrace  = 500 * time.Millisecond  // an exchange with each peer, so that the end of one of the two is heard
	peerLife    = 5 * time.Second         // a node that was heard no later is there
	syncRound   = time.Second             // how long a peer has for its tables
	aloneAfter  = 1500 * time.Millisecond // a node that starts and hears no ready node begins with nothing
	syncMost    = 10 * time.Second        // a node that starts does not wait for longer
	calmAfter   = 20 * time.Millisecond   // without a change of a table; events take less
	doubtMost   = 10 * time.Second        // that digests may differ while tables change all the time
	silence     = 1100 * time.Millisecond // two beats: the node may have died, and its last messages reached some only
	tickPeriod  = time.Second
)

// Sizes of the protocol.
const (
	maxEvents   = 256       // in a message
	batchBytes  = 256 << 10 // a message with more is sent; one event has at most half a MiB
	pushBytes   = 16 << 20  // that one exchange sends of a model; the rest goes with the next
	outboxBytes = 64 << 20  // that wait to be sent
	partPoints  = 4096      // live keys and ends of spans in a part of a summary
	summaryRoom = 64 << 10  // requests in the summaries that a node begins within exchangeGap, if it is more than one
	maxParts    = 1 << 16
)

// Message is to be published where the nodes of the namespace listen for a model; the empty model is for all. One to a
// node is published where that one listens.
type Message struct {
	Model Model
	To    uint64 // the origin of the only node that it is for; 0: all
	Data  []byte
}

// ReplicaCounts are of what happened to a replica since it was made.
type ReplicaCounts struct {
	Sent, Received, Malformed, OtherVersion uint64 // messages
	Beats                                   uint64 // of those sent
	Exchanges                               uint64 // summaries sent because a peer's digest differed
	Pushed                                  uint64 // events sent because a peer's summary lacked them
	Compared                                uint64 // requests under way that were compared with summaries
	Healed                                  uint64 // requests ended because a peer had seen their end
	Dropped                                 uint64 // messages that were not sent, because too many wait, or taken
	Unsynced                                uint64 // 1: it was ready without a peer's tables although there are peers
	Recalled                                uint64 // past requests that a peer has told of
	Idle                                    uint64 // tables dropped because nothing was booked there for long
}

// Replica keeps the same tables on every node. It is stepped: time and messages are arguments, and what is to be sent
// is a result of [Replica.Step]. Whatever is lost on the way is healed by digests, which each node sends twice a
// second. One goroutine at a time may use it; a [Table] may be read by several while none changes anything.
type Replica struct {
	Counts ReplicaCounts

	cfg      ReplicaConfig
	models   []*replica
	byName   map[Model]*replica
	dropped  numbers
	peers    map[uint64]*other
	others   time.Duration // when a ready node was last heard, or this one began
	out      []Message
	outBytes int
	nextBeat time.Duration
	nextTick time.Duration
	now      time.Duration
	summary  uint64 // the last one's number

	window time.Duration // when summaries began to count
	begun  int           // requests in those that were begun since
	asked  uint64        // whose answer is awaited; 0: nobody's
	late   uint64        // who has not answered within exchangeGap; 0: nobody

	began  time.Duration
	ready  bool
	source uint64        // whose tables are waited for; 0: nobody's
	since  time.Duration // when it was asked
}

// other is another node.
type other struct {
	heard  time.Duration // when it was last
	silent bool          // it was not for a while, and that was noted
	ready  bool
	starts bool // it is not ready, as it says
}

// numbers are the last ones of own keys and own messages of events, of all tables that were dropped. A table that is
// made again counts on from them, as other nodes may remember which of its numbers they have seen.
type numbers struct{ key, sent uint64 }

// replica is the table of one model.
type replica struct {
	Model
	table   *Table
	used    time.Duration // when anything was last said of its requests, here or by another node
	batch   []byte        // events that wait
	events  int
	due     time.Duration // when they are to be sent
	flushed time.Duration // when the last were made a message
	doubt   bool          // some nodes may know what others do not, though nobody will miss a message
	sent    uint64        // how many messages of events have been sent, or would have been if somebody had been there
	peers   map[uint64]*peer
	last    Digest        // as it was
	touched time.Duration // when it last changed

	// While the node starts: what of the source's summary has not come.
	waiting  bool
	complete bool // all parts of its summary have
	want     map[Key]bool
	recall   uint64               // the question for past requests that is not answered; 0: there is none
	past     map[uint64][]Request // parts of the answer that have come
}

// peer is another node's table of the same model.
type peer struct {
	got       seen   // which of its messages of events have come, or are not needed any more
	sent      uint64 // how many it has sent, as it said last
	exchanged time.Duration
	agreed    time.Duration // when the digests were last equal, or compared
	in        [2]incoming   // a summary that wants an answer; one that is an answer

	// versions came beside the peer's answer versionsOf, of which not all has come; 0: there are none
	versions   []version
	versionsOf uint64
}

// incoming is a summary of which parts may be missing.
type incoming struct {
	id      uint64
	missing map[uint64]bool
	sent    uint64 // how many messages we had sent when it began to come

	versions []version // what we had of others' messages then
	cut      bool      // not all that the peer lacks was sent
}

// NewReplica returns a replica that knows nothing, and is ready when it has a peer's tables or there is no peer.
func NewReplica(now time.Duration, cfg ReplicaConfig) *Replica {
	if cfg.Models <= 0 {
		cfg.Models = usualModels
	}
	r := &Replica{cfg: cfg, byName: map[Model]*replica{}, peers: map[uint64]*other{}}
	r.Begin(now)
	return r
}

// Begin says that what was set up before begins to hear others now.
func (r *Replica) Begin(now time.Duration) {
	r.now, r.began, r.others, r.nextBeat, r.nextTick = now, now, now, now, now+tickPeriod
}

// Alone says that there is no other node: what there is is all.
func (r *Replica) Alone() { r.ready = true }

// Ready reports whether the tables are those of the other nodes.
func (r *Replica) Ready() bool { return r.ready }

// Peers is how many other nodes were heard a moment ago.
func (r *Replica) Peers() int { return len(r.peers) }

// Len is how many requests are under way, or have their id taken.
func (r *Replica) Len() (n int) {
	for _, m := range r.models {
		n += m.table.Len()
	}
	return n
}

// Models lists the models that have tables, in the order in which they came.
func (r *Replica) Models() []Model {
	list := make([]Model, len(r.models))
	for i, m := range r.models {
		list[i] = m.Model
	}
	return list
}

// Table returns a model's table to read, nil if there is none.
func (r *Replica) Table(model Model) *Table {
	if m := r.byName[model]; m != nil {
		return m.table
	}
	return nil
}

// model returns a model's table, and makes it if there is room.
func (r *Replica) model(model Model) *replica {
	m := r.byName[model]
	if m == nil && len(r.models) < r.cfg.Models {
		m = &replica{Model: model, table: NewTable(r.cfg.Origin, r.cfg.Limits), used: r.now, peers: map[uint64]*peer{}}
		m.table.former = r.dropped.key
		m.table.changed = func(kind change, rec *record) { r.enqueue(m, kind, rec) }
		if r.cfg.Watch != nil {
			m.table.watch = func(q *Request) { r.cfg.Watch(model, q) }
		}
		r.byName[model] = m
		r.models = append(r.models, m)
	}
	return m
}

// dropIdle drops tables that have had nothing for so long that whatever was booked in them has expired everywhere: what
// they have seen is not needed any more.
func (r *Replica) dropIdle() {
	if !r.ready {
		return
	}
	r.models = slices.DeleteFunc(r.models, func(m *replica) bool {
		t := m.table
		idle := t.Len() == 0 && m.events == 0 && r.now-m.used > 2*t.limits.Expiry
		if idle {
			r.Counts.Idle++
			r.dropped.key, r.dropped.sent = max(r.dropped.key, t.next), max(r.dropped.sent, m.sent)
			delete(r.byName, m.Model)
		}
		return idle
	})
}

// Book is [Table.Book]. [ErrFull] may also say that there are too many models.
func (r *Replica) Book(now time.Duration, model Model, b Booking) error {
	r.now = now
	if len(model.Name) > maxName || len(model.Group) > maxName {
		return fmt.Errorf("%w: a model's name and group have at most %d bytes", ErrInvalid, maxName)
	}
	m := r.model(model)
	if m == nil {
		return fmt.Errorf("%w: of %d models", ErrFull, len(r.models))
	}
	return m.table.Book(now, b)
}

// PrefillComplete is [Table.PrefillComplete].
func (r *Replica) PrefillComplete(now time.Duration, model Model, id string) error {
	return r.with(now, model, id, func(t *Table) error { return t.PrefillComplete(now, id) })
}

// OutputBlock is [Table.OutputBlock].
func (r *Replica) OutputBlock(now time.Duration, model Model, id string, fraction float64) error {
	return r.with(now, model, id, func(t *Table) error { return t.OutputBlock(now, id, fraction) })
}

// Free is [Table.Free].
func (r *Replica) Free(now time.Duration, model Model, id string) error {
	return r.with(now, model, id, func(t *Table) error { return t.Free(now, id) })
}

func (r *Replica) with(now time.Duration, model Model, id string, do func(*Table) error) error {
	r.now = now
	if m := r.byName[model]; m != nil {
		return do(m.table)
	}
	return fmt.Errorf("%w: %.64q", ErrUnknown, id)
}

// RemoveRank is [Table.RemoveRank], of every model.
func (r *Replica) RemoveRank(now time.Duration, key events.RankKey) {
	r.now = now
	for _, m := range r.models {
		m.table.RemoveRank(key)
	}
}

// enqueue sends a change to the others with the next batch. If nobody was heard for long there is nobody to send to:
// who comes later finds by the digests that it lacks something.
func (r *Replica) enqueue(m *replica, kind change, rec *record) {
	m.touch(r.now)
	m.used = r.now
	if len(r.peers) == 0 {
		r.number(m)
		return
	}
	if m.events == 0 {
		pace := time.Duration(len(r.peers)/batchPeers) * time.Millisecond
		m.due = max(r.now+batchDelay, m.flushed+pace)
	}
	m.batch = appendEvent(m.batch, kind, rec, rec.deadline-r.now)
	if m.events++; m.events >= maxEvents || len(m.batch) >= batchBytes {
		r.flush(m)
	}
}

// number gives a message of events its number.
func (r *Replica) number(m *replica) {
	if m.sent == 0 {
		m.sent = r.dropped.sent
	}
	m.sent++
}

// flush makes a message of the events that wait.
func (r *Replica) flush(m *replica) {
	if m.events == 0 {
		return
	}
	b := make([]byte, 0, len(m.batch)+len(m.Name)+len(m.Group)+32)
	r.number(m)
	b = appendEvents(appendModel(appendHead(b, kindEvents, r.cfg.Origin), m.Model), m.sent, m.events, m.batch)
	m.batch, m.events, m.flushed = m.batch[:0], 0, r.now
	r.send(m.Model, 0, b)
}

func (r *Replica) send(model Model, to uint64, data []byte) {
	if r.outBytes+len(data) > outboxBytes {
		r.Counts.Dropped++
		return
	}
	r.outBytes += len(data)
	r.out = append(r.out, Message{model, to, data})
	r.Counts.Sent++
}

// Wake is when Step is due if nothing happens before.
func (r *Replica) Wake() time.Duration {
	if len(r.out) > 0 {
		return r.now
	}
	wake := min(r.nextBeat, r.nextTick)
	for _, m := range r.models {
		if m.events > 0 {
			wake = min(wake, m.due)
		}
	}
	return wake
}

// Finish is the last step: what waits in batches is due.
func (r *Replica) Finish(now time.Duration) []Message {
	for _, m := range r.models {
		r.flush(m)
	}
	return r.Step(now)
}

// Step goes on to now and returns what is to be sent, in any order.
func (r *Replica) Step(now time.Duration) []Message {
	r.now = now
	if now >= r.nextTick {
		r.nextTick = now + tickPeriod
		for _, m := range r.models {
			m.table.Tick(now)
			m.table.forget(now)
			for origin := range m.peers {
				// One that comes back soon is not asked again for what has come.
				if r.peers[origin] == nil && m.table.seen[origin] == nil {
					delete(m.peers, origin)
				}
			}
		}
		r.dropIdle()
	}
	if now >= r.nextBeat {
		r.nextBeat = now + beatPeriod
		for origin, o := range r.peers {
			if now-o.heard > peerLife {
				delete(r.peers, origin)
			} else if now-o.heard > silence && !o.silent {
				o.silent = true
				for _, m := range r.models {
					m.doubt = true
				}
			}
		}
		for _, m := range r.models {
			m.table.expire(now)
			m.table.resolve(now, rivalGrace)
		}
		r.start()
		r.again()
		r.beat(0)
	}
	for _, m := range r.models {
		if m.events > 0 && now >= m.due {
			r.flush(m)
		}
	}
	out := r.out
	r.out, r.outBytes = nil, 0
	return out
}

// again asks the source anew for what has not come, or for another source.
func (r *Replica) again() {
	if r.ready || r.source == 0 {
		return
	}
	if r.now-r.since >= syncRound {
		r.source = 0
		return
	}
	for _, m := range r.models {
		if r.now-m.peer(r.source, r.now).exchanged < exchangeGap {
			continue
		}
		if m.waiting {
			r.summarize(m, r.source, nil)
		}
		if m.recall != 0 {
			r.recall(m, r.source)
		}
	}
}

// start looks whether a node that starts has what it waits for.
func (r *Replica) start() {
	if r.ready {
		return
	}
	if r.source != 0 {
		late := r.now-r.since >= syncRound // for past requests, which weigh nothing
		r.ready = !slices.ContainsFunc(r.models, func(m *replica) bool { return m.waiting || m.recall != 0 && !late })
	}
	if r.now-r.others >= aloneAfter {
		r.ready = true
	} else if !r.ready && r.now-r.began >= syncMost {
		r.ready = true
		r.Counts.Unsynced++
	}
}

// beat says what this node has, to all; if it answers one that has asked it names it.
func (r *Replica) beat(answers uint64) {
	b := beat{ready: r.ready, ask: !r.ready && r.source == 0, answers: answers}
	for _, m := range r.models {
		b.models = append(b.models, modelBeat{m.Model, m.table.sum, m.table.next, m.sent, m.calm(r.now)})
	}
	r.Counts.Beats++
	r.send(Model{}, 0, appendBeat(appendHead(nil, kindBeat, r.cfg.Origin), &b))
}

// Receive takes a message of another node.
func (r *Replica) Receive(now time.Duration, data []byte) error {
	m, err := decode(data, r.cfg.Origin)
	return r.accept(now, m, err)
}

// accept takes a message of another node, or why it could not be read. The errors are for counters: there is nothing
// to do.
func (r *Replica) accept(now time.Duration, m *message, err error) error {
	r.now = now
	if err != nil {
		if err == errVersion {
			r.Counts.OtherVersion++
		} else {
			r.Counts.Malformed++
		}
		return err
	}
	if m.from == r.cfg.Origin {
		return nil
	}
	r.Counts.Received++
	if r.peers[m.from] == nil {
		r.peers[m.from] = &other{}
	}
	r.peers[m.from].heard, r.peers[m.from].silent = now, false
	switch m.kind {
	case kindBeat:
		r.heard(m.from, &m.beat)
	case kindEvents:
		if of := r.model(m.model); of != nil {
			if m.number > 0 {
				of.peer(m.from, now).got.add(m.number, m.number)
			}
			of.take(now, m.events)
		} else {
			r.Counts.Dropped++
		}
	case kindSummary:
		if of := r.model(m.model); of != nil && m.to == r.cfg.Origin {
			r.compare(of, m.from, &m.summary)
		}
	case kindVersions:
		if of := r.byName[m.model]; of != nil && m.to == r.cfg.Origin {
			r.learn(of, m.from, m.id, m.versions)
		}
	case kindRecall:
		if of := r.byName[m.model]; of != nil && m.to == r.cfg.Origin {
			r.remember(of, m.from, m.id)
		}
	case kindPast:
		if of := r.byName[m.model]; of != nil && m.to == r.cfg.Origin {
			r.recalled(of, m)
		}
	}
	if !r.ready {
		r.start()
	}
	return nil
}

// take applies events.
func (m *replica) take(now time.Duration, list []event) {
	for i := range list {
		e := &list[i]
		if e.kind == freed {
			m.table.drop(now, e.key)
		} else {
			m.table.put(now, e)
		}
		if e.kind != updated {
			delete(m.want, e.key)
		}
	}
	if m.table.suspect {
		m.table.suspect, m.doubt = false, true
	}
	m.touch(now)
	m.used = now
	m.settle()
}

// settle ends the wait for a source's table if all of it has come.
func (m *replica) settle() {
	if m.waiting && m.complete && len(m.want) == 0 {
		m.waiting, m.want = false, nil
	}
}

// touch notes whether the table has changed.
func (m *replica) touch(now time.Duration) {
	if m.last != m.table.sum {
		m.last, m.touched = m.table.sum, now
	}
}

// calm reports whether the table has not changed for a moment.
func (m *replica) calm(now time.Duration) bool {
	m.touch(now)
	return now-m.touched >= calmAfter
}

// peer returns what is known of another node's table.
func (m *replica) peer(origin uint64, now time.Duration) *peer {
	p := m.peers[origin]
	if p == nil {
		p = &peer{exchanged: now - exchangeGap, agreed: now}
		m.peers[origin] = p
	}
	return p
}

// heard compares another node's digests with ours.
func (r *Replica) heard(from uint64, b *beat) {
	if b.ask && r.ready {
		r.beat(from)
	}
	if r.peers[from].ready, r.peers[from].starts = b.ready, !b.ready; b.ready {
		r.others = r.now
	}
	next := from == r.next()
	source := !r.ready && r.source == 0 && b.ready && b.answers == r.cfg.Origin
	if source {
		r.source, r.since = from, r.now
		for _, m := range r.models {
			m.waiting, m.recall = false, 0
		}
	}
	for i := range b.models {
		d := &b.models[i]
		// One that has nothing is not made: nodes drop such tables, each in its own time. Who starts asks its source for
		// past requests too.
		if r.byName[d.Model] == nil && d.Digest == (Digest{}) && !source {
			continue
		}
		m := r.model(d.Model)
		if m == nil {
			continue
		}
		t := m.table
		t.expire(r.now)
		s := t.seen[from]
		if s == nil && d.last > 0 {
			s = t.seenOf(from, r.now)
		}
		if s != nil {
			s.active = max(s.active, r.now)
		}
		p := m.peer(from, r.now)
		p.sent = d.sent
		equal := t.sum == d.Digest && s.all(d.last)
		if equal {
			p.agreed = r.now
		}
		switch {
		case source:
			m.waiting, m.complete, m.want = true, false, map[Key]bool{}
			r.summarize(m, from, nil)
			r.recall(m, from)
		case r.ready != b.ready: // who starts asks one node for all
		case r.now-p.exchanged < exchangeGap:
		case next && (m.doubt || !equal && d.calm && m.calm(r.now) || r.now-p.agreed >= doubtMost):
			m.doubt = !r.exchange(m, from) && m.doubt
		case !p.got.all(d.sent):
			r.exchange(m, cmp.Or(r.missed(m), from))
		}
	}
}

// next is the node with which this one compares what may be known to some nodes only: the next ready one by origin, as
// in a ring. Of what some of the nodes in a ring know and the others do not, one that lacks it is before one that has
// it; and what it is then sent goes to all. So as many exchanges as there are nodes do, and not as many as pairs.
func (r *Replica) next() (origin uint64) {
	least := uint64(math.MaxUint64)
	for of, o := range r.peers {
		if o.ready && !o.silent && of-r.cfg.Origin <= least { // it wraps
			origin, least = of, of-r.cfg.Origin
		}
	}
	return origin
}

// exchange begins an exchange with a peer and reports whether it did; if not, the next beat comes soon.
func (r *Replica) exchange(m *replica, with uint64) bool {
	if !r.begins(with, m.table.Len()) {
		return false
	}
	m.peer(with, r.now).agreed = r.now
	r.Counts.Exchanges++
	r.summarize(m, with, nil)
	return true
}

// missed is which of the nodes of which messages were missed to exchange summaries with: the first in the ring after
// this one. Its answer says what it has had of the nodes behind it. So if all have missed messages of all, as when they
// were cut off from each other, a node has those of one node, then of 3, then of 7: as many exchanges as the number of
// nodes has bits do. It is 0 if there is none to ask now.
//
// The next one is asked when a peer is heard, and not as soon as an answer has come: what was sent with answers to
// others is still under way then, and would be sent again by each node that is asked.
func (r *Replica) missed(m *replica) (origin uint64) {
	least := uint64(math.MaxUint64)
	for of, p := range m.peers {
		o := r.peers[of]
		if o != nil && o.ready && !o.silent && of != r.late && r.now-p.exchanged >= exchangeGap && !p.got.all(p.sent) &&
			of-r.cfg.Origin <= least { // it wraps
			origin, least = of, of-r.cfg.Origin
		}
	}
	return origin
}

// begins reports whether this node may begin an exchange with a peer now, and counts it. Before one peer has answered
// it asks no other: what a node has missed all others have, and each that is asked sends it.
func (r *Replica) begins(with uint64, requests int) bool {
	if r.now-r.window >= exchangeGap {
		r.window, r.begun, r.asked, r.late = r.now, 0, 0, r.asked
	}
	if r.begun > 0 && r.begun+requests > summaryRoom || r.asked != 0 && r.asked != with {
		return false
	}
	r.begun, r.asked = r.begun+requests, with
	return true
}
