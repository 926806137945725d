package dynamoselect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// deadline is the time limit of a request.
const deadline = 10 * time.Second

// Maximum sizes of request bodies, in bytes.
const (
	SelectBody  = 8 << 20
	TrackerBody = 2 << 20
)

// id names a worker: a number, or a text if another API registered the worker.
type id string

func (i *id) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		var name string
		if err := strictjson.Unmarshal(data, &name); err != nil {
			return err
		}
		if _, err := strconv.ParseUint(name, 10, 64); err == nil || name == "" {
			return fmt.Errorf("%.40s is text; a worker's number is written as one", data)
		}
		*i = id(name)
		return nil
	}
	return i.number(data)
}

func (i *id) number(data []byte) error {
	n, err := strconv.ParseUint(string(data), 10, 64)
	*i = numbered(n)
	return err
}

// MarshalJSON writes a numeric id as a JSON number.
func (i id) MarshalJSON() ([]byte, error) { return compat.ID(i).MarshalJSON() }

func numbered(n uint64) id { return id(strconv.FormatUint(n, 10)) }

// number is an id that must be a number.
type number id

func (n *number) UnmarshalJSON(data []byte) error { return (*id)(n).number(data) }

// key is a model with a routing group.
type key struct{ model, group string }

const (
	defaultModel = "default"
	defaultGroup = compat.DefaultGroup
)

func (k key) String() string { return fmt.Sprintf("model=%s routing_group=%s", k.model, k.group) }

// name returns the model's name in the index.
func (k key) name() string { return compat.ModelOf(k.model, k.group) }

// is reports whether the key matches the filter of a request.
func (k key) is(asked url.Values) bool {
	return (!asked.Has("model_name") || asked.Get("model_name") == k.model) &&
		(!asked.Has("routing_group") || asked.Get("routing_group") == k.group)
}

// failure is an error in the form of the service's replies.
type failure struct {
	status int
	code   api.Code // for the metric of outcomes
	text   string
	plain  bool // whether the body is only the text

	details *compat.QueueRejection // nil without details
}

func (f *failure) Error() string { return f.text }

// codes maps HTTP statuses to error codes.
var codes = map[int]api.Code{
	http.StatusBadRequest: api.CodeMalformed, http.StatusNotFound: api.CodeUnknownRequest,
	http.StatusMethodNotAllowed: api.CodeWrongMethod, http.StatusConflict: api.CodeConflict,
	http.StatusRequestEntityTooLarge: api.CodeTooLarge, http.StatusUnsupportedMediaType: api.CodeWrongContentType,
	http.StatusUnprocessableEntity: api.CodeMalformed, http.StatusTooManyRequests: api.CodeOverloaded,
	http.StatusServiceUnavailable: api.CodeNoWorkers,
}

func fail(status int, format string, args ...any) error {
	return &failure{status: status, code: codes[status], text: fmt.Sprintf(format, args...)}
}

// failed converts an error of the services behind to the reply for clients. err is not nil.
func failed(err error) *failure {
	if f, is := errors.AsType[*failure](err); is {
		return f
	}
	e := api.AsError(err)
	return &failure{status: e.Code.HTTPStatus(), code: e.Code, text: e.Message}
}

// asked is a parsed request.
type asked struct {
	ctx    context.Context
	id     string // from the path
	query  url.Values
	header http.Header
	fields compat.Object // members of the body
}

// handler returns the reply body and the status. Status 0 means 200.
type handler func(r *asked) (status int, body any, err error)

// route is the handler of a path and method.
type route struct {
	method, path string
	do           handler
	rule         web.Rule
	number       bool // whether {id} must be a worker's number
}

var ok = map[string]string{"status": "ok"}

// mux serves the routes. Forbidden and unknown requests get Dynamo's error texts. ended is called with the outcome of
// every request. The operation is the prefix and the first segment of the path.
func mux(prefix string, routes []route, maxBody int64, ended func(op, outcome string)) *web.Mux {
	m := web.NewMux()
	paths := map[string][]route{}
	for _, r := range routes {
		paths[r.path] = append(paths[r.path], r)
	}
	for path, routes := range paths {
		op := prefix + strings.Split(path, "/")[1]
		rules := web.Rules{}
		for _, r := range routes {
			rules[r.method] = r.rule
		}
		m.Handle(path, rules, func(w http.ResponseWriter, r *http.Request) {
			for _, route := range routes {
				if r.Method == route.method || r.Method == http.MethodHead && route.method == http.MethodGet {
					status, body, err := serve(w, r, &route, maxBody)
					if dump, is := body.(*compat.Dump); is && err == nil {
						var begun bool
						if begun, err = dump.Stream(r.Context(), w); begun || err == nil {
							ended(op, compat.Streamed(r, err))
							compat.AbortAfter(err)
							return
						}
					}
					send(w, r, status, body, err, op, ended)
					return
				}
			}
			methods := make([]string, len(routes))
			for i := range routes {
				methods[i] = routes[i].method
			}
			web.Allowed(w, r, methods...) // sets the header Allow
			send(w, r, 0, nil, fail(http.StatusMethodNotAllowed, "method not allowed"), op, ended)
		})
	}
	m.Otherwise(func(w http.ResponseWriter, r *http.Request) {
		send(w, r, 0, nil, fail(http.StatusNotFound, "route not found"), prefix+"other", ended)
	})
	return m
}

