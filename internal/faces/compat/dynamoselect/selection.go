package dynamoselect

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Config configures the selection service and the slot tracker.
type Config struct {
	Node      string // the name of this node
	Namespace *jetstream.Namespace
	Registry  *registry.Registry
	Loads     *load.Service

	// The following fields are only for the selection service.
	Choice *selection.Service
	Shims  *compat.Shims
	Find   func(ctx context.Context, q *api.Query) (*api.Answer, error)
	// starts a dump of the workers' blocks, as for /dump of compat
	Dump func(ctx context.Context) (*compat.Dump, error)

	// Unregister stops the shims of a worker on another node.
	Unregister func(ctx context.Context, instance events.WorkerID) error

	Admit func() error             // nil when the node is ready to serve
	Ended func(op, outcome string) // called with the outcome of every request
}

// selectService implements the selection service.
type selectService struct {
	Config
	mu    sync.Mutex // serializes changes of workers
	hints hintCache
}

// Selection returns the handler of Dynamo's selection service.
func Selection(cfg Config) *web.Mux {
	s := &selectService{Config: cfg}
	const post, get, drop = http.MethodPost, http.MethodGet, http.MethodDelete
	routes := []route{
		{method: post, path: "/select", rule: web.Chooses,
			do: func(r *asked) (int, any, error) { return s.choose(r, false) }},
		{method: post, path: "/select_and_reserve", rule: web.Chooses,
			do: func(r *asked) (int, any, error) { return s.choose(r, true) }},
		{method: post, path: "/reservations", rule: web.Chooses, do: s.reserve},
		{method: post, path: "/reservations/{id}/prefill_complete", rule: web.Chooses, do: s.prefillComplete},
		{method: post, path: "/reservations/{id}/output_block", rule: web.Chooses, do: s.outputBlock},
		{method: drop, path: "/reservations/{id}", rule: web.Chooses, do: s.free},
		{method: post, path: "/workers", rule: web.Registers, do: s.post},
		{method: get, path: "/workers", rule: web.Reads, do: s.list},
		{method: http.MethodPatch, path: "/workers/{id}", rule: web.Operates, do: s.patch, number: true},
		{method: drop, path: "/workers/{id}", rule: web.Removes, do: s.remove, number: true},
		{method: get, path: "/ready", rule: web.Rule{Needs: rights.Any, Cost: web.Usual}, do: s.ready},
		{method: get, path: "/loads", rule: web.Reads, do: s.loads},
		{method: post, path: "/potential_loads", rule: web.Reads, do: s.potentialLoads},
		{method: post, path: "/overlap_scores", rule: web.Reads, do: s.overlapScores},
		{method: get, path: "/dump", rule: web.Rule{Needs: rights.Operate, Cost: web.Costly},
			do: func(r *asked) (int, any, error) {
				out, err := s.Dump(r.ctx)
				return 0, out, err
			}},
	}
	for i := range routes {
		routes[i].do = cfg.admitted(routes[i].do)
	}
	routes = append(routes, replication...)
	routes = append(routes, route{method: get, path: "/health", rule: web.Rule{Needs: rights.Anybody, Cost: web.Probe},
		do: func(*asked) (int, any, error) { return 0, ok, nil }})
	return mux("selection_", routes, SelectBody, cfg.Ended)
}

// admitted refuses requests while the node cannot serve.
func (cfg *Config) admitted(do handler) handler {
	return func(r *asked) (int, any, error) {
		if err := cfg.Admit(); err != nil {
			return 0, nil, err
		}
		return do(r)
	}
}

// replication serves the peers of Dynamo's replicas. kvatlas has no such peers.
var replication = []route{
	{method: http.MethodGet, path: "/replica_sync/peers", rule: web.Reads,
		do: func(*asked) (int, any, error) { return 0, []string{}, nil }},
	{method: http.MethodPost, path: "/replica_sync/register_peer", rule: web.Operates, do: noPeers},
	{method: http.MethodPost, path: "/replica_sync/deregister_peer", rule: web.Operates, do: noPeers},
}

func noPeers(r *asked) (int, any, error) {
	var endpoint string
	if err := r.fields.Read(&words, member("endpoint", &endpoint, required, "text")); err != nil {
		return 0, nil, err
	}
	return 0, nil, fail(http.StatusConflict, "replica sync is disabled")
}

// mine reports whether a model belongs to the selection service, not to the slot tracker.
func mine(m load.Model) bool { return !Tracked(m.Name) }

