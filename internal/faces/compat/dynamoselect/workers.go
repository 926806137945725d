package dynamoselect

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// worker is a worker in the posted and listed form. An absent field is null.
type worker struct {
	ID        id     `json:"worker_id"`
	Model     string `json:"model_name"`
	Group     string `json:"routing_group"`
	Lifecycle string `json:"lifecycle"`

	Endpoint        *string   `json:"endpoint"`
	EventsEndpoint  *string   `json:"kv_events_endpoint"`
	EventsEndpoints rankTexts `json:"kv_events_endpoints,omitempty"`
	ReplayEndpoint  *string   `json:"replay_endpoint"`
	BlockSize       *uint32   `json:"block_size"`
	RankStart       *uint32   `json:"data_parallel_start_rank"`
	RankSize        *uint32   `json:"data_parallel_size"`

	MaxBatchedTokens *uint64           `json:"max_num_batched_tokens"`
	TotalKVBlocks    *uint64           `json:"total_kv_blocks"`
	StableRoutingID  *string           `json:"stable_routing_id"`
	Eagle            *bool             `json:"is_eagle"`
	Taints           []string          `json:"taints"`
	TopologyDomains  map[string]string `json:"topology_domains"`

	TransferDomain      *string      `json:"kv_transfer_domain"`
	TransferEnforcement *enforcement `json:"kv_transfer_enforcement"`
	TransferWeight      *float32     `json:"kv_transfer_preferred_weight"`

	HintType      *string   `json:"router_hint_worker_type,omitempty"`
	HintEndpoints rankTexts `json:"router_hint_source_control_endpoints,omitempty"`
	SourceMode    *string   `json:"kv_event_source_mode,omitempty"`

	Reasons []string `json:"not_schedulable_reasons,omitempty"`
}

// enforcement is required or preferred.
type enforcement string

func (e *enforcement) UnmarshalJSON(data []byte) error {
	if s := string(data); s != `"required"` && s != `"preferred"` {
		return errors.New("the value must be required or preferred")
	}
	return strictjson.Unmarshal(data, (*string)(e))
}

// members returns the fields of a registration or of a change. In a change all fields may be null.
func (w *worker) members(collections compat.Presence) []compat.Field {
	const text, count = "text", "an unsigned number"
	return []compat.Field{
		member("endpoint", &w.Endpoint, optional, text),
		member("kv_events_endpoint", &w.EventsEndpoint, optional, text),
		member("kv_events_endpoints", &w.EventsEndpoints, collections, "an object with text for each rank"),
		member("replay_endpoint", &w.ReplayEndpoint, optional, text),
		member("block_size", &w.BlockSize, optional, count),
		member("data_parallel_start_rank", &w.RankStart, optional, count),
		member("data_parallel_size", &w.RankSize, optional, count),
		member("max_num_batched_tokens", &w.MaxBatchedTokens, optional, count),
		member("total_kv_blocks", &w.TotalKVBlocks, optional, count),
		member("stable_routing_id", &w.StableRoutingID, optional, text),
		member("is_eagle", &w.Eagle, optional, "true or false"),
		member("taints", &w.Taints, collections, "a list of text"),
		member("topology_domains", &w.TopologyDomains, collections, "an object with text"),
		member("kv_transfer_domain", &w.TransferDomain, optional, text),
		member("kv_transfer_enforcement", &w.TransferEnforcement, optional, "required or preferred"),
		member("kv_transfer_preferred_weight", &w.TransferWeight, optional, "a number"),
		member("router_hint_worker_type", &w.HintType, optional, text),
		member("router_hint_source_control_endpoints", &w.HintEndpoints, collections, "an object with text for each rank"),
		member("kv_event_source_mode", &w.SourceMode, optional, text),
	}
}

func (w *worker) key() key { return key{w.Model, w.Group} }

func or[T any](p *T, usual T) T {
	if p == nil {
		return usual
	}
	return *p
}

// ranks returns the worker's ranks with the endpoint of the events. The endpoint may be empty.
func (w *worker) ranks() map[events.Rank]string {
	start, size, all := or(w.RankStart, 0), or(w.RankSize, 1), map[events.Rank]string{}
	for i := range size {
		r := events.Rank(start + i)
		all[r] = w.EventsEndpoints[r]
		if len(w.EventsEndpoints) == 0 && size == 1 {
			all[r] = or(w.EventsEndpoint, "")
		}
	}
	return all
}

