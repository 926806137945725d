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

// Operator has the changes of a worker by operators: the JSON value of the key operator.<instance> in the bucket of
// workers. The shim does not use the key, so the value outlives shims and leases. The node that receives a change
// writes by compare-and-set.
type Operator struct {
	Version  int             `json:"version"`
	Instance events.WorkerID `json:"instance"`

	Declared *Declared      `json:"declared,omitempty"` // a worker without a shim
	Change   api.WorkerSpec `json:"change,omitzero"`    // overrides the record of the shim, or Declared
	Drain    *Drain         `json:"drain,omitempty"`

	// Posted is the registration of the worker by a client of Dynamo's selection service or slot tracker; see
	// internal/faces/compat/dynamoselect.
	Posted json.RawMessage `json:"posted,omitempty"`
}

// Declared is a worker without a shim. The lease of a shim on the worker overrides it.
type Declared struct {
	Model     string         `json:"model"`
	BlockSize uint32         `json:"block_size"`
	Worker    api.WorkerSpec `json:"worker"`
}

// Drain excludes a worker from new requests.
type Drain struct {
	Since time.Time `json:"since"` // by the clock of the answering node
	Why   string    `json:"why,omitempty"`
}

// operatorVersion is the version of new records.
const operatorVersion = 1

// errLater means that an operator's record has a later version and must not be overwritten.
var errLater = errors.New("the version is later than this program's")

// decodeOperator decodes the operators' record of a worker. The error wraps errLater if other nodes may be able to read
// the record.
func decodeOperator(instance events.WorkerID, data []byte) (*Operator, error) {
	o := &Operator{}
	if err := strictjson.Unmarshal(data, o); err != nil {
		return nil, fmt.Errorf("operators' record of %s: %w", instance, err)
	}
	if o.Version > operatorVersion {
		return nil, fmt.Errorf("operators' record of %s has version %d; this program supports %d: %w", instance, o.Version,
			operatorVersion, errLater)
	}
	if o.Version != operatorVersion || o.Instance != instance {
		return nil, fmt.Errorf("operators' record of %s has version %d and names %q", instance, o.Version, o.Instance)
	}
	return o, nil
}

// empty reports whether the record has no content.
func (o *Operator) empty() bool {
	data, err := json.Marshal(o.Change)
	return o.Declared == nil && o.Drain == nil && o.Posted == nil && err == nil && string(data) == "{}"
}

// operators are the known records of operators. The registry's lock guards them.
type operators struct {
	known map[events.WorkerID]*Operator
	texts map[events.WorkerID][]byte // the encoded records
	fresh map[events.WorkerID]bool   // keys since the restart of the watch; nil when the watch is current
	ended *lru.Cache[events.WorkerID, struct{}]
}

// see processes an entry of the bucket. see reports whether the entry is an operator's, and whether it is a change.
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
		return true, false, err // the previous record stays
	}
	if o.Declared == nil {
		s.undeclare(instance)
	}
	s.known[instance], s.texts[instance] = o, e.Value
	return true, true, nil
}

// undeclare records the end of a declared worker.
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

// current ends the restart of the watch, and reports whether records are gone. Records that will be written into a new
// bucket stay.
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

// Declare registers a worker without a shim, and replaces an earlier registration with its changes; a drain stays. It
// removes another declared worker without a shim for the same ranks, model and serving address. The error is an
// [api.Error], or an error of the bucket.
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
		r.cfg.Log.Info("a worker is registered at the serving address of another, which is removed", "worker", w.Instance,
			"removed", old)
	}
	return worker, nil
}

// declaredAt returns the other workers that were declared for the same ranks, model and serving address, without a shim
// and without a client of another API.
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

// unleased returns an error if a shim holds a lease on any rank of a worker.
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

