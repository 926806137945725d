package dynamoselect

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// trackerPrefix is the prefix of the slot tracker's workers and models.
const trackerPrefix = "slot-tracker:"

// Tracked reports whether a worker or model belongs to the slot tracker. Such workers have no blocks in the index.
func Tracked(name string) bool { return strings.HasPrefix(name, trackerPrefix) }

// tracker implements the slot tracker.
type tracker struct {
	Config
	mu sync.Mutex // serializes changes of workers
}

// Tracker returns the handler of Dynamo's slot tracker.
func Tracker(cfg Config) *web.Mux {
	t := &tracker{Config: cfg}
	routes := []route{
		{method: http.MethodPost, path: "/register", rule: web.Registers, do: t.register},
		{method: http.MethodPost, path: "/unregister", rule: web.Removes, do: t.unregister},
		{method: http.MethodGet, path: "/workers", rule: web.Reads, do: t.workers},
		{method: http.MethodPost, path: "/add", rule: web.Chooses, do: t.add},
		{method: http.MethodPost, path: "/prefill_complete", rule: web.Chooses, do: t.prefillComplete},
		{method: http.MethodPost, path: "/free", rule: web.Chooses, do: t.free},
		{method: http.MethodGet, path: "/loads", rule: web.Reads, do: t.loads},
		{method: http.MethodPost, path: "/potential_loads", rule: web.Reads, do: t.potentialLoads},
	}
	for i := range routes {
		routes[i].do = cfg.admitted(routes[i].do)
	}
	routes = append(routes, replication...)
	routes = append(routes, route{method: http.MethodGet, path: "/health",
		rule: web.Rule{Needs: rights.Anybody, Cost: web.Probe},
		do:   func(*asked) (int, any, error) { return 0, nil, nil }})
	return mux("slots_", routes, TrackerBody, cfg.Ended)
}

// slots is a worker of the slot tracker, in the stored and listed form.
type slots struct {
	Worker    number `json:"worker_id"`
	Model     string `json:"model_name"`
	Group     string `json:"routing_group"`
	BlockSize uint32 `json:"block_size"`
	Start     uint32 `json:"dp_start"`
	Size      uint32 `json:"dp_size"`
}

// MarshalJSON writes the worker as a JSON number.
func (n number) MarshalJSON() ([]byte, error) { return id(n).MarshalJSON() }

func (w *slots) key() key { return key{w.Model, w.Group} }

// ranks returns the names of the worker's ranks in the registry.
func (w *slots) ranks() []events.RankKey {
	list := make([]events.RankKey, w.Size)
	for i := range list {
		list[i] = w.key().rank(w.Worker, w.Start+uint32(i))
	}
	return list
}

// tracked returns the name of the model in the registry.
func (k key) tracked() string { return trackerPrefix + k.model + ":" + k.group }

// rank returns the name of a rank in the registry.
func (k key) rank(worker number, rank uint32) events.RankKey {
	return events.RankKey{Instance: events.WorkerID(k.tracked() + ":" + string(worker)), Rank: events.Rank(rank)}
}

func (k key) table() load.Model { return load.Model{Name: k.tracked()} }

// registered lists the workers by model, group and number.
func (t *tracker) registered() (list []*slots) {
	for _, o := range t.Registry.Posted() {
		w := &slots{}
		if Tracked(string(o.Instance)) && strictjson.Unmarshal(o.Posted, w) == nil {
			list = append(list, w)
		}
	}
	slices.SortFunc(list, func(a, b *slots) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group),
			compat.CompareIDs(id(a.Worker), id(b.Worker)))
	})
	return list
}

// workersOf lists the workers of a model. An empty list is an error.
func (t *tracker) workersOf(k key) ([]*slots, error) {
	list := slices.DeleteFunc(t.registered(), func(w *slots) bool { return w.key() != k })
	if len(list) == 0 {
		return nil, fail(http.StatusNotFound, "no slot tracker for %s", k)
	}
	return list, nil
}

// named returns the fields that name the model of a request.
func named(k *key) []compat.Field {
	k.group = defaultGroup
	return []compat.Field{member("model_name", &k.model, required, "text"),
		member("routing_group", &k.group, defaulted, "text")}
}