// missing returns the reasons that the worker's own fields give against scheduling.
func (w *worker) missing() (why []string) {
	if or(w.Endpoint, "") == "" {
		why = append(why, "endpoint is required")
	}
	if or(w.BlockSize, 0) == 0 {
		why = append(why, "block_size must be greater than 0")
	}
	if or(w.RankSize, 1) == 0 {
		why = append(why, "data_parallel_size must be greater than 0")
	}
	ranks := w.ranks()
	for _, r := range slices.Sorted(maps.Keys(ranks)) {
		if ranks[r] == "" {
			why = append(why, fmt.Sprintf("kv_events endpoint is required for dp_rank %d", r))
		}
	}
	if or(w.RankSize, 1) > 1 && w.ReplayEndpoint != nil {
		why = append(why, "replay_endpoint is supported only for data_parallel_size 1")
	}
	return why
}

// spec returns the fields that a selection needs.
func (w *worker) spec() api.WorkerSpec {
	return api.WorkerSpec{Endpoint: or(w.Endpoint, ""), RankStart: or(w.RankStart, 0), RankSize: or(w.RankSize, 1),
		TotalKVBlocks: or(w.TotalKVBlocks, 0), MaxBatchedTokens: or(w.MaxBatchedTokens, 0),
		StableRoutingID: or(w.StableRoutingID, ""), Taints: slices.Clone(w.Taints), TopologyDomains: w.TopologyDomains}
}

