package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Models keeps the block sizes of a namespace's models current, and repairs the namespace's record: its owner has the
// number of partitions. It is for indexers. Its methods may be called from any goroutine.
type Models struct {
	ns      *Namespace
	log     *slog.Logger
	changed func()                            // see NewModels
	sizes   atomic.Pointer[map[string]uint32] // tokens in a block, by model
	lost    chan struct{}                     // the namespace's record may be lost
	bad     chan Entry                        // an unreadable record of a model, to be erased

	current     chan struct{} // closed once all records have been read
	currentOnce sync.Once

	fresh map[string]bool // keys since the watch's restart; nil: all read. Watch's goroutine owns it
}

// NewModels returns an empty Models. Run fills it, and calls changed after a model was registered or removed. The
// function changed must not block.
func NewModels(ns *Namespace, log *slog.Logger, changed func()) *Models {
	m := &Models{ns: ns, log: log, changed: changed, lost: make(chan struct{}, 1), bad: make(chan Entry, 16),
		current: make(chan struct{})}
	m.sizes.Store(&map[string]uint32{})
	return m
}

// BlockSize returns the registered block size of a model in tokens; 0 if the model is unknown.
func (m *Models) BlockSize(model string) uint32 { return (*m.sizes.Load())[model] }

// Await waits until all records have been read, or ctx ends.
func (m *Models) Await(ctx context.Context) {
	select {
	case <-m.current:
	case <-ctx.Done():
	}
}

// Run watches the bucket until ctx ends.
func (m *Models) Run(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { m.ns.meta.Watch(ctx, m.observe) })
	all.Go(func() { m.keepRecord(ctx) })
	all.Wait()
}

func (m *Models) observe(u Watched) {
	if u.Err != nil {
		return // the watch resumes by itself; known sizes stay
	}
	if u.Anew {
		m.fresh = map[string]bool{}
	}
	before := *m.sizes.Load()
	now := maps.Clone(before)
	for i := range u.Entries {
		m.see(now, &u.Entries[i])
	}
	if u.Current {
		for model := range now {
			if key, err := modelKey(model); err == nil && !m.fresh[key] {
				delete(now, model)
			}
		}
		if !m.fresh[namespaceKey] {
			loop.Wake(m.lost)
		}
		m.fresh = nil
	}
	if !maps.Equal(before, now) {
		m.sizes.Store(&now)
		m.changed()
	}
	if u.Current { // after the sizes are stored: Await promises them
		m.currentOnce.Do(func() { close(m.current) })
	}
}

// see updates the block sizes by an entry of the bucket.
func (m *Models) see(sizes map[string]uint32, e *Entry) {
	if m.fresh != nil && !e.Deleted {
		m.fresh[e.Key] = true
	}
	if e.Key == namespaceKey {
		if _, err := parseRecord(e.Value); e.Deleted || errors.Is(err, ErrBadRecord) {
			loop.Wake(m.lost)
		}
		return
	}
	if name, ok := parseForgottenKey(e.Key); ok {
		delete(sizes, name)
		return
	}
	name, ok := parseModelKey(e.Key)
	switch {
	case !ok:
	case e.Deleted:
		delete(sizes, name)
	default:
		model, err := parseModel(e.Key, e.Value)
		if err != nil {
			m.log.Warn("a model's record cannot be read; the earlier record stays in use", "key", e.Key, "error", err,
				"what_to_do", "restart a shim of the model, which writes it again, or indexer models remove MODEL")
			select {
			case m.bad <- *e:
			default: // the next start of an indexer finds it again
			}
			return
		}
		sizes[name] = model.BlockSize
	}
}

func (m *Models) logLost(err error) {
	m.log.Warn("the namespace's record is lost and cannot be written yet; it is tried again", "error", err,
		"what_to_do", "check that NATS answers and has free space; until then no node can start")
}

// keepRecord writes the namespace's record again after a loss.
func (m *Models) keepRecord(ctx context.Context) {
	for {
		select {
		case <-m.lost:
		case e := <-m.bad: // shims may not replace it; the next shim registers the model again
			if err := m.ns.meta.Erase(ctx, e.Key, e.Revision); err != nil && ctx.Err() == nil {
				m.logLost(err)
			}
			continue
		case <-ctx.Done():
			return
		}
		for retry := (loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}); ; {
			lost, err := m.restore(ctx)
			if err == nil {
				if lost != nil {
					m.log.Warn("the namespace's record was lost; it is written again", "error", lost, "what_to_do",
						"check which other users may write to the bucket; indexer auth create prints the permissions of each user")
				}
				break
			}
			if ctx.Err() == nil {
				m.logLost(err)
			}
			if !retry.Wait(ctx) {
				return
			}
		}
	}
}

// restore writes the namespace's record if it is lost. It returns the reason of the loss.
func (m *Models) restore(ctx context.Context) (lost, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	entry, deleted, err := m.ns.meta.last(ctx, namespaceKey)
	switch {
	case errors.Is(err, ErrNotFound) || err == nil && deleted:
		lost = fmt.Errorf("record %q in bucket %s: %w", namespaceKey, m.ns.meta.name, ErrNotFound)
	case err != nil:
		return nil, err
	default:
		if _, lost = parseRecord(entry.Value); !errors.Is(lost, ErrBadRecord) {
			return nil, nil
		}
	}
	if err = m.ns.meta.writeRecord(ctx, m.ns.partitions, entry.Revision); errors.Is(err, ErrConflict) {
		return nil, nil // another node has written it
	}
	return lost, err
}
