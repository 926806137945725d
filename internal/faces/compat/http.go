package compat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Server answers queries for the whole cluster.
type Server interface {
	Find(ctx context.Context, q *api.Query) (*api.Answer, error)
	Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error)
	Snapshot(ctx context.Context) (*api.SnapshotList, error)
}

// Config configures the paths of Dynamo's indexer.
type Config struct {
	Server Server
	Shims  *Shims

	// Resolve resolves an alias to a model. nil disables aliases.
	Resolve registry.Resolver

	// Dump writes the blocks of workers as router events, with a JSON object on every line. Every Write call contains a
	// single line.
	Dump func(ctx context.Context, of []events.WorkerID, out io.Writer) error

	// Dumps is a semaphore. The capacity is the number of concurrent dumps.
	Dumps chan struct{}

	// Ended is called with the outcome of every request. The operation is the path without the slash. nil disables the
	// call.
	Ended func(op, outcome string)
}

// deadline is the time limit of a request.
const deadline = 10 * time.Second

// DefaultGroup is the routing group of requests without a group.
const DefaultGroup = "default"

// ID is an instance id: a number or a string.
type ID string

func (i *ID) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		return strictjson.Unmarshal(data, (*string)(i))
	}
	_, signed := strconv.ParseInt(string(data), 10, 64)
	if _, err := strconv.ParseUint(string(data), 10, 64); err != nil && signed != nil {
		return fmt.Errorf("instance_id is %.40s, neither a whole number nor a string", data)
	}
	*i = ID(data)
	return nil
}

// MarshalJSON writes a numeric id as a JSON number.
func (i ID) MarshalJSON() ([]byte, error) {
	if n, err := strconv.ParseUint(string(i), 10, 64); err == nil && strconv.FormatUint(n, 10) == string(i) {
		return []byte(i), nil
	}
	return json.Marshal(string(i))
}

// request has the fields of all requests.
type request struct {
	Instance *ID
	Endpoint string
	Model    *string
	Size     *uint32
	Group    *string
	Rank     *events.Rank
	Replay   string
	Type     string
	Tokens   api.Tokens
	Hashes   api.Hashes
	LoRA     string
	Salt     string
	Media    []*media

	Record *api.WorkerSpec // extension: the fields for worker selection
	L3     *hicache.Config // extension: the worker's configuration of a shared store
	passed hicache.Passed  // unknown fields of L3
	KV     string          // extension: equal to --kv-groups of worker-shim
}

// media are the multimodal items of a block.
type media struct {
	Objects []MediaObject `json:"mm_objects"`
}

// MediaObject is a multimodal item of a block in Dynamo's form. Dynamo's hashes do not include the offsets.
type MediaObject struct {
	Hash MediaHash `json:"mm_hash"`
}

// BlockMedia converts the items of a block for hashing. The hash of a single item is equal to Dynamo's. The hash of
// several items depends on the order.
func BlockMedia(objects []MediaObject) (list []events.BlockMedia) {
	for _, o := range objects {
		list = append(list, events.BlockMedia{Hash: uint64(o.Hash), Offset: events.NoOffset})
	}
	return list
}

// MediaHash is a 64-bit number, as a JSON number or as text.
type MediaHash uint64

func (h *MediaHash) UnmarshalJSON(data []byte) error {
	v, err := strconv.ParseUint(strings.Trim(string(data), `"`), 10, 64)
	*h = MediaHash(v)
	return err
}

// fields returns the table of all request fields.
func (r *request) fields() []Field {
	return []Field{
		{"instance_id", &r.Instance, Optional, "a whole number or text"},
		{"endpoint", &r.Endpoint, Optional, "text"},
		{"model_name", &r.Model, Optional, "text"},
		{"block_size", &r.Size, Optional, "an unsigned 32-bit number"},
		{"routing_group", &r.Group, Optional, "text"},
		{"dp_rank", &r.Rank, Optional, "an unsigned 32-bit number"},
		{"replay_endpoint", &r.Replay, Optional, "text"},
		{"type", &r.Type, Optional, "text"},
		{"lora_name", &r.LoRA, Optional, "text"},
		{"cache_salt", &r.Salt, Optional, "text"},
		{"kv_groups", &r.KV, Optional, "text"},
		{"block_mm_infos", &r.Media, Optional, wantMedia},
		{"token_ids", &r.Tokens, Optional, ""},
		{"block_hashes", &r.Hashes, Optional, ""},
		{"record", func(value []byte) (err error) {
			r.Record, err = api.ReadWorkerSpec("record", value)
			return unprocessable(err)
		}, Optional, ""},
		{"l3", func(value []byte) error {
			if string(value) == "null" {
				return nil
			}
			c, passed, err := hicache.DecodeConfig(value)
			if err != nil {
				return fail(http.StatusUnprocessableEntity, api.CodeMalformed, "l3: %v", err)
			}
			r.L3, r.passed = &c, passed
			return nil
		}, Optional, ""},
	}
}