// post registers a worker and replaces an earlier registration.
func (s *selectService) post(r *asked) (int, any, error) {
	w := &worker{Model: defaultModel, Group: defaultGroup}
	if err := r.fields.Read(&words, append(w.members(defaulted),
		member("worker_id", (*number)(&w.ID), required, "a worker's number"),
		member("model_name", &w.Model, defaulted, "text"),
		member("routing_group", &w.Group, defaulted, "text"))...); err != nil {
		return 0, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settle(r.ctx, w); err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, w, nil
}

func (s *selectService) patch(r *asked) (int, any, error) {
	change := worker{}
	if err := r.fields.Read(&words, change.members(optional)...); err != nil {
		return 0, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	w, err := s.posted(r.id)
	if err != nil {
		return 0, nil, err
	}
	w.change(&change)
	if err := s.settle(r.ctx, w); err != nil {
		return 0, nil, err
	}
	return 0, w, nil
}

// change sets the fields that a change contains.
func (w *worker) change(by *worker) {
	set(&w.Endpoint, by.Endpoint)
	set(&w.EventsEndpoint, by.EventsEndpoint)
	set(&w.ReplayEndpoint, by.ReplayEndpoint)
	set(&w.BlockSize, by.BlockSize)
	set(&w.RankStart, by.RankStart)
	set(&w.RankSize, by.RankSize)
	set(&w.MaxBatchedTokens, by.MaxBatchedTokens)
	set(&w.TotalKVBlocks, by.TotalKVBlocks)
	set(&w.StableRoutingID, by.StableRoutingID)
	set(&w.Eagle, by.Eagle)
	set(&w.TransferDomain, by.TransferDomain)
	set(&w.TransferEnforcement, by.TransferEnforcement)
	set(&w.TransferWeight, by.TransferWeight)
	set(&w.HintType, by.HintType)
	set(&w.SourceMode, by.SourceMode)
	if by.EventsEndpoints != nil {
		w.EventsEndpoints = by.EventsEndpoints
	}
	if by.Taints != nil {
		w.Taints = by.Taints
	}
	if by.TopologyDomains != nil {
		w.TopologyDomains = by.TopologyDomains
	}
	if by.HintEndpoints != nil {
		w.HintEndpoints = by.HintEndpoints
	}
}

func set[T any](to **T, v *T) {
	if v != nil {
		*to = v
	}
}

// posted returns the posted record of a worker.
func (s *selectService) posted(number string) (*worker, error) {
	notFound := fail(http.StatusNotFound, "worker %s not found", number)
	instance := events.WorkerID(number)
	o, there := s.Registry.PostedWorker(instance)
	if !there {
		if _, registered := s.Registry.Registered(instance); registered {
			return nil, fail(http.StatusConflict,
				"worker %s was registered elsewhere; /v1/workers/%s of the indexer changes it", number, number)
		}
		return nil, notFound
	}
	w := &worker{}
	if err := strictjson.Unmarshal(o.Posted, w); err != nil {
		return nil, fmt.Errorf("worker %s: %w", number, err)
	}
	return w, nil
}

// settle registers the worker, or removes the worker if a required field is missing, and sets the lifecycle fields of
// w. The caller holds s.mu. The error is an invalid request or a failure of the services behind. After a failure a
// repeated request completes the change.
func (s *selectService) settle(ctx context.Context, w *worker) error {
	if size := or(w.RankSize, 1); size > api.MaxWorkerRanks {
		return fail(http.StatusBadRequest, "data_parallel_size %d exceeds the maximum %d", size, api.MaxWorkerRanks)
	}
	slices.Sort(w.Taints)
	w.Taints = append([]string{}, slices.Compact(w.Taints)...)
	if w.TopologyDomains == nil {
		w.TopologyDomains = map[string]string{}
	}
	instance := events.WorkerID(w.ID)
	spec := w.spec()
	if err := spec.Check(); err != nil {
		return err
	}
	if err := s.foreign(instance); err != nil {
		return err
	}
	before := s.Registry.Known()
	if w.Reasons = w.missing(); len(w.Reasons) == 0 {
		if err := s.fits(ctx, w); err != nil {
			w.Reasons = []string{"reconciliation failed: " + err.Error()}
		}
	}
	wanted := shims{}
	if len(w.Reasons) == 0 {
		for rank, endpoint := range w.ranks() {
			wanted[rank] = registry.Record{Instance: instance, Rank: rank, Model: w.key().name(),
				BlockSize: *w.BlockSize, Source: "auto",
				Engine: &registry.Engine{Endpoint: endpoint, Replay: or(w.ReplayEndpoint, ""), Group: w.Group}}
		}
	}
	elsewhere, err := s.elsewhere(ctx, instance, wanted)
	if err == nil {
		err = s.keep(ctx, w, spec)
	}
	if err != nil {
		return err
	}
	if err := s.follow(ctx, instance, wanted, elsewhere); err != nil {
		if failed(err).code != api.CodeMalformed && failed(err).code != api.CodeBlockSizeMismatch {
			return err
		}
		w.Reasons = []string{"reconciliation failed: " + failed(err).text}
		if err := errors.Join(s.follow(ctx, instance, nil, nil), s.keep(ctx, w, spec)); err != nil {
			return err
		}
	}
	for at, model := range before { // compare with the wanted ranks, because the registry may lag
		stays := len(w.Reasons) == 0 && wanted[at.Rank].Model == model
		if at.Instance == instance && !stays {
			s.Loads.RemoveRank(at)
		}
	}
	s.await(ctx, w)
	s.judge(w, s.ranksOf(instance))
	return nil
}

// foreign refuses a worker with a shim of its own.
func (s *selectService) foreign(instance events.WorkerID) error {
	for _, l := range s.Registry.Workers() {
		if l.Record.Instance == instance && l.Record.State == registry.Held && l.Record.Engine == nil {
			return fail(http.StatusConflict, "a shim on %s serves worker %s; /v1/workers/%s of the indexer changes it",
				l.Record.Holder.Host, instance, instance)
		}
	}
	return nil
}

// fits refuses a worker with another block size or hash mode than the model.
func (s *selectService) fits(ctx context.Context, w *worker) error {
	m, err := s.Namespace.Model(ctx, w.key().name())
	if err == nil && m.BlockSize != *w.BlockSize {
		return fmt.Errorf("block_size mismatch for %s: existing=%d requested=%d", w.key(), m.BlockSize, *w.BlockSize)
	}
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return err
	}
	eagle := or(w.Eagle, false)
	for _, other := range s.all() {
		if other.ID != w.ID && other.key() == w.key() && len(other.Reasons) == 0 && or(other.Eagle, false) != eagle {
			return fmt.Errorf("is_eagle mismatch for %s: existing=%t requested=%t", w.key(), !eagle, eagle)
		}
	}
	return nil
}

// keep stores the posted worker, and declares the worker unless a field is missing.
func (s *selectService) keep(ctx context.Context, w *worker, spec api.WorkerSpec) error {
	data, err := json.Marshal(w)
	if err != nil {
		return err
	}
	_, err = s.Registry.Edit(ctx, events.WorkerID(w.ID), func(o *registry.Operator, _ bool) error {
		o.Posted, o.Declared, o.Change = data, nil, api.WorkerSpec{}
		if len(w.Reasons) == 0 {
			o.Declared, o.Change = &registry.Declared{Model: w.key().name(), BlockSize: *w.BlockSize}, spec
		}
		return nil
	})
	return err
}

// shims are the wanted shims of a worker, by rank.
type shims map[events.Rank]registry.Record

// has reports whether a running shim is equal to a wanted shim.
func (want shims) has(r registry.Record) bool {
	w, is := want[r.Rank]
	return is && r.Model == w.Model && r.BlockSize == w.BlockSize && r.Engine.Endpoint == w.Engine.Endpoint &&
		r.Engine.Replay == w.Engine.Replay
}

// elsewhere lists the ranks with shims on other nodes. If such a shim is not wanted, all shims of the worker end,
// and the operator's record is deleted.
func (s *selectService) elsewhere(ctx context.Context, instance events.WorkerID, want shims) (map[events.Rank]bool,
	error) {
	running := map[events.Rank]bool{}
	for _, l := range s.Registry.Workers() {
		r := l.Record
		if r.Instance != instance || r.Engine == nil || r.Engine.Node == s.Node {
			continue
		}
		if !want.has(r) {
			return nil, s.Unregister(ctx, instance)
		}
		running[r.Rank] = true
	}
	return running, nil
}

// follow starts the missing shims of a worker and stops unwanted shims. Equal shims continue, here or on another node.
func (s *selectService) follow(ctx context.Context, instance events.WorkerID, want shims,
	elsewhere map[events.Rank]bool) error {
	running := maps.Clone(elsewhere)
	if running == nil {
		running = map[events.Rank]bool{}
	}
	for _, l := range s.Shims.Listeners() {
		if l.Record.Instance == instance && want.has(l.Record) {
			running[l.Record.Rank] = true
		}
	}
	other := func(r registry.Record) bool { return !want.has(r) }
	if err := s.Shims.Unregister(ctx, instance, other, nil); err != nil && !errors.Is(err, compat.ErrUnknown) {
		return compat.AsError(err)
	}
	var missing []registry.Record
	for _, rank := range slices.Sorted(maps.Keys(want)) {
		if !running[rank] {
			missing = append(missing, want[rank])
		}
	}
	if err := s.Shims.Register(ctx, missing...); err != nil {
		return compat.AsError(err)
	}
	return nil
}

// patience is the longest wait for the registry to reflect a change. After that, the reply has the current state of the
// worker.
const patience = 15 * time.Second

// await waits until all ranks of a worker can be selected, or no rank if a field is missing.
func (s *selectService) await(ctx context.Context, w *worker) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		changed := s.Registry.Changed()
		if s.reflects(w) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// reflects reports whether the registry has the current fields of a worker.
func (s *selectService) reflects(w *worker) bool {
	if len(w.Reasons) > 0 {
		for at := range s.Registry.Complete() {
			if at.Instance == events.WorkerID(w.ID) {
				return false
			}
		}
		return true
	}
	ready := 0
	for _, r := range s.ranksOf(events.WorkerID(w.ID)) {
		if schedulable(r.PoolRank) && r.Model == w.key().name() {
			ready++
		}
	}
	return ready == len(w.ranks())
}

// ranksOf lists the ranks of a worker.
func (s *selectService) ranksOf(instance events.WorkerID) []registry.ModelRank {
	return slices.DeleteFunc(s.Registry.All(), func(r registry.ModelRank) bool { return r.Instance != instance })
}

// judge sets the lifecycle of a worker from the best rank.
func (s *selectService) judge(w *worker, ranks []registry.ModelRank) {
	if len(w.Reasons) > 0 {
		w.Lifecycle = string(api.WorkerIncomplete)
		return
	}
	order := []api.WorkerState{api.WorkerSchedulable, api.WorkerDraining, api.WorkerIncomplete, api.WorkerUnschedulable}
	w.Lifecycle = string(api.WorkerIncomplete)
	best := len(order)
	for _, r := range ranks {
		if at := slices.Index(order, r.Record.State); at >= 0 && at < best {
			best, w.Lifecycle, w.Reasons = at, string(r.Record.State), r.Record.Reasons
		}
	}
}

// all lists the posted workers, without workers of other APIs.
func (s *selectService) all() (list []*worker) {
	for _, o := range s.Registry.Posted() {
		w := &worker{}
		if !Tracked(string(o.Instance)) && strictjson.Unmarshal(o.Posted, w) == nil {
			list = append(list, w)
		}
	}
	return list
}

// named maps the names of models with a routing group to their keys.
func (s *selectService) named() map[string]key {
	names := map[string]key{}
	for _, w := range s.all() {
		names[w.key().name()] = w.key()
	}
	return names
}

func keyOf(named map[string]key, model string) key {
	if k, is := named[model]; is {
		return k
	}
	return key{model, defaultGroup}
}

// listed lists all workers, with workers of other APIs.
func (s *selectService) listed() []*worker {
	ranks := map[events.WorkerID][]registry.ModelRank{}
	for _, r := range s.Registry.All() {
		if !Tracked(r.Model) {
			ranks[r.Instance] = append(ranks[r.Instance], r)
		}
	}
	list := s.all()
	named := map[string]key{}
	for _, w := range list {
		named[w.key().name()] = w.key()
		s.judge(w, ranks[events.WorkerID(w.ID)])
		delete(ranks, events.WorkerID(w.ID))
	}
	for instance, of := range ranks {
		r, k := of[0].Record, keyOf(named, of[0].Model)
		start, size := uint32(of[0].Rank), uint32(len(of))
		w := &worker{ID: id(instance), Model: k.model, Group: k.group, BlockSize: &of[0].BlockSize, RankStart: &start,
			RankSize: &size, Taints: append([]string{}, r.Taints...), TopologyDomains: r.TopologyDomains,
			Endpoint: pointer(r.Endpoint), MaxBatchedTokens: pointer(r.MaxBatchedTokens),
			TotalKVBlocks: pointer(r.TotalKVBlocks), StableRoutingID: pointer(r.StableRoutingID)}
		if w.TopologyDomains == nil {
			w.TopologyDomains = map[string]string{}
		}
		s.judge(w, of)
		list = append(list, w)
	}
	slices.SortFunc(list, func(a, b *worker) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group), compat.CompareIDs(a.ID, b.ID))
	})
	return list
}

