package compat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Config is what the handler is made of.
type Config struct {
	Indexer api.Indexer
	Shims   *Shims

	// Dump writes what all workers hold as router events, one JSON object a line.
	Dump func(ctx context.Context, out io.Writer) error

	Deadline time.Duration // of a request; default 10 s
}

// defaultGroup is the routing group of who names none.
const defaultGroup = "default"

// id is an instance id: a number or a string.
type id string

func (i *id) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, (*string)(i))
	}
	if _, err := strconv.ParseInt(string(data), 10, 64); err == nil {
		*i = id(data)
		return nil
	}
	if _, err := strconv.ParseUint(string(data), 10, 64); err != nil {
		return fmt.Errorf("instance_id is %.40s, neither a whole number nor a string", data)
	}
	*i = id(data)
	return nil
}

// MarshalJSON writes a number where it is one.
func (i id) MarshalJSON() ([]byte, error) {
	if n, err := strconv.ParseUint(string(i), 10, 64); err == nil && strconv.FormatUint(n, 10) == string(i) {
		return []byte(i), nil
	}
	return json.Marshal(string(i))
}

// request has the fields of all requests.
type request struct {
	Instance *id          `json:"instance_id"`
	Endpoint string       `json:"endpoint"`
	Model    *string      `json:"model_name"`
	Size     *uint32      `json:"block_size"`
	Group    string       `json:"routing_group"`
	Rank     *events.Rank `json:"dp_rank"`
	Replay   string       `json:"replay_endpoint"`
	Snapshot string       `json:"snapshot_endpoint"`
	Type     string       `json:"type"`
	Tokens   api.Tokens   `json:"token_ids"`
	Hashes   api.Hashes   `json:"block_hashes"`
	LoRA     string       `json:"lora_name"`
	Salt     string       `json:"cache_salt"`

	L3 *hicache.Config `json:"l3"`        // ours: how the worker uses a shared store
	KV string          `json:"kv_groups"` // ours: as worker-shim's --kv-groups
}

// failure is an error with its status.
type failure struct {
	status int
	text   string
}

func (f *failure) Error() string { return f.text }

func fail(status int, format string, args ...any) error {
	return &failure{status, fmt.Sprintf(format, args...)}
}

// NewHandler returns what answers a client of Dynamo's standalone indexer or of Mooncake's conductor.
func NewHandler(cfg Config) http.Handler {
	if cfg.Deadline <= 0 {
		cfg.Deadline = 10 * time.Second
	}
	mux := http.NewServeMux()
	handle := func(pattern string, good int, do func(context.Context, *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), cfg.Deadline)
			defer cancel()
			r.Body = http.MaxBytesReader(w, r.Body, api.MaxBody)
			out, err := do(ctx, r)
			status := good
			if err != nil {
				status, out = statusOf(err), map[string]string{"error": err.Error()}
			}
			body, err := json.Marshal(out)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", api.JSON)
			w.WriteHeader(status)
			w.Write(body) // an error means that the caller has gone
		})
	}
	handle("POST /register", http.StatusCreated, cfg.register)
	handle("POST /unregister", http.StatusOK, cfg.unregister)
	handle("GET /workers", http.StatusOK, cfg.workers)
	handle("POST /query", http.StatusOK, func(ctx context.Context, r *http.Request) (any, error) { return cfg.query(ctx, r, false) })
	handle("POST /query_by_hash", http.StatusOK, func(ctx context.Context, r *http.Request) (any, error) { return cfg.query(ctx, r, true) })
	handle("GET /dump", http.StatusOK, cfg.dump)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	return mux
}

// Patterns are the paths that [NewHandler] answers.
var Patterns = []string{"/register", "/unregister", "/workers", "/query", "/query_by_hash", "/dump", "/health"}

func statusOf(err error) int {
	var f *failure
	var e *api.Error
	switch {
	case errors.As(err, &f):
		return f.status
	case errors.As(err, &e):
		return e.Code.HTTPStatus()
	case errors.Is(err, ErrExists), errors.Is(err, ErrMismatch):
		return http.StatusConflict
	case errors.Is(err, ErrUnknown):
		return http.StatusNotFound
	case errors.Is(err, ErrBad):
		return http.StatusBadRequest
	}
	return http.StatusServiceUnavailable
}

// read decodes a request and demands the fields that are named.
func read(r *http.Request, need ...string) (*request, error) {
	req := &request{}
	data, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, fail(http.StatusRequestEntityTooLarge, "read the body: %v", err)
	}
	if !json.Valid(data) {
		return nil, fail(http.StatusBadRequest, "the body is not JSON")
	}
	if err := json.Unmarshal(data, req); err != nil {
		return nil, fail(http.StatusUnprocessableEntity, "the body is not the JSON that it should be: %v", err)
	}
	for _, name := range need {
		missing := map[string]bool{
			"instance_id": req.Instance == nil, "endpoint": req.Endpoint == "", "model_name": req.Model == nil, "block_size": req.Size == nil,
			"token_ids": req.Tokens == nil, "block_hashes": req.Hashes == nil,
		}[name]
		if missing {
			return nil, fail(http.StatusUnprocessableEntity, "missing field `%s`", name)
		}
	}
	if req.Group == "" {
		req.Group = defaultGroup
	}
	return req, nil
}

// modelOf is how a model of a routing group is called in the index.
func modelOf(model, group string) string {
	if group == defaultGroup {
		return model
	}
	return model + ":" + group
}

var ok = map[string]string{"status": "ok"}