func (t *tracker) register(r *asked) (int, any, error) {
	const count = "an unsigned 32-bit number"
	var w slots
	var k key
	if err := r.fields.Read(&words, append(named(&k), member("worker_id", &w.Worker, required, "a worker's number"),
		member("block_size", &w.BlockSize, required, count), member("dp_start", &w.Start, required, count),
		member("dp_size", &w.Size, required, count))...); err != nil {
		return 0, nil, err
	}
	w.Model, w.Group = k.model, k.group
	bad := func(format string, args ...any) error { return fail(http.StatusBadRequest, format, args...) }
	switch {
	case w.BlockSize == 0:
		return 0, nil, bad("block_size must be greater than 0")
	case w.Size == 0:
		return 0, nil, bad("dp_size must be greater than 0")
	case w.Size > api.MaxWorkerRanks:
		return 0, nil, bad("dp_size %d exceeds the maximum %d", w.Size, api.MaxWorkerRanks)
	case uint64(w.Start)+uint64(w.Size) > math.MaxUint32:
		return 0, nil, bad("dp range overflows u32: start=%d size=%d", w.Start, w.Size)
	}
	data, err := json.Marshal(&w)
	if err != nil {
		return 0, nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, other := range t.registered() {
		if other.key() == k && other.BlockSize != w.BlockSize {
			return 0, nil, fail(http.StatusConflict, "block_size mismatch for %s: existing=%d, requested=%d", k,
				other.BlockSize, w.BlockSize)
		}
	}
	_, err = t.Registry.Edit(r.ctx, k.rank(w.Worker, 0).Instance, func(o *registry.Operator, _ bool) error {
		if o.Posted != nil {
			return fail(http.StatusConflict, "worker %s already registered for %s", w.Worker, k)
		}
		o.Posted = data
		o.Declared = &registry.Declared{Model: k.tracked(), BlockSize: w.BlockSize,
			Worker: api.WorkerSpec{RankStart: w.Start, RankSize: w.Size, Events: api.EventsNone}}
		return nil
	})
	return http.StatusCreated, ok, err
}

func (t *tracker) unregister(r *asked) (int, any, error) {
	var worker number
	var k key
	if err := r.fields.Read(&words, append(named(&k),
		member("worker_id", &worker, required, "a worker's number"))...); err != nil {
		return 0, nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var was slots
	_, err := t.Registry.Edit(r.ctx, k.rank(worker, 0).Instance, func(o *registry.Operator, _ bool) error {
		if o.Posted == nil {
			return fail(http.StatusNotFound, "worker %s not found for %s", worker, k)
		}
		err := strictjson.Unmarshal(o.Posted, &was)
		*o = registry.Operator{Version: o.Version, Instance: o.Instance}
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	for _, rank := range was.ranks() {
		t.Loads.RemoveRank(rank)
	}
	return 0, ok, nil
}

func (t *tracker) workers(r *asked) (int, any, error) {
	list := slices.DeleteFunc(t.registered(), func(w *slots) bool { return !w.key().is(r.query) })
	return 0, append([]*slots{}, list...), nil
}

// request returns the fields that name a request.
func request(k *key, requestID *string) []compat.Field {
	return append(named(k), member("request_id", requestID, required, "text"))
}

func (t *tracker) add(r *asked) (int, any, error) {
	var worker number
	var k key
	var requestID string
	var rank uint32
	var tokens uint64
	var hashes api.Hashes
	if err := r.fields.Read(&words, append(request(&k, &requestID),
		member("worker_id", &worker, required, "a worker's number"),
		member("dp_rank", &rank, required, "an unsigned 32-bit number"),
		member("sequence_hashes", &hashes, required, "a list of 64-bit numbers"),
		member("new_isl_tokens", &tokens, defaulted, "a number of tokens"))...); err != nil {
		return 0, nil, err
	}
	list, err := t.workersOf(k)
	if err != nil {
		return 0, nil, err
	}
	at := k.rank(worker, rank)
	there := slices.ContainsFunc(list, func(w *slots) bool { return slices.Contains(w.ranks(), at) })
	if !there {
		return 0, nil, noRank(events.RankKey{Instance: events.WorkerID(worker), Rank: events.Rank(rank)})
	}
	b := load.Booking{ID: requestID, Rank: at, Hashes: sequence(hashes), PrefillTokens: int64(min(tokens, math.MaxInt64))}
	err = t.Loads.Book(r.ctx, k.table(), b)
	if errors.Is(err, load.ErrConflict) {
		err = t.again(r, k, b)
	}
	if err != nil {
		return 0, nil, t.refused(err, requestID)
	}
	return http.StatusCreated, ok, nil
}

// again books a request with a used id, if the earlier request ran on a worker that is gone.
func (t *tracker) again(r *asked, k key, b load.Booking) error {
	var at events.RankKey
	under := false
	t.Loads.Read(k.table(), func(table *load.Table) { at, under = table.Where(b.ID) })
	if under {
		_, worker, _ := strings.Cut(strings.TrimPrefix(string(at.Instance), k.tracked()), ":")
		return fail(http.StatusConflict,
			"Request %s already exists (assigned to worker WorkerWithDpRank { worker_id: %s, dp_rank: %d })", b.ID, worker,
			at.Rank)
	}
	if err := t.Loads.Free(r.ctx, k.table(), b.ID); err != nil && !errors.Is(err, load.ErrUnknown) {
		return err
	}
	return t.Loads.Book(r.ctx, k.table(), b)
}

// refused converts the error of a load table to Dynamo's text.
func (t *tracker) refused(err error, requestID string) error {
	switch {
	case errors.Is(err, load.ErrUnknown):
		return fail(http.StatusNotFound, "Request %s not found", requestID)
	case errors.Is(err, load.ErrConflict):
		return fail(http.StatusConflict, "Request %s already exists", requestID)
	case errors.Is(err, load.ErrInvalid):
		return fail(http.StatusBadRequest, "%v", err)
	case errors.Is(err, load.ErrFull):
		return api.Errorf(api.CodeBusy, "%v", err)
	}
	return err
}

func sequence(hashes api.Hashes) []events.SeqHash {
	list := make([]events.SeqHash, len(hashes))
	for i, h := range hashes {
		list[i] = events.SeqHash(h)
	}
	return list
}

func (t *tracker) prefillComplete(r *asked) (int, any, error) {
	return t.change(r, t.Loads.PrefillComplete)
}

// free ends a request. The end of an unknown request is not an error.
func (t *tracker) free(r *asked) (int, any, error) {
	return t.change(r, func(ctx context.Context, of load.Model, id string) error {
		err := t.Loads.Free(ctx, of, id)
		if errors.Is(err, load.ErrUnknown) {
			return nil
		}
		return err
	})
}

// change changes the request that the body names.
func (t *tracker) change(r *asked, do func(context.Context, load.Model, string) error) (int, any, error) {
	var k key
	var requestID string
	if err := r.fields.Read(&words, request(&k, &requestID)...); err != nil {
		return 0, nil, err
	}
	if _, err := t.workersOf(k); err != nil {
		return 0, nil, err
	}
	if err := do(r.ctx, k.table(), requestID); err != nil {
		return 0, nil, t.refused(err, requestID)
	}
	return 0, ok, nil
}

// each calls do with every rank of the workers and the load. The depth in the load is about hashes.
func (t *tracker) each(list []*slots, hashes []events.SeqHash, do func(w *slots, rank uint32, l load.Load)) {
	tables := map[key]map[events.RankKey]load.Load{}
	for _, w := range list {
		k := w.key()
		if tables[k] == nil {
			tables[k] = map[events.RankKey]load.Load{}
			t.Loads.Read(k.table(), func(table *load.Table) {
				for _, l := range table.Loads(nil, hashes) {
					tables[k][l.Rank] = l
				}
			})
		}
		for i, at := range w.ranks() {
			do(w, w.Start+uint32(i), tables[k][at])
		}
	}
}

type slotLoad struct {
	Model         string `json:"model_name"`
	Group         string `json:"routing_group"`
	Worker        number `json:"worker_id"`
	Rank          uint32 `json:"dp_rank"`
	PrefillTokens int64  `json:"active_prefill_tokens"`
	DecodeBlocks  int64  `json:"active_decode_blocks"`
}

func (t *tracker) loads(r *asked) (int, any, error) {
	list := slices.DeleteFunc(t.registered(), func(w *slots) bool { return !w.key().is(r.query) })
	out := []slotLoad{}
	t.each(list, nil, func(w *slots, rank uint32, l load.Load) {
		out = append(out, slotLoad{w.Model, w.Group, w.Worker, rank, l.PrefillTokens, l.Blocks})
	})
	return 0, out, nil
}

func (t *tracker) potentialLoads(r *asked) (int, any, error) {
	var k key
	var hashes api.Hashes
	var tokens uint64
	if err := r.fields.Read(&words, append(named(&k),
		member("sequence_hashes", &hashes, required, "a list of 64-bit numbers"),
		member("new_isl_tokens", &tokens, defaulted, "a number of tokens"))...); err != nil {
		return 0, nil, err
	}
	list, err := t.workersOf(k)
	if err != nil {
		return 0, nil, err
	}
	out := []loadRow{}
	t.each(list, sequence(hashes), func(w *slots, rank uint32, l load.Load) {
		out = append(out, loadRow{id(w.Worker), events.Rank(rank), uint64(l.PrefillTokens) + tokens,
			uint64(l.Blocks) + uint64(len(hashes)) - uint64(l.Depth), uint64(l.Requests)})
	})
	return 0, out, nil
}