const wantMedia = "a list with null or the mm_objects, each with its mm_hash, of each block"

// words builds the errors of requests to Dynamo's indexer.
var words = Words{
	Twice: func(name string) error {
		return fail(http.StatusUnprocessableEntity, api.CodeMalformed, "duplicate field `%s`", name)
	},
	Wrong: wrong,
}

// wrong returns the error of an invalid value.
func wrong(f Field, value []byte, err error) error {
	if e, is := errors.AsType[*api.Error](err); is { // the error of tokens or hashes names the field
		return unprocessable(e)
	}
	return fail(http.StatusUnprocessableEntity, api.CodeMalformed, "%s is %.40s, not %s", f.Name, value, f.Want)
}

// failure is an error with a status. Some statuses of Dynamo differ from the status of the code.
type failure struct {
	status int
	why    *api.Error
}

func (f *failure) Error() string { return f.why.Error() }

func fail(status int, code api.Code, format string, args ...any) error {
	return &failure{status, api.Errorf(code, format, args...)}
}

// unprocessable returns the error of a body with invalid JSON or invalid values.
func unprocessable(err error) error {
	if e, is := errors.AsType[*api.Error](err); is && e.Code != api.CodeTooLarge {
		return &failure{http.StatusUnprocessableEntity, e}
	}
	return err
}

// Register adds the paths of Dynamo's standalone indexer and of RFC #1403 to mux.
func Register(mux *web.Mux, cfg Config) {
	if cfg.Ended == nil {
		cfg.Ended = func(string, string) {}
	}
	handle := func(method, path string, rule web.Rule, good int,
		do func(context.Context, []byte, url.Values) (any, error)) {
		op := strings.TrimPrefix(path, "/")
		mux.Handle(path, web.Rules{method: rule}, func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), deadline)
			defer cancel()
			var out any
			body, err := open(w, r, method)
			if err == nil {
				out, err = do(ctx, body, r.URL.Query())
			}
			if dump, is := out.(*Dump); is {
				var begun bool
				if begun, err = dump.Stream(r.Context(), w); begun || err == nil {
					cfg.Ended(op, Streamed(r, err))
					AbortAfter(err)
					return
				}
			}
			status, e := statusOf(err)
			if e != nil {
				out = map[string]string{"error": e.Message, "code": string(e.Code)}
			} else {
				status = good
			}
			text, err := json.Marshal(out)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			cfg.Ended(op, web.Reply(w, r, api.JSON, text, status, e.Outcome()))
		})
	}
	handle(http.MethodPost, "/register", web.Registers, http.StatusCreated, cfg.register)
	handle(http.MethodPost, "/unregister", web.Removes, http.StatusOK, cfg.unregister)
	handle(http.MethodGet, "/workers", web.Reads, http.StatusOK, cfg.workers)
	for path, byHash := range map[string]bool{"/query": false, "/query_by_hash": true} {
		handle(http.MethodPost, path, web.Reads, http.StatusOK,
			func(ctx context.Context, body []byte, _ url.Values) (any, error) { return cfg.query(ctx, body, byHash) })
	}
	handle(http.MethodPost, "/overlap_scores", web.Reads, http.StatusOK, cfg.overlapScores)
	handle(http.MethodGet, "/dump", web.Rule{Needs: rights.Operate, Cost: web.Costly}, http.StatusOK, cfg.dump)
	health := web.Rules{http.MethodGet: {Needs: rights.Any, Cost: web.Probe}}
	mux.Handle("/health", health, func(w http.ResponseWriter, r *http.Request) {
		if !web.Allowed(w, r, http.MethodGet) {
			http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
		}
	})
}

