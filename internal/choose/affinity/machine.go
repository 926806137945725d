package affinity

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds.
const (
	MinTTL      = time.Second
	MaxTTL      = 31_536_000 * time.Second
	MaxSessions = 65_536
	MaxID       = 256 // bytes of a session id
	maxName     = 255 // bytes of a model or worker name
	maxLeases   = 256 // monitored requests of a session; the oldest are dropped first
)

// Errors of [Machine.Bind].
var (
	ErrElsewhere = errors.New("the session is bound to another worker")
	ErrFull      = errors.New("too many sessions are bound")
)

// Key is the model and the id of a session.
type Key struct{ Model, Session string }

// Config configures a [Machine].
type Config struct {
	Origin   uint64        // of this session of this node: random, not 0
	TTL      time.Duration // after the last use; MinTTL to MaxTTL
	Sessions int           // most sessions with an id; 0: MaxSessions
	Prompts  int           // most ends of prompts without an id; 0: MaxPrompts

	// Alive reports whether a booking of this node is under way.
	Alive func(model, request string) bool
}

// How is the effect of a booking on the binding of its session.
type How int

// The effects.
const (
	Made  How = iota + 1 // there was no binding
	Kept                 // the same rank
	Moved                // another rank
)

// version orders changes of all nodes by the sequence, then by the writer.
type version struct{ Seq, Writer uint64 }

func (a version) compare(b version) int {
	return cmp.Or(cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.Writer, b.Writer))
}

// binding is the rank of a session. Each binding of a session to a rank is a separate entry: the entry with the later
// version replaces the earlier one.
type binding struct {
	key  Key
	rank events.RankKey
	at   shared.Key    // key of the entry
	is   version       // of the entry
	used version       // last published use
	ends time.Duration // end without a further use

	dirty  bool          // used since the last publication
	told   time.Duration // last publication of a use by this node
	leases []string      // requests of this node that may be under way
}

// sum hashes the changing fields of an entry. The key determines the rest.
func (b *binding) sum() uint64 {
	var numbers [32]byte
	for i, v := range []uint64{b.at.Owner, b.at.Seq, b.used.Seq, b.used.Writer} {
		binary.LittleEndian.PutUint64(numbers[8*i:], v)
	}
	return xxh3.Hash(numbers[:])
}

// Counts count the events of a machine since its creation.
type Counts struct {
	Made, Kept, Moved  uint64 // bookings on this node, by effect
	Elsewhere, Full    uint64 // refused bookings
	Expired            uint64 // bindings ended by this node
	Continued, Unclear uint64 // prompts without an id that continued a session, or ended like another prompt
}

// reapPeriod is the time between two searches for ended bindings.
const reapPeriod = time.Second

// Machine keeps the same bindings on every node; [shared.Machine] has the protocol. One goroutine at a time may use it.
type Machine struct {
	*shared.Machine[wireBinding]
	Counts Counts

	cfg      Config
	bindings map[Key]*binding
	entries  map[shared.Key]*binding
	ends     map[string]map[events.SeqHash]*binding // ends of prompts with a binding, by model and hash
	prompts  int                                    // number of ends
	leased   map[*binding]struct{}
	dirty    []*binding
	total    uint64        // sum of all sums
	clock    uint64        // greatest known sequence
	soonest  time.Duration // earliest end of a binding
	now      time.Duration
	nextUse  time.Duration
	nextReap time.Duration
}

// NewMachine returns a machine without bindings. It is ready when it has another node's bindings, or there is no other
// node.
func NewMachine(now time.Duration, cfg Config) *Machine {
	if cfg.Sessions <= 0 {
		cfg.Sessions = MaxSessions
	}
	if cfg.Prompts <= 0 {
		cfg.Prompts = MaxPrompts
	}
	if cfg.Alive == nil {
		cfg.Alive = func(string, string) bool { return false }
	}
	m := &Machine{cfg: cfg, bindings: map[Key]*binding{}, entries: map[shared.Key]*binding{},
		ends: map[string]map[events.SeqHash]*binding{}, leased: map[*binding]struct{}{}, soonest: math.MaxInt64}
	m.Machine = shared.NewMachine(now, m, shared.Config[wireBinding]{Origin: cfg.Origin,
		Entries: 2 * (cfg.Sessions + cfg.Prompts), Memory: 2 * cfg.TTL, Read: readBinding})
	m.Begin(now)
	return m
}

