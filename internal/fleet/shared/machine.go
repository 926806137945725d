package shared

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Times of the protocol.
const (
	batchDelay  = time.Millisecond
	batchPeers  = 16 // this number of peers adds a millisecond to the least time between two batches
	beatPeriod  = 500 * time.Millisecond
	exchangeGap = 400 * time.Millisecond  // between two requests about an owner, and between repeated changes
	peerLife    = 5 * time.Second         // Peers counts nodes with a message within this time
	silence     = 1100 * time.Millisecond // after two missed beats of a node, another node writes for it
	hush        = 600 * time.Millisecond  // after one missed beat, messages of the replacing writer are accepted
	gatherDelay = 5 * time.Millisecond    // nodes without the same entries send requests within this time
	repeatGap   = 200 * time.Millisecond  // between two checks of changes that the writer has not published
	forgetGap   = time.Second
)

// Sizes of the protocol.
const (
	maxChanges  = 256       // in a message
	batchBytes  = 256 << 10 // a larger message is sent at once
	answerBytes = 16 << 20  // of entries in one answer; the receiver requests the rest
	outboxBytes = 64 << 20  // of waiting messages
	partPoints  = 4096      // entries and holes in a part of a summary
	askRoom     = 64 << 10  // entries of the owners in requests within exchangeGap, except for a single owner
	maxRepeats  = 4096      // repeated changes in a beat
	maxOwners   = 1 << 14
	maxHoles    = 1 << 14 // spans of an owner
)

// Key identifies an entry: the creating session of a node, and a number in the session, from 1.
type Key struct{ Owner, Seq uint64 }

// Compare orders keys.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Owner, o.Owner), cmp.Compare(k.Seq, o.Seq))
}

// Table stores the entries of a [Machine]. The machine calls the methods under its own lock. E is the state of an entry
// in a message.
type Table[E any] interface {
	// Append appends the state of a present entry: the whole state, or only the changing fields.
	Append(b []byte, now time.Duration, k Key, whole bool) []byte

	// Join merges a state into the entry. The result is independent of the order of the calls, and a repeated call has
	// no effect. A missing entry is created from a whole state. Join returns false if the table refuses the entry,
	// which then ends on all nodes.
	Join(now time.Duration, k Key, state *E) bool

	// End removes an entry, if present.
	End(now time.Duration, k Key)

	// Hash hashes the state of an entry. The second result is false if the entry is missing.
	Hash(k Key) (uint64, bool)
}

// Config configures a [Machine].
type Config[E any] struct {
	Origin  uint64        // session of this node: random, not 0
	Entries int           // further entries of other nodes are dropped; 0: no limit
	Memory  time.Duration // time without entries and messages after which an owner is dropped

	// Read decodes a state and returns the hash, equal to Table.Hash. Several goroutines may call Read.
	Read func(r *Reader, k Key, whole bool) (E, uint64)

	Memories []Memory
}

// Memory is state that every node collects alone. A starting node gets the state from another node.
type Memory struct {
	Each func(yield func([]byte) bool) // yields items of at most 1 MiB, the most important first
	Take func([]byte)                  // adds an item of another node
}

// Message is a message to all nodes of the namespace, or to one.
type Message struct {
	To   uint64 // origin of the only receiver; 0: all nodes
	Data []byte
}

// Counts count the events of a machine since its creation.
type Counts struct {
	Sent, Received, Malformed, OtherVersion uint64 // messages
	Beats                                   uint64 // sent beats
	Exchanges                               uint64 // requests for an owner's entries after a difference
	Pushed                                  uint64 // entries sent to nodes without them
	Repeated                                uint64 // changes sent to a writer again
	Healed                                  uint64 // entries ended because a summary lacked them
	Stray                                   uint64 // changes of ended or missing entries
	Dropped                                 uint64 // messages not sent, and entries not accepted
	Unsynced                                uint64 // 1: the node became ready without another node's entries
	Recalled                                uint64 // received items of memories
}

