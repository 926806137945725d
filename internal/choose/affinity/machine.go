package affinity

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds.
const (
	MinTTL      = time.Second
	MaxTTL      = 31_536_000 * time.Second
	MaxSessions = 65_536
	MaxID       = 256 // bytes of a session's id
	maxName     = 255 // bytes of a model or worker
	maxLeases   = 256 // requests of one session that are looked after; of more, the oldest are not
)

// Errors of [Machine.Bind].
var (
	ErrElsewhere = errors.New("the session is bound to another worker")
	ErrFull      = errors.New("too many sessions are bound")
)

// Key names a session.
type Key struct{ Model, Session string }

// Config is one node's.
type Config struct {
	Origin   uint64        // of this session of this node: random, not 0
	TTL      time.Duration // since a session's last use; MinTTL to MaxTTL
	Sessions int           // how many with an id may be bound; 0: MaxSessions
	Prompts  int           // how many ends of prompts without an id may be bound; 0: MaxPrompts

	// Alive reports whether a request that this node has booked is under way.
	Alive func(model, request string) bool
}

// How a booking has changed its session's binding.
type How int

// The ways.
const (
	Made  How = iota + 1 // there was none
	Kept                 // it is to the same rank
	Moved                // it was to another one
)

// version is of a binding, or of its use.
type version struct{ Seq, Writer uint64 }

func (a version) compare(b version) int {
	return cmp.Or(cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.Writer, b.Writer))
}

// binding is where a session is.
type binding struct {
	key  Key
	rank events.RankKey
	is   version
	used version       // its last use that others were told of
	ends time.Duration // unless it is used again

	dirty  bool          // it was used since
	told   time.Duration // when this node last told of a use
	leases []string      // requests of this node that may be under way
}

func (b *binding) sum() uint64 {
	h := xxh3.New()
	for _, s := range []string{b.key.Model, b.key.Session, string(b.rank.Instance)} {
		h.WriteString(s)
		h.Write([]byte{0, byte(len(s))})
	}
	var numbers []byte
	for _, v := range []uint64{uint64(b.rank.Rank), b.is.Seq, b.is.Writer, b.used.Seq, b.used.Writer} {
		for i := range 8 {
			numbers = append(numbers, byte(v>>(8*i)))
		}
	}
	h.Write(numbers)
	return h.Sum64()
}

// parts is how many parts the bindings have, each with a sum.
const parts = 256

func (k Key) part() int { return int(xxh3.HashString(k.Session) % parts) }

// Counts are of what happened to a machine since it was made.
type Counts struct {
	Made, Kept, Moved          uint64 // bookings on this node, by what became of the binding
	Elsewhere, Full            uint64 // refused bookings
	Expired                    uint64
	Sent, Received, Malformed  uint64 // messages
	Exchanges, Healed, Dropped uint64 // questions because of a difference; what was learnt so; what there was no room for
	Continued, Unclear         uint64 // prompts without an id that continued a session, and whose end is also another's
	Unsynced                   uint64 // 1: it was ready without a peer's bindings although there are peers
}

// Machine keeps the same bindings on every node. One goroutine at a time may use it.
type Machine struct {
	Counts Counts

	cfg      Config
	bindings map[Key]*binding
	ends     map[string]map[events.SeqHash]*binding // of bindings: ends of prompts, by model and hash
	prompts  int                                    // bindings of ends
	leased   map[*binding]struct{}
	dirty    []*binding
	sums     [parts]uint64
	clock    uint64        // the greatest sequence that was seen
	soonest  time.Duration // no binding ends before
	now      time.Duration
	changed  time.Duration // when a sum last did
	learnt   time.Duration // when it last did because of another node

	protocol
}

// NewMachine returns a machine without bindings, which is ready when it has a peer's or there is no peer.
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
	m := &Machine{cfg: cfg, bindings: map[Key]*binding{}, ends: map[string]map[events.SeqHash]*binding{},
		leased: map[*binding]struct{}{}, soonest: math.MaxInt64}
	m.peers = map[uint64]*peer{}
	m.Begin(now)
	return m
}

// Len is how many sessions are bound, with those that have ended a moment ago.
func (m *Machine) Len() int { return len(m.bindings) }

