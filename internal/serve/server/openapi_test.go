package server

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var update = flag.Bool("update", false, "write openapi.json anew")

// always are the possible error codes of all operations.
var always = []api.Code{api.CodeMalformed, api.CodeUnauthorized, api.CodeForbidden, api.CodeUnknownOperation,
	api.CodeWrongMethod, api.CodeRequestTimeout, api.CodeTooLarge, api.CodeWrongContentType, api.CodeBusy,
	api.CodeInternal, api.CodeNotReady, api.CodeUnavailable, api.CodeBehind}

// needs are the required fields of requests, by type.
var needs = map[string][]string{
	"Query": {"model"}, "SelectRequest": {"model"}, "BookRequest": {"model", "request_id"},
	"RequestRef": {"model", "request_id"}, "PotentialRequest": {"model"}, "FunnelRequest": {"model"},
	"Report":             {"request_id"},
	"WorkerRegistration": {"instance", "model", "block_size"},
	"PrefixesRequest":    {"model"},
	"RecordedRequest":    {"model"},
	"CapacityRequest":    {"model"},
	"PartitionSeq":       {"partition", "seq"}, "EngineLoad": {"worker"},
	"MediaItem": {"hash", "offset", "length"},
}

// limits are further restrictions of request fields, by name or by type and name.
var limits = map[string]object{
	"model": {"minLength": 1}, "block_size": {"minimum": 1}, "deadline_ms": {"minimum": 1},
	"l3_timeout_ms": {"minimum": 1}, "hashed": {"minItems": 1, "maxItems": 16}, "workers": {"minItems": 1},
	"ranks": {"minItems": 1}, "endpoints": {"minItems": 1}, "partitions": {"minItems": 1}, "messages": {"minItems": 1},
	"LoadsRequest.model":            {"minLength": 0},
	"request_id":                    {"minLength": 1, "maxLength": api.MaxRequestID},
	"SelectRequest.request_id":      {"minLength": 0},
	"session_id":                    {"maxLength": api.MaxSessionID},
	"isl_tokens":                    {"maximum": api.MaxISL},
	"effective_prefill_tokens":      {"maximum": int64(math.MaxInt64)},
	"cached_tokens":                 {"maximum": api.MaxISL},
	"decay_fraction":                {"minimum": 0, "maximum": 1},
	"limit":                         {"minimum": 0, "maximum": math.MaxInt32},
	"PrefixesRequest.limit":         {"minimum": 1, "maximum": api.MaxPrefixes},
	"RecordedRequest.limit":         {"minimum": 1, "maximum": api.MaxRecorded},
	"loads":                         {"maxItems": api.MaxEngineLoads},
	"media":                         {"maxItems": api.MaxMedia},
	"MediaItem.length":              {"minimum": 1},
	"WorkerRegistration.instance":   {"minLength": 1, "maxLength": 255},
	"WorkerRegistration.model":      {"minLength": 1, "maxLength": 255},
	"WorkerRegistration.block_size": {"minimum": 1, "maximum": events.MaxBlockSize},
	"endpoint":                      {"minLength": 1, "maxLength": 2048},
	"stable_routing_id":             {"minLength": 1, "maxLength": 255},
	"rank_size":                     {"minimum": 1, "maximum": api.MaxWorkerRanks},
	"total_kv_blocks":               {"minimum": 1, "maximum": 1 << 53},
	"max_num_batched_tokens":        {"minimum": 1, "maximum": 1 << 53},
	"taints":                        {"maxItems": 64, "items": shortText},
	"lora_adapters":                 {"maxItems": 1024, "items": shortText},
	"served_model_names":            {"maxItems": 64, "items": shortText},
	"topology_domains":              {"maxProperties": 64},
	"events":                        {"enum": []any{api.EventsNone}},
	"api":                           {"enum": apis},
	"events_endpoint":               {"minLength": 1}, "replay_endpoint": {"minLength": 1},
	"source":                           {"minLength": 1},
	"why":                              {"maxLength": 255},
	"EngineLoad.worker":                {"minLength": 1},
	"EngineLoad.kv_used_blocks":        {"maximum": events.MaxEngineCount},
	"EngineLoad.kv_total_blocks":       {"maximum": events.MaxEngineCount},
	"EngineLoad.active_decode_blocks":  {"maximum": events.MaxEngineCount},
	"EngineLoad.active_prefill_tokens": {"maximum": events.MaxEngineCount},
}

var apis = []any{"completions", "chat", "responses", "messages", "embeddings", "score", "rerank"}

var shortText = object{"type": "string", "minLength": 1, "maxLength": 255}

// alsoTaken are accepted fields without a Go field: Dynamo's older metrics.
var alsoTaken = map[string]object{
	"kv_active_blocks": {"type": "integer", "minimum": 0, "maximum": events.MaxEngineCount,
		"description": "another name of kv_used_blocks"},
	"request_active_slots": passedOver, "request_total_slots": passedOver, "num_requests_waiting": passedOver,
	"gpu_cache_usage_perc": passedOver, "gpu_prefix_cache_hit_rate": passedOver,
}

