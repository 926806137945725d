package load

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Config is a node's.
type Config struct {
	Conn      *jetstream.Conn
	Namespace string
	Limits    Limits
	Models    int          // how many tables there may be; 0: 256
	Log       *slog.Logger // nil: nothing is logged

	// Watch is told of every request, whichever node booked it; nil: nobody is. Tables are locked meanwhile: it must be
	// quick, and must not call back.
	Watch func(Model, *Request)

	// Past and Recall are those of [ReplicaConfig]. Tables are locked meanwhile.
	Past   func(of Model, yield func(*Request) bool)
	Recall func(Model, *Request)

	Memories []shared.Memory // that a node that starts gets from another node too
}

// lag is how long a call waits for the booking of an id that is not known yet: it may have been made on another node a
// moment ago.
const lag = 10 * time.Millisecond

// Service is a node's tables of requests under way, and what keeps them equal to those of the other nodes. Readers of
// tables share the lock. Only what is booked while it runs reaches other nodes.
type Service struct {
	*shared.Runner[*Replica]
	watch   atomic.Pointer[chan<- struct{}] // of Watch
	foreign *foreign
	started time.Time // the clock of foreign
}

// New returns a service without requests.
func New(cfg Config) *Service {
	s := &Service{started: time.Now(), foreign: newForeign(cfg.Limits, cmp.Or(max(cfg.Models, 0), usualModels))}
	watch := func(model Model, r *Request) {
		if r.New {
			s.foreign.own(time.Since(s.started), model, r.ID)
		}
		if cfg.Watch != nil {
			cfg.Watch(model, r)
		}
	}
	replica := NewReplica(0, ReplicaConfig{Origin: rand.Uint64() | 1, Limits: cfg.Limits, Models: cfg.Models,
		Watch: watch, Past: cfg.Past, Recall: cfg.Recall, Memories: cfg.Memories})
	s.Runner = shared.NewRunner(replica, shared.ShellConfig{Conn: cfg.Conn, Namespace: cfg.Namespace, Name: "loads",
		Changed: s.notify, Log: cfg.Log, Entries: "requests under way", Count: "requests"})
	return s
}

// Watch has a value put into the channel, unless that is full, whenever a load may have changed. There is one watcher.
func (s *Service) Watch(changed chan<- struct{}) { s.watch.Store(&changed) }

func (s *Service) notify() {
	if c := s.watch.Load(); c != nil {
		loop.Wake(*c)
	}
}

// Book enters a request that is sent to a worker. Errors: [ErrInvalid], [ErrConflict], [ErrFull].
func (s *Service) Book(_ context.Context, model Model, b Booking) error {
	return s.Change(func(r *Replica, now time.Duration) error { return r.Book(now, model, b) })
}

// PrefillComplete says that a request has its first output token. It may be said twice. Error: [ErrUnknown].
func (s *Service) PrefillComplete(ctx context.Context, model Model, id string) error {
	return s.of(ctx, model, id, func(r *Replica, now time.Duration) error { return r.PrefillComplete(now, model, id) })
}

// OutputBlock says that a request has one output block more. See [Table.OutputBlock] for the fraction, which is
// negative for none. Errors: [ErrInvalid], [ErrUnknown], [ErrFull].
func (s *Service) OutputBlock(ctx context.Context, model Model, id string, fraction float64) error {
	return s.of(ctx, model, id, func(r *Replica, now time.Duration) error {
		return r.OutputBlock(now, model, id, fraction)
	})
}

// Free ends a request. Error: [ErrUnknown].
func (s *Service) Free(ctx context.Context, model Model, id string) error {
	return s.of(ctx, model, id, func(r *Replica, now time.Duration) error { return r.Free(now, model, id) })
}

// of changes a request. If it is not known here and there are other nodes it waits a moment for its booking.
func (s *Service) of(ctx context.Context, model Model, id string, do func(*Replica, time.Duration) error) error {
	s.Mu.RLock()
	t := s.Machine.Table(model)
	wait := s.Machine.Peers() > 0 && (t == nil || !t.Has(id))
	s.Mu.RUnlock()
	if wait {
		if !loop.Wait(ctx, lag) {
			return context.Cause(ctx)
		}
	}
	return s.Change(do)
}

// RemoveRank says that a rank is gone, with its requests. See [Table.RemoveRank].
func (s *Service) RemoveRank(key events.RankKey) {
	s.foreign.removeRank(time.Since(s.started), key)
	_ = s.Change(func(r *Replica, now time.Duration) error { r.RemoveRank(now, key); return nil })
}

// Models lists the models that have tables, of requests that were booked here or of foreign ones.
func (s *Service) Models() []Model {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	list := s.Machine.Models()
	for _, m := range s.foreign.models() {
		if !slices.Contains(list, m) {
			list = append(list, m)
		}
	}
	return list
}

// Locate is the model, of those for which among holds, in which an id is taken: for callers that name only the request.
func (s *Service) Locate(id string, among func(Model) bool) (Model, bool) {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	for _, m := range s.Machine.models {
		if among(m.Model) && m.table.Has(id) {
			return m.Model, true
		}
	}
	return Model{}, false
}

// LocateSoon is [Service.Locate] that waits a moment for the booking if it is not known here and there are other nodes.
func (s *Service) LocateSoon(ctx context.Context, id string, among func(Model) bool) (Model, bool) {
	m, found := s.Locate(id, among)
	if found || s.Status().Peers == 0 {
		return m, found
	}
	loop.Wait(ctx, lag)
	return s.Locate(id, among)
}

// Read calls read with a model's table, which does not change meanwhile, and reports whether there is one. Readers
// share the table with each other; whoever books waits for them.
func (s *Service) Read(model Model, read func(*Table)) bool {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	t := s.Machine.Table(model)
	if t != nil {
		read(t)
	}
	return t != nil
}

// Status is what a service has and has done.
type Status struct {
	Ready  bool
	Peers  int
	Counts shared.Counts
	Models []ModelStatus

	Foreign ForeignCounts
}

// ModelStatus is one table's. Digests of a model are equal on all nodes, but for what is on its way.
type ModelStatus struct {
	Model
	Digest
	Blocks int // of all requests, shared ones counted for each
	Ranks  int
	Twice  int // ids that more than one request has
	Counts Counts
}

// Status is for metrics and people.
func (s *Service) Status() Status {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	r := s.Machine
	st := Status{Ready: r.Ready(), Peers: r.Peers(), Counts: r.Counts,
		Foreign: s.foreign.status(time.Since(s.started))}
	for _, m := range r.models {
		t := m.table
		st.Models = append(st.Models, ModelStatus{m.Model, t.Digest(), t.Blocks(), len(t.rows), len(t.rivals), t.Counts})
	}
	return st
}