// Get returns the rank to which a session is bound.
func (m *Machine) Get(now time.Duration, key Key) (events.RankKey, bool) {
	b := m.bindings[key]
	if b == nil || b.ends <= now {
		return events.RankKey{}, false
	}
	return b.rank, true
}

// Bind notes that a session's request was booked on a rank. Errors: [ErrElsewhere], if the affinity is hard and the
// session is bound to another rank, and [ErrFull]; nothing has changed then.
func (m *Machine) Bind(now time.Duration, key Key, rank events.RankKey, request string, hard bool) (How, error) {
	m.now = now
	b := m.bindings[key]
	if b == nil && m.full(key, 1) {
		if m.reap(); m.full(key, 1) {
			m.Counts.Full++
			return 0, fmt.Errorf("%w: %d", ErrFull, len(m.bindings)-m.prompts)
		}
	}
	how := Kept
	switch {
	case b == nil || b.ends <= now:
		how = Made
		m.Counts.Made++
	case b.rank == rank:
		m.Counts.Kept++
	case hard:
		m.Counts.Elsewhere++
		return 0, fmt.Errorf("%w: %s rank %d", ErrElsewhere, b.rank.Instance, b.rank.Rank)
	default:
		how = Moved
		m.Counts.Moved++
	}
	if b == nil {
		b = &binding{key: key}
		m.insert(b)
	} else if how != Kept {
		m.add(b, -1)
	}
	m.use(b)
	if how != Kept {
		m.clock++
		b.rank, b.is, b.used = rank, version{m.clock, m.cfg.Origin}, version{m.clock, m.cfg.Origin}
		b.dirty, b.told = false, m.now
		m.add(b, 1)
		m.enqueue(b)
	}
	m.lease(b, request)
	return how, nil
}

// use notes that a binding is used now.
func (m *Machine) use(b *binding) {
	b.ends = m.now + m.cfg.TTL
	m.soonest = min(m.soonest, b.ends)
	if !b.dirty {
		b.dirty = true
		m.dirty = append(m.dirty, b)
	}
}

// add adds a binding to the sums, or takes it away.
func (m *Machine) add(b *binding, times int) {
	m.sums[b.key.part()] += uint64(times) * b.sum()
	m.changed = m.now
}

// reap removes what has ended, if something has.
func (m *Machine) reap() {
	if m.now < m.soonest {
		return
	}
	m.soonest = math.MaxInt64
	for _, b := range m.bindings {
		if b.ends > m.now {
			m.soonest = min(m.soonest, b.ends)
			continue
		}
		m.add(b, -1)
		m.remove(b)
		m.Counts.Expired++
	}
}

// prolong notes that bindings are used by requests under way, and tells others of uses.
func (m *Machine) prolong() {
	for b := range m.leased {
		live := slices.IndexFunc(b.leases, func(id string) bool { return m.cfg.Alive(b.key.Model, id) })
		if live >= 0 {
			b.leases = slices.Delete(b.leases, 0, live)
		} else { // they have ended since this was last looked at
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
		m.add(b, -1)
		m.clock++
		b.used = version{m.clock, m.cfg.Origin}
		m.add(b, 1)
		m.enqueue(b)
	}
	m.dirty = m.dirty[:0]
}

// join takes a state of a binding from another node, and reports whether it is news.
func (m *Machine) join(o *binding, left time.Duration) bool {
	m.clock = max(m.clock, o.is.Seq, o.used.Seq)
	ends := m.now + min(left, m.cfg.TTL)
	b := m.bindings[o.key]
	if left <= 0 || b == nil && m.full(o.key, 2) {
		if left > 0 {
			m.Counts.Dropped++
		}
		return false
	}
	newer := 1
	if b != nil {
		newer = cmp.Or(o.is.compare(b.is), o.used.compare(b.used))
	}
	if newer <= 0 {
		return false
	}
	if b == nil {
		b = &binding{key: o.key}
		m.insert(b)
	} else {
		m.add(b, -1)
		if o.is == b.is {
			ends = max(ends, b.ends)
		}
	}
	if o.rank.Instance == nowhere {
		b.leases = nil
		delete(m.leased, b)
	}
	b.rank, b.is, b.used, b.ends = o.rank, o.is, o.used, ends
	m.soonest = min(m.soonest, ends)
	m.add(b, 1)
	return true
}