// Change changes the attributes of a worker. Change is idempotent. The error is an [api.Error], or an error of the
// bucket.
func (r *Registry) Change(ctx context.Context, c *api.WorkerChange) (*api.Worker, error) {
	return r.Edit(ctx, c.Instance, func(o *Operator, found bool) error {
		if !found && len(r.ranksOf(c.Instance)) == 0 {
			return api.Errorf(api.CodeUnknownWorker, "worker %q is not registered; indexer workers lists all workers",
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

// Remove removes the operators' record of a worker. A worker without a shim is then gone, and an expired worker is no
// longer listed. The error is an [api.Error], or an error of the bucket.
func (r *Registry) Remove(ctx context.Context, instance events.WorkerID) (*api.Worker, error) {
	claims := r.presentClaims(instance)
	unleased := func() error {
		return r.unleased(instance, api.CodeConflict, "stop the shim, and the worker goes with its lease")
	}
	if err := unleased(); err != nil {
		return nil, err
	}
	was, _ := r.Registered(instance)
	_, err := r.Edit(ctx, instance, func(o *Operator, found bool) error {
		if !found && !r.expired.has(instance) {
			return api.Errorf(api.CodeUnknownWorker, "worker %q is not registered", instance)
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
	if unleased() != nil { // a shim has started meanwhile; the claims are in use
		return was, nil
	}
	return was, r.deleteClaims(ctx, claims)
}

// Forget removes the operators' record of a worker, if it exists, and the worker's model claims.
func (r *Registry) Forget(ctx context.Context, instance events.WorkerID) error {
	claims := r.presentClaims(instance)
	_, err := r.Edit(ctx, instance, func(o *Operator, _ bool) error {
		*o = Operator{Version: operatorVersion, Instance: instance}
		return nil
	})
	if err != nil {
		return err
	}
	return r.deleteClaims(ctx, claims)
}

// Posted returns the operators' records of posted workers, by instance.
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

// PostedWorker returns the operators' record of a posted worker, and whether the worker was posted.
func (r *Registry) PostedWorker(instance events.WorkerID) (Operator, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.operators.known[instance]
	if o == nil || o.Posted == nil {
		return Operator{}, false
	}
	return *o, true
}

// Edit writes a change of a worker's operator record, and applies it again after a concurrent write. found reports
// whether the record exists. This node has the change when Edit returns. The error is an [api.Error], an error of
// change, or an error of the bucket.
func (r *Registry) Edit(ctx context.Context, instance events.WorkerID,
	change func(o *Operator, found bool) error) (*api.Worker, error) {
	name, err := jetstream.OperatorKey(instance)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "instance: %v", err)
	}
	for {
		before := r.shown()
		entry, err := r.cfg.Bucket.Latest(ctx, name)
		o := &Operator{Version: operatorVersion, Instance: instance}
		found := err == nil
		switch {
		case errors.Is(err, jetstream.ErrNotFound) && entry.Revision == 0:
			// The record was never written, or the bucket was deleted: a deletion leaves a mark.
			o = r.operatorBefore(instance)
			found = !o.empty()
		case errors.Is(err, jetstream.ErrNotFound):
		case err != nil:
			return nil, err
		default:
			if o, err = decodeOperator(instance, entry.Value); errors.Is(err, errLater) {
				return nil, api.Errorf(api.CodeConflict, "%v", err)
			} else if err != nil {
				o = r.operatorBefore(instance) // the record is unreadable and is written again
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
			// nothing to write; a mark of deletion makes all nodes drop the expired lease of the worker
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
		if revision == entry.Revision { // nothing was written
			before = shown{}
		}
		if err := r.await(ctx, revision, before); err != nil {
			return nil, err
		}
		w, _ := r.Registered(instance)
		return w, nil
	}
}

// operatorBefore returns this node's last version of an operators' record that is unreadable now.
func (r *Registry) operatorBefore(instance events.WorkerID) *Operator {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.operators.known[instance]; known != nil {
		before := *known
		return &before
	}
	return &Operator{Version: operatorVersion, Instance: instance}
}

// shown is what the watch has shown: everything up to a revision of the bucket that was created at epoch.
type shown struct {
	epoch    time.Time
	revision uint64
}

func (r *Registry) shown() shown {
	r.mu.Lock()
	defer r.mu.Unlock()
	return shown{r.epoch, r.heard}
}

// await waits until the watch has shown a revision, or ctx is done. before was shown before the revision was written: a
// revision that is not later is in a new bucket. The zero before permits any bucket.
func (r *Registry) await(ctx context.Context, revision uint64, before shown) error {
	const again = 50 * time.Millisecond // a value that was written twice may cause no change
	for {
		r.mu.Lock()
		changed := r.changed
		anew := before == (shown{}) || revision > before.revision || !r.epoch.Equal(before.epoch)
		there := anew && r.heard >= revision
		r.mu.Unlock()
		if there {
			return nil
		}
		select {
		case <-changed:
		case <-time.After(again):
		case <-ctx.Done():
			return api.Errorf(api.CodeUnavailable,
				"the change is written, but this node has not received it in time; see indexer status")
		}
	}
}
