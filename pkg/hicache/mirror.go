package hicache

import (
	"cmp"
	"context"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// MirrorConfig bounds a [Mirror]. The zero value takes the defaults.
type MirrorConfig struct {
	// Objects (default 2,000,000; some 60 bytes each) is how many may be known. A store with more is polled, and looked
	// at again after six times Pause.
	Objects int

	Fresh time.Duration // default 2 s: how long the master's word that nothing was missed counts.

	// Pause (default 10 s) is the least time between two lists of all objects: each costs the master one walk over all
	// it holds.
	Pause time.Duration

	Now func() time.Time // default time.Now
}

// Mirror is a set of what a store's master says in its own events that it holds. It implements [Store]: what the set
// knows is answered from there, and all else by asking the master. Any number of goroutines may use it.
//
// The stream has no replay and does not begin with what is there, so the set knows three things of an object. It is
// there, if it was announced and no removal followed. Nothing is known, if the master's list of all objects has it: the
// list does not say in which media, and has objects too that are still being written. It is not there, if neither
// holds, and the list came after the stream's beginning. All three hold only while the numbers of the stream are
// consecutive and its shim says, at least each Fresh, that the master has published no more than that. After a gap the
// set is empty, everything is asked for, and a new list makes it whole again.
type Mirror struct {
	store listedStore
	cfg   MirrorConfig

	mu      sync.RWMutex
	objects map[[16]byte]media // by the XXH3-128 of their keys; those of which nothing is there are not in it
	session uint64
	number  uint64    // of the last batch of this session
	heard   bool      // number is known
	whole   bool      // the list is in objects
	full    bool      // there are too many objects; until the next list
	alive   time.Time // when it was last said that nothing was missed
	epoch   uint64    // counts how often the set was emptied for a new beginning
	listing bool
	next    time.Time // when the next list may be asked for
	stats   MirrorStats
}

// listedStore is a store that can list what it holds, and more.
type listedStore interface {
	Store

	// Keys calls key with each object's key until it returns false. The bytes are key's only for the call.
	Keys(ctx context.Context, key func([]byte) bool) error
}

// MirrorStats counts what became of a mirror.
type MirrorStats struct {
	Objects   int    // known, or in doubt
	Whole     bool   // what is not among them is not there
	Gaps      uint64 // how often the set was given up: the stream broke, or a message of it could not be read
	Overflows uint64 // how often it was given up for its size
	Lists     uint64 // how many lists were taken in
	Answered  uint64 // keys that were answered for from the set
	Asked     uint64 // keys that the master was asked for
}

// media is where an object is said to be.
type media uint8

const (
	onCPU media = 1 << iota
	onDisk
	inDoubt // it may be elsewhere
)

func mediumOf(name string) media {
	switch name {
	case "cpu":
		return onCPU
	case "disk":
		return onDisk
	}
	return inDoubt
}

// NewMirror returns an empty mirror, which asks for everything.
func NewMirror(store listedStore, cfg MirrorConfig) *Mirror {
	cfg.Objects = cmp.Or(max(cfg.Objects, 0), 2_000_000)
	cfg.Fresh = cmp.Or(max(cfg.Fresh, 0), 2*time.Second)
	cfg.Pause = cmp.Or(max(cfg.Pause, 0), 10*time.Second)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Mirror{store: store, cfg: cfg, objects: map[[16]byte]media{}}
}

// Stats counts.
func (m *Mirror) Stats() MirrorStats {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.stats
	s.Objects, s.Whole = len(m.objects), m.trusted() && m.whole
	return s
}

// Receive takes one message of the store's shim, an [events.StoreMessage]. Messages must come in the order in which
// they arrive. Where a list is needed then, another goroutine asks for it, until ctx ends.
func (m *Mirror) Receive(ctx context.Context, data []byte) {
	if epoch, want := m.receive(data); want {
		go m.list(ctx, epoch)
	}
}

// receive reports whether a list must be asked for, for which set.
func (m *Mirror) receive(data []byte) (epoch uint64, list bool) {
	msg, err := events.ReadStoreMessage(data)
	var batch iter.Seq[events.StoreEvent]
	if err == nil && msg.Kind == events.StoreBatch {
		batch, err = events.ReadStoreEvents(msg.Payload)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.number
	if msg.Kind == events.StoreBatch {
		next++
	}
	if err != nil || msg.Kind == events.StoreLost || !m.heard || msg.Session != m.session || msg.Number != next {
		if m.heard {
			m.stats.Gaps++
		}
		m.empty()
		m.heard, m.session, m.number = err == nil && msg.Kind != events.StoreLost, msg.Session, msg.Number
	}
	if !m.heard {
		return 0, false
	}
	m.number = msg.Number
	now := m.cfg.Now()
	if msg.Kind == events.StoreAlive {
		m.alive = now
	}
	if batch != nil {
		for e := range batch {
			m.apply(&e)
		}
	}
	if m.whole || m.listing || now.Before(m.next) || !m.trusted() {
		return 0, false
	}
	m.listing, m.full, m.next = true, false, now.Add(m.cfg.Pause)
	return m.epoch, true
}

// empty begins a new set, of which nothing is known. Called with m.mu held, as those below are.
func (m *Mirror) empty() {
	m.objects = map[[16]byte]media{}
	m.whole, m.alive = false, time.Time{}
	m.epoch++
}

func (m *Mirror) apply(e *events.StoreEvent) {
	if e.Tenant != events.DefaultTenant || m.full {
		return
	}
	if e.Kind == events.Cleared {
		clear(m.objects)
		return
	}
	key, medium := nameOf(e.Object), mediumOf(e.Medium)
	was := m.objects[key]
	switch {
	case e.Kind == events.Stored:
		m.set(key, was|medium)
	case medium == inDoubt:
		m.set(key, inDoubt)
	case was&^medium == 0:
		delete(m.objects, key)
	default:
		m.objects[key] = was &^ medium
	}
}

func (m *Mirror) set(key [16]byte, where media) {
	m.objects[key] = where
	if len(m.objects) > m.cfg.Objects {
		alive := m.alive
		m.empty()
		m.alive, m.full, m.next = alive, true, m.cfg.Now().Add(6*m.cfg.Pause)
		m.stats.Overflows++
	}
}

// list asks the master for all objects, of which it is in doubt where they are, and if at all: the set is whole then. A
// list that comes too late for its set is dropped.
func (m *Mirror) list(ctx context.Context, epoch uint64) {
	var names [][16]byte
	err := m.store.Keys(ctx, func(key []byte) bool {
		names = append(names, nameOfBytes(key))
		return len(names) <= m.cfg.Objects
	})
	const step = 4096 // names taken in while readers wait
	for err == nil && m.addListed(epoch, names[:min(step, len(names))], len(names) <= step) {
		names = names[min(step, len(names)):]
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.listing = false
}

// addListed takes in a part of a list, and reports whether more of it is wanted.
func (m *Mirror) addListed(epoch uint64, names [][16]byte, last bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range names {
		if m.epoch != epoch {
			return false
		}
		m.set(key, m.objects[key]|inDoubt) // it may be in a medium that was not spoken of
	}
	if last && m.epoch == epoch {
		m.whole = true
		m.stats.Lists++
	}
	return !last && m.epoch == epoch
}

// trusted reports whether the set can be believed.
func (m *Mirror) trusted() bool {
	return m.heard && !m.alive.IsZero() && m.cfg.Now().Sub(m.alive) <= m.cfg.Fresh
}

func (m *Mirror) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	present, known = NewBitmap(len(keys)), NewBitmap(len(keys))
	var rest []string
	var at []int
	m.mu.RLock()
	trusted, whole := m.trusted(), m.whole
	for i, key := range keys {
		where := inDoubt
		if trusted {
			if is, has := m.objects[nameOf(key)]; has {
				where = is
			} else if whole && !strings.Contains(key, "\n") { // which the list cannot name
				where = 0
			}
		}
		switch {
		case where&^inDoubt != 0:
			present.Set(i)
			known.Set(i)
		case where == 0:
			known.Set(i)
		default:
			rest, at = append(rest, key), append(at, i)
		}
	}
	m.mu.RUnlock()
	m.mu.Lock()
	m.stats.Answered += uint64(len(keys) - len(rest))
	m.stats.Asked += uint64(len(rest))
	m.mu.Unlock()
	if len(rest) == 0 {
		return present, known, nil
	}
	there, sure, err := m.store.Exists(ctx, rest)
	for i, to := range at {
		if sure.Get(i) {
			known.Set(to)
			if there.Get(i) {
				present.Set(to)
			}
		}
	}
	return present, known, err
}

func nameOf(key string) [16]byte      { return xxh3.HashString128(key).Bytes() }
func nameOfBytes(key []byte) [16]byte { return xxh3.Hash128(key).Bytes() }