// Machine keeps the same entries on every node. A machine is stepped: time and messages are arguments, and
// [Machine.Step] returns the messages to send. One goroutine at a time may use a machine.
//
// Invariants, verified by Check:
// 1. An entry that is not pending is published, and the hash equals the table's.
// 2. An entry of an owner for which this node writes is not pending after a beat.
// 3. A known number of an owner without an entry is never entered again.
type Machine[E any] struct {
	Counts Counts

	cfg     Config[E]
	table   Table[E]
	owners  map[uint64]*owner
	peers   map[uint64]*peer
	size    int              // entries of all owners
	pending map[Key]*pending // local changes that the writer has not published
	batches map[uint64]*batch
	wanted  map[uint64]*wanted // requested entries by owner
	out     []Message
	bytes   int // of out

	now        time.Duration
	nextBeat   time.Duration
	nextRepeat time.Duration
	nextForget time.Duration
	lastBatch  time.Duration // last send of changes to all
	questions  uint64
	askedSince time.Duration // the window of askRoom
	askedRoom  int

	start starting
}

// peer is another node.
type peer struct {
	heard    time.Duration
	ready    bool
	answered time.Duration // last beat of all owners to this node
}

// pending is a local change that the writer has not published yet.
type pending struct {
	to   uint64 // last receiver
	sent time.Duration
}

// batch is a set of changes to send.
type batch struct {
	n    int
	data []byte
	due  time.Duration
}

// NewMachine returns a machine without entries. The machine is ready when it has another node's entries, or no other
// node exists.
func NewMachine[E any](now time.Duration, table Table[E], cfg Config[E]) *Machine[E] {
	m := &Machine[E]{cfg: cfg, table: table, owners: map[uint64]*owner{}, peers: map[uint64]*peer{},
		pending: map[Key]*pending{}, batches: map[uint64]*batch{}, wanted: map[uint64]*wanted{}}
	m.Begin(now)
	return m
}

// Begin marks the time from which the machine receives foreign messages.
func (m *Machine[E]) Begin(now time.Duration) {
	m.now, m.nextBeat, m.nextForget = now, now, now+forgetGap
	m.start.began, m.start.others = now, now
}

// Origin is the session of this node.
func (m *Machine[E]) Origin() uint64 { return m.cfg.Origin }

// Peers returns the number of other nodes with a recent message.
func (m *Machine[E]) Peers() int { return len(m.peers) }

// NewKey returns the key of a new entry. The caller enters it into the table and calls Put.
func (m *Machine[E]) NewKey() Key { return Key{m.cfg.Origin, m.owner(m.cfg.Origin).last + 1} }

// owner returns an owner and marks a new message about it.
func (m *Machine[E]) owner(id uint64) *owner {
	o := m.owners[id]
	if o == nil {
		o = &owner{id: id, entries: map[uint64]*entry{}, wants: map[uint64]bool{}, asked: m.now - exchangeGap}
		m.owners[id] = o
	}
	o.touched = m.now
	return o
}

// heardWithin reports whether a node's last message is at most d old.
func (m *Machine[E]) heardWithin(origin uint64, d time.Duration) bool {
	p := m.peers[origin]
	return p != nil && m.now-p.heard <= d
}

// acting returns the node that writes for missing owners: the ready node with the smallest origin; 0 without a ready
// node.
func (m *Machine[E]) acting() (origin uint64) {
	if m.start.ready {
		origin = m.cfg.Origin
	}
	for id, p := range m.peers {
		if p.ready && m.now-p.heard <= silence && (origin == 0 || id < origin) {
			origin = id
		}
	}
	return origin
}

// writer returns the node that publishes the entries of an owner; 0: none at present.
func (m *Machine[E]) writer(id uint64) uint64 {
	if id == m.cfg.Origin || m.heardWithin(id, silence) {
		return id
	}
	return m.acting()
}

// Writes reports whether this node publishes an entry. Only the writer ends an entry by age.
func (m *Machine[E]) Writes(k Key) bool { return m.writer(k.Owner) == m.cfg.Origin }

// Put records a creation or change of an entry on this node. A quiet change is also made by the writer: this node sends
// a quiet change only if the writer has not published the change by the next beat.
func (m *Machine[E]) Put(now time.Duration, k Key, quiet bool) {
	m.now = now
	o := m.owner(k.Owner)
	e := o.entries[k.Seq]
	if e == nil {
		e = m.insert(o, k.Seq)
	}
	if !m.Writes(k) {
		m.propose(k, quiet)
		return
	}
	if hash, there := m.table.Hash(k); there {
		kind := uint64(changeState)
		if !e.published {
			kind = changeWhole
		}
		o.publish(e, hash)
		delete(m.pending, k)
		m.enqueue(0, kind, k)
	}
}

