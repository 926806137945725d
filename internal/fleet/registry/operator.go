package registry

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Operator is what operators say of one worker: the value of the key operator.<instance> in the bucket of workers, in
// JSON. Its shim neither reads nor writes it, so it outlives shims and their leases. Whichever node is asked writes it,
// by compare-and-set.
type Operator struct {
	Version  int             `json:"version"`
	Instance events.WorkerID `json:"instance"`

	Declared *Declared      `json:"declared,omitempty"` // a worker that has no shim
	Change   api.WorkerSpec `json:"change,omitzero"`    // is above what the shim, or Declared, says
	Drain    *Drain         `json:"drain,omitempty"`

	// Posted is the worker as a client of Dynamo's selection service or slot tracker has registered it; see
	// internal/faces/compat/dynamoselect.
	Posted json.RawMessage `json:"posted,omitempty"`
}

// Declared is a worker that is known by its registration alone. While a shim holds a lease on the worker, that counts.
type Declared struct {
	Model     string         `json:"model"`
	BlockSize uint32         `json:"block_size"`
	Worker    api.WorkerSpec `json:"worker"`
}

// Drain says that a worker is to get nothing new.
type Drain struct {
	Since time.Time `json:"since"` // by the clock of the node that was asked
	Why   string    `json:"why,omitempty"`
}

// operatorVersion is the version of the records that this program writes.
const operatorVersion = 1

// errLater: an operator's record is of a later version, and must not be written over.
var errLater = errors.New("it is of a later version")

// decodeOperator reads the operators' record of a worker. The error wraps errLater if other nodes may be able to read
// it.
func decodeOperator(instance events.WorkerID, data []byte) (*Operator, error) {
	o := &Operator{}
	if err := strictjson.Unmarshal(data, o); err != nil {
		return nil, fmt.Errorf("what operators say of %s: %w", instance, err)
	}
	if o.Version > operatorVersion {
		return nil, fmt.Errorf("what operators say of %s has version %d; this program knows %d: %w", instance, o.Version,
			operatorVersion, errLater)
	}
	if o.Version != operatorVersion || o.Instance != instance {
		return nil, fmt.Errorf("what operators say of %s has version %d and names %q", instance, o.Version, o.Instance)
	}
	return o, nil
}

// empty reports whether nothing is said.
func (o *Operator) empty() bool {
	data, err := json.Marshal(o.Change)
	return o.Declared == nil && o.Drain == nil && o.Posted == nil && err == nil && string(data) == "{}"
}

// operators is what is known of the operators' records. The registry's lock guards it.
type operators struct {
	known map[events.WorkerID]*Operator
	texts map[events.WorkerID][]byte // as they were read
	fresh map[events.WorkerID]bool   // seen since the watch began anew; nil once it is current
	ended *lru.Cache[events.WorkerID, struct{}]
}

// see takes an entry of the bucket. It reports whether it is an operator's, and whether anything is other than before.
func (s *operators) see(e jetstream.Entry) (is, changed bool, err error) {
	instance, is := jetstream.ParseOperatorKey(e.Key)
	if !is {
		return false, false, nil
	}
	if e.Deleted {
		_, changed = s.known[instance]
		s.forget(instance)
		return true, changed, nil
	}
	if s.fresh != nil {
		s.fresh[instance] = true
	}
	if bytes.Equal(s.texts[instance], e.Value) {
		return true, false, nil
	}
	o, err := decodeOperator(instance, e.Value)
	if err != nil {
		return true, false, err // what was known before stays
	}
	if o.Declared == nil {
		s.undeclare(instance)
	}
	s.known[instance], s.texts[instance] = o, e.Value
	return true, true, nil
}

// undeclare notes that a worker that was declared is no more.
func (s *operators) undeclare(instance events.WorkerID) {
	if was := s.known[instance]; was != nil && was.Declared != nil {
		s.ended.Add(instance, struct{}{})
	}
}

func (s *operators) forget(instance events.WorkerID) {
	s.undeclare(instance)
	delete(s.known, instance)
	delete(s.texts, instance)
	delete(s.fresh, instance)
}

// current tells that all keys have been told, and reports whether some are gone. Those of which a lost bucket's record
// is to be written again are not.
func (s *operators) current(lost map[string][]byte) (changed bool) {
	for instance := range s.known {
		name, err := jetstream.OperatorKey(instance)
		if s.fresh != nil && !s.fresh[instance] && (err != nil || lost[name] == nil) {
			s.forget(instance)
			changed = true
		}
	}
	s.fresh = nil
	return changed
}

