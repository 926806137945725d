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
	batchPeers  = 16 // so many peers add a millisecond to the least time between two batches
	beatPeriod  = 500 * time.Millisecond
	exchangeGap = 400 * time.Millisecond  // between two questions about one owner, and between repeated changes
	peerLife    = 5 * time.Second         // Peers counts the nodes that were heard no longer ago
	silence     = 1100 * time.Millisecond // another node writes for a node that was silent for two beats
	hush        = 600 * time.Millisecond  // after one missed beat the word of that other node is accepted
	gatherDelay = 5 * time.Millisecond    // nodes that lack the same entries ask within this time
	repeatGap   = 200 * time.Millisecond  // between two looks at changes that the writer has not published
	forgetGap   = time.Second
)

// Sizes of the protocol.
const (
	maxChanges  = 256       // in a message
	batchBytes  = 256 << 10 // a message with more is sent
	answerBytes = 16 << 20  // of entries in one answer; the receiver asks for the rest
	outboxBytes = 64 << 20  // that wait to be sent
	partPoints  = 4096      // entries and holes in a part of a summary
	askRoom     = 64 << 10  // entries of the owners that a node asks for within exchangeGap, if they are more than one
	maxRepeats  = 4096      // changes that are repeated in one beat
	maxOwners   = 1 << 14
	maxHoles    = 1 << 14 // spans, of one owner
)

// Key names an entry: the session of the node that created it, and its number there, from 1.
type Key struct{ Owner, Seq uint64 }

// Compare orders keys.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Owner, o.Owner), cmp.Compare(k.Seq, o.Seq))
}

// Table stores the entries of a [Machine]. The machine calls it from its own methods, under the same lock. E is the
// state of an entry as a message carries it.
type Table[E any] interface {
	// Append appends the state of an entry that is there: all of it, or only the fields that change.
	Append(b []byte, now time.Duration, k Key, whole bool) []byte

	// Join merges a state into the entry. The result does not depend on the order of the calls, and a second call
	// changes nothing. An entry that is not there is created; its state is whole then. Join returns false if the table
	// refuses the entry: it ends on all nodes.
	Join(now time.Duration, k Key, state *E) bool

	// End removes an entry, if it is there.
	End(now time.Duration, k Key)

	// Hash hashes the state of an entry. The second result is false if the entry is not there.
	Hash(k Key) (uint64, bool)
}

// Config configures a [Machine].
type Config[E any] struct {
	Origin  uint64        // the session of this node: random, not 0
	Entries int           // entries of other nodes beyond this number are dropped; 0: no limit
	Memory  time.Duration // an owner without entries is forgotten when it was not heard of for so long

	// Read reads a state and returns its hash, as Table.Hash has it. It may be called by several goroutines.
	Read func(r *Reader, k Key, whole bool) (E, uint64)

	Memories []Memory
}

// Memory is state that every node collects by itself and that a node that starts gets from another node.
type Memory struct {
	Each func(yield func([]byte) bool) // yields items of at most 1 MiB, the most important first
	Take func([]byte)                  // takes an item of another node
}

// Message is to be published where the nodes of the namespace listen, or where one of them does.
type Message struct {
	To   uint64 // the origin of the only receiver; 0: all nodes
	Data []byte
}

// Counts count what happened to a machine since it was made.
type Counts struct {
	Sent, Received, Malformed, OtherVersion uint64 // messages
	Beats                                   uint64 // of those sent
	Exchanges                               uint64 // questions for an owner's entries because of a difference
	Pushed                                  uint64 // entries sent because another node lacked them
	Repeated                                uint64 // changes sent to a writer again
	Healed                                  uint64 // entries that ended because an answer did not have them
	Stray                                   uint64 // changes of entries that have ended, or are not here yet
	Dropped                                 uint64 // messages that were not sent, and entries that were not accepted
	Unsynced                                uint64 // 1: the node was ready without another node's entries
	Recalled                                uint64 // items of memories that came from another node
}

// Machine keeps the same entries on every node. It is stepped: time and messages are arguments, and the messages to
// send are the result of [Machine.Step]. One goroutine at a time may use it.
//
// Invariants, which Check verifies:
//  1. An entry that is not pending is published, and its hash is that of the table.
//  2. An entry of an owner for which this node writes is not pending after a beat.
//  3. A number that an owner knows and that is not among its entries is never entered again.
type Machine[E any] struct {
	Counts Counts

	cfg     Config[E]
	table   Table[E]
	owners  map[uint64]*owner
	peers   map[uint64]*peer
	size    int              // entries of all owners
	pending map[Key]*pending // local changes that the entry's writer has not published
	batches map[uint64]*batch
	wanted  map[uint64]*wanted // entries that others have asked for, by owner
	out     []Message
	bytes   int // of out

	now        time.Duration
	nextBeat   time.Duration
	nextRepeat time.Duration
	nextForget time.Duration
	lastBatch  time.Duration // when changes were last sent to all
	questions  uint64
	askedSince time.Duration // the window of askRoom
	askedRoom  int

	start starting
}

// peer is another node.
type peer struct {
	heard    time.Duration
	ready    bool
	answered time.Duration // when it was last sent a beat of all owners
}

// pending is a local change that the writer has not published yet.
type pending struct {
	to   uint64 // the writer that it was last meant for
	sent time.Duration
}

// batch is changes that wait to be sent.
type batch struct {
	n    int
	data []byte
	due  time.Duration
}