// End records the end of an entry on this node; quiet as in Put.
func (m *Machine[E]) End(now time.Duration, k Key, quiet bool) {
	m.now = now
	o := m.owners[k.Owner]
	if o == nil || o.entries[k.Seq] == nil {
		return
	}
	switch e := o.entries[k.Seq]; {
	case m.Writes(k):
		m.remove(o, k)
		m.enqueue(0, changeEnd, k)
	case !e.published:
		m.remove(o, k)
		if to := m.writer(k.Owner); to != 0 && !quiet {
			m.enqueue(to, changeEnd, k)
		}
	default:
		m.propose(k, quiet)
	}
}

// propose requests the publication of a local state, or of an end, by the writer.
func (m *Machine[E]) propose(k Key, quiet bool) {
	p, to := m.pending[k], m.writer(k.Owner)
	if p == nil {
		p = &pending{to: to, sent: m.now}
		m.pending[k] = p
	}
	if !quiet && to != 0 {
		*p = pending{to: to, sent: m.now}
		m.enqueue(to, m.pendingKind(k), k)
	}
}

func (m *Machine[E]) pendingKind(k Key) uint64 {
	if _, there := m.table.Hash(k); !there {
		return changeEnd
	}
	if !m.owners[k.Owner].entries[k.Seq].published {
		return changeWhole
	}
	return changeState
}

// repeat sends unpublished changes to the writers again, and publishes changes for which this node writes now.
func (m *Machine[E]) repeat() {
	n := 0
	for _, k := range slices.SortedFunc(maps.Keys(m.pending), Key.Compare) {
		p := m.pending[k]
		kind := m.pendingKind(k)
		switch to := m.writer(k.Owner); {
		case to == m.cfg.Origin && kind == changeEnd:
			m.End(m.now, k, false)
		case to == m.cfg.Origin:
			m.Put(m.now, k, false)
		case to != 0 && (to != p.to || m.now-p.sent >= exchangeGap) && n < maxRepeats:
			*p = pending{to: to, sent: m.now}
			n++
			m.Counts.Repeated++
			m.enqueue(to, kind, k)
		}
	}
}

// insert creates an entry that the writer may not have.
func (m *Machine[E]) insert(o *owner, seq uint64) *entry {
	e := &entry{}
	o.entries[seq] = e
	o.markKnown(seq)
	m.size++
	return e
}

// remove removes an ended entry.
func (m *Machine[E]) remove(o *owner, k Key) {
	if e := o.entries[k.Seq]; e != nil {
		o.retract(e)
		delete(o.entries, k.Seq)
		m.size--
	}
	delete(m.pending, k)
	delete(o.wants, k.Seq)
}

// applyChange applies a change. proposed: the change was sent to this node only, as the writer of the entry. Otherwise
// the change was published by another node.
func (m *Machine[E]) applyChange(from uint64, c *change[E], proposed bool) {
	k := c.key
	if m.owners[k.Owner] == nil && len(m.owners) >= maxOwners {
		m.Counts.Dropped++
		return
	}
	o := m.owner(k.Owner)
	delete(o.wants, k.Seq)
	if c.kind == changeEnd {
		m.applyEnd(o, k, proposed)
		return
	}
	e := o.entries[k.Seq]
	created := e == nil
	if created {
		switch {
		case o.isKnown(k.Seq): // it has ended
			m.Counts.Stray++
			if proposed {
				m.enqueue(from, changeEnd, k)
			}
			return
		case m.cfg.Entries > 0 && m.size >= m.cfg.Entries || len(o.holes) >= maxHoles:
			m.Counts.Dropped++
			return
		case c.kind == changeState:
			m.Counts.Stray++
			o.extend(k.Seq)
			return
		}
		e = m.insert(o, k.Seq)
	}
	before, there := m.table.Hash(k)
	local := m.Writes(k) || proposed // counts as a local change
	if !created && !there {          // it has ended here
		if !local {
			o.publish(e, c.hash)
		}
		return
	}
	kept := m.table.Join(m.now, k, &c.state)
	after, _ := m.table.Hash(k)
	switch {
	case local && !kept:
		m.End(m.now, k, false)
	case local && (!there || after != before):
		m.Put(m.now, k, false)
	case local:
	default:
		o.publish(e, c.hash)
		if kept && after == c.hash {
			delete(m.pending, k)
		} else {
			m.propose(k, true)
		}
	}
}