func serve(w http.ResponseWriter, r *http.Request, to *route, maxBody int64) (status int, body any, err error) {
	ctx, cancel := context.WithTimeout(r.Context(), deadline)
	defer cancel()
	a := &asked{ctx: ctx, id: r.PathValue("id"), header: r.Header}
	if to.number {
		if _, err := strconv.ParseUint(a.id, 10, 64); err != nil {
			text := fmt.Sprintf("Invalid URL: Cannot parse `%.100s` to a `u64`", a.id)
			return 0, nil, &failure{status: http.StatusBadRequest, code: api.CodeMalformed, text: text, plain: true}
		}
	}
	if a.query, err = url.ParseQuery(r.URL.RawQuery); err != nil {
		return 0, nil, fail(http.StatusBadRequest, "Failed to deserialize query string: %v", err)
	}
	if (to.method == http.MethodPost || to.method == http.MethodPatch) && !bodiless(to.path) {
		if a.fields, err = open(w, r, maxBody); err != nil {
			return 0, nil, err
		}
	}
	return to.do(a)
}

// bodiless reports whether the path accepts a POST request without a body.
func bodiless(path string) bool { return strings.HasSuffix(path, "/{id}/prefill_complete") }

// open reads the body of a request.
func open(w http.ResponseWriter, r *http.Request, maxBody int64) (compat.Object, error) {
	header := r.Header.Get("Content-Type")
	if form, known := api.ContentType(header); header == "" || !known || form != api.JSON {
		return nil, fail(http.StatusUnsupportedMediaType, "Expected request with `Content-Type: application/json`")
	}
	body, e := web.ReadBody(w, r, maxBody)
	if e != nil {
		return nil, &failure{status: e.Code.HTTPStatus(), code: e.Code, text: e.Message}
	}
	return members(body)
}

// members reads a JSON object. As in Dynamo, text after the object is ignored.
func members(body []byte) (compat.Object, error) {
	f, err := compat.ReadObject(body)
	if err == nil {
		return f, nil
	}
	var first json.RawMessage
	if json.NewDecoder(bytes.NewReader(body)).Decode(&first) != nil {
		return nil, fail(http.StatusBadRequest, "Failed to parse the request body as JSON: %s", api.AsError(err).Message)
	}
	if f, err = compat.ReadObject(first); err != nil {
		status := http.StatusUnprocessableEntity
		if first[0] == '{' { // invalid text, such as half a character
			status = http.StatusBadRequest
		}
		return nil, fail(status, "Failed to deserialize the JSON body into the target type: %s", api.AsError(err).Message)
	}
	return f, nil
}

// member describes a field of a request.
func member(name string, to any, presence compat.Presence, want string) compat.Field {
	return compat.Field{Name: name, To: to, Presence: presence, Want: want}
}

const (
	optional  = compat.Optional
	defaulted = compat.Defaulted
	required  = compat.Required
)

// words builds the errors of invalid requests. As in Dynamo, unknown fields are ignored and names are case-sensitive.
var words = compat.Words{
	Missing: func(name string) error { return unprocessable("missing field `%s`", name) },
	Twice:   func(name string) error { return unprocessable("duplicate field `%s`", name) },
	Null:    func(f compat.Field) error { return unprocessable("%s is null, not %s", f.Name, f.Want) },
	Wrong: func(f compat.Field, value []byte, err error) error {
		if errors.Is(err, errRankKey) {
			return fail(http.StatusBadRequest, "Failed to parse the request body as JSON: %s: %v", f.Name, err)
		}
		return unprocessable("%s is %.40s, not %s", f.Name, value, f.Want)
	},
}

func unprocessable(format string, args ...any) error {
	return fail(http.StatusUnprocessableEntity, "Failed to deserialize the JSON body into the target type: "+format,
		args...)
}

// send writes the reply of a request and calls ended with the outcome.
func send(w http.ResponseWriter, r *http.Request, status int, body any, err error, op string,
	ended func(op, outcome string)) {
	outcome, contentType := ops.OK, api.JSON
	if status == 0 {
		status = http.StatusOK
	}
	var text []byte
	if err != nil {
		f := failed(err)
		status, outcome = f.status, string(f.code)
		reply := map[string]any{"error": f.text}
		if f.details != nil {
			reply["details"] = f.details
		}
		body = reply
		if f.plain {
			text, contentType = []byte(f.text), "text/plain; charset=utf-8"
		}
	}
	if text == nil && body != nil {
		if text, err = json.Marshal(body); err != nil { // every body can be encoded
			status, text = http.StatusInternalServerError, []byte(`{"error":"internal"}`)
		}
	}
	ended(op, web.Reply(w, r, contentType, text, status, outcome))
}