var passedOver = object{"type": "number", "description": "of Dynamo's ForwardPassMetrics; nothing follows from it"}

// document makes the document.
func document(t *testing.T) object {
	s := &schemas{readComments(t, "api", "events", "routing"), object{}}
	codes := map[api.Code]string{}
	for _, c := range s.constants["api.Code"] {
		codes[api.Code(c.value)] = c.comment
	}
	s.component(reflect.TypeFor[api.ErrorBody]())
	paths, shared, used := object{}, object{}, map[api.Code]bool{}
	at := func(path string) object {
		if paths[path] == nil {
			paths[path] = object{}
		}
		return paths[path].(object)
	}
	failures := func(list []api.Code) object {
		byStatus := map[int][]api.Code{}
		for _, code := range list {
			used[code] = true
			byStatus[code.HTTPStatus()] = append(byStatus[code.HTTPStatus()], code)
		}
		answers := object{}
		for status, list := range byStatus {
			slices.Sort(list)
			name := strconv.Itoa(status) + "_" + strings.Join(texts(list), "_")
			shared[name] = failure(status, list, codes)
			answers[strconv.Itoa(status)] = object{"$ref": "#/components/responses/" + name}
		}
		return answers
	}
	for _, r := range routes {
		op := r.op
		described := object{"operationId": op.Name, "summary": op.Summary,
			"parameters": []any{object{"$ref": "#/components/parameters/Deadline"}}}
		if len(op.Routes) > 1 && r.Method == http.MethodPost {
			described["operationId"] = op.Name + "_post"
		}
		if strings.Contains(r.Path, "{instance}") {
			described["parameters"] = append(described["parameters"].([]any),
				object{"$ref": "#/components/parameters/Instance"})
		}
		for _, name := range op.Parameters {
			described["parameters"] = append(described["parameters"].([]any), object{"name": name, "in": "query",
				"schema": object{"type": "string"}})
		}
		schema := object{"type": []string{"object", "null"}, "additionalProperties": false}
		if op.Request != nil {
			name := cmp.Or(op.Schema, op.Request.Name())
			schema = s.request(t, op.Request, probe{op.Name, func(all string) string { return all }}, needs[op.Request.Name()])
			if op.Empty {
				schema = orNull(schema)
			}
			s.components[name] = schema
			schema = object{"$ref": "#/components/schemas/" + name}
		}
		described["requestBody"] = object{"required": !op.Empty, "content": both(schema)}
		answers := failures(append(slices.Clone(always), op.Codes...))
		answers["200"] = object{"description": "the answer", "content": both(s.answer(op.Answer))}
		described["responses"] = answers
		at(r.Path)[strings.ToLower(r.Method)] = described
	}
	common := []api.Code{api.CodeUnauthorized, api.CodeForbidden, api.CodeWrongMethod}
	plain := func(path, op, summary string, codes ...api.Code) object {
		answers := failures(codes)
		answers["200"] = object{"description": summary, "content": object{"text/plain": object{
			"schema": object{"type": "string"}}}}
		described := object{"operationId": op, "summary": summary, "responses": answers}
		at(path)["get"] = described
		return described
	}
	plain("/healthz", "healthz", "The process runs", api.CodeWrongMethod)["security"] = []any{}
	ready := plain("/readyz", "readyz", "The node is ready; the body lists parts that its answers lack",
		api.CodeWrongMethod)
	ready["security"] = []any{}
	ready["responses"].(object)["503"] = object{"description": "The node is not ready; the body has the reason",
		"content": object{"text/plain": object{"schema": object{"type": "string"}}}}
	metrics := plain("/metrics", "metrics", "For Prometheus", append(common, api.CodeInternal)...)
	metrics["parameters"] = []any{object{"name": "name[]", "in": "query", "description": "names of the returned " +
		"metrics; default all", "schema": object{"type": "array", "items": object{"type": "string"}}}}
	for _, status := range []string{"500"} { // the library's own text
		metrics["responses"].(object)[status] = object{"description": "metrics cannot be gathered",
			"content": object{"text/plain": object{"schema": object{"type": "string"}}}}
	}
	watch := plain("/v1/watch", "watch", "Server-sent events: `"+api.EventFleet+"` has the state of all ranks, and "+
		"later the changes, once a second or less often; `"+api.EventCluster+"` has the status of all nodes. The "+
		"data of each is JSON",
		append(common, api.CodeBusy)...)
	s.answer(reflect.TypeFor[api.FleetEvent]())
	s.answer(reflect.TypeFor[api.ClusterEvent]())
	watch["responses"].(object)["200"].(object)["content"] = object{"text/event-stream": object{
		"schema": object{"type": "object", "description": "one event", "required": []any{"event", "data"},
			"properties": object{"event": object{"enum": []any{api.EventFleet, api.EventCluster}},
				"data": object{"type": "string", "contentMediaType": api.JSON}}}}}
	plain("/v1/kv_indexer.proto", "proto", "The service that the gRPC port has for SGLang's router, as a .proto file",
		append(common, api.CodeBusy)...)
	self := plain("/v1/openapi.json", "openapi", "This document", append(common, api.CodeBusy)...)
	self["responses"].(object)["200"].(object)["content"] = object{api.JSON: object{"schema": object{"type": "object"}}}
	for code := range codes {
		if !used[code] {
			t.Errorf("no path answers with %s", code)
		}
	}
	return object{
		"openapi": "3.1.0",
		"info": object{"title": "kvatlas", "version": "1", "description": "Which worker holds how much of a prompt's KV " +
			"cache, and in which tier. A request has at most " + fmt.Sprint(api.MaxBody) + " bytes. A null " +
			"field counts as absent; an unknown field is refused. 64-bit numbers may be text in decimal digits. " +
			"Answers may have further fields in a later version. The paths of other indexers on the same port are in " +
			"docs/compatibility.md."},
		"servers":  []any{object{"url": "/"}},
		"security": []any{object{"token": []any{}}, object{}},
		"paths":    paths,
		"components": object{
			"securitySchemes": object{"token": object{"type": "http", "scheme": "bearer",
				"description": "where the indexer runs with --http-token-file"}},
			"parameters": object{
				"Deadline": object{"name": rpc.HeaderDeadline, "in": "header", "description": "how many milliseconds the " +
					"answer may take; default and most " + fmt.Sprint(ops.Deadline.Milliseconds()),
					"schema": object{"type": "integer", "minimum": 1}},
				"Instance": object{"name": "instance", "in": "path", "required": true, "description": "the worker",
					"schema": object{"type": "string", "minLength": 1}},
			},
			"responses": shared, "schemas": s.components,
		},
	}
}