// pointer returns a pointer to v, or nil for the zero value.
func pointer[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

func (s *selectService) list(r *asked) (int, any, error) {
	list := slices.DeleteFunc(s.listed(), func(w *worker) bool { return !w.key().is(r.query) })
	return 0, append([]*worker{}, list...), nil
}

type readiness struct {
	Ready       bool      `json:"ready"`
	Schedulable int       `json:"schedulable_workers"`
	Workers     []*worker `json:"workers"`
}

func (s *selectService) ready(*asked) (int, any, error) {
	out := readiness{Workers: append([]*worker{}, s.listed()...)}
	for _, w := range out.Workers {
		if w.Lifecycle == string(api.WorkerSchedulable) {
			out.Schedulable++
		}
	}
	if out.Ready = out.Schedulable > 0; !out.Ready {
		return http.StatusServiceUnavailable, out, nil
	}
	return 0, out, nil
}

// remove ends the registration of a worker.
func (s *selectService) remove(r *asked) (int, any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, err := s.posted(r.id)
	if err != nil {
		return 0, nil, err
	}
	instance := events.WorkerID(w.ID)
	before := s.Registry.Known()
	if _, err := s.elsewhere(r.ctx, instance, nil); err != nil {
		return 0, nil, err
	}
	if err := s.follow(r.ctx, instance, nil, nil); err != nil {
		return 0, nil, err
	}
	_, err = s.Registry.Edit(r.ctx, instance, func(o *registry.Operator, _ bool) error {
		o.Posted, o.Declared, o.Change, o.Drain = nil, nil, api.WorkerSpec{}, nil
		return nil
	})
	if err != nil {
		return 0, nil, err
	}
	for at := range before {
		if at.Instance == instance {
			s.Loads.RemoveRank(at)
		}
	}
	w.Lifecycle, w.Reasons = string(api.WorkerUnschedulable), nil
	return 0, w, nil
}
