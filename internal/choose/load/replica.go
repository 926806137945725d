package load

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Model identifies a table by a model's name and a routing group. The name and the group have at most 255 bytes. The
// default group is empty.
type Model struct{ Name, Group string }

// usualModels is the default limit of tables.
const usualModels = 256

// ReplicaConfig configures a [Replica].
type ReplicaConfig struct {
	Origin uint64 // of the node's session: random, not 0
	Limits Limits
	Models int // the limit of tables made by bookings of this node; 0: 256

	// Watch receives every request of all nodes; nil: not called. Watch must not call the replica.
	Watch func(Model, *Request)

	// Past yields the stored ended requests with ages, the latest first. A starting node receives up to 16 MiB of ended
	// requests through Recall. nil: none.
	Past   func(of Model, yield func(*Request) bool)
	Recall func(Model, *Request)

	Memories []shared.Memory // further data for a starting node
}

const (
	rivalGrace = 500 * time.Millisecond // the wait before the end of a request with a duplicate id
	agePeriod  = 500 * time.Millisecond // the interval of the checks for expired requests
	maxEntries = 2 * MaxRequests        // of remote nodes, in all tables
)

// Replica keeps the same tables on every node. [shared.Machine] defines the protocol. Each request under way is an
// entry of the machine. Only a single goroutine at a time may use a replica. Several goroutines may read a [Table]
// while no goroutine changes the table.
type Replica struct {
	*shared.Machine[event]

	cfg     ReplicaConfig
	models  []*modelTable
	byName  map[Model]*modelTable
	places  map[Key]*modelTable // of the requests of all tables
	nextAge time.Duration
	now     time.Duration
}

// modelTable is the table of a model.
type modelTable struct {
	Model
	table *Table
	used  time.Duration // the time of the last change by any node
}

// NewReplica returns a replica without requests. The replica becomes ready with another node's tables, or if there is
// no other node.
func NewReplica(now time.Duration, cfg ReplicaConfig) *Replica {
	if cfg.Models <= 0 {
		cfg.Models = usualModels
	}
	cfg.Limits.setDefaults()
	r := &Replica{cfg: cfg, byName: map[Model]*modelTable{}, places: map[Key]*modelTable{}, nextAge: now}
	memories := cfg.Memories
	if cfg.Past != nil {
		memories = append(slices.Clone(memories), shared.Memory{Each: r.past, Take: r.recall})
	}
	r.Machine = shared.NewMachine(now, r, shared.Config[event]{Origin: cfg.Origin, Entries: maxEntries,
		Memory: 2 * cfg.Limits.Expiry, Read: readEvent, Memories: memories})
	return r
}

// Begin starts the reception of messages from remote nodes.
func (r *Replica) Begin(now time.Duration) {
	r.Machine.Begin(now)
	r.nextAge = now
}

// Len returns the number of requests under way or with an id in use.
func (r *Replica) Len() int { return len(r.places) }

// Models lists the models with tables, in order of creation.
func (r *Replica) Models() []Model {
	list := make([]Model, len(r.models))
	for i, m := range r.models {
		list[i] = m.Model
	}
	return list
}

// Table returns a model's table for reading; nil if there is none.
func (r *Replica) Table(model Model) *Table {
	if m := r.byName[model]; m != nil {
		return m.table
	}
	return nil
}

// model returns a model's table, and creates a missing table.
func (r *Replica) model(model Model) *modelTable {
	m := r.byName[model]
	if m == nil {
		m = &modelTable{Model: model, table: NewTable(r.cfg.Origin, r.cfg.Limits)}
		m.table.key = r.NewKey
		m.table.changed = func(kind change, rec *record) { r.changed(m, kind, rec) }
		if r.cfg.Watch != nil {
			m.table.watch = func(q *Request) { r.cfg.Watch(model, q) }
		}
		r.byName[model] = m
		r.models = append(r.models, m)
	}
	m.used = r.now
	return m
}

// changed passes a local change to the machine.
func (r *Replica) changed(m *modelTable, kind change, rec *record) {
	m.used = r.now
	switch kind {
	case booked:
		r.places[rec.key] = m
		r.Put(r.now, rec.key, false)
	case updated, gone:
		r.Put(r.now, rec.key, kind == gone)
	case freed, outlive:
		delete(r.places, rec.key)
		r.Machine.End(r.now, rec.key, kind == outlive)
	}
}