func texts(codes []api.Code) (list []string) {
	for _, code := range codes {
		list = append(list, string(code))
	}
	return list
}

// both returns the content types of requests and answers. An answer has the content type of the request.
func both(schema object) object {
	return object{api.JSON: object{"schema": schema}, api.MsgPack: object{"schema": schema}}
}

// failure returns an error answer with a code from the list.
func failure(status int, list []api.Code, codes map[api.Code]string) object {
	var said []string
	for _, code := range list {
		said = append(said, fmt.Sprintf("`%s`: %s", code, codes[code]))
	}
	f := object{"description": strings.Join(said, "; "), "content": both(object{"allOf": []any{
		object{"$ref": "#/components/schemas/ErrorBody"},
		object{"properties": object{"error": object{"properties": object{"code": object{"enum": list}}}}},
	}})}
	text := object{"type": "string"}
	switch status {
	case http.StatusUnauthorized:
		f["headers"] = object{"WWW-Authenticate": object{"required": true, "schema": text}}
	case http.StatusMethodNotAllowed:
		f["headers"] = object{"Allow": object{"required": true, "schema": text}}
	}
	return f
}

// TestOpenAPI checks that the document is equal to the types, their comments and the readers of requests.
func TestOpenAPI(t *testing.T) {
	want, err := json.MarshalIndent(document(t), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile("openapi.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		openAPI = want
	}
	if !bytes.Equal(openAPI, want) {
		t.Error("openapi.json differs from the code; rewrite with go generate ./internal/serve/server")
	}
}

// TestOpenAPIHasJSONNames checks that no description contains nil or the Go name of a field with two words.
func TestOpenAPIHasJSONNames(t *testing.T) {
	names := readComments(t, "api", "events", "routing").named
	for line := range strings.Lines(string(openAPI)) {
		said, is := strings.CutPrefix(strings.TrimSpace(line), `"description": `)
		for _, word := range regexp.MustCompile(`\w+`).FindAllString(said, -1) {
			if is && (word == "nil" || names[word] != "") {
				t.Errorf("%s in %s", word, said)
			}
		}
	}
}

// TestOpenAPIHasAllPaths checks that the document has all paths and methods of the HTTP port, except other indexers'
// paths.
func TestOpenAPIHasAllPaths(t *testing.T) {
	var described struct{ Paths map[string]map[string]any }
	if err := json.Unmarshal(openAPI, &described); err != nil {
		t.Fatal(err)
	}
	mux, others := web.NewMux(), web.NewMux()
	s := &Server{scrape: http.NotFoundHandler()}
	s.register(mux, &httpFront{ended: func(string, string) {}})
	compat.Register(others, compat.Config{})
	served := mux.Routes()
	maps.DeleteFunc(served, func(path string, _ web.Rules) bool { return others.Routes()[path] != nil })
	if a, b := slices.Sorted(maps.Keys(served)), slices.Sorted(maps.Keys(described.Paths)); !slices.Equal(a, b) {
		t.Errorf("the port has the paths\n%q, the document\n%q", a, b)
	}
	for path, methods := range described.Paths {
		r := httptest.NewRequest("NONE", strings.ReplaceAll(path, "{instance}", "w"), nil)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		for allowed := range strings.SplitSeq(w.Header().Get("Allow"), ", ") {
			if methods[strings.ToLower(allowed)] == nil && allowed != http.MethodHead {
				t.Errorf("the document lacks %s %s", allowed, path)
			}
		}
	}
}
