package conductor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// Config is what the conductor stands on.
type Config struct {
	Server compat.Server
	Shims  *compat.Shims

	// Ended is told what became of each request, by its path behind conductor_.
	Ended func(op, outcome string)
}

// deadline bounds a request.
const deadline = 10 * time.Second

// conductor answers requests.
type conductor struct {
	Config
	mu sync.Mutex // registrations change one after another
}

// Handler returns what answers as Mooncake's conductor.
func Handler(cfg Config) *web.Mux {
	c := &conductor{Config: cfg}
	mux := web.NewMux()
	for path, route := range map[string]struct {
		method string
		rule   web.Rule
		do     func(ctx context.Context, body []byte) (any, error)
	}{
		"/query":       {http.MethodPost, web.Reads, c.query},
		"/register":    {http.MethodPost, web.Registers, c.register},
		"/unregister":  {http.MethodPost, web.Removes, c.unregister},
		"/services":    {http.MethodGet, web.Reads, c.services},
		"/global_view": {http.MethodGet, web.Reads, c.globalView},
	} {
		mux.Handle(path, web.Rules{route.method: route.rule}, func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), deadline)
			defer cancel()
			body, err := read(w, r, route.method)
			var answer any
			if err == nil {
				answer, err = route.do(ctx, body)
			}
			c.send(w, r, path, answer, err)
		})
	}
	mux.Otherwise(func(w http.ResponseWriter, r *http.Request) {
		c.send(w, r, "/other", nil, &refusal{status: http.StatusNotFound, code: api.CodeUnknownOperation,
			Message: "there is no " + r.URL.Path})
	})
	return mux
}

// read reads a request's body, as JSON whatever its form. What is posted must say which form it has: a web page may
// post anything else to any address.
func read(w http.ResponseWriter, r *http.Request, method string) ([]byte, error) {
	if !web.Allowed(w, r, method) {
		return nil, &refusal{status: http.StatusMethodNotAllowed, code: api.CodeWrongMethod,
			Message: "Method not allowed"}
	}
	if method == http.MethodGet {
		return nil, nil
	}
	header := r.Header.Get("Content-Type")
	form, known := api.ContentType(header)
	if header == "" || !known {
		return nil, api.WrongContentType(header)
	}
	body, failure := web.ReadBody(w, r, api.MaxBody)
	if failure != nil {
		return nil, failure
	}
	if form == api.MsgPack {
		text, err := api.ObjectJSON(body)
		if e, is := errors.AsType[*api.Error](err); is {
			return nil, refuse("invalid_msgpack", "", "Invalid msgpack object: %s", e.Message)
		}
		return text, err
	}
	return body, nil
}

// packs reports whether a request is to be answered in MessagePack: it is in that form, or has no body and asks for it.
func packs(r *http.Request) bool {
	form, _ := api.ContentType(r.Header.Get("Content-Type"))
	return form == api.MsgPack || r.Header.Get("Content-Type") == "" && r.Header.Get("Accept") == api.MsgPack
}

// pack is what is in JSON in MessagePack.
func pack(text []byte) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	e := msgpack.NewEncoder(&b)
	e.SetSortMapKeys(true)
	e.UseCompactInts(true)
	err := e.Encode(whole(v))
	return b.Bytes(), err
}

// whole has all numbers in a value, which answers have of one kind only, be whole numbers.
func whole(v any) any {
	switch v := v.(type) {
	case json.Number:
		n, _ := v.Int64()
		return n
	case []any:
		for i := range v {
			v[i] = whole(v[i])
		}
	case map[string]any:
		for name := range v {
			v[name] = whole(v[name])
		}
	}
	return v
}

// send answers a request, and counts it. All answers but those of /services end with a newline.
func (c *conductor) send(w http.ResponseWriter, asked *http.Request, path string, answer any, err error) {
	status, contentType, outcome := http.StatusOK, api.JSON, api.OutcomeOK
	var text []byte
	if err != nil {
		r := refusalOf(err)
		answer, status, outcome = r, r.status, string(r.code)
		if packs(asked) && r.Reason == "" {
			answer = map[string]string{"error": r.Message}
		} else if r.Reason == "" {
			contentType, text = "text/plain; charset=utf-8", []byte(r.Message)
		}
	}
	if text == nil {
		text, _ = json.Marshal(answer) // which can be encoded
	}
	switch {
	case packs(asked):
		contentType = api.MsgPack
		if text, err = pack(text); err != nil {
			status, outcome = http.StatusInternalServerError, string(api.CodeInternal)
		}
	case path != "/services" || err != nil:
		text = append(text, '\n')
	}
	c.Ended("conductor_"+strings.TrimPrefix(path, "/"), web.Reply(w, asked, contentType, text, status, outcome))
}