// applyEnd applies the end of an entry.
func (m *Machine[E]) applyEnd(o *owner, k Key, proposed bool) {
	switch {
	case o.entries[k.Seq] == nil:
		m.Counts.Stray++
		if len(o.holes) < maxHoles && o.markKnown(k.Seq) && m.Writes(k) {
			m.enqueue(0, changeEnd, k)
		}
	case m.Writes(k) || proposed:
		m.table.End(m.now, k)
		m.End(m.now, k, false)
	default:
		m.table.End(m.now, k)
		m.remove(o, k)
	}
}

// enqueue adds a change of an entry to the next batch: to one node, or to all (0).
func (m *Machine[E]) enqueue(to, kind uint64, k Key) {
	if len(m.peers) == 0 {
		return // a later node finds the difference by the digests
	}
	b := m.batches[to]
	if b == nil {
		b = &batch{}
		m.batches[to] = b
	}
	if b.n == 0 {
		b.due = m.now + batchDelay
		if to == 0 {
			b.due = max(b.due, m.lastBatch+time.Duration(len(m.peers)/batchPeers)*time.Millisecond)
		}
	}
	b.data = m.appendChange(b.data, kind, k)
	if b.n++; b.n >= maxChanges || len(b.data) >= batchBytes {
		m.flush(to)
	}
}

// flush sends the waiting changes for a receiver as a message.
func (m *Machine[E]) flush(to uint64) {
	b := m.batches[to]
	if b == nil || b.n == 0 {
		return
	}
	kind := uint64(kindProposed)
	if to == 0 {
		kind, m.lastBatch = kindPublished, m.now
	}
	m.sendChanges(to, kind, b)
}

func (m *Machine[E]) flushAll() {
	for _, to := range slices.Sorted(maps.Keys(m.batches)) {
		m.flush(to)
		if m.peers[to] == nil && to != 0 {
			delete(m.batches, to)
		}
	}
}

func (m *Machine[E]) send(to uint64, data []byte) {
	if m.bytes+len(data) > outboxBytes {
		m.Counts.Dropped++
		return
	}
	m.bytes += len(data)
	m.out = append(m.out, Message{to, data})
	m.Counts.Sent++
}

// Wake returns the time of the next Step without further events.
func (m *Machine[E]) Wake() time.Duration {
	if len(m.out) > 0 {
		return m.now
	}
	wake := m.nextBeat
	if len(m.pending) > 0 {
		wake = min(wake, m.nextRepeat)
	}
	for _, b := range m.batches {
		if b.n > 0 {
			wake = min(wake, b.due)
		}
	}
	for _, w := range m.wanted {
		wake = min(wake, w.due)
	}
	return wake
}

// Step advances the time to now and returns the messages to send, in this order.
func (m *Machine[E]) Step(now time.Duration) []Message {
	m.now = now
	for _, id := range slices.Sorted(maps.Keys(m.wanted)) {
		if w := m.wanted[id]; now >= w.due {
			delete(m.wanted, id)
			m.sendWanted(id, w)
		}
	}
	if now >= m.nextForget {
		m.nextForget = now + forgetGap
		m.forget()
	}
	if now >= min(m.nextBeat, m.nextRepeat) {
		m.nextRepeat = now + repeatGap
		m.repeat()
	}
	if now >= m.nextBeat {
		m.nextBeat = now + beatPeriod
		maps.DeleteFunc(m.peers, func(_ uint64, p *peer) bool { return now-p.heard > peerLife })
		m.startAgain()
		m.beat(false)
	}
	for _, to := range slices.Sorted(maps.Keys(m.batches)) {
		if now >= m.batches[to].due {
			m.flush(to)
		}
	}
	out := m.out
	m.out, m.bytes = nil, 0
	return out
}

// Finish is the last step: it sends all waiting changes and a beat that ends this node's membership.
func (m *Machine[E]) Finish(now time.Duration) []Message {
	m.now = now
	m.flushAll()
	m.beat(true)
	m.nextBeat = now + beatPeriod // this node has left
	return m.Step(now)
}

// forget drops owners without entries, after the time in which a node could still have such an entry.
func (m *Machine[E]) forget() {
	maps.DeleteFunc(m.owners, func(id uint64, o *owner) bool {
		return id != m.cfg.Origin && len(o.entries) == 0 && m.peers[id] == nil && m.now-o.touched > m.cfg.Memory
	})
}
