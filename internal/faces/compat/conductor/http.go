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

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// Config configures the handler of the conductor's API.
type Config struct {
	Server compat.Server
	Shims  *compat.Shims

	// Ended is called with the outcome of every request. The operation is conductor_ and the path without the slash.
	Ended func(op, outcome string)
}

// deadline is the time limit of a request.
const deadline = 10 * time.Second

// conductor is the state of the handler.
type conductor struct {
	Config
	mu sync.Mutex // serializes changes of registrations
}

// Handler returns the handler of the conductor's API.
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

// read returns the body of a request as JSON. A POST request must have a Content-Type, because a web page may send a
// request without that header to any address.
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

// packs reports whether the reply is MessagePack: the request body is MessagePack, or the body is missing and the
// Accept header names MessagePack.
func packs(r *http.Request) bool {
	form, _ := api.ContentType(r.Header.Get("Content-Type"))
	return form == api.MsgPack || r.Header.Get("Content-Type") == "" && r.Header.Get("Accept") == api.MsgPack
}

// pack converts JSON to MessagePack.
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

// whole converts all numbers of a decoded JSON value to int64. Replies contain only whole numbers.
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

// send writes the reply of a request and counts the outcome. Every reply except that of /services ends with a newline.
func (c *conductor) send(w http.ResponseWriter, asked *http.Request, path string, answer any, err error) {
	status, contentType, outcome := http.StatusOK, api.JSON, ops.OK
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
		text, _ = json.Marshal(answer) // the value can always be encoded
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

// refusalOf converts an error to the reply for clients. err is not nil.
func refusalOf(err error) *refusal {
	if r, is := errors.AsType[*refusal](err); is {
		return r
	}
	e := compat.AsError(err)
	return &refusal{status: e.Code.HTTPStatus(), code: e.Code, Message: e.Message, Reason: string(e.Code)}
}

// labels are the fields of a registration that a shim does not need.
type labels struct {
	LoRA       string  `json:"lora_name,omitempty"`
	CacheGroup *int64  `json:"cache_group"`
	Profile    profile `json:"hash_profile"`
}

// labelsOf returns the labels of a record. ok is false if another API registered the record.
func labelsOf(r registry.Record) (l labels, ok bool) {
	return l, r.Engine.Conductor != nil && strictjson.Unmarshal(r.Engine.Conductor, &l) == nil
}

// place returns the service key of a registration.
func place(instance events.WorkerID, tenant string, rank events.Rank) string {
	return fmt.Sprintf("%s|%s|%d", instance, tenant, rank)
}

func (c *conductor) register(ctx context.Context, body []byte) (any, error) {
	f, err := open(body, "block_size", "cache_group", "dp_rank", "endpoint", "hash_profile", "instance_id", "lora_name",
		"modelname", "replay_endpoint", "tenant_id", "type")
	if err != nil {
		return nil, plain(err)
	}
	record, own := registry.Record{Engine: &registry.Engine{}}, labels{}
	var kind, model, instance string
	for _, read := range []func() error{
		func() (err error) { record.Engine.Endpoint, err = f.text("endpoint"); return err },
		func() (err error) { kind, err = f.text("type"); return err },
		func() (err error) { model, err = f.text("modelname"); return err },
		func() (err error) { instance, err = f.text("instance_id"); return err },
		func() error { size, err := f.blockSize(); record.BlockSize = uint32(min(size, 1<<32-1)); return err },
		func() (err error) { record.Engine.Replay, err = f.optional("replay_endpoint", ""); return err },
		func() (err error) { own.LoRA, err = f.optional("lora_name", ""); return err },
		func() (err error) { record.Engine.Group, err = f.tenant(); return err },
		func() (err error) { own.CacheGroup, err = f.cacheGroup(); return err },
		func() (err error) { own.Profile, err = f.profile(); return err },
		func() (err error) { record.Source, err = sourceOf(kind); return err },
		func() (err error) { record.Rank, err = f.rank(); return err },
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	record.Instance, record.Model = events.WorkerID(instance), compat.ModelOf(model, record.Engine.Group)
	if record.Engine.Conductor, err = json.Marshal(own); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	there, err := c.contradicts(record, own)
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

// kinds maps the source of a record to the publisher's type.
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

// contradicts compares a registration with the existing registrations. there is true if an equal registration exists. A
// conflict is an error.
func (c *conductor) contradicts(r registry.Record, own labels) (there bool, err error) {
	for _, l := range c.Shims.Listeners() {
		other := l.Record
		known, ok := labelsOf(other)
		switch {
		case other.Key() == r.Key() && other.Engine.Group == r.Engine.Group:
			if same := ok && other.Source == r.Source && other.Model == r.Model && other.BlockSize == r.BlockSize &&
				other.Engine.Endpoint == r.Engine.Endpoint && other.Engine.Replay == r.Engine.Replay &&
				bytes.Equal(compact(other.Engine.Conductor), r.Engine.Conductor); same {
				return true, nil
			}
			return false, refuse("invalid_registration", "", "conflicting registration for service key: %s",
				place(r.Instance, r.Engine.Group, r.Rank))
		case other.Engine.Endpoint == r.Engine.Endpoint:
			return false, refuse("invalid_registration", "", "conflicting active registration for endpoint: %s",
				r.Engine.Endpoint)
		case ok && other.Model == r.Model && known.LoRA == own.LoRA && known.Profile != own.Profile:
			return false, refuse("invalid_registration", "",
				"failed to register prefix context: registration conflicts with the ContextKey hash profile")
		}
	}
	return false, nil
}

// compact removes white space from JSON.
func compact(text []byte) []byte {
	var b bytes.Buffer
	_ = json.Compact(&b, text) // the stored text is valid JSON
	return b.Bytes()
}

// plain removes the reason from a refusal for invalid JSON, so that the reply is text. The conductor replies to
// registrations in the same form.
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

// match counts the matched tokens of a prompt. Every field includes the tiers above: GPU is device memory, CPU adds
// host memory, and Disk adds disks.
type match struct {
	GPU  int64 `json:"gpu"`
	CPU  int64 `json:"cpu"`
	Disk int64 `json:"disk"`
}

// hit is the match of an instance. Every number is the maximum over the ranks.
type hit struct {
	Longest int64            `json:"longest_matched"`
	DP      map[string]int64 `json:"dp"`
	Ranks   map[string]match `json:"rank_matches"`
	match
}

// add adds the match of a rank to the instance.
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
	var silent []events.RankKey // ranks with a registration here, perhaps without an event yet
	for _, l := range c.Shims.Listeners() {
		if l.Record.Model != q.Model || int64(l.Record.BlockSize) != size {
			continue
		}
		if known, ok := labelsOf(l.Record); ok && known.LoRA != q.LoRA {
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
		return nil, api.Errorf(api.CodeNotReady, "a node of the cluster did not answer for every worker of the model; retry")
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

// salt returns the field cache_salt.
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

// instance returns the field instance_id of a query. nil selects all instances.
func (f fields) instance() (*string, error) {
	if f["instance_id"] == nil {
		return nil, nil
	}
	s, err := f.optional("instance_id", "")
	return &s, err
}

// service is a registration in the reply of /services.
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

// registered lists the registrations that this API made on this node.
func (c *conductor) registered() []service {
	list := []service{}
	for _, l := range c.Shims.Listeners() {
		if known, ok := labelsOf(l.Record); ok {
			e := l.Record.Engine
			list = append(list, service{e.Endpoint, e.Replay, kinds[l.Record.Source], compat.NameOf(l.Record), known.LoRA,
				e.Group, l.Record.Instance, l.Record.BlockSize, l.Record.Rank, known.CacheGroup, known.Profile})
		}
	}
	return list
}

func (c *conductor) services(context.Context, []byte) (any, error) {
	list := c.registered()
	return map[string]any{"count": len(list), "services": list}, nil
}

// view is the summary of a model, adapter and tenant in the reply of /global_view.
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