// Begin marks the time from which the machine receives the messages of other nodes.
func (m *Machine) Begin(now time.Duration) {
	m.Machine.Begin(now)
	m.now, m.nextUse, m.nextReap = now, now, now
}

// Len returns the number of bindings, including bindings that ended recently.
func (m *Machine) Len() int { return len(m.bindings) }

// Get returns the rank of a session. The second result is false if the session has no binding.
func (m *Machine) Get(now time.Duration, key Key) (events.RankKey, bool) {
	b := m.bindings[key]
	if b == nil || b.ends <= now {
		return events.RankKey{}, false
	}
	return b.rank, true
}

// Bind records the booking of a session's request on a rank. mayLeave reports whether the session may leave its earlier
// rank. from is that rank, also with an error. The error is [ErrElsewhere] if the session may not leave the rank, or
// [ErrFull]. Nothing has changed then.
func (m *Machine) Bind(now time.Duration, key Key, rank events.RankKey, request string,
	mayLeave func(from events.RankKey) bool) (how How, from events.RankKey, err error) {
	m.now = now
	b := m.bindings[key]
	if b == nil && m.full(key) {
		if m.reap(now); m.full(key) {
			m.Counts.Full++
			return 0, from, fmt.Errorf("%w: %d", ErrFull, len(m.bindings)-m.prompts)
		}
	}
	how = Kept
	if b != nil {
		from = b.rank
	}
	switch {
	case b == nil || b.ends <= now:
		how = Made
		m.Counts.Made++
	case b.rank == rank:
		m.Counts.Kept++
	case !mayLeave(from):
		m.Counts.Elsewhere++
		return 0, from, fmt.Errorf("%w: %s rank %d", ErrElsewhere, from.Instance, from.Rank)
	default:
		how = Moved
		m.Counts.Moved++
	}
	if b == nil {
		b = &binding{key: key}
	}
	if how == Kept {
		m.use(b)
	} else {
		m.assign(b, rank, m.cfg.TTL)
	}
	m.lease(b, request)
	return how, from, nil
}

// assign creates a new entry that binds a session to a rank, and ends the previous entry.
func (m *Machine) assign(b *binding, rank events.RankKey, life time.Duration) {
	before := b.at
	if m.bindings[b.key] == b {
		m.detach(b)
	} else {
		m.insert(b)
	}
	m.clock++
	b.at, b.rank = m.NewKey(), rank
	b.is = version{m.clock, m.cfg.Origin}
	b.used, b.ends, b.dirty, b.told = b.is, m.now+life, false, m.now
	m.attach(b)
	m.Put(m.now, b.at, false)
	m.Machine.End(m.now, before, true)
}

// use records a use of a binding now.
func (m *Machine) use(b *binding) {
	b.ends = m.now + m.cfg.TTL
	m.soonest = min(m.soonest, b.ends)
	if !b.dirty {
		b.dirty = true
		m.dirty = append(m.dirty, b)
	}
}

// attach adds the entry of a binding.
func (m *Machine) attach(b *binding) {
	m.entries[b.at] = b
	m.total += b.sum()
	m.soonest = min(m.soonest, b.ends)
}

// detach removes the entry of a binding.
func (m *Machine) detach(b *binding) {
	delete(m.entries, b.at)
	m.total -= b.sum()
}