// pool returns the workers of a model. A model without a schedulable rank is an error.
func (s *selectService) pool(k key) (*registry.Pool, error) {
	pool := s.Registry.Pool(k.name())
	if slices.ContainsFunc(pool.Ranks, schedulable) {
		return pool, nil
	}
	for _, r := range s.Registry.All() {
		if !Tracked(r.Model) && schedulable(r.PoolRank) {
			return nil, fail(http.StatusServiceUnavailable, "no schedulable workers for %s", k)
		}
	}
	return nil, fail(http.StatusServiceUnavailable, "no schedulable workers are available")
}

// resolve replaces an alias in the prompt with the name of the model and the adapter.
func (s *selectService) resolve(p *prompt) error {
	of, err := registry.Resolver(s.Registry.Resolve).Resolve(p.name(), p.lora)
	if err != nil {
		return fail(http.StatusConflict, "%s", api.AsError(err).Message)
	}
	if of.Model != p.name() {
		p.key, p.lora = keyOf(s.named(), of.Model), of.LoRA
	}
	return nil
}

func schedulable(r registry.PoolRank) bool { return r.Record.State == api.WorkerSchedulable }

// overlapSummary counts the tokens of a prompt on a worker. The number of a tier includes the tiers above.
type overlapSummary struct {
	Longest uint64            `json:"longest_matched"`
	GPU     uint64            `json:"gpu"`
	DP      map[string]uint64 `json:"dp"` // on the device of each rank
	CPU     uint64            `json:"cpu"`
	Disk    uint64            `json:"disk"`
}

// selected is the reply to a selection.
type selected struct {
	SelectionID    *string `json:"selection_id,omitempty"`
	SequenceHashes []int64 `json:"sequence_hashes,omitzero"`
	ISLTokens      *uint64 `json:"isl_tokens,omitempty"`
	Track          *bool   `json:"track_prefill_tokens,omitempty"`

	Model        string          `json:"model_name"`
	Group        string          `json:"routing_group"`
	Worker       id              `json:"worker_id"`
	Rank         events.Rank     `json:"dp_rank"`
	Endpoint     string          `json:"endpoint"`
	BlockSize    uint32          `json:"block_size"`
	Overlap      overlapSummary  `json:"overlap"`
	Prefill      uint64          `json:"effective_prefill_tokens"`
	DecodeBlocks uint64          `json:"potential_decode_blocks"`
	DecodeBusy   *bool           `json:"decode_busy,omitempty"`
	Load         *api.WorkerLoad `json:"worker_load,omitempty"`
	Hint         *kvHint         `json:"kv_hint,omitempty"`
}

// choiceBody is the body of a request for a worker.
type choiceBody struct {
	prompt
	selectionID, sessionID *string
	expected               uint32 // output tokens
	jump                   float64
	priority               uint32
	session                *session
	affinity               *target
	pinned                 *pin
	allowed, excluded      []id // nil: not given
	taints                 constraints
	advisory               bool
}

func (b *choiceBody) members(book bool) []compat.Field {
	list := append(b.prompt.members(),
		member("selection_id", &b.selectionID, optional, "text"), member("session_id", &b.sessionID, optional, "text"),
		member("expected_output_tokens", &b.expected, optional, "an unsigned 32-bit number"),
		member("priority_jump", &b.jump, optional, "a number"),
		member("strict_priority", &b.priority, optional, "an unsigned 32-bit number"),
		member("session_context", &b.session, optional, "an object with session_id"),
		member("affinity_target", &b.affinity, optional, "an object with worker_id"),
		member("pinned_worker", &b.pinned, optional, "an object with worker_id and dp_rank"),
		member("allowed_worker_ids", &b.allowed, optional, "a list of workers' numbers"),
		member("excluded_worker_ids", &b.excluded, optional, "a list of workers' numbers"), // as in its requests to workers
		member("routing_constraints", &b.taints, defaulted, "an object with required_taints and preferred_taints"))
	if !book {
		list = append(list, member("advisory", &b.advisory, defaulted, "true or false"))
	}
	return list
}

