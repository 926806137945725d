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

// Config configures the tables of requests under way on one node.
type Config struct {
	Conn      *jetstream.Conn
	Namespace string
	Limits    Limits
	Models    int          // the limit of tables; 0: 256
	Log       *slog.Logger // nil: no logs

	// Watch receives every request of all nodes; nil: not called. Tables are locked during the call, so Watch must
	// return quickly and must not call the service.
	Watch func(Model, *Request)

	// Past and Recall: see [ReplicaConfig]. Tables are locked during the calls.
	Past   func(of Model, yield func(*Request) bool)
	Recall func(Model, *Request)

	Memories []shared.Memory // further state that a starting node copies from another node
}

// lag is the longest wait of a call for the booking of an unknown id. Another node may have made the booking a moment
// ago, and the message about it may be late: a busy node or network delays it. An end without a wait would be lost, and
// the request would count until its expiry.
const lag = time.Second

// Service keeps the tables of requests under way equal on all nodes. Readers of tables share the lock. Bookings reach
// remote nodes only while the service runs.
type Service struct {
	*shared.Runner[*Replica]
	watch   atomic.Pointer[chan<- struct{}] // the channel set by Watch
	foreign *foreign
	started time.Time // the origin of the times in foreign
}

// New returns a service without requests.
func New(cfg Config) *Service {
	s := &Service{started: time.Now(), foreign: newForeign(cfg.Limits, cmp.Or(max(cfg.Models, 0), usualModels))}
	watch := func(model Model, r *Request) {
		if r.New {
			s.foreign.removeBooked(time.Since(s.started), model, r.ID)
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

// Watch sets the channel that receives a value after each possible change of a load, unless the channel is full. A
// later call replaces the channel.
func (s *Service) Watch(changed chan<- struct{}) { s.watch.Store(&changed) }

func (s *Service) notify() {
	if c := s.watch.Load(); c != nil {
		loop.Wake(*c)
	}
}

// Book adds a request that is sent to a worker. Errors: [ErrInvalid], [ErrConflict], [ErrFull].
func (s *Service) Book(_ context.Context, model Model, b Booking) error {
	return s.Change(func(r *Replica, now time.Duration) error { return r.Book(now, model, b) })
}

// Progress restarts the expiry of a request. Error: [ErrUnknown].
func (s *Service) Progress(ctx context.Context, model Model, id string) error {
	return s.update(ctx, model, id, (*Table).Progress)
}

// PrefillComplete reports a request's first output token. See [Table.PrefillComplete]. Error: [ErrUnknown].
func (s *Service) PrefillComplete(ctx context.Context, model Model, id string) error {
	return s.update(ctx, model, id, (*Table).PrefillComplete)
}

// OutputBlock adds one output block to a request. See [Table.OutputBlock] for the fraction; a negative fraction means
// none. Errors: [ErrInvalid], [ErrUnknown], [ErrFull].
func (s *Service) OutputBlock(ctx context.Context, model Model, id string, fraction float64) error {
	return s.update(ctx, model, id, outputBlock(fraction))
}

// Free ends a request. Error: [ErrUnknown].
func (s *Service) Free(ctx context.Context, model Model, id string) error {
	return s.update(ctx, model, id, (*Table).Free)
}

// update changes a request. If there are peers, update first waits for the booking of an unknown id.
func (s *Service) update(ctx context.Context, model Model, id string, change Update) error {
	if err := awaitBooking(ctx, func() bool {
		s.Mu.RLock()
		defer s.Mu.RUnlock()
		t := s.Machine.Table(model)
		return t != nil && t.Has(id) || s.Machine.Peers() == 0
	}); err != nil {
		return err
	}
	return s.Change(func(r *Replica, now time.Duration) error { return r.Update(now, model, id, change) })
}

// awaitBooking waits until arrived returns true, and at most for lag, without an error then. The end of ctx is an
// error, unless the booking has arrived.
func awaitBooking(ctx context.Context, arrived func() bool) error {
	if arrived() {
		return nil
	}
	limit, cancel := context.WithTimeout(ctx, lag)
	defer cancel()
	for poll := (loop.Backoff{Min: time.Millisecond, Max: lag / 20}); !arrived() && poll.Wait(limit); {
	}
	return context.Cause(ctx)
}

// RemoveRank removes a rank with its requests. See [Table.RemoveRank].
func (s *Service) RemoveRank(key events.RankKey) {
	s.foreign.removeRank(time.Since(s.started), key)
	_ = s.Change(func(r *Replica, now time.Duration) error { r.RemoveRank(now, key); return nil })
}

// Models lists the models with a table of booked or foreign requests.
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

// Locate returns the model of an id in use, for callers that name only the request. among returns true for the
// models to search.
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

// LocateSoon calls [Service.Locate]. If there are peers, LocateSoon waits for the booking of an unknown id.
func (s *Service) LocateSoon(ctx context.Context, id string, among func(Model) bool) (m Model, found bool) {
	_ = awaitBooking(ctx, func() bool {
		m, found = s.Locate(id, among)
		return found || s.Status().Peers == 0
	})
	return m, found
}

// Read calls read with a model's table. It returns false if there is no table. The table does not change during the
// call. Readers share the lock; bookings wait for the readers.
func (s *Service) Read(model Model, read func(*Table)) bool {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	t := s.Machine.Table(model)
	if t != nil {
		read(t)
	}
	return t != nil
}

// Status describes the state of a service.
type Status struct {
	Ready  bool
	Peers  int
	Counts shared.Counts
	Models []ModelStatus

	Foreign ForeignCounts
}

// ModelStatus describes a table. Digests of a model are equal on all nodes, except for changes under way.
type ModelStatus struct {
	Model
	Digest
	Blocks int // of all requests; a shared block counts once per request
	Ranks  int
	Twice  int // ids of several requests
	Counts Counts
}

// Status returns the present state for metrics and operators.
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