// reap removes bindings that ended before a time. Only the writer of an entry ends it.
func (m *Machine) reap(before time.Duration) {
	if before < m.soonest {
		return
	}
	m.soonest = math.MaxInt64
	for _, b := range m.bindings {
		if b.ends > before || !m.Writes(b.at) {
			m.soonest = min(m.soonest, b.ends)
			continue
		}
		m.remove(b)
		m.Machine.End(m.now, b.at, false)
		m.Counts.Expired++
	}
}

// prolong records uses by requests under way, and publishes uses.
func (m *Machine) prolong() {
	for b := range m.leased {
		live := slices.IndexFunc(b.leases, func(id string) bool { return m.cfg.Alive(b.key.Model, id) })
		if live >= 0 {
			b.leases = slices.Delete(b.leases, 0, live)
		} else { // the requests have ended since the last check
			b.leases = nil
			delete(m.leased, b)
		}
		b.ends = m.now + m.cfg.TTL
		if live < 0 || m.now-b.told >= m.cfg.TTL/4 {
			m.use(b)
		}
	}
	for _, b := range m.dirty {
		if !b.dirty || m.bindings[b.key] != b {
			continue
		}
		b.dirty, b.told = false, m.now
		m.detach(b)
		m.clock++
		b.used = version{m.clock, m.cfg.Origin}
		m.attach(b)
		m.Put(m.now, b.at, false)
	}
	m.dirty = m.dirty[:0]
}

// usePeriod is the longest delay of the publication of a use.
func (m *Machine) usePeriod() time.Duration { return min(m.cfg.TTL/8, time.Second) }

// Wake returns the time of the next Step without further events.
func (m *Machine) Wake() time.Duration {
	wake := min(m.Machine.Wake(), m.nextReap)
	if len(m.dirty)+len(m.leased) > 0 {
		wake = min(wake, m.nextUse)
	}
	return wake
}

// Step advances the time to now and returns the messages to send.
func (m *Machine) Step(now time.Duration) []shared.Message {
	m.now = now
	if now >= m.nextUse {
		m.nextUse = now + m.usePeriod()
		m.prolong()
	}
	if now >= m.nextReap {
		m.nextReap = now + reapPeriod
		m.reap(now - 2*m.usePeriod()) // until then, another node may report a later use
	}
	return m.Machine.Step(now)
}

// Finish is the last step. It publishes all uses.
func (m *Machine) Finish(now time.Duration) []shared.Message {
	m.now = now
	m.prolong()
	return m.Machine.Finish(now)
}

// Append implements [shared.Table].
func (m *Machine) Append(b []byte, now time.Duration, k shared.Key, whole bool) []byte {
	return appendBinding(b, m.entries[k], now, whole)
}

// Hash implements [shared.Table].
func (m *Machine) Hash(k shared.Key) (uint64, bool) {
	if b := m.entries[k]; b != nil {
		return b.sum(), true
	}
	return 0, false
}

// Join implements [shared.Table].
func (m *Machine) Join(now time.Duration, k shared.Key, w *wireBinding) bool {
	m.now = now
	m.clock = max(m.clock, w.is.Seq, w.used.Seq)
	ends := now + min(w.left, m.cfg.TTL)
	if b := m.entries[k]; b != nil {
		if w.used.compare(b.used) > 0 {
			m.detach(b)
			b.used, b.ends = w.used, max(b.ends, ends)
			m.attach(b)
		}
		return true
	}
	b, before := m.bindings[w.key], shared.Key{}
	switch {
	case b == nil:
		b = &binding{key: w.key}
		m.insert(b)
	case w.is.compare(b.is) < 0:
		return false
	default:
		before = b.at
		m.detach(b)
	}
	if w.rank.Instance == nowhere {
		m.release(b)
	}
	b.at, b.rank, b.is, b.used, b.ends = k, w.rank, w.is, w.used, ends
	m.attach(b)
	m.Machine.End(now, before, true)
	return true
}

// End implements [shared.Table].
func (m *Machine) End(now time.Duration, k shared.Key) {
	m.now = now
	if b := m.entries[k]; b != nil {
		m.remove(b)
	}
}