// refusalOf is an error as clients get it; err is not nil.
func refusalOf(err error) *refusal {
	if r, is := errors.AsType[*refusal](err); is {
		return r
	}
	e := compat.AsError(err)
	return &refusal{status: e.Code.HTTPStatus(), code: e.Code, Message: e.Message, Reason: string(e.Code)}
}

// told is what a registration says beside what a shim needs.
type told struct {
	LoRA       string  `json:"lora_name,omitempty"`
	CacheGroup *int64  `json:"cache_group"`
	Profile    profile `json:"hash_profile"`
}

// of is what the conductor was told of a rank; false if it was registered otherwise.
func of(r registry.Record) (t told, was bool) {
	return t, r.Engine.Conductor != nil && strictjson.Unmarshal(r.Engine.Conductor, &t) == nil
}

// place is what a registration is called.
func place(instance events.WorkerID, tenant string, rank events.Rank) string {
	return fmt.Sprintf("%s|%s|%d", instance, tenant, rank)
}

func (c *conductor) register(ctx context.Context, body []byte) (any, error) {
	f, err := open(body, "block_size", "cache_group", "dp_rank", "endpoint", "hash_profile", "instance_id", "lora_name",
		"modelname", "replay_endpoint", "tenant_id", "type")
	if err != nil {
		return nil, plain(err)
	}
	record, what := registry.Record{Engine: &registry.Engine{}}, told{}
	var kind, model, instance string
	for _, read := range []func() error{
		func() (err error) { record.Engine.Endpoint, err = f.text("endpoint"); return err },
		func() (err error) { kind, err = f.text("type"); return err },
		func() (err error) { model, err = f.text("modelname"); return err },
		func() (err error) { instance, err = f.text("instance_id"); return err },
		func() error { size, err := f.blockSize(); record.BlockSize = uint32(min(size, 1<<32-1)); return err },
		func() (err error) { record.Engine.Replay, err = f.optional("replay_endpoint", ""); return err },
		func() (err error) { what.LoRA, err = f.optional("lora_name", ""); return err },
		func() (err error) { record.Engine.Group, err = f.tenant(); return err },
		func() (err error) { what.CacheGroup, err = f.cacheGroup(); return err },
		func() (err error) { what.Profile, err = f.profile(); return err },
		func() (err error) { record.Source, err = sourceOf(kind); return err },
		func() (err error) { record.Rank, err = f.rank(); return err },
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	record.Instance, record.Model = events.WorkerID(instance), compat.ModelOf(model, record.Engine.Group)
	if record.Engine.Conductor, err = json.Marshal(what); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	there, err := c.contradicts(record, what)
	if err == nil && !there {
		err = c.Shims.Register(ctx, record)
	}
	switch {
	case err == nil:
		return map[string]string{"status": "registered successfully", "instance_id": instance}, nil
	case errors.Is(err, compat.ErrExists), errors.Is(err, compat.ErrMismatch), errors.Is(err, compat.ErrBad):
		return nil, refuse("invalid_registration", "", "%v", err)
	}
	return nil, err
}

// kinds are the types of publishers, by the source of their records.
var kinds = map[string]string{"vllm": "vLLM", "sglang": "SGLang"}

// sourceOf returns the source of a publisher's record.
func sourceOf(kind string) (string, error) {
	for source, name := range kinds {
		if kind == name {
			return source, nil
		}
	}
	if kind == "Mooncake" {
		return "", refuse("unsupported", "type", "type Mooncake is not supported: the indexer asks the master what a shared "+
			"store holds; name the master in the workers' registrations or --l3-config (docs/l3.md)")
	}
	return "", refuse("invalid_value", "type", "type must be vLLM or SGLang")
}

func (f fields) cacheGroup() (*int64, error) {
	if f["cache_group"] == nil || string(f["cache_group"]) == "null" {
		return nil, nil
	}
	v, err := f.whole("cache_group")
	switch {
	case err != nil:
		return nil, refuse("invalid_type", "cache_group", "cache_group must be an integer or null")
	case v != 0:
		return nil, refuse("unsupported", "cache_group", "only cache group zero is supported")
	}
	return &v, nil
}

// contradicts compares a registration with those that there are: one that says the same is there already.
func (c *conductor) contradicts(r registry.Record, what told) (there bool, err error) {
	for _, l := range c.Shims.Listeners() {
		other := l.Record
		said, was := of(other)
		switch {
		case other.Key() == r.Key() && other.Engine.Group == r.Engine.Group:
			if same := was && other.Source == r.Source && other.Model == r.Model && other.BlockSize == r.BlockSize &&
				other.Engine.Endpoint == r.Engine.Endpoint && other.Engine.Replay == r.Engine.Replay &&
				bytes.Equal(compact(other.Engine.Conductor), r.Engine.Conductor); same {
				return true, nil
			}
			return false, refuse("invalid_registration", "", "conflicting registration for service key: %s",
				place(r.Instance, r.Engine.Group, r.Rank))
		case other.Engine.Endpoint == r.Engine.Endpoint:
			return false, refuse("invalid_registration", "", "conflicting active registration for endpoint: %s",
				r.Engine.Endpoint)
		case was && other.Model == r.Model && said.LoRA == what.LoRA && said.Profile != what.Profile:
			return false, refuse("invalid_registration", "",
				"failed to register prefix context: registration conflicts with the ContextKey hash profile")
		}
	}
	return false, nil
}

// compact is JSON without blanks.
func compact(text []byte) []byte {
	var b bytes.Buffer
	_ = json.Compact(&b, text) // which is JSON: it was stored as such
	return b.Bytes()
}

// plain has a body that is no object refused in text, as those of registrations are.
func plain(err error) error {
	if r := refusalOf(err); r.Reason == "invalid_json" {
		r.Reason = ""
	}
	return err
}

func (c *conductor) unregister(ctx context.Context, body []byte) (any, error) {
	f, err := open(body, "dp_rank", "instance_id", "tenant_id")
	if err != nil {
		return nil, plain(err)
	}
	instance, err := f.text("instance_id")
	if err != nil {
		return nil, err
	}
	tenant, err := f.tenant()
	if err != nil {
		return nil, err
	}
	rank, err := f.rank()
	if err != nil {
		if r := refusalOf(err); r.Reason != "missing" {
			return nil, refuse("invalid_value", "dp_rank", "dp_rank must be a non-negative int")
		}
		return nil, err
	}
	key := place(events.WorkerID(instance), tenant, rank)
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.Shims.Unregister(ctx, events.WorkerID(instance), func(r registry.Record) bool {
		return r.Engine.Group == tenant && r.Rank == rank
	}, nil)
	if errors.Is(err, compat.ErrUnknown) {
		return nil, &refusal{status: http.StatusNotFound, code: api.CodeUnknownWorker,
			Message: "service not found: " + key}
	} else if err != nil {
		return nil, err
	}
	return map[string]any{"status": "unregistered successfully", "removed_instances": []string{key}}, nil
}

// match is how many tokens of a prompt lie in device memory, in host memory too, and on disk too.
type match struct {
	GPU  int64 `json:"gpu"`
	CPU  int64 `json:"cpu"`
	Disk int64 `json:"disk"`
}

// hit is what an instance holds of a prompt: the most of its ranks.
type hit struct {
	Longest int64            `json:"longest_matched"`
	DP      map[string]int64 `json:"dp"`
	Ranks   map[string]match `json:"rank_matches"`
	match
}

// add adds a rank of an instance.
func add(instances map[string]*hit, key events.RankKey, m match) {
	in, rank := instances[string(key.Instance)], fmt.Sprint(key.Rank)
	if in == nil {
		in = &hit{DP: map[string]int64{}, Ranks: map[string]match{}}
		instances[string(key.Instance)] = in
	}
	if _, there := in.Ranks[rank]; there {
		return
	}
	in.DP[rank], in.Ranks[rank] = m.GPU, m
	in.match = match{max(in.GPU, m.GPU), max(in.CPU, m.CPU), max(in.Disk, m.Disk)}
	in.Longest = in.Disk
}

func (c *conductor) query(ctx context.Context, body []byte) (any, error) {
	f, err := open(body, "block_size", "cache_salt", "instance_id", "lora_name", "model", "tenant_id", "token_ids")
	if err != nil {
		return nil, err
	}
	q := &api.Query{Idle: true}
	var size int64
	var model, tenant string
	var instance *string
	for _, read := range []func() error{
		func() (err error) { model, err = f.text("model"); return err },
		func() (err error) { size, err = f.blockSize(); return err },
		func() (err error) { q.Tokens, err = f.tokens(); return err },
		func() (err error) { tenant, err = f.tenant(); return err },
		func() (err error) { q.LoRA, err = f.optional("lora_name", ""); return err },
		func() (err error) { q.CacheSalt, err = f.salt(); return err },
		func() (err error) { instance, err = f.instance(); return err },
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	q.Model = compat.ModelOf(model, tenant)
	wanted := func(key events.RankKey) bool { return instance == nil || string(key.Instance) == *instance }
	instances, others := map[string]*hit{}, map[events.RankKey]bool{}
	var silent []events.RankKey // registered here: they may have said nothing yet
	for _, l := range c.Shims.Listeners() {
		if l.Record.Model != q.Model || int64(l.Record.BlockSize) != size {
			continue
		}
		if said, was := of(l.Record); was && said.LoRA != q.LoRA {
			others[l.Record.Key()] = true
		} else if wanted(l.Record.Key()) {
			silent = append(silent, l.Record.Key())
		}
	}
	answer, err := c.Server.Find(ctx, q)
	switch {
	case api.HasCode(err, api.CodeUnknownModel):
		answer = &api.Answer{Complete: true}
	case err != nil:
		return nil, err
	case !answer.Complete:
		return nil, api.Errorf(api.CodeNotReady, "not every worker of the model could be looked at")
	}
	for i := range answer.Workers {
		o := answer.Workers[i].WithGuess()
		key := events.RankKey{Instance: o.Instance, Rank: o.Rank}
		if int64(answer.BlockSize) == size && !others[key] && wanted(key) {
			add(instances, key, match{int64(o.Device) * size, int64(o.Device+o.Host) * size, int64(o.Total()+o.L3) * size})
		}
	}
	for _, key := range silent {
		add(instances, key, match{})
	}
	return map[string]any{"instances": instances}, nil
}

// salt is the field cache_salt.
func (f fields) salt() (string, error) {
	if string(f["cache_salt"]) == "null" {
		return "", nil
	}
	s, err := f.optional("cache_salt", "")
	if err != nil {
		return "", refuse("invalid_type", "cache_salt", "cache_salt must be a string or null")
	}
	return s, nil
}

// instance is the field instance_id of a query; nil: all instances are asked for.
func (f fields) instance() (*string, error) {
	if f["instance_id"] == nil {
		return nil, nil
	}
	s, err := f.optional("instance_id", "")
	return &s, err
}

// service is a registration as it is listed.
type service struct {
	Endpoint       string          `json:"Endpoint"`
	ReplayEndpoint string          `json:"ReplayEndpoint"`
	Type           string          `json:"Type"`
	ModelName      string          `json:"ModelName"`
	LoraName       string          `json:"LoraName"`
	TenantID       string          `json:"TenantID"`
	InstanceID     events.WorkerID `json:"InstanceID"`
	BlockSize      uint32          `json:"BlockSize"`
	DPRank         events.Rank     `json:"DPRank"`
	CacheGroup     *int64          `json:"CacheGroup"`
	HashProfile    profile         `json:"HashProfile"`
}

// registered lists what was registered here, by this API.
func (c *conductor) registered() []service {
	list := []service{}
	for _, l := range c.Shims.Listeners() {
		if said, was := of(l.Record); was {
			e := l.Record.Engine
			list = append(list, service{e.Endpoint, e.Replay, kinds[l.Record.Source], compat.NameOf(l.Record), said.LoRA,
				e.Group, l.Record.Instance, l.Record.BlockSize, l.Record.Rank, said.CacheGroup, said.Profile})
		}
	}
	return list
}

func (c *conductor) services(context.Context, []byte) (any, error) {
	list := c.registered()
	return map[string]any{"count": len(list), "services": list}, nil
}

// view is what is registered of one model, adapter and tenant.
type view struct {
	Model     string                            `json:"model_name"`
	LoRA      string                            `json:"lora_name"`
	BlockSize uint32                            `json:"block_size"`
	Tenant    string                            `json:"tenant_id"`
	Prefixes  uint64                            `json:"prefix_count"`
	Profile   profile                           `json:"hash_profile"`
	Instances map[events.WorkerID][]events.Rank `json:"instances"`
}

func (c *conductor) globalView(ctx context.Context, _ []byte) (any, error) {
	list, err := c.Server.Workers(ctx, api.WorkersRequest{})
	if err != nil {
		return nil, err
	}
	holds := map[events.RankKey]uint64{}
	for _, w := range list.Workers {
		holds[events.RankKey{Instance: w.Instance, Rank: w.Rank}] = w.Blocks.Device + w.Blocks.Host + w.Blocks.Disk +
			w.Blocks.External
	}
	views := []*view{}
	for _, s := range c.registered() {
		i := slices.IndexFunc(views, func(v *view) bool {
			return v.Tenant == s.TenantID && v.Model == s.ModelName && v.LoRA == s.LoraName && v.BlockSize == s.BlockSize
		})
		if i < 0 {
			i = len(views)
			views = append(views, &view{Model: s.ModelName, LoRA: s.LoraName, BlockSize: s.BlockSize, Tenant: s.TenantID,
				Profile: s.HashProfile, Instances: map[events.WorkerID][]events.Rank{}})
		}
		v := views[i]
		v.Instances[s.InstanceID] = append(v.Instances[s.InstanceID], s.DPRank)
		v.Prefixes += holds[events.RankKey{Instance: s.InstanceID, Rank: s.DPRank}]
	}
	slices.SortFunc(views, func(a, b *view) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Model, b.Model), cmp.Compare(a.LoRA, b.LoRA))
	})
	return map[string]any{"context_count": len(views), "contexts": views}, nil
}
