package node

import (
	"fmt"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// Machine applies the log to the index. Machine is a state machine: no method starts a goroutine, waits, or reads a
// clock. A single goroutine, the shard's writer, owns the machine. All goroutines may call View, Applied and the
// index's own readers.
//
// Invariants: 1. A partition's index reflects the log up to `applied`, from the first message or from a snapshot on. 2.
// A rank's events are applied in the order of the ids, once. If ids are missing, the rank is cleared first. 3. A rank
// is in the index under the space of the model and block size announced by the incarnation. 4. A rank is in the view
// only if the worker has claimed the model. Queries see only ranks in the view.
type Machine struct {
	index  *radix.Index
	parts  []*replica
	spaces *spaces
	view   atomic.Pointer[View]
	stale  bool // the view no longer shows the present ranks

	shard     int         // of the node; part of views
	published func(*View) // receives a new view before the messages behind the view count as applied

	batch  events.Batch // reused for every message
	counts Counts

	decoded func(*jetstream.Message, *events.Batch) // receives every batch before the application; nil: not called
	source  func(events.RankKey) string             // the protocol of a rank's engine; empty: unknown
	claimed func(events.WorkerID, string) bool      // queries may use the worker under the model
	size    func(model string) uint32               // the registered block size of a model; 0: unknown
	tallies map[string]*tally                       // by source
	ages    Ages

	sessions *sessionChains
}

// replica is the state of one partition's log: the ranks with events in the log, and the applied position.
type replica struct {
	id      events.Partition
	applied atomic.Uint64 // events.StreamSeq; written by the writer, read by queries
	time    events.Millis // when the log stored the last applied message; 0: unknown
	grown   growth        // since the partition was empty
	ranks   map[events.RankKey]*rank

	forgotten []radix.RankID     // still in the index, and nowhere else
	checksums []*checksumRequest // requested checksums, all beyond applied
}

type growth struct {
	changes uint64 // stored and removed blocks, and messages
	bytes   uint64 // approximate size of the messages in the log
}

func (g growth) since(earlier growth) growth {
	return growth{g.changes - earlier.changes, g.bytes - earlier.bytes}
}

// messageOverhead is the approximate size of a message in the log without the data: subject, headers and record.
const messageOverhead = 128

type rank struct {
	snapshot.RankState // as in a snapshot, without Cursor
	id                 radix.RankID
	space              uint32
	cursor             events.Cursor
	bounded            bool   // depths are an upper bound, by the announced groups
	placed             bool   // blocks have had a place in the index since the node began to read the rank's events
	restored           bool   // from a snapshot: earlier blocks may have had a place
	before             change // stored and removed before the last clear of all tiers
	cleared            uint64 // cleared events that this node has applied
	hidden             bool   // the view excludes the rank: the worker has not claimed the model
	tally              *tally // the counts of the rank's events
	memory             *deviceMemory
}

// change counts the blocks announced by an engine as stored and as removed.
type change struct{ stored, removed uint64 }

// spaceKey is the part of a rank's identity that must be equal for a query to match.
type spaceKey struct {
	model     string
	blockSize uint32
}

// Counts counts the log's messages and events by result. All counts only grow.
type Counts struct {
	Messages     uint64 // applied messages
	Poison       uint64 // unreadable messages; skipped
	OtherRank    uint64 // messages of ranks beyond [events.MaxRanks]; skipped
	OtherSize    uint64 // messages with a block size that differs from the registered size; hidden from queries
	Stale        uint64 // messages of an ended incarnation; skipped
	Repeated     uint64 // events seen before; skipped
	Gaps         uint64 // places with missing event ids; the rank was cleared
	Incarnations uint64 // new incarnations of engines
	Ended        uint64 // closed incarnations, with removed ranks
	BlocksStored uint64 // blocks in stored events passed to the index
	Index        radix.Counts

	SessionsForgotten uint64 // sessions with blocks that are no longer known; see sessionChains
}

// NewMachine returns a machine for the empty partitions 0 to n-1.
func NewMachine(index *radix.Index, n int) *Machine {
	m := &Machine{index: index, spaces: new(spaces), tallies: map[string]*tally{}, published: func(*View) {},
		sessions: newSessionChains(maxChainHashes),
		source:   func(events.RankKey) string { return "" }, claimed: func(events.WorkerID, string) bool { return true },
		size: func(string) uint32 { return 0 }}
	for p := range n {
		m.parts = append(m.parts, &replica{id: events.Partition(p), ranks: map[events.RankKey]*rank{}})
	}
	m.view.Store(&View{})
	return m
}

// Begin sets the position after which a partition's messages follow: the position of a snapshot, or the position before
// the log's first message. at is when the log stored seq; 0: unknown.
func (m *Machine) Begin(p events.Partition, seq events.StreamSeq, at events.Millis) {
	part := m.parts[p]
	part.time = at
	part.applied.Store(uint64(seq))
	m.stale = true
	m.publishView()
}

// Applied returns the last message of a partition reflected by the index. Applied is safe for concurrent use.
func (m *Machine) Applied(p events.Partition) events.StreamSeq {
	return events.StreamSeq(m.parts[p].applied.Load())
}

// Apply applies messages of a partition, in order, and skips applied messages. Apply stops and returns false at a
// message after a gap in the sequence: messages were lost between the log and the index.
func (m *Machine) Apply(p events.Partition, msgs []jetstream.Message) (ok bool) {
	part := m.parts[p]
	applied := events.StreamSeq(part.applied.Load())
	ok = true
	for i := range msgs {
		msg := &msgs[i]
		if msg.Seq <= applied {
			continue
		}
		if msg.Seq != applied+1 {
			ok = false
			break
		}
		m.applyMessage(part, msg)
		applied, part.time = msg.Seq, msg.Time
		part.grown.changes++
		part.grown.bytes += uint64(len(msg.Data)) + messageOverhead
		if len(part.checksums) > 0 {
			m.reached(part, applied)
		}
		if !m.stale {
			part.applied.Store(uint64(applied))
		}
	}
	if m.stale { // a view must have a rank before an answer claims to reflect the rank
		m.publishView()
	}
	part.applied.Store(uint64(applied))
	m.batch.Trim()
	return ok
}

func (m *Machine) applyMessage(part *replica, msg *jetstream.Message) {
	m.counts.Messages++
	if msg.Key == (events.RankKey{}) || events.DecodeBatch(msg.Data, &m.batch) != nil {
		m.counts.Poison++
		return
	}
	if m.decoded != nil {
		m.decoded(msg, &m.batch)
	}
	if msg.Key.Rank >= events.MaxRanks {
		m.counts.OtherRank++
		return
	}
	b := &m.batch
	if size := m.size(b.Model); size != 0 && b.BlockSize != size {
		m.counts.OtherSize++
	}
	r := part.ranks[msg.Key]
	switch {
	case r == nil:
		r = &rank{}
		part.ranks[msg.Key] = r
		m.begin(r, msg.Key, b)
	case b.Incarnation < r.Incarnation:
		m.counts.Stale++
		return
	case b.Incarnation > r.Incarnation:
		m.dropRank(r.id)
		m.begin(r, msg.Key, b)
	}
	evs := b.Events
	switch {
	case b.FirstID <= r.LastID:
		seen := min(int(r.LastID-b.FirstID)+1, len(evs))
		m.counts.Repeated += uint64(seen)
		evs = evs[seen:]
	case b.FirstID > r.LastID+1:
		m.counts.Gaps++
		r.Partial = true
		r.cleared++
		m.count(m.index.Apply(r.id, msg.Time, []events.Event{{Kind: events.Cleared, Reason: events.ReasonGap}}))
	}
	tagged := m.countEvents(part, r, evs)
	apply := m.index.Apply
	if b.Cursor.Partial > 0 { // the rest of the engine's message follows in other batches
		apply = m.index.ApplyPart
	}
	done := apply(r.id, msg.Time, evs)
	m.count(done)
	if tagged {
		m.counts.SessionsForgotten += m.sessions.stored(m.index, r.id, evs)
	}
	r.memory.store(m.index.DeviceMemory(r.id))
	r.placed = r.placed || done.Stored+done.Attached+done.OtherStored > 0
	if b := m.index.Bounded(r.id); b != r.bounded {
		r.bounded, m.stale = b, true
	}
	r.LastID = max(r.LastID, b.LastID())
	r.cursor, r.LastSeen, r.Closed = b.Cursor, msg.Time, b.Shutdown
	if b.Shutdown { // the rank is removed, and begins a new incarnation after a return
		m.dropRank(r.id)
		delete(part.ranks, msg.Key)
		m.counts.Ended++
		m.stale = true
	}
}

// countEvents counts events before their application. tagged reports whether an event has a session.
func (m *Machine) countEvents(part *replica, r *rank, evs []events.Event) (tagged bool) {
	for i := range evs {
		r.tally[evs[i].Kind][evs[i].Tier]++
		switch evs[i].Kind {
		case events.Stored:
			r.Stored += uint64(len(evs[i].Blocks))
			m.counts.BlocksStored += uint64(len(evs[i].Blocks))
			tagged = tagged || evs[i].Session != 0
			if evs[i].Places() && evs[i].Lookahead != r.Lookahead {
				r.Lookahead, m.stale = evs[i].Lookahead, true
			}
		case events.Removed:
			r.Removed += uint64(len(evs[i].Blocks))
		case events.Cleared:
			r.cleared++
			if evs[i].Tier == events.AllTiers {
				r.before = change{r.Stored, r.Removed}
			}
		}
		part.grown.changes += uint64(len(evs[i].Blocks))
	}
	return tagged
}

// addRank adds a rank to the index.
func (m *Machine) addRank(space, blockSize uint32) radix.RankID {
	id := m.index.AddRank(space, blockSize)
	m.sessions.add(id)
	return id
}

// dropRank removes a rank from the index.
func (m *Machine) dropRank(id radix.RankID) {
	m.index.DropRank(id)
	m.sessions.drop(id)
}

func (m *Machine) begin(r *rank, key events.RankKey, b *events.Batch) {
	m.counts.Incarnations++
	*r = rank{space: m.spaces.number(spaceKey{b.Model, b.BlockSize}, 0), RankState: snapshot.RankState{
		Instance: snapshot.Text(key.Instance), Rank: key.Rank, Model: snapshot.Text(b.Model), BlockSize: b.BlockSize,
		Incarnation: b.Incarnation,
	}, tally: m.tallyOf(key), memory: new(deviceMemory)}
	r.id = m.addRank(r.space, r.BlockSize)
	m.stale = true
}

// checksum returns the sum of the checksums of a partition's ranks. The sum depends neither on the node nor on the
// order of the ranks.
func (m *Machine) checksum(p events.Partition) (sum uint64) {
	for key, r := range m.parts[p].ranks {
		name := fmt.Appendf(nil, "%d:%s %d %d:%s %d", len(key.Instance), key.Instance, key.Rank, len(r.Model), r.Model,
			r.BlockSize)
		sum += xxh3.HashSeed(name, m.index.Checksum(r.id))
	}
	return sum
}

func (m *Machine) count(c radix.Counts) { m.counts.Index.Add(c) }

// View returns the present ranks and models. View is safe for concurrent use.
func (m *Machine) View() *View { return m.view.Load() }

func (m *Machine) publishView() {
	m.stale = false
	v := &View{Models: map[string][]*Served{}}
	for _, part := range m.parts {
		for _, r := range part.ranks {
			r.bounded = m.index.Bounded(r.id)
			if r.hidden = !m.claims(r); r.hidden {
				v.Hidden = append(v.Hidden, HiddenRank{Key: r.Key(), Model: string(r.Model), Partition: part.id})
				continue
			}
			v.add(spaceKey{string(r.Model), r.BlockSize}, r.space, &RankOfView{Key: r.Key(), Shard: m.shard, ID: r.id,
				Partition: part.id, Lookahead: r.Lookahead, Bounded: r.bounded, memory: r.memory})
		}
	}
	v.order()
	m.view.Store(v)
	m.published(v)
}

// claims reports whether the worker of a rank has claimed the model announced by the rank.
func (m *Machine) claims(r *rank) bool {
	return m.claimed(events.WorkerID(r.Instance), string(r.Model))
}

// Recheck publishes a new view if a change of claims hides or shows a rank.
func (m *Machine) Recheck() {
	for _, part := range m.parts {
		for _, r := range part.ranks {
			if r.hidden == m.claims(r) {
				m.publishView()
				return
			}
		}
	}
}
