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

// recordVersion is the version of new records.
const recordVersion = 1

// Limits of a lease.
const (
	MinLease     = time.Second
	MaxLease     = time.Hour
	DefaultLease = 30 * time.Second
)

// Record is the registration of a rank.
type Record struct {
	Version   int             `json:"version"`
	Instance  events.WorkerID `json:"instance"`
	Rank      events.Rank     `json:"rank"`
	Model     string          `json:"model"`
	BlockSize uint32          `json:"block_size"` // tokens
	Source    string          `json:"source"`     // the source of the engine's events: vllm, sglang, ...

	// Engine has the addresses of the engine if an indexer runs the shim, after a registration over HTTP.
	Engine *Engine `json:"engine,omitempty"`

	// KVGroups has the engine's KV-cache groups if an indexer runs the shim; see [events.ParseGroups].
	KVGroups string `json:"kv_groups,omitempty"`

	// L3 is the configuration of the worker's shared store; nil: none. The readers check it: a rank with an invalid
	// configuration is still registered.
	L3 *hicache.Config `json:"l3,omitempty"`

	// Worker has the attributes for the choice of a worker, as far as the shim provides them; nil: none.
	Worker *api.WorkerSpec `json:"worker,omitempty"`

	Holder  Holder `json:"holder"`
	LeaseMS int64  `json:"lease_ms"`
	State   State  `json:"state"`

	// Control reports that the shim serves the control subject while connected to NATS.
	Control bool `json:"control,omitempty"`

	// Shim is the state of the shim and its engine; nil: a shim of an earlier release.
	Shim *ShimState `json:"standing,omitempty"`
}

// ShimState is the state of a shim and its engine.
type ShimState struct {
	Engine api.EngineState `json:"engine,omitempty"` // empty: unknown
	// start of the engine's state, by the shim's clock; for a silent engine, its last sign of life
	Since      time.Time `json:"since,omitzero"`
	Why        string    `json:"why,omitempty"` // why the engine counts as silent or gone
	CatchingUp bool      `json:"catching_up,omitempty"`
	Quiet      bool      `json:"quiet,omitempty"`  // the engine has published no message since the start of the shim
	Speaks     string    `json:"speaks,omitempty"` // the detected source, if the shim had to detect it

	// Refused is why the log rejects the shim's events, with a remedy; empty: it accepts them.
	Refused string `json:"refused,omitempty"`

	// Slowed is why the log stores the shim's events one by one, with a remedy; empty: it stores batches.
	Slowed string `json:"slowed,omitempty"`

	// Several names the engines that publish to a shim for a single engine, with a remedy; empty: a single engine.
	Several string `json:"several,omitempty"`

	// Unusable is why the engine's events are ignored, with a remedy; empty: they are used.
	Unusable string `json:"unusable,omitempty"`

	// Unserved is why the engine accepts no more requests; empty: it may accept requests.
	Unserved string `json:"unserved,omitempty"`

	// Stopped is when the shim stopped cleanly, by the shim's clock; zero: not stopped. With a gone Engine, the shim has
	// ended the lease. Otherwise the engine continued, and the lease waits for the next shim.
	Stopped time.Time `json:"stopped,omitzero"`
}

// Engine has the addresses of an engine.
type Engine struct {
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint,omitempty"`
	Group    string `json:"routing_group,omitempty"`
	Node     string `json:"node,omitempty"` // the indexer that runs the shim

	// Conductor has additional data of a registration with Mooncake's conductor; empty: another registration.
	Conductor json.RawMessage `json:"conductor,omitempty"`
}

// Holder is the process that holds a lease.
type Holder struct {
	ID    string    `json:"id"` // unique for each run of a process
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`
}

// State is the state of a lease.
type State string

// States of a lease.
const (
	Held    State = "held"
	Expired State = "expired" // a node has seen the expiry; the rank's blocks are being cleared
)

// Key returns the rank.
func (r *Record) Key() events.RankKey { return events.RankKey{Instance: r.Instance, Rank: r.Rank} }

// Lease returns the validity of the record without a renewal.
func (r *Record) Lease() time.Duration { return time.Duration(r.LeaseMS) * time.Millisecond }

// endedByShim reports whether the shim received a stop request and the engine is gone: nothing is wrong.
func (r *Record) endedByShim() bool {
	return r.State == Expired && r.Shim != nil && !r.Shim.Stopped.IsZero() && r.Shim.Engine == api.EngineGone
}

// Check returns an error for an unusable record.
func (r *Record) Check() error {
	var errs []error
	if r.Version != recordVersion {
		errs = append(errs, fmt.Errorf("version %d; this program supports %d", r.Version, recordVersion))
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

// decode decodes the record of a key.
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

// Records reads all current registrations of a small namespace at once. Records omits unreadable records, like nodes.
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