// NewMachine returns a machine without entries. It is ready when it has the entries of another node, or there is none.
func NewMachine[E any](now time.Duration, table Table[E], cfg Config[E]) *Machine[E] {
	m := &Machine[E]{cfg: cfg, table: table, owners: map[uint64]*owner{}, peers: map[uint64]*peer{},
		pending: map[Key]*pending{}, batches: map[uint64]*batch{}, wanted: map[uint64]*wanted{}}
	m.Begin(now)
	return m
}

// Begin notes that the machine receives the messages of other nodes from now on.
func (m *Machine[E]) Begin(now time.Duration) {
	m.now, m.nextBeat, m.nextForget = now, now, now+forgetGap
	m.start.began, m.start.others = now, now
}

// Origin is the session of this node.
func (m *Machine[E]) Origin() uint64 { return m.cfg.Origin }

// Peers returns how many other nodes were heard a moment ago.
func (m *Machine[E]) Peers() int { return len(m.peers) }

// NewKey returns the key of a new entry. The caller enters it into the table and calls Put.
func (m *Machine[E]) NewKey() Key { return Key{m.cfg.Origin, m.owner(m.cfg.Origin).last + 1} }

// owner returns what is known of an owner, of which something has come now.
func (m *Machine[E]) owner(id uint64) *owner {
	o := m.owners[id]
	if o == nil {
		o = &owner{id: id, entries: map[uint64]*entry{}, wants: map[uint64]bool{}, asked: m.now - exchangeGap}
		m.owners[id] = o
	}
	o.touched = m.now
	return o
}

// heardWithin reports whether a node was heard no longer ago than d.
func (m *Machine[E]) heardWithin(origin uint64, d time.Duration) bool {
	p := m.peers[origin]
	return p != nil && m.now-p.heard <= d
}

// acting returns the node that writes for owners that are gone: the ready one with the smallest origin. It is 0 if this
// node is not ready and hears no node that is.
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

// writer returns the node that publishes the entries of an owner; 0: there is none now.
func (m *Machine[E]) writer(id uint64) uint64 {
	if id == m.cfg.Origin || m.heardWithin(id, silence) {
		return id
	}
	return m.acting()
}

// Writes reports whether this node publishes an entry. Only this node ends an entry by its age.
func (m *Machine[E]) Writes(k Key) bool { return m.writer(k.Owner) == m.cfg.Origin }

// Put notes that an entry of the table was created or has changed on this node. A quiet change is one that the entry's
// writer makes by itself too: it is sent to the writer only if that has not happened by the next beat.
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

// End notes that an entry has left the table on this node; quiet as in Put.
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

// propose notes that the writer of an entry is to publish its local state, or its end.
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

// repeat sends changes again that their writers have not published, and publishes those for which this node writes now.
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

// insert makes an entry that the writer is not known to have.
func (m *Machine[E]) insert(o *owner, seq uint64) *entry {
	e := &entry{}
	o.entries[seq] = e
	o.learn(seq)
	m.size++
	return e
}

// remove notes that an entry has ended.
func (m *Machine[E]) remove(o *owner, k Key) {
	if e := o.entries[k.Seq]; e != nil {
		o.retract(e)
		delete(o.entries, k.Seq)
		m.size--
	}
	delete(m.pending, k)
	delete(o.wants, k.Seq)
}

// take applies a change. It is proposed if it came to this node alone, as the writer of the entry, and published if
// another node has sent it as the writer.
func (m *Machine[E]) take(from uint64, c *change[E], proposed bool) {
	k := c.key
	if m.owners[k.Owner] == nil && len(m.owners) >= maxOwners {
		m.Counts.Dropped++
		return
	}
	o := m.owner(k.Owner)
	delete(o.wants, k.Seq)
	if c.kind == changeEnd {
		m.takeEnd(o, k, proposed)
		return
	}
	e := o.entries[k.Seq]
	created := e == nil
	if created {
		switch {
		case o.knows(k.Seq): // it has ended
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
	local := m.Writes(k) || proposed // it counts as a change of this node's
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

// takeEnd applies the end of an entry.
func (m *Machine[E]) takeEnd(o *owner, k Key, proposed bool) {
	switch {
	case o.entries[k.Seq] == nil:
		m.Counts.Stray++
		if len(o.holes) < maxHoles && o.learn(k.Seq) && m.Writes(k) {
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

// enqueue sends a change of an entry with the next batch: to one node, or to all (0).
func (m *Machine[E]) enqueue(to, kind uint64, k Key) {
	if len(m.peers) == 0 {
		return // a node that comes later finds by the digests that it lacks something
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

// flush makes a message of the changes that wait for a receiver.
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

// Wake returns when Step is due if nothing happens before.
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

// Step goes on to now and returns the messages to send, in this order.
func (m *Machine[E]) Step(now time.Duration) []Message {
	m.now = now
	for _, id := range slices.Sorted(maps.Keys(m.wanted)) {
		if w := m.wanted[id]; now >= w.due {
			delete(m.wanted, id)
			m.supply(id, w)
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

// Finish is the last step: changes that wait are due, and other nodes need not wait for this one.
func (m *Machine[E]) Finish(now time.Duration) []Message {
	m.now = now
	m.flushAll()
	m.beat(true)
	m.nextBeat = now + beatPeriod // the node is gone
	return m.Step(now)
}

// forget drops owners that have no entries and were not heard of for so long that no node has an entry of theirs.
func (m *Machine[E]) forget() {
	maps.DeleteFunc(m.owners, func(id uint64, o *owner) bool {
		return id != m.cfg.Origin && len(o.entries) == 0 && m.peers[id] == nil && m.now-o.touched > m.cfg.Memory
	})
}
