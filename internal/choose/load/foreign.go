package load

import (
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// foreign keeps the requests that routers of another make (NVIDIA Dynamo) have sent to workers and published. Every
// node receives every message, so the tables are not replicated. A new node has only the requests published since its
// start.
//
// foreign skips a request if the service has booked the same id. If the booking comes later, foreign removes the
// request. The reason: a router may publish requests for which kvatlas chose the worker.
//
// foreign is safe for concurrent use. The lock of [Service] precedes the lock of foreign.
type foreign struct {
	mu     sync.RWMutex
	limits Limits
	most   int // tables
	tables map[Model]*Table
	ticked time.Duration // when rows without requests were last dropped
	counts ForeignCounts
}

// ForeignCounts counts the changes of foreign requests since the start of the node, by result.
type ForeignCounts struct {
	Requests int // under way now

	Added, Prefilled, Freed uint64
	Own                     uint64 // of requests booked by this service
	Duplicate               uint64 // of a request already in the table
	Unknown                 uint64 // of a request absent from the table
	Refused                 uint64 // beyond the limits of a table, or without a valid id
	Expired                 uint64 // never freed
}

// foreignSlots limits the number of ranks with the same request id at once: a prefill worker, a decode worker, and the
// two of a migration.
const foreignSlots = 4

// Ids of a table of foreign requests consist of a kind, a slot, and the router's id. Old releases of Dynamo publish
// prefill tokens separately from the request, so the table has a separate entry for prefill tokens.
const (
	sequenceEntry = 's'
	prefillEntry  = 'p'
)

func foreignID(kind byte, slot int, id string) string {
	return string([]byte{kind, '0' + byte(slot)}) + id
}

func newForeign(limits Limits, most int) *foreign {
	return &foreign{limits: limits, most: most, tables: map[Model]*Table{}}
}

// find returns the id of a rank's entry. Without an entry, find returns the first free id, or "" if all ids are in use.
func (f *foreign) find(t *Table, kind byte, id string, key events.RankKey) (entry string, found bool) {
	for slot := range foreignSlots {
		name := foreignID(kind, slot, id)
		at, there := t.Where(name)
		if there && at == key {
			return name, true
		}
		if !there && entry == "" {
			entry = name
		}
	}
	return entry, false
}

// apply applies a change. owned reports whether this service booked the request.
func (f *foreign) apply(now time.Duration, model Model, r *events.RouterRequest, owned bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if owned {
		f.counts.Own++
		return
	}
	t := f.tables[model]
	if t == nil {
		if r.Change == events.RequestPrefilled || r.Change == events.RequestFreed {
			f.counts.Unknown++
			return
		}
		if len(f.tables) >= f.most && !f.dropEmpty() {
			f.counts.Refused++
			return
		}
		t = NewTable(1, f.limits)
		f.tables[model] = t
	}
	f.expire(now, t)
	entry, known := f.find(t, sequenceEntry, r.ID, r.Key)
	prefill, prefilling := f.find(t, prefillEntry, r.ID, r.Key)
	switch r.Change {
	case events.RequestAdded:
		if known {
			f.counts.Duplicate++
			return
		}
		if prefilling && r.PrefillTokens > 0 {
			_ = t.Free(now, prefill) // the same tokens
		}
		f.book(now, t, Booking{ID: entry, Rank: r.Key, Hashes: r.Blocks, PrefillTokens: int64(r.PrefillTokens)})
	case events.RequestPrefilling:
		if known && t.ids[entry].tokens > 0 {
			f.counts.Duplicate++ // the request came with tokens
			return
		}
		if prefilling {
			_ = t.Free(now, prefill) // replaced
		}
		f.book(now, t, Booking{ID: prefill, Rank: r.Key, PrefillTokens: int64(r.PrefillTokens)})
	case events.RequestPrefilled:
		if known {
			_ = t.PrefillComplete(now, entry)
		}
		if prefilling {
			_ = t.Free(now, prefill)
		}
		f.count(&f.counts.Prefilled, known || prefilling)
	case events.RequestFreed:
		if known {
			_ = t.Free(now, entry)
		}
		if prefilling {
			_ = t.Free(now, prefill)
		}
		f.count(&f.counts.Freed, known || prefilling)
	default: // of a later version
		f.counts.Refused++
	}
}

func (f *foreign) count(to *uint64, found bool) {
	if !found {
		to = &f.counts.Unknown
	}
	*to++
}

func (f *foreign) book(now time.Duration, t *Table, b Booking) {
	if b.ID == "" || t.Book(now, b) != nil {
		f.counts.Refused++
		return
	}
	f.counts.Added++
}

// expire drops expired requests. Once a second, expire also drops the rows of ranks without requests for Limits.Expiry.
func (f *foreign) expire(now time.Duration, t *Table) {
	before := t.Counts.Expired
	t.expire(now)
	f.counts.Expired += t.Counts.Expired - before
	if now-f.ticked < time.Second {
		return
	}
	f.ticked = now
	for _, t := range f.tables {
		before := t.Counts.Expired
		t.Tick(now)
		f.counts.Expired += t.Counts.Expired - before
	}
}

// dropEmpty drops a table without requests. It returns false if all tables have requests.
func (f *foreign) dropEmpty() bool {
	for model, t := range f.tables {
		if t.Len() == 0 {
			delete(f.tables, model)
			return true
		}
	}
	return false
}

// removeBooked removes a request booked by this service.
func (f *foreign) removeBooked(now time.Duration, model Model, id string) {
	f.mu.RLock()
	t := f.tables[model]
	none := t == nil || t.Len() == 0
	f.mu.RUnlock()
	if none {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, kind := range []byte{sequenceEntry, prefillEntry} {
		for slot := range foreignSlots {
			if t.Free(now, foreignID(kind, slot, id)) == nil {
				f.counts.Own++
			}
		}
	}
}

// removeRank ends a rank's requests.
func (f *foreign) removeRank(now time.Duration, key events.RankKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.tables {
		row := t.byRank[key]
		if row == nil {
			continue
		}
		for _, r := range slices.Clone(row.records) {
			_ = t.Free(now, r.id)
		}
	}
}

// read calls read with a model's table, if the table has requests.
func (f *foreign) read(now time.Duration, model Model, read func(*Table)) {
	f.mu.RLock()
	t := f.tables[model]
	if t != nil && len(t.queue) > 0 && t.queue[0].deadline <= now {
		f.mu.RUnlock()
		f.mu.Lock()
		f.expire(now, t)
		f.mu.Unlock()
		f.mu.RLock()
	}
	defer f.mu.RUnlock()
	if t != nil && t.Len() > 0 {
		read(t)
	}
}

// models lists the models with foreign requests.
func (f *foreign) models() (list []Model) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for m, t := range f.tables {
		if t.Len() > 0 {
			list = append(list, m)
		}
	}
	return list
}

// status returns the counts of changes and of requests under way.
func (f *foreign) status(now time.Duration) ForeignCounts {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.counts
	for _, t := range f.tables {
		f.expire(now, t)
		c.Requests += t.Len()
	}
	c.Expired = f.counts.Expired
	return c
}

// ReportForeign applies changes of requests that routers of another make sent to workers of a model. Every node
// receives and applies all changes.
func (s *Service) ReportForeign(model Model, changes []events.RouterRequest) {
	now := time.Since(s.started)
	s.Mu.RLock()
	own := s.Machine.Table(model)
	for i := range changes {
		s.foreign.apply(now, model, &changes[i], own != nil && own.Has(changes[i].ID))
	}
	s.Mu.RUnlock()
	s.notify()
}

// ReadForeign calls read with the table of a model's foreign requests, if there are any. The table does not change
// during the call.
func (s *Service) ReadForeign(model Model, read func(*Table)) {
	s.foreign.read(time.Since(s.started), model, read)
}
