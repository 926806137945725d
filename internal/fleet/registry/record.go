package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// recordVersion is the version of records that this program writes.
const recordVersion = 1

// The bounds of a lease.
const (
	MinLease     = time.Second
	MaxLease     = time.Hour
	DefaultLease = 30 * time.Second
)

// Record is what is registered of one rank.
type Record struct {
	Version   int             `json:"version"`
	Instance  events.WorkerID `json:"instance"`
	Rank      events.Rank     `json:"rank"`
	Model     string          `json:"model"`
	BlockSize uint32          `json:"block_size"` // tokens
	Source    string          `json:"source"`     // how the engine speaks: vllm, sglang, ...

	// Engine is how to reach the engine, if an indexer runs the shim: it was registered over HTTP.
	Engine *Engine `json:"engine,omitempty"`

	// KVGroups is what the engine's KV-cache groups serve, where an indexer runs the shim; see [events.ParseGroups].
	KVGroups string `json:"kv_groups,omitempty"`

	// L3 is how the worker uses a store that it shares with others; nil: it does not. It is for those who read it to
	// check: a rank whose configuration makes no sense is there all the same.
	L3 *hicache.Config `json:"l3,omitempty"`

	// Worker is what a choice of worker needs to know of it, as far as the shim says; nil: nothing.
	Worker *api.WorkerSpec `json:"worker,omitempty"`

	Holder  Holder `json:"holder"`
	LeaseMS int64  `json:"lease_ms"`
	State   State  `json:"state"`

	// Control reports that the shim listens on its control subject for as long as it is connected to NATS.
	Control bool `json:"control,omitempty"`

	// Shim is how it stands with the shim and its engine; nil: the shim is of a release that does not say.
	Shim *ShimState `json:"standing,omitempty"`
}

// ShimState is how it stands with a shim and its engine.
type ShimState struct {
	Engine api.EngineState `json:"engine,omitempty"` // empty: not known
	// of Engine, by the shim's clock; of a silent one, its last sign of life
	Since      time.Time `json:"since,omitzero"`
	Why        string    `json:"why,omitempty"` // why it is taken to be silent or gone
	CatchingUp bool      `json:"catching_up,omitempty"`
	Quiet      bool      `json:"quiet,omitempty"`  // the engine has published no message since the shim began
	Speaks     string    `json:"speaks,omitempty"` // how the engine speaks, where the shim was to find out

	// Refused is why the log takes nothing from the shim, and what to do; empty: it takes what there is.
	Refused string `json:"refused,omitempty"`

	// Slowed is why the log stores the shim's events one by one, and what to do; empty: it stores batches.
	Slowed string `json:"slowed,omitempty"`

	// Several is which engines publish where the shim expects one, and what to do; empty: one does.
	Several string `json:"several,omitempty"`

	// Unusable is why what the engine announces is passed over, and what to do; empty: it is not.
	Unusable string `json:"unusable,omitempty"`

	// Unserved is why the engine accepts no requests any more; empty: it may accept them.
	Unserved string `json:"unserved,omitempty"`

	// Stopped is when the shim stopped in good order, by its clock; zero: it has not. With an Engine that is gone, the
	// shim has ended the lease. Otherwise the engine ran on, and the lease waits for the next shim.
	Stopped time.Time `json:"stopped,omitzero"`
}

// Engine is where an engine can be heard.
type Engine struct {
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint,omitempty"`
	Snapshot string `json:"snapshot_endpoint,omitempty"`
	Group    string `json:"routing_group,omitempty"`
	Node     string `json:"node,omitempty"` // the indexer that runs the shim

	// Conductor is what Mooncake's conductor was told of it beside; empty: it was registered otherwise.
	Conductor json.RawMessage `json:"conductor,omitempty"`
}

// Holder is the process that holds a lease.
type Holder struct {
	ID    string    `json:"id"` // of one run of one process
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`
}

// State is how it stands with a lease.
type State string

// The states.
const (
	Held    State = "held"
	Expired State = "expired" // a node has seen it expire; what the rank held is being cleared
)

// Key is the rank.
func (r *Record) Key() events.RankKey { return events.RankKey{Instance: r.Instance, Rank: r.Rank} }

// Lease is for how long the record is good without being renewed.
func (r *Record) Lease() time.Duration { return time.Duration(r.LeaseMS) * time.Millisecond }

// endedByShim reports whether the shim was told to stop and the engine is gone: nothing is wrong.
func (r *Record) endedByShim() bool {
	return r.State == Expired && r.Shim != nil && !r.Shim.Stopped.IsZero() && r.Shim.Engine == api.EngineGone
}

// Check refuses a record that nobody could act on.
func (r *Record) Check() error {
	var errs []error
	if r.Version != recordVersion {
		errs = append(errs, fmt.Errorf("version %d; this program knows %d", r.Version, recordVersion))
	}
	if r.Model == "" {
		errs = append(errs, errors.New("no model"))
	}
	if r.BlockSize == 0 || r.BlockSize > events.MaxBlockSize {
		errs = append(errs, fmt.Errorf("block size %d is not from 1 to %d", r.BlockSize, events.MaxBlockSize))
	}
	if l := r.Lease(); l < MinLease || l > MaxLease {
		errs = append(errs, fmt.Errorf("a lease of %v is not from %v to %v", l, MinLease, MaxLease))
	}
	if r.State != Held && r.State != Expired {
		errs = append(errs, fmt.Errorf("state %q is neither held nor expired", r.State))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("registration of %s: %w", r.Key(), err)
	}
	return nil
}

// decode reads the record of a key.
func decode(key events.RankKey, data []byte) (Record, error) {
	var r Record
	if err := strictjson.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("registration of %s: %w", key, err)
	}
	if r.Key() != key {
		return r, fmt.Errorf("registration of %s names %s", key, r.Key())
	}
	return r, r.Check()
}

func (r *Record) encode() ([]byte, error) { return json.MarshalIndent(r, "", " ") }

// Records reads all registrations of a small namespace at once, as they are in the bucket now. What cannot be read is
// left out, as nodes do.
func Records(ctx context.Context, ns *jetstream.Namespace) (list []Record, err error) {
	entries, err := ns.OpenWorkers().All(ctx)
	for _, e := range entries {
		if _, key, ok := jetstream.ParseWorkerKey(e.Key); ok {
			if r, err := decode(key, e.Value); err == nil {
				list = append(list, r)
			}
		}
	}
	return list, err
}