// request returns the request of the body with the converted prompt.
func (b *choiceBody) request(converted *api.Prompt, book bool) (*api.SelectRequest, error) {
	q := &api.SelectRequest{
		Policy: routing.DynamoPolicy,
		Query: api.Query{Model: converted.Model, BlockSize: converted.BlockSize, Tokens: converted.Tokens,
			Hashes: converted.Hashes, LoRA: converted.LoRA, CacheSalt: converted.CacheSalt},
		SequenceHashes: converted.SequenceHashes, ISLTokens: converted.ISLTokens, Book: book, Advisory: b.advisory,
		Affinity: b.affinity.routing(), RequiredTaints: b.taints.required, PreferredTaints: b.taints.preferred,
		ExpectedOutputTokens: b.expected, Overrides: &b.overrides.Overrides,
		StrictPriority: b.priority, PriorityJump: b.jump, RequestID: or(b.selectionID, ""),
	}
	if b.pinned != nil {
		q.Pinned = b.pinned.routing()
	} else if b.affinity == nil { // the session does not decide if affinity is set
		q.SessionID = or(b.sessionID, "")
		if b.session != nil {
			q.SessionID = b.session.id
		}
	}
	for _, worker := range b.excluded {
		q.Excluded = append(q.Excluded, events.WorkerID(worker))
	}
	if b.allowed != nil {
		q.Workers = []events.WorkerID{}
		for _, worker := range b.allowed {
			q.Workers = append(q.Workers, events.WorkerID(worker))
		}
		if b.pinned != nil && !slices.Contains(q.Workers, q.Pinned.Worker) {
			return nil, fail(http.StatusBadRequest, "pinned worker %s is not in allowed worker set", b.pinned.id)
		}
	}
	return q, nil
}

// choose serves /select and /select_and_reserve.
func (s *selectService) choose(r *asked, book bool) (int, any, error) {
	var b choiceBody
	if err := r.fields.Read(&words, b.members(book)...); err != nil {
		return 0, nil, err
	}
	if err := s.resolve(&b.prompt); err != nil {
		return 0, nil, err
	}
	pool, err := s.pool(b.key)
	if err != nil {
		return 0, nil, err
	}
	if book && b.selectionID == nil {
		made := newID()
		b.selectionID = &made
	}
	if book {
		if err := s.unused(*b.selectionID); err != nil {
			return 0, nil, err
		}
	}
	converted, err := b.convert(pool.Ranks[0].BlockSize)
	if err != nil {
		return 0, nil, err
	}
	q, err := b.request(&converted, book)
	if err != nil {
		return 0, nil, err
	}
	q.PolicyClass = r.header.Get("X-Dynamo-Meta-Policy-Class")
	var d selection.Details
	choice, err := s.Choice.SelectDetailed(r.ctx, q, &d)
	if err != nil {
		return 0, nil, refused(err, q.RequestID, b.key)
	}
	out := b.reply(choice, &d, book)
	if book {
		out.Hint = s.hint(r.ctx, q.RequestID, &converted, pool,
			events.RankKey{Instance: choice.Worker, Rank: choice.Rank})
	}
	return 0, out, nil
}

// reply returns the reply to the body with the choice.
func (b *choiceBody) reply(choice *api.Selection, d *selection.Details, book bool) *selected {
	out := &selected{SelectionID: b.selectionID, Model: b.model, Group: b.group, Worker: id(choice.Worker),
		Rank: choice.Rank, Endpoint: choice.Endpoint, BlockSize: choice.BlockSize,
		Overlap: summary(d.Ranks, choice.BlockSize), Prefill: choice.EffectivePrefillTokens,
		DecodeBlocks: choice.PotentialDecodeBlocks, DecodeBusy: choice.DecodeBusy, Load: choice.WorkerLoad}
	if book {
		out.SequenceHashes = make([]int64, len(d.SequenceHashes))
		for i, h := range d.SequenceHashes {
			out.SequenceHashes[i] = int64(h)
		}
		out.ISLTokens, out.Track = &choice.ISLTokens, &choice.TrackPrefillTokens
	}
	return out
}

// newID returns a random UUID for a selection without an id.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // Read never returns an error
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// summary returns the tokens of a prompt on a worker, with a number for every rank.
func summary(ranks []routing.Candidate, blockSize uint32) overlapSummary {
	out, size := overlapSummary{DP: map[string]uint64{}}, uint64(blockSize)
	for i := range ranks {
		c := &ranks[i]
		gpu := uint64(c.Device) * size
		cpu := gpu + uint64(c.Host)*size
		out.DP[strconv.FormatUint(uint64(c.Rank), 10)] = gpu
		out.GPU, out.CPU, out.Disk = max(out.GPU, gpu), max(out.CPU, cpu), max(out.Disk, cpu+uint64(c.Disk)*size)
	}
	out.Longest = max(out.GPU, out.CPU, out.Disk)
	return out
}

// refused converts the error of a selection or booking to Dynamo's text, if Dynamo has a text for the error.
func refused(err error, selectionID string, k key) error {
	f := failed(err)
	switch f.code {
	case api.CodeNoWorkers:
		f.text = "no endpoints available to route work"
	case api.CodeOverloaded:
		if why := compat.NewQueueRejection(err); why != nil {
			f.details = why
			f.text = fmt.Sprintf("router policy class %q queue %s limit reached (current=%d, limit=%d)", why.Class, why.Kind,
				why.Current, why.Limit)
			break
		}
		f.text = "all eligible workers are overloaded"
	case api.CodeUnknownModel:
		f.status, f.text = http.StatusServiceUnavailable, fmt.Sprintf("no schedulable workers for %s", k)
	case api.CodeConflict:
		f.text = fmt.Sprintf("selection %s is already reserved or being reserved", selectionID)
	}
	return f
}