func (cfg *Config) register(ctx context.Context, r *http.Request) (any, error) {
	req, err := read(r, "instance_id", "endpoint", "model_name", "block_size")
	if err != nil {
		return nil, err
	}
	if req.Type == "" {
		req.Type = "auto"
	}
	record := registry.Record{
		Instance: events.WorkerID(*req.Instance), Model: modelOf(*req.Model, req.Group), BlockSize: *req.Size, Source: strings.ToLower(req.Type),
		Engine: &registry.Engine{Endpoint: req.Endpoint, Replay: req.Replay, Snapshot: req.Snapshot, Group: req.Group}, L3: req.L3, KVGroups: req.KV,
	}
	if req.L3 != nil {
		if err := req.L3.Check(); err != nil {
			return nil, fail(http.StatusBadRequest, "l3: %v", err)
		}
	}
	if req.Rank != nil {
		record.Rank = *req.Rank
	}
	if err := cfg.Shims.Register(ctx, record); err != nil {
		return nil, err
	}
	return ok, nil
}

func (cfg *Config) unregister(ctx context.Context, r *http.Request) (any, error) {
	req, err := read(r, "instance_id", "model_name")
	if err != nil {
		return nil, err
	}
	if err := cfg.Shims.Unregister(ctx, events.WorkerID(*req.Instance), modelOf(*req.Model, req.Group), req.Rank); err != nil {
		return nil, err
	}
	return ok, nil
}

type listener struct {
	Endpoint string `json:"endpoint"`
	Status   string `json:"status"`
}

type worker struct {
	Instance  id                  `json:"instance_id"`
	Source    string              `json:"source"`
	Status    string              `json:"status"`
	Model     string              `json:"model_name"`
	Group     string              `json:"routing_group"`
	Size      uint32              `json:"block_size"`
	Endpoints map[string]string   `json:"endpoints"`
	Listeners map[string]listener `json:"listeners"`
}

func (cfg *Config) workers(_ context.Context, r *http.Request) (any, error) {
	model, group := r.URL.Query().Get("model_name"), r.URL.Query().Get("routing_group")
	list := []*worker{}
	for _, l := range cfg.Shims.Listeners() {
		rec := l.Record
		name := rec.Model
		if rec.Engine.Group != defaultGroup {
			name = name[:len(name)-len(rec.Engine.Group)-1]
		}
		if model != "" && model != name || group != "" && group != rec.Engine.Group {
			continue
		}
		status := "active"
		if !l.Connected {
			status = "pending"
		}
		n := len(list)
		if n == 0 || list[n-1].Instance != id(rec.Instance) || list[n-1].Model != name || list[n-1].Group != rec.Engine.Group {
			list = append(list, &worker{
				Instance: id(rec.Instance), Source: "zmq", Status: status, Model: name, Group: rec.Engine.Group, Size: rec.BlockSize,
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

func (cfg *Config) query(ctx context.Context, r *http.Request, byHash bool) (any, error) {
	need := "token_ids"
	if byHash {
		need = "block_hashes"
	}
	req, err := read(r, need, "model_name")
	if err != nil {
		return nil, err
	}
	model := modelOf(*req.Model, req.Group)
	q := &api.Query{Model: model, Tokens: req.Tokens, LoRA: req.LoRA, CacheSalt: req.Salt}
	if byHash {
		if req.Salt != "" {
			return nil, fail(http.StatusBadRequest, "cache_salt is not accepted by /query_by_hash; block_hashes must already include the intended cache salt")
		}
		q = &api.Query{Model: model, Hashes: req.Hashes}
	}
	out := &scores{Scores: map[string]map[string]uint64{}, Frequencies: []uint64{}, Instances: map[string]*instance{}}
	answer, err := cfg.Indexer.Find(ctx, q)
	var e *api.Error
	switch {
	case errors.As(err, &e) && e.Code == api.CodeUnknownModel:
		for _, l := range cfg.Shims.Listeners() {
			if l.Record.Model == model {
				return out, nil // it has said nothing yet
			}
		}
		return nil, fail(http.StatusNotFound, "no indexer for model=%s routing_group=%s", *req.Model, req.Group)
	case err != nil:
		return nil, err
	case !answer.Complete:
		return nil, fail(http.StatusServiceUnavailable, "not every worker of the model could be looked at; see GET /v1/status")
	}
	size := uint64(answer.BlockSize)
	for _, o := range answer.Workers {
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

type dumped struct {
	Size   uint32            `json:"block_size"`
	Events []json.RawMessage `json:"events"`
}

// dump has snapshots written and reads them back: what it tells is what the log said a moment ago.
func (cfg *Config) dump(ctx context.Context, _ *http.Request) (any, error) {
	list, err := cfg.Indexer.Workers(ctx, api.WorkersRequest{})
	if err != nil {
		return nil, err
	}
	if _, err := cfg.Indexer.Snapshot(ctx); err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := cfg.Dump(ctx, &text); err != nil {
		return nil, err
	}
	out, models := map[string]*dumped{}, map[id]*dumped{}
	named := maps.Collect(func(yield func(string, string) bool) {
		for _, l := range cfg.Shims.Listeners() {
			if l.Record.Engine.Group != defaultGroup && !yield(l.Record.Model, l.Record.Model) {
				return
			}
		}
	})
	for _, w := range list.Workers {
		key := w.Model + ":" + defaultGroup
		if full, grouped := named[w.Model]; grouped {
			key = full
		}
		if out[key] == nil {
			out[key] = &dumped{Size: w.BlockSize, Events: []json.RawMessage{}}
		}
		models[id(w.Instance)] = out[key]
	}
	for _, line := range bytes.Split(bytes.TrimSpace(text.Bytes()), []byte{'\n'}) {
		var of struct {
			Worker id `json:"worker_id"`
		}
		if json.Unmarshal(line, &of) == nil && models[of.Worker] != nil {
			models[of.Worker].Events = append(models[of.Worker].Events, json.RawMessage(line))
		}
	}
	return out, nil
}