// Streamed returns the outcome of a request with a streamed reply. err is the error of the last write.
func Streamed(r *http.Request, err error) string {
	if err != nil {
		return web.CutOff(r, err)
	}
	return ops.OK
}

// AbortAfter closes the connection after an error in the middle of a reply. The client then detects the incomplete
// reply.
func AbortAfter(err error) {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

// open reads the body of a request. As in Dynamo, a POST request must have a JSON Content-Type, because a web page may
// send a request without that header to any address.
func open(w http.ResponseWriter, r *http.Request, method string) ([]byte, error) {
	if !web.Allowed(w, r, method) {
		return nil, web.WrongMethod(r, method)
	}
	if method == http.MethodGet {
		return nil, nil
	}
	header := r.Header.Get("Content-Type")
	if form, known := api.ContentType(header); header == "" || !known || form != api.JSON {
		return nil, api.Errorf(api.CodeWrongContentType,
			"Content-Type is %.40q; send the header \"Content-Type: %s\"", header, api.JSON)
	}
	body, failure := web.ReadBody(w, r, api.MaxBody)
	if failure != nil {
		return nil, failure
	}
	return body, nil
}

// statusOf converts an error to the status and the error for clients. Without an error, the error is nil.
func statusOf(err error) (int, *api.Error) {
	switch f, is := errors.AsType[*failure](err); {
	case err == nil:
		return http.StatusOK, nil
	case is:
		return f.status, f.why
	}
	e := AsError(err)
	return e.Code.HTTPStatus(), e
}

// AsError converts an error of [Shims], or of the services behind, to the error for clients. err is not nil.
func AsError(err error) *api.Error {
	switch e, is := errors.AsType[*api.Error](err); {
	case is:
		return e
	case errors.Is(err, ErrExists):
		return api.Errorf(api.CodeRegistered, "%v", err)
	case errors.Is(err, ErrMismatch):
		return api.Errorf(api.CodeBlockSizeMismatch, "%v", err)
	case errors.Is(err, ErrUnknown):
		return api.Errorf(api.CodeUnknownWorker, "%v", err)
	case errors.Is(err, ErrBad):
		return api.Errorf(api.CodeMalformed, "%v", err)
	}
	return api.Errorf(api.CodeUnavailable, "%v", err)
}

// read decodes a request and checks for the required fields.
func read(body []byte, need ...string) (*request, error) {
	req := &request{}
	if err := ReadFields(body, &words, req.fields()...); err != nil {
		return nil, err
	}
	for _, name := range need {
		missing := map[string]bool{
			"instance_id": req.Instance == nil, "endpoint": req.Endpoint == "", "model_name": req.Model == nil,
			"block_size": req.Size == nil,
			"token_ids":  req.Tokens == nil, "block_hashes": req.Hashes == nil,
		}[name]
		if missing {
			return nil, fail(http.StatusUnprocessableEntity, api.CodeMalformed, "missing field `%s`", name)
		}
	}
	return req, nil
}

// group returns the routing group of a request, or DefaultGroup.
func (r *request) group() string {
	if r.Group == nil || *r.Group == "" {
		return DefaultGroup
	}
	return *r.Group
}

// ModelOf returns the index name of a model in a routing group.
func ModelOf(model, group string) string {
	if group == DefaultGroup {
		return model
	}
	return model + ":" + group
}

// NameOf returns the model's name in the registration.
func NameOf(r registry.Record) string {
	if r.Engine.Group == DefaultGroup {
		return r.Model
	}
	return strings.TrimSuffix(r.Model, ":"+r.Engine.Group)
}

var ok = map[string]string{"status": "ok"}

func (cfg *Config) register(ctx context.Context, body []byte, _ url.Values) (any, error) {
	req, err := read(body, "instance_id", "endpoint", "model_name", "block_size")
	if err != nil {
		return nil, err
	}
	if req.Type == "" {
		req.Type = "auto"
	}
	record := registry.Record{
		Instance: events.WorkerID(*req.Instance), Model: ModelOf(*req.Model, req.group()), BlockSize: *req.Size,
		Source: strings.ToLower(req.Type),
		Engine: &registry.Engine{Endpoint: req.Endpoint, Replay: req.Replay,
			Group: req.group()}, L3: req.L3, KVGroups: req.KV, Worker: req.Record,
	}
	if req.L3 != nil {
		if err := req.L3.Check(); err != nil {
			return nil, fail(http.StatusBadRequest, api.CodeMalformed, "l3: %v", err)
		}
	}
	if req.Rank != nil {
		record.Rank = *req.Rank
	}
	if err := cfg.Shims.Register(ctx, record); err != nil {
		return nil, err
	}
	cfg.Shims.notePassed(record.Key(), req.passed)
	return ok, nil
}

// unregister removes an instance. Without a routing group, the instance is removed from all groups.
func (cfg *Config) unregister(ctx context.Context, body []byte, _ url.Values) (any, error) {
	req, err := read(body, "instance_id", "model_name")
	if err != nil {
		return nil, err
	}
	which := func(r registry.Record) bool {
		return NameOf(r) == *req.Model && (req.Group == nil || r.Engine.Group == req.group()) &&
			(req.Rank == nil || r.Rank == *req.Rank)
	}
	if err := cfg.Shims.Unregister(ctx, events.WorkerID(*req.Instance), which, nil); err != nil {
		return nil, err
	}
	return ok, nil
}

type listener struct {
	Endpoint string `json:"endpoint"`
	Status   string `json:"status"`
}

type worker struct {
	Instance  ID                  `json:"instance_id"`
	Source    string              `json:"source"`
	Status    string              `json:"status"`
	Model     string              `json:"model_name"`
	Group     string              `json:"routing_group"`
	Size      uint32              `json:"block_size"`
	Endpoints map[string]string   `json:"endpoints"`
	Listeners map[string]listener `json:"listeners"`
}

func (cfg *Config) workers(_ context.Context, _ []byte, asked url.Values) (any, error) {
	model, group := asked.Get("model_name"), asked.Get("routing_group")
	list := []*worker{}
	for _, l := range cfg.Shims.Listeners() {
		rec := l.Record
		name := NameOf(rec)
		if model != "" && model != name || group != "" && group != rec.Engine.Group {
			continue
		}
		status := "active"
		if !l.Connected {
			status = "pending"
		}
		n := len(list)
		if n == 0 || list[n-1].Instance != ID(rec.Instance) || list[n-1].Model != name ||
			list[n-1].Group != rec.Engine.Group {
			list = append(list, &worker{
				Instance: ID(rec.Instance), Source: "zmq", Status: status, Model: name, Group: rec.Engine.Group,
				Size:      rec.BlockSize,
				Endpoints: map[string]string{}, Listeners: map[string]listener{},
			})
			n++
		}
		w, rank := list[n-1], strconv.FormatUint(uint64(rec.Rank), 10)
		w.Endpoints[rank], w.Listeners[rank] = rec.Engine.Endpoint, listener{rec.Engine.Endpoint, status}
		if status != "active" {
			w.Status = status
		}
	}
	return list, nil
}

type instance struct {
	Longest uint64            `json:"longest_matched"`
	GPU     uint64            `json:"gpu"`
	DP      map[string]uint64 `json:"dp"`
	CPU     uint64            `json:"cpu"`
	Disk    uint64            `json:"disk"`
}

type scores struct {
	Scores      map[string]map[string]uint64 `json:"scores"`
	Frequencies []uint64                     `json:"frequencies"` // always empty, as in Dynamo
	Instances   map[string]*instance         `json:"instances"`
}

func (cfg *Config) query(ctx context.Context, body []byte, byHash bool) (any, error) {
	need := "token_ids"
	if byHash {
		need = "block_hashes"
	}
	req, err := read(body, need, "model_name")
	if err != nil {
		return nil, err
	}
	if byHash && req.Salt != "" {
		return nil, fail(http.StatusBadRequest, api.CodeMalformed,
			"cache_salt is not accepted by /query_by_hash; block_hashes must already include the intended cache salt")
	}
	answer, err := cfg.find(ctx, req, byHash, false)
	if err != nil {
		return nil, err
	}
	out := &scores{Scores: map[string]map[string]uint64{}, Frequencies: []uint64{}, Instances: map[string]*instance{}}
	size := uint64(answer.BlockSize)
	for i := range answer.Workers {
		o := answer.Workers[i].WithGuess()
		name, rank := string(o.Instance), strconv.FormatUint(uint64(o.Rank), 10)
		in := out.Instances[name]
		if in == nil {
			in = &instance{DP: map[string]uint64{}}
			out.Instances[name] = in
		}
		gpu, cpu, disk := uint64(o.Device)*size, uint64(o.Device+o.Host)*size, uint64(o.Total())*size
		in.GPU, in.CPU, in.Disk = max(in.GPU, gpu), max(in.CPU, cpu), max(in.Disk, disk)
		in.Longest = max(in.Longest, disk)
		if gpu > 0 {
			in.DP[rank] = gpu
			if out.Scores[name] == nil {
				out.Scores[name] = map[string]uint64{}
			}
			out.Scores[name][rank] = gpu
		}
	}
	return out, nil
}

// find queries the index for the workers of the request's model. The answer must be complete. A registered model
// without events has an empty answer. all adds ranks without blocks and all blocks of a shared store.
func (cfg *Config) find(ctx context.Context, req *request, byHash, all bool) (*api.Answer, error) {
	of, err := cfg.Resolve.Resolve(ModelOf(*req.Model, req.group()), req.LoRA)
	if err != nil {
		return nil, err
	}
	model := of.Model
	q := &api.Query{Model: model, Tokens: req.Tokens, LoRA: of.LoRA, CacheSalt: req.Salt}
	if byHash {
		q = &api.Query{Model: model, Hashes: req.Hashes}
	}
	if !byHash && slices.ContainsFunc(req.Media, func(m *media) bool { return m != nil && len(m.Objects) > 0 }) {
		q, err = cfg.hashed(ctx, q, req.Media)
	}
	var answer *api.Answer
	if err == nil {
		if q.Idle = all; all {
			q.L3 = api.L3All
		}
		answer, err = cfg.Server.Find(ctx, q)
	}
	switch {
	case api.HasCode(err, api.CodeUnknownModel):
		for _, l := range cfg.Shims.Listeners() {
			if l.Record.Model == model {
				blocks := len(req.Hashes)
				if !byHash {
					blocks = len(req.Tokens) / int(max(l.Record.BlockSize, 1))
				}
				return &api.Answer{Model: model, BlockSize: l.Record.BlockSize, Blocks: blocks, Complete: true}, nil
			}
		}
		return nil, fail(http.StatusNotFound, api.CodeUnknownModel,
			"no indexer for model=%s routing_group=%s", *req.Model, req.group())
	case err != nil:
		return nil, err
	case !answer.Complete:
		return nil, fail(http.StatusServiceUnavailable, api.CodeNotReady,
			"a node of the cluster did not answer for every worker of the model; see GET /v1/status")
	}
	return answer, nil
}

// hashed converts a query with multimodal items to a query by block hashes, because a query by tokens has no items. A
// first query reads the hash mode of the model's workers.
func (cfg *Config) hashed(ctx context.Context, q *api.Query, items []*media) (*api.Query, error) {
	known, err := cfg.Server.Find(ctx, &api.Query{Model: q.Model, Hashed: []api.Hashed{{}}, L3: api.L3Off})
	if err != nil {
		return nil, err
	}
	if len(known.Lookaheads) == 0 {
		known.Lookaheads = []uint32{0}
	}
	by := &api.Query{Model: q.Model, BlockSize: known.BlockSize}
	for _, lookahead := range known.Lookaheads {
		space := events.Space{LoRA: q.LoRA, Salt: q.CacheSalt}
		hashes, err := hashMedia(known.BlockSize, lookahead, space, q.Tokens, items)
		if err != nil {
			return nil, err
		}
		by.Hashed = append(by.Hashed, api.Hashed{Lookahead: lookahead, Hashes: hashes})
	}
	return by, nil
}

// hashMedia hashes the whole blocks of a prompt with multimodal items.
func hashMedia(
	blockSize, lookahead uint32, space events.Space, tokens api.Tokens, items []*media,
) (api.Hashes, error) {
	of := make([][]events.BlockMedia, len(items))
	for i, m := range items {
		if m != nil {
			of[i] = BlockMedia(m.Objects)
		}
	}
	hasher, err := events.NewLookaheadHasher(blockSize, lookahead, space)
	if err != nil {
		return nil, err
	}
	hashes := api.Hashes{}
	for _, local := range hasher.HashMedia(nil, tokens, of) {
		hashes = append(hashes, uint64(local))
	}
	return hashes, nil
}