// loadRow is the load of a rank, or the load with a further request.
type loadRow struct {
	Worker        id          `json:"worker_id"`
	Rank          events.Rank `json:"dp_rank"`
	PrefillTokens uint64      `json:"potential_prefill_tokens"`
	DecodeBlocks  uint64      `json:"potential_decode_blocks"`
	Requests      uint64      `json:"active_requests"`
}

type modelLoads struct {
	Model      string    `json:"model_name"`
	Group      string    `json:"routing_group"`
	Loads      []loadRow `json:"loads"`
	Pending    int       `json:"pending_count"`
	PendingISL uint64    `json:"pending_isl_tokens"`
}

func (s *selectService) loads(r *asked) (int, any, error) {
	models := map[key]bool{}
	named := s.named()
	for _, rank := range s.Registry.All() {
		if k := keyOf(named, rank.Model); !Tracked(rank.Model) && schedulable(rank.PoolRank) && k.is(r.query) {
			models[k] = true
		}
	}
	out := []modelLoads{}
	for _, k := range slices.SortedFunc(maps.Keys(models), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.model, b.model), cmp.Compare(a.group, b.group))
	}) {
		list, err := s.Choice.Loads(r.ctx, &api.LoadsRequest{Model: k.name()})
		if err != nil {
			continue // the workers are gone
		}
		of, pool := &list.Models[0], s.Registry.Pool(k.name())
		m := modelLoads{Model: k.model, Group: k.group, Loads: []loadRow{}, Pending: of.PendingCount,
			PendingISL: of.PendingISLTokens}
		for _, l := range of.Ranks {
			rank := pool.Rank(events.RankKey{Instance: l.Worker, Rank: l.Rank})
			if rank != nil && schedulable(*rank) {
				m.Loads = append(m.Loads, loadRow{id(l.Worker), l.Rank, l.ActivePrefillTokens, l.ActiveBlocks,
					l.ActiveRequests})
			}
		}
		out = append(out, m)
	}
	return 0, out, nil
}

// prompt reads a request with only a prompt and returns the pool of the model.
func (s *selectService) prompt(r *asked) (p prompt, body api.Prompt, pool *registry.Pool, err error) {
	if err = r.fields.Read(&words, p.members()...); err != nil {
		return p, body, nil, err
	}
	if err = s.resolve(&p); err == nil {
		pool, err = s.pool(p.key)
	}
	if err == nil {
		body, err = p.convert(pool.Ranks[0].BlockSize)
	}
	return p, body, pool, err
}

func (s *selectService) potentialLoads(r *asked) (int, any, error) {
	p, body, pool, err := s.prompt(r)
	if err != nil {
		return 0, nil, err
	}
	list, err := s.Choice.PotentialLoads(r.ctx, &api.PotentialRequest{Prompt: body, Overrides: p.overrides.Overrides})
	if err != nil {
		return 0, nil, refused(err, "", p.key)
	}
	out := []loadRow{}
	for _, l := range list.Ranks {
		rank := pool.Rank(events.RankKey{Instance: l.Worker, Rank: l.Rank})
		if rank != nil && schedulable(*rank) {
			out = append(out, loadRow{id(l.Worker), l.Rank, l.PotentialPrefillTokens, l.PotentialDecodeBlocks,
				l.ActiveRequests})
		}
	}
	return 0, out, nil
}

func (s *selectService) overlapScores(r *asked) (int, any, error) {
	p, body, pool, err := s.prompt(r)
	if err != nil {
		return 0, nil, err
	}
	answer := &api.Answer{BlockSize: body.BlockSize, Blocks: len(body.Hashes)}
	if body.Tokens != nil {
		answer.Blocks = len(body.Tokens) / int(body.BlockSize)
	}
	if answer.Blocks > 0 {
		found, err := s.Find(r.ctx, &api.Query{Model: body.Model, BlockSize: body.BlockSize, Tokens: body.Tokens,
			Hashes: body.Hashes, LoRA: body.LoRA, CacheSalt: body.CacheSalt})
		if err == nil {
			answer = found
		} else if api.AsError(err).Code != api.CodeUnknownModel { // a model without events is unknown
			return 0, nil, refused(err, "", p.key)
		}
	}
	var ranks []events.RankKey
	for _, rank := range pool.Ranks {
		if schedulable(rank) {
			ranks = append(ranks, rank.RankKey)
		}
	}
	return 0, compat.NewOverlapScores(answer, ranks), nil
}