// Append implements [shared.Table].
func (r *Replica) Append(b []byte, now time.Duration, k Key, whole bool) []byte {
	m := r.places[k]
	rec := m.table.records[k]
	return appendRecord(b, m.Model, rec, rec.deadline-now, whole)
}

// Hash implements [shared.Table].
func (r *Replica) Hash(k Key) (uint64, bool) {
	if m := r.places[k]; m != nil {
		return m.table.records[k].digest, true
	}
	return 0, false
}

// Join implements [shared.Table].
func (r *Replica) Join(now time.Duration, k Key, e *event) bool {
	r.now = now
	m := r.places[k]
	if m == nil {
		m = r.model(e.model)
	}
	m.used = now
	if !m.table.put(now, e) {
		return false
	}
	r.places[k] = m
	return true
}

// End implements [shared.Table].
func (r *Replica) End(now time.Duration, k Key) {
	r.now = now
	if m := r.places[k]; m != nil {
		m.used = now
		m.table.drop(now, k)
		delete(r.places, k)
	}
}

// Book is [Table.Book]. [ErrFull] may also mean too many models.
func (r *Replica) Book(now time.Duration, model Model, b Booking) error {
	r.now = now
	if len(model.Name) > maxName || len(model.Group) > maxName {
		return fmt.Errorf("%w: a model's name and group have at most %d bytes", ErrInvalid, maxName)
	}
	if r.byName[model] == nil && len(r.models) >= r.cfg.Models {
		return fmt.Errorf("%w: of %d models", ErrFull, len(r.models))
	}
	return r.model(model).table.Book(now, b)
}

// Update is a method of [Table] that changes a request under way, such as (*Table).Progress.
type Update func(t *Table, now time.Duration, id string) error

// outputBlock returns [Table.OutputBlock] with a fraction.
func outputBlock(fraction float64) Update {
	return func(t *Table, now time.Duration, id string) error { return t.OutputBlock(now, id, fraction) }
}

// Update calls update with the table of a model. Errors: the errors of update, and [ErrUnknown] if there is no table.
func (r *Replica) Update(now time.Duration, model Model, id string, update Update) error {
	r.now = now
	if m := r.byName[model]; m != nil {
		return update(m.table, now, id)
	}
	return fmt.Errorf("%w: %.64q", ErrUnknown, id)
}

// Free is [Table.Free].
func (r *Replica) Free(now time.Duration, model Model, id string) error {
	return r.Update(now, model, id, (*Table).Free)
}

// RemoveRank is [Table.RemoveRank], of every model.
func (r *Replica) RemoveRank(now time.Duration, key events.RankKey) {
	r.now = now
	for _, m := range r.models {
		m.table.RemoveRank(key)
	}
}

// Wake returns the time at which Step is due without earlier events.
func (r *Replica) Wake() time.Duration { return min(r.Machine.Wake(), r.nextAge) }

// Step advances to now and returns the messages to send.
func (r *Replica) Step(now time.Duration) []shared.Message {
	r.now = now
	if now >= r.nextAge {
		r.nextAge = now + agePeriod
		for _, m := range r.models {
			m.table.Tick(now)
			m.table.resolve(now, rivalGrace, r.Writes)
		}
		r.models = slices.DeleteFunc(r.models, func(m *modelTable) bool {
			idle := m.table.Len() == 0 && now-m.used > 2*r.cfg.Limits.Expiry
			if idle {
				delete(r.byName, m.Model)
			}
			return idle
		})
	}
	return r.Machine.Step(now)
}

// past yields past requests for a starting node.
func (r *Replica) past(yield func([]byte) bool) {
	var b []byte
	for _, m := range r.models {
		more := true
		r.cfg.Past(m.Model, func(q *Request) bool {
			b = appendPast(b[:0], m.Model, q)
			more = yield(b)
			return more
		})
		if !more {
			return
		}
	}
}

// recall passes on a past request of another node.
func (r *Replica) recall(data []byte) {
	reader := &shared.Reader{Reader: msgp.Reader{Data: data}}
	if model, q := readPast(reader); !reader.Bad && reader.Left() == 0 {
		r.cfg.Recall(model, &q)
	}
}
