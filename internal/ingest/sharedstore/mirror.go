package sharedstore

import (
	"cmp"
	"context"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// MirrorConfig configures a [Mirror]. The zero value selects the defaults.
type MirrorConfig struct {
	// Objects (default 2,000,000; some 60 bytes each) is the maximum number of objects. For a larger store, the Mirror
	// queries the master instead, and tries a new list after six times Pause.
	Objects int

	Fresh time.Duration // default 2 s: validity of the master's statement that no event is missing

	// Pause (default 10 s) is the minimum time between two lists of all objects. A list costs the master a walk over
	// all objects.
	Pause time.Duration

	Now func() time.Time // default time.Now
}

// Mirror is a set of the objects that a store's master announces in its events. It implements [hicache.Store]: it
// answers from the set if possible, and queries the master for the rest. It is safe for concurrent use.
//
// The event stream has no replay and does not start with the present objects. So an object has one of three states:
//
//   - present: an event announced the object and no removal followed.
//   - unknown: the master's list of all objects has the object. The list does not name the media, and includes objects
//     that are still being written.
//   - missing: no event or list has the object, and the list is newer than the start of the stream.
//
// The states hold only while the numbers of the stream are consecutive, and the shim reports at least once per Fresh
// that the master has published no further events. After a gap, the set is empty and the Mirror queries the master for
// everything. A new list completes the set again.
type Mirror struct {
	store listedStore
	cfg   MirrorConfig

	mu      sync.RWMutex
	objects map[[16]byte]media // by the XXH3-128 of the keys; missing objects have no entry
	session uint64
	number  uint64    // number of the last batch of the session
	counted bool      // number is valid
	whole   bool      // objects includes the list
	full    bool      // the store has too many objects; valid until the next list
	alive   time.Time // time of the last report that no event is missing
	epoch   uint64    // counts the resets of the set
	listing bool
	next    time.Time // earliest time of the next list
	stats   MirrorStats
}

// listedStore is a store that can list all objects.
type listedStore interface {
	hicache.Store

	// Keys calls key with the key of each object until key returns false. The bytes are valid only during the call.
	Keys(ctx context.Context, key func([]byte) bool) error
}

// MirrorStats are the counters of a [Mirror].
type MirrorStats struct {
	Objects   int    // known or unknown objects, without the missing
	Whole     bool   // the set lists all objects of the store; other objects do not exist
	Gaps      uint64 // resets of the set: a gap in the stream, or an unreadable message
	Overflows uint64 // resets because of the size
	Lists     uint64 // accepted lists
	Answered  uint64 // keys answered from the set
	Asked     uint64 // keys queried from the master
}

// media are the media of an object.
type media uint8

const (
	onCPU media = 1 << iota
	onDisk
	inDoubt // possibly in other media
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

// NewMirror returns an empty mirror, which queries the master for everything.
func NewMirror(store listedStore, cfg MirrorConfig) *Mirror {
	cfg.Objects = cmp.Or(max(cfg.Objects, 0), 2_000_000)
	cfg.Fresh = cmp.Or(max(cfg.Fresh, 0), 2*time.Second)
	cfg.Pause = cmp.Or(max(cfg.Pause, 0), 10*time.Second)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Mirror{store: store, cfg: cfg, objects: map[[16]byte]media{}}
}

// Stats returns the counters.
func (m *Mirror) Stats() MirrorStats {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.stats
	s.Objects, s.Whole = len(m.objects), m.trusted() && m.whole
	return s
}

// Receive processes a message of the store's shim, an [Message]. Pass the messages in the order of arrival.
// If a list is required, Receive starts a goroutine that requests the list until ctx is done.
func (m *Mirror) Receive(ctx context.Context, data []byte) {
	if epoch, want := m.receive(data); want {
		go m.list(ctx, epoch)
	}
}

// receive returns true if a list is required, with the epoch of the set.
func (m *Mirror) receive(data []byte) (epoch uint64, list bool) {
	msg, err := readMessage(data)
	var batch iter.Seq[storeEvent]
	if err == nil && msg.Kind == Batch {
		batch, err = readEvents(msg.Payload)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.number
	if msg.Kind == Batch {
		next++
	}
	if err != nil || msg.Kind == Lost || !m.counted || msg.Session != m.session || msg.Number != next {
		if m.counted {
			m.stats.Gaps++
		}
		m.empty()
		m.counted, m.session, m.number = err == nil && msg.Kind != Lost, msg.Session, msg.Number
	}
	if !m.counted {
		return 0, false
	}
	m.number = msg.Number
	now := m.cfg.Now()
	if msg.Kind == Alive {
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

// empty resets the set. The caller of this and the following methods holds m.mu.
func (m *Mirror) empty() {
	m.objects = map[[16]byte]media{}
	m.whole, m.alive = false, time.Time{}
	m.epoch++
}

func (m *Mirror) apply(e *storeEvent) {
	if e.Tenant != defaultTenant || m.full {
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

// list requests the list of all objects from the master. The objects become unknown, and the set becomes whole. A list
// for an older set is discarded.
func (m *Mirror) list(ctx context.Context, epoch uint64) {
	var names [][16]byte
	err := m.store.Keys(ctx, func(key []byte) bool {
		names = append(names, nameOfBytes(key))
		return len(names) <= m.cfg.Objects
	})
	const step = 4096 // names per lock of the set, while readers wait
	for err == nil && m.addListed(epoch, names[:min(step, len(names))], len(names) <= step) {
		names = names[min(step, len(names)):]
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.listing = false
}

// addListed adds a part of a list. It returns false if the list is no longer wanted.
func (m *Mirror) addListed(epoch uint64, names [][16]byte, last bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range names {
		if m.epoch != epoch {
			return false
		}
		m.set(key, m.objects[key]|inDoubt) // possibly in a medium without an event
	}
	if last && m.epoch == epoch {
		m.whole = true
		m.stats.Lists++
	}
	return !last && m.epoch == epoch
}

// trusted reports whether the set is valid.
func (m *Mirror) trusted() bool {
	return m.counted && !m.alive.IsZero() && m.cfg.Now().Sub(m.alive) <= m.cfg.Fresh
}

func (m *Mirror) Exists(ctx context.Context, keys []string) (present, known hicache.Bitmap, err error) {
	present, known = hicache.NewBitmap(len(keys)), hicache.NewBitmap(len(keys))
	var rest []string
	var at []int
	m.mu.RLock()
	trusted, whole := m.trusted(), m.whole
	for i, key := range keys {
		where := inDoubt
		if trusted {
			if is, has := m.objects[nameOf(key)]; has {
				where = is
			} else if whole && !strings.Contains(key, "\n") { // the list cannot have a key with a line break
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
