package api

import (
	"maps"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Role is the part of a request that a worker computes.
type Role string

// The roles.
const (
	RoleAggregated Role = "aggregated" // prefill and decode
	RolePrefill    Role = "prefill"
	RoleDecode     Role = "decode"
	RoleEncode     Role = "encode" // encodes media for other workers, and is never chosen
)

// roles lists all roles.
var roles = []Role{RoleAggregated, RolePrefill, RoleDecode, RoleEncode}

// WorkerState decides whether a rank may be chosen for new requests.
type WorkerState string

// The states, from best to worst. If several apply to a rank, the worst counts.
const (
	WorkerSchedulable WorkerState = "schedulable"

	// WorkerDraining: an operator wants the worker to finish its requests and to get no new ones.
	WorkerDraining WorkerState = "draining"

	// WorkerIncomplete: the registration lacks something, or contradicts itself.
	WorkerIncomplete WorkerState = "incomplete"

	// WorkerUnschedulable: the engine or the lease has ended, or the rank is outside of the rank range.
	WorkerUnschedulable WorkerState = "unschedulable"
)

// The sources of a worker's events.
const (
	EventsShim = "shim" // a shim publishes them; never in a request
	EventsNone = "none" // the worker has no events, only a registration
)

// Limits of a worker's registration.
const (
	MaxWorkerRanks = events.MaxRanks
	maxWorkerText  = 255  // bytes of a text
	maxEndpoint    = 2048 // bytes
	maxTaints      = 64   // and as many topology domains
	maxServedNames = 64
	maxAdapters    = 1024
)

// WorkerSpec has settings of a worker: from its shim, its registration, or an operator's change. The zero value of a
// field sets nothing. An empty list or map that is not nil sets an empty one.
type WorkerSpec struct {
	// Endpoint is the serving address for routers.
	Endpoint string `json:"endpoint,omitempty" msgpack:"endpoint,omitempty"`

	Role Role `json:"role,omitempty" msgpack:"role,omitempty"`

	// BootstrapPort is the port where a prefill worker of SGLang meets decode workers (--disaggregation-bootstrap-port),
	// at the host of Endpoint.
	BootstrapPort uint32 `json:"bootstrap_port,omitempty" msgpack:"bootstrap_port,omitempty"`

	// The data-parallel ranks from RankStart on, RankSize of them; 0: unknown.
	RankStart uint32 `json:"rank_start,omitempty" msgpack:"rank_start,omitempty"`
	RankSize  uint32 `json:"rank_size,omitempty" msgpack:"rank_size,omitempty"`

	// Of each rank: the capacity of its device memory in blocks, and the most tokens that it computes in a step.
	TotalKVBlocks    uint64 `json:"total_kv_blocks,omitempty" msgpack:"total_kv_blocks,omitempty"`
	MaxBatchedTokens uint64 `json:"max_num_batched_tokens,omitempty" msgpack:"max_num_batched_tokens,omitempty"`

	// StableRoutingID identifies the worker across restarts that change its instance.
	StableRoutingID string `json:"stable_routing_id,omitempty" msgpack:"stable_routing_id,omitempty"`

	Taints          []string          `json:"taints,omitzero" msgpack:"taints"`                     // ascending
	TopologyDomains map[string]string `json:"topology_domains,omitzero" msgpack:"topology_domains"` // zone → eu-1
	LoRAAdapters    []string          `json:"lora_adapters,omitzero" msgpack:"lora_adapters"`       // ascending

	// ServedNames are further model names that the worker accepts in requests, ascending.
	ServedNames []string `json:"served_model_names,omitzero" msgpack:"served_model_names"`

	Events string `json:"events,omitempty" msgpack:"events,omitempty"` // EventsNone; in a record also EventsShim
}

// With returns s with the set fields of over.
func (s WorkerSpec) With(over WorkerSpec) WorkerSpec {
	set(&s.Endpoint, over.Endpoint)
	set(&s.Role, over.Role)
	set(&s.BootstrapPort, over.BootstrapPort)
	if over.RankSize > 0 {
		s.RankStart, s.RankSize = over.RankStart, over.RankSize
	}
	set(&s.TotalKVBlocks, over.TotalKVBlocks)
	set(&s.MaxBatchedTokens, over.MaxBatchedTokens)
	set(&s.StableRoutingID, over.StableRoutingID)
	if over.Taints != nil {
		s.Taints = over.Taints
	}
	if over.TopologyDomains != nil {
		s.TopologyDomains = over.TopologyDomains
	}
	if over.LoRAAdapters != nil {
		s.LoRAAdapters = over.LoRAAdapters
	}
	if over.ServedNames != nil {
		s.ServedNames = over.ServedNames
	}
	set(&s.Events, over.Events)
	return s
}

func set[T comparable](to *T, v T) {
	if v != *new(T) {
		*to = v
	}
}

// Covers reports whether a rank is in the range. A spec without a range covers all ranks.
func (s *WorkerSpec) Covers(r events.Rank) bool {
	return s.RankSize == 0 || uint32(r) >= s.RankStart && uint32(r)-s.RankStart < s.RankSize
}

// Check returns an error for an invalid spec, and sorts its lists. The error is an [Error].
func (s *WorkerSpec) Check() error {
	switch {
	case s.Role != "" && !slices.Contains(roles, s.Role):
		return Errorf(CodeMalformed, "role is %q; a worker has one role of %v", shorten(string(s.Role)), roles)
	case s.BootstrapPort > math.MaxUint16:
		return Errorf(CodeMalformed, "bootstrap_port is %d, above %d", s.BootstrapPort, math.MaxUint16)
	case s.Events != "" && s.Events != EventsNone:
		return Errorf(CodeMalformed, "events is %q; set it to %q or omit it", shorten(s.Events), EventsNone)
	case s.RankSize == 0 && s.RankStart != 0:
		return Errorf(CodeMalformed, "rank_start goes with rank_size")
	case s.RankSize > MaxWorkerRanks:
		return Errorf(CodeMalformed, "rank_size is %d; a worker has %d ranks at most", s.RankSize, MaxWorkerRanks)
	case uint64(s.RankStart)+uint64(s.RankSize) > 1<<32:
		return Errorf(CodeMalformed, "ranks %d to %d go beyond 32 bits", s.RankStart,
			uint64(s.RankStart)+uint64(s.RankSize)-1)
	case len(s.Endpoint) > maxEndpoint:
		return Errorf(CodeMalformed, "endpoint has %d bytes, more than %d", len(s.Endpoint), maxEndpoint)
	case s.Endpoint != "" && dial.CheckServing(s.Endpoint) != nil:
		return Errorf(CodeMalformed, "endpoint: %v", dial.CheckServing(s.Endpoint))
	case len(s.StableRoutingID) > maxWorkerText:
		return Errorf(CodeMalformed, "stable_routing_id has %d bytes, more than %d", len(s.StableRoutingID), maxWorkerText)
	case len(s.TopologyDomains) > maxTaints:
		return Errorf(CodeMalformed, "topology_domains has %d members, more than %d", len(s.TopologyDomains), maxTaints)
	}
	for _, name := range slices.Sorted(maps.Keys(s.TopologyDomains)) {
		if value := s.TopologyDomains[name]; name == "" || value == "" || len(name)+len(value) > maxWorkerText {
			return Errorf(CodeMalformed, "topology_domains: %q is %q; both have text, of %d bytes in all at most",
				shorten(name), shorten(value), maxWorkerText)
		}
	}
	for _, l := range []struct {
		field string
		list  *[]string
		most  int
	}{{"taints", &s.Taints, maxTaints}, {"lora_adapters", &s.LoRAAdapters, maxAdapters},
		{"served_model_names", &s.ServedNames, maxServedNames}} {
		if len(*l.list) > l.most {
			return Errorf(CodeMalformed, "%s has %d elements, more than %d", l.field, len(*l.list), l.most)
		}
		for i, text := range *l.list {
			if text == "" || len(text) > maxWorkerText {
				return Errorf(CodeMalformed, "%s[%d] has %d bytes; it has 1 to %d", l.field, i, len(text), maxWorkerText)
			}
		}
		if len(*l.list) > 0 {
			*l.list = slices.Compact(slices.Sorted(slices.Values(*l.list)))
		}
	}
	return nil
}

// SetNames sets the further model names and the LoRA adapters, sorted and without duplicates. It omits invalid names
// and names beyond the limits, and returns their number. Empty lists set nothing.
func (s *WorkerSpec) SetNames(names, adapters []string) (left int) {
	for _, l := range []struct {
		from []string
		to   *[]string
		most int
	}{{names, &s.ServedNames, maxServedNames}, {adapters, &s.LoRAAdapters, maxAdapters}} {
		list := slices.Compact(slices.Sorted(slices.Values(l.from)))
		all := len(list)
		list = slices.DeleteFunc(list, func(name string) bool { return name == "" || len(name) > maxWorkerText })
		*l.to = nil
		if list = list[:min(len(list), l.most)]; len(list) > 0 {
			*l.to = list
		}
		left += all - len(list)
	}
	return left
}

// WorkerRecord has the settings of a rank, and whether it may be chosen.
type WorkerRecord struct {
	WorkerSpec `msgpack:",inline"`

	State   WorkerState `json:"state" msgpack:"state"`
	Reasons []string    `json:"reasons,omitempty" msgpack:"reasons,omitempty"` // for people
}

// Because sets the state unless the present state is worse, and adds the reason.
func (r *WorkerRecord) Because(s WorkerState, reason string) {
	order := [...]WorkerState{WorkerSchedulable, WorkerDraining, WorkerIncomplete, WorkerUnschedulable}
	if slices.Index(order[:], s) > slices.Index(order[:], r.State) {
		r.State = s
	}
	r.Reasons = append(r.Reasons, reason)
}

// WorkerRegistration registers a worker.
type WorkerRegistration struct {
	Instance  events.WorkerID `json:"instance" msgpack:"instance"`
	Model     string          `json:"model" msgpack:"model"`
	BlockSize uint32          `json:"block_size" msgpack:"block_size"` // tokens

	WorkerSpec `msgpack:",inline"`

	// EventsEndpoint is the address where the engine publishes its events, tcp://HOST:PORT. The node that receives the
	// registration runs a shim for it, which uses ReplayEndpoint and Source as worker-shim run uses --replay and
	// --source (default auto). Further ranks of the range have the following ports.
	EventsEndpoint string `json:"events_endpoint,omitempty" msgpack:"events_endpoint,omitempty"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty" msgpack:"replay_endpoint,omitempty"`
	Source         string `json:"source,omitempty" msgpack:"source,omitempty"`
}

// Check returns an error for an invalid registration, and sets defaults for the rank range and the role. The error is
// an [Error].
func (r *WorkerRegistration) Check() error {
	switch {
	case r.Instance == "":
		return Errorf(CodeMalformed, "the registration has no instance")
	case len(r.Instance) > maxWorkerText:
		return Errorf(CodeMalformed, "instance has %d bytes, more than %d", len(r.Instance), maxWorkerText)
	case r.Model == "":
		return Errorf(CodeMissingModel, "the registration has no model")
	case len(r.Model) > maxWorkerText:
		return Errorf(CodeMalformed, "model has %d bytes, more than %d", len(r.Model), maxWorkerText)
	case r.BlockSize == 0 || r.BlockSize > events.MaxBlockSize:
		return Errorf(CodeMalformed, "block_size is %d, not from 1 to %d", r.BlockSize, events.MaxBlockSize)
	case r.EventsEndpoint == "" && (r.ReplayEndpoint != "" || r.Source != ""):
		return Errorf(CodeMalformed, "replay_endpoint and source are valid with events_endpoint only")
	case r.EventsEndpoint != "" && r.Events != "":
		return Errorf(CodeMalformed, "events is %q and there is an events_endpoint; give one of them", shorten(r.Events))
	}
	if r.RankSize == 0 && r.RankStart == 0 {
		r.RankSize = 1
	}
	if r.Role == "" {
		r.Role = RoleAggregated
	}
	return r.WorkerSpec.Check()
}

// WorkerChange changes settings of a worker. It overrides the settings of the shim and the registration. An absent
// field changes nothing.
type WorkerChange struct {
	Instance events.WorkerID `json:"instance,omitempty" msgpack:"instance,omitempty"`

	Drain *bool  `json:"drain,omitempty" msgpack:"drain,omitempty"`
	Why   string `json:"why,omitempty" msgpack:"why,omitempty"` // for people, with Drain

	// Reset removes all earlier changes first, except Drain.
	Reset bool `json:"reset,omitempty" msgpack:"reset,omitempty"`

	WorkerSpec `msgpack:",inline"`
}

// Check returns an error for an invalid change. The error is an [Error].
func (c *WorkerChange) Check() error {
	switch {
	case c.Instance == "":
		return Errorf(CodeMalformed, "the change has no instance")
	case c.Why != "" && (c.Drain == nil || !*c.Drain):
		return Errorf(CodeMalformed, "why goes with drain: true")
	case len(c.Why) > maxWorkerText:
		return Errorf(CodeMalformed, "why has %d bytes, more than %d", len(c.Why), maxWorkerText)
	}
	return c.WorkerSpec.Check()
}

// WorkerRemoval has the worker to remove.
type WorkerRemoval struct {
	Instance events.WorkerID `json:"instance,omitempty" msgpack:"instance,omitempty"`
}

// Worker is a registered worker.
type Worker struct {
	Instance  events.WorkerID `json:"instance" msgpack:"instance"`
	Model     string          `json:"model" msgpack:"model"`
	BlockSize uint32          `json:"block_size" msgpack:"block_size"`
	Ranks     []WorkerRank    `json:"ranks" msgpack:"ranks"` // ascending
}

// WorkerRank is a rank of a worker.
type WorkerRank struct {
	Rank         events.Rank `json:"rank" msgpack:"rank"`
	WorkerRecord `msgpack:",inline"`
}

// ReadWorkerSpec reads a spec in JSON from the value of a field. Errors contain the name of the field. An error is an
// [Error].
func ReadWorkerSpec(name string, data []byte) (*WorkerSpec, error) {
	s := &WorkerSpec{}
	err := (&reader{within: name}).read(JSON, data, s)
	if err == nil {
		err = s.Check()
	}
	return s, err
}

// nonEmpty reads text that is not empty.
func (r *reader) nonEmpty(field string, to *string) error {
	err := r.string(field, to)
	if err == nil && *to == "" {
		return Errorf(CodeMalformed, "%s is empty; omit it", r.name(field))
	}
	return err
}