// Declare registers a worker that has no shim, in place of an earlier registration. What was changed of that is
// forgotten; a worker that is drained stays so. Another worker without a shim that was declared for the same ranks,
// model and serving address is removed. The error is an [api.Error], or of the bucket.
func (r *Registry) Declare(ctx context.Context, w *api.WorkerRegistration) (*api.Worker, error) {
	if err := r.unleased(w.Instance, api.CodeRegistered, "PATCH changes its record"); err != nil {
		return nil, err
	}
	err := r.cfg.Namespace.RegisterModel(ctx, jetstream.Model{Name: w.Model, BlockSize: w.BlockSize})
	if errors.Is(err, jetstream.ErrMismatch) {
		return nil, api.Errorf(api.CodeBlockSizeMismatch, "%v", err)
	} else if err != nil {
		return nil, err
	}
	worker, err := r.Edit(ctx, w.Instance, func(o *Operator, _ bool) error {
		o.Declared = &Declared{Model: w.Model, BlockSize: w.BlockSize, Worker: w.WorkerSpec}
		o.Change = api.WorkerSpec{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, old := range r.declaredAt(w) {
		_, err := r.Remove(ctx, old)
		if failure, is := errors.AsType[*api.Error](err); is && failure.Code == api.CodeUnknownWorker {
			err = nil // another node has removed it
		}
		if err != nil {
			return nil, err
		}
		r.cfg.Hooks.Replaced(old, w.Instance)
	}
	return worker, nil
}

// declaredAt lists the other workers that were declared for the ranks, model and serving address of a worker, and that
// have neither a shim nor a client of another API.
func (r *Registry) declaredAt(w *api.WorkerRegistration) (list []events.WorkerID) {
	address, ok := dial.ServingAddress(w.Endpoint)
	if !ok {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	leased := map[events.WorkerID]bool{}
	for key := range r.workers {
		leased[key.Instance] = true
	}
	for instance, o := range r.operators.known {
		if instance == w.Instance || leased[instance] || o.Posted != nil || o.Declared == nil || o.Declared.Model != w.Model {
			continue
		}
		spec := o.Declared.Worker.With(o.Change)
		at, _ := dial.ServingAddress(spec.Endpoint)
		apart := spec.RankStart >= w.RankStart+max(w.RankSize, 1) || w.RankStart >= spec.RankStart+max(spec.RankSize, 1)
		if at == address && !apart {
			list = append(list, instance)
		}
	}
	slices.Sort(list)
	return list
}

// unleased refuses if a shim holds a lease on some rank of a worker.
func (r *Registry) unleased(instance events.WorkerID, code api.Code, instead string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, w := range r.workers {
		if key.Instance == instance && w.Record.State == Held {
			return api.Errorf(code, "a shim on %s (process %d) serves worker %s; %s", w.Record.Holder.Host,
				w.Record.Holder.PID, key, instead)
		}
	}
	return nil
}

// Change changes what operators say of a worker. The same change twice is one. The error is an [api.Error], or of the
// bucket.
func (r *Registry) Change(ctx context.Context, c *api.WorkerChange) (*api.Worker, error) {
	return r.Edit(ctx, c.Instance, func(o *Operator, found bool) error {
		if !found && len(r.ranksOf(c.Instance)) == 0 {
			return api.Errorf(api.CodeUnknownWorker, "nobody has registered worker %q; indexer workers lists them",
				c.Instance)
		}
		if c.Reset {
			o.Change = api.WorkerSpec{}
		}
		o.Change = o.Change.With(c.WorkerSpec)
		switch {
		case c.Drain == nil:
		case !*c.Drain:
			o.Drain = nil
		case o.Drain == nil:
			o.Drain = &Drain{Since: time.Now().UTC().Truncate(time.Second), Why: c.Why}
		case c.Why != "":
			o.Drain.Why = c.Why
		}
		return nil
	})
}

// Remove forgets what operators say of a worker: one that has no shim is gone then, and one whose lease has expired is
// named no more. The error is an [api.Error], or of the bucket.
func (r *Registry) Remove(ctx context.Context, instance events.WorkerID) (*api.Worker, error) {
	if err := r.unleased(instance, api.CodeConflict, "stop the shim, and the worker goes with its lease"); err != nil {
		return nil, err
	}
	was, _ := r.Registered(instance)
	_, err := r.Edit(ctx, instance, func(o *Operator, found bool) error {
		if !found && !r.expired.has(instance) {
			return api.Errorf(api.CodeUnknownWorker, "nobody has registered worker %q", instance)
		}
		*o = Operator{Version: operatorVersion, Instance: instance}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range was.Ranks {
		was.Ranks[i].Because(api.WorkerUnschedulable, "it is removed")
	}
	return was, r.forgetClaims(ctx, instance)
}

// Forget forgets what operators say of a worker, if anything, and deletes its model claims.
func (r *Registry) Forget(ctx context.Context, instance events.WorkerID) error {
	_, err := r.Edit(ctx, instance, func(o *Operator, _ bool) error {
		*o = Operator{Version: operatorVersion, Instance: instance}
		return nil
	})
	if err != nil {
		return err
	}
	return r.forgetClaims(ctx, instance)
}

// Posted lists what operators say of workers that were posted, by instance.
func (r *Registry) Posted() []Operator {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Operator
	for _, o := range r.operators.known {
		if o.Posted != nil {
			list = append(list, *o)
		}
	}
	slices.SortFunc(list, func(a, b Operator) int { return cmp.Compare(a.Instance, b.Instance) })
	return list
}

// PostedWorker is what operators say of a worker that was posted, and whether it was.
func (r *Registry) PostedWorker(instance events.WorkerID) (Operator, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.operators.known[instance]
	if o == nil || o.Posted == nil {
		return Operator{}, false
	}
	return *o, true
}

// Edit has a change of what operators say of a worker written, unless somebody else writes at the same time: then it is
// applied to that. found says that there was something. It is known to this node when Edit returns. The error is an
// [api.Error], the change's, or of the bucket.
func (r *Registry) Edit(ctx context.Context, instance events.WorkerID,
	change func(o *Operator, found bool) error) (*api.Worker, error) {
	name, err := jetstream.OperatorKey(instance)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "instance: %v", err)
	}
	for {
		entry, err := r.cfg.Bucket.Latest(ctx, name)
		o := &Operator{Version: operatorVersion, Instance: instance}
		found := err == nil
		switch {
		case errors.Is(err, jetstream.ErrNotFound):
		case err != nil:
			return nil, err
		default:
			if o, err = decodeOperator(instance, entry.Value); errors.Is(err, errLater) {
				return nil, api.Errorf(api.CodeConflict, "%v", err)
			} else if err != nil {
				o = r.operatorBefore(instance) // nobody can read it: it is written again
			}
		}
		if err := change(o, found); err != nil {
			return nil, err
		}
		data, err := json.MarshalIndent(o, "", " ")
		if err != nil {
			return nil, err
		}
		revision := entry.Revision
		switch {
		case !found && o.empty() && !r.expired.has(instance), found && bytes.Equal(entry.Value, data):
			// there is nothing to write; a mark of deletion has all nodes forget that the worker's lease has expired
		case o.empty():
			revision, err = r.cfg.Bucket.Delete(ctx, name, entry.Revision)
		default:
			value := jetstream.Value{Key: name, Data: data}
			revision, err = r.cfg.Bucket.Commit(ctx, nil, value, entry.Revision)
		}
		if errors.Is(err, jetstream.ErrConflict) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := r.await(ctx, revision); err != nil {
			return nil, err
		}
		w, _ := r.Registered(instance)
		return w, nil
	}
}

// operatorBefore returns what this node knew of a worker's operators before their record became unreadable.
func (r *Registry) operatorBefore(instance events.WorkerID) *Operator {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.operators.known[instance]; known != nil {
		before := *known
		return &before
	}
	return &Operator{Version: operatorVersion, Instance: instance}
}

// await waits until the watch has shown all up to a revision, or ctx ends.
func (r *Registry) await(ctx context.Context, revision uint64) error {
	const again = 50 * time.Millisecond // what is written twice over may come without a change
	for {
		r.mu.Lock()
		shown, changed := r.heard >= revision, r.changed
		r.mu.Unlock()
		if shown {
			return nil
		}
		select {
		case <-changed:
		case <-time.After(again):
		case <-ctx.Done():
			return api.Errorf(api.CodeUnavailable,
				"it is written, and this node does not hear of it in time; see indexer status")
		}
	}
}
