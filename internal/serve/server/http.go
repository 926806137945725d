package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/internal/operate/dump"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/internal/serve/page"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// route is a method and path of an operation with the access rule.
type route struct {
	api.Route
	op   *api.Operation
	rule web.Rule
}

// routes are the methods and paths of [api.Operations].
var routes = func() (list []route) {
	for _, op := range api.Operations {
		rule := web.Rule{Needs: rights.Roles(op.Access), Cost: web.Usual}
		if op.Costly {
			rule.Cost = web.Costly
		}
		for _, r := range op.Routes {
			list = append(list, route{r, op, rule})
		}
	}
	return list
}()

// paths returns the handler of the HTTP port. It serves the routes of [api.Operations], and
//
//	GET  /healthz      200 while the process runs
//	GET  /readyz       200 once every partition is restored and caught up, with a line for every missing part of answers;
//	                   otherwise 503 and the reason
//	GET  /metrics      for Prometheus
//	GET  /v1/watch     server-sent events: FleetEvents and ClusterEvents
//	GET  /v1/openapi.json      the description of the port in OpenAPI 3.1
//	GET  /v1/kv_indexer.proto  the services of the gRPC port except the endpoint picker
//
// and the paths of [compat] and [page].
func (s *Server) paths() *web.Mux {
	mux := web.NewMux()
	s.register(mux, &httpFront{requests: s.requests(), ended: s.endedHTTP, tenants: s.tenants, deadline: ops.Deadline})
	page.Register(mux)
	return mux
}

// register adds all paths of the HTTP port.
func (s *Server) register(mux *web.Mux, front *httpFront) {
	front.register(mux)
	compat.Register(mux, s.compat(front.ended))
	front.get(mux, "/metrics", web.Rule{Needs: rights.Read, Cost: web.Probe}, s.scrape.ServeHTTP)
	front.get(mux, "/v1/watch", web.Rule{Needs: rights.Read, Cost: web.Lasting}, s.watch)
	probe := web.Rule{Needs: rights.Anybody, Cost: web.Probe}
	front.get(mux, "/readyz", probe, func(w http.ResponseWriter, _ *http.Request) {
		if err := s.node.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
		for _, note := range append(s.node.Warnings(), s.registry.Warnings()...) {
			fmt.Fprintln(w, note)
		}
	})
}

// compat returns the configuration of Dynamo's indexer.
func (s *Server) compat(ended func(op, outcome string)) compat.Config {
	return compat.Config{
		Server: s, Shims: s.shims, Ended: ended, Resolve: s.registry.Resolve,
		Dump: func(ctx context.Context, of []events.WorkerID, out io.Writer) error {
			return dump.WriteWorkers(ctx, s.ns, of, s.registry.Claimed, out)
		},
		Dumps: s.dumps,
	}
}

// httpFront answers the operations over HTTP.
type httpFront struct {
	requests api.Handler
	ended    func(op, outcome string) // called with the outcome of every request, by operation or path
	tenants  *tenants.Names           // nil: requests are not attributed
	deadline time.Duration
}

// register adds the paths of the operations, the description, /healthz, and the reply for unknown paths.
func (f *httpFront) register(mux *web.Mux) {
	byPath := map[string]map[string]*api.Operation{}
	methods, rules := map[string][]string{}, map[string]web.Rules{} // by path
	for _, r := range routes {
		if byPath[r.Path] == nil {
			byPath[r.Path], rules[r.Path] = map[string]*api.Operation{}, web.Rules{}
		}
		byPath[r.Path][r.Method], rules[r.Path][r.Method] = r.op, r.rule
		methods[r.Path] = append(methods[r.Path], r.Method)
	}
	for path, methods := range methods {
		mux.Handle(path, rules[path], func(w http.ResponseWriter, r *http.Request) {
			op := byPath[path][r.Method]
			if op == nil {
				op = byPath[path][methods[0]] // HEAD for a GET operation
			}
			if web.Allowed(w, r, methods...) {
				f.serve(w, r, op)
			} else {
				f.refuse(w, r, op.Name, api.JSON, web.WrongMethod(r, methods...))
			}
		})
	}
	anyToken := web.Rule{Needs: rights.Any, Cost: web.Usual}
	f.get(mux, "/healthz", web.Rule{Needs: rights.Anybody, Cost: web.Probe},
		func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	f.get(mux, "/v1/openapi.json", anyToken, func(w http.ResponseWriter, _ *http.Request) {
		_ = web.WriteReply(w, api.JSON, openAPI, http.StatusOK) // or the caller has gone
	})
	f.get(mux, "/v1/kv_indexer.proto", anyToken, func(w http.ResponseWriter, _ *http.Request) {
		_ = web.WriteReply(w, "text/plain; charset=utf-8", kvindexerpb.Proto, http.StatusOK)
	})
	mux.Otherwise(func(w http.ResponseWriter, r *http.Request) {
		failure := api.Errorf(api.CodeUnknownOperation, "there is no %s %s", r.Method, r.URL.Path)
		f.refuse(w, r, ops.Other, api.JSON, failure)
	})
}

// get adds a path for GET requests.
func (f *httpFront) get(mux *web.Mux, path string, rule web.Rule, handle http.HandlerFunc) {
	mux.Handle(path, web.Rules{http.MethodGet: rule}, func(w http.ResponseWriter, r *http.Request) {
		if web.Allowed(w, r, http.MethodGet) {
			handle(w, r)
		} else {
			f.refuse(w, r, ops.Other, api.JSON, web.WrongMethod(r, http.MethodGet))
		}
	})
}

// serve serves a request, and counts the outcome.
func (f *httpFront) serve(w http.ResponseWriter, r *http.Request, op *api.Operation) {
	var buffer web.Buffer // nothing of the body is kept once the request is answered
	defer buffer.Free()
	contentType, body, deadline, failure := f.open(&buffer, w, r, op)
	if failure != nil {
		f.refuse(w, r, op.Name, contentType, failure)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), deadline)
	defer cancel()
	ctx = f.tenants.With(ctx, tenantHeader(r.Header))
	requests := f.requests
	requests.Instance = events.WorkerID(r.PathValue("instance"))
	reply, failure := requests.Handle(ctx, op.Name, contentType, body)
	status := http.StatusOK
	if failure != nil {
		status = failure.Code.HTTPStatus()
	}
	if after := failure.RetryAfter(); after > 0 {
		w.Header().Set("Retry-After", strconv.FormatUint(after, 10))
	}
	f.ended(op.Name, web.Reply(w, r, contentType, reply, status, failure.Outcome()))
}

// open reads a request. The failure is to be sent in the content type.
func (f *httpFront) open(buffer *web.Buffer, w http.ResponseWriter, r *http.Request, op *api.Operation) (
	contentType string, body []byte, deadline time.Duration, failure *api.Error) {
	header := r.Header.Get("Content-Type")
	contentType, known := api.ContentType(header)
	// A web page may send some content types, or no content type, to any address without a preflight request. Such
	// requests are refused even if the content is valid.
	if !known || header == "" && r.ContentLength != 0 {
		return contentType, nil, 0, api.WrongContentType(header)
	}
	deadline = f.deadline
	if texts := r.Header.Values(rpc.HeaderDeadline); len(texts) > 0 {
		text := texts[0]
		ms, err := strconv.ParseUint(text, 10, 64)
		if err != nil || ms == 0 {
			return contentType, nil, 0, api.Errorf(api.CodeMalformed,
				"the header %s is %.40q, not a whole number of milliseconds above 0", rpc.HeaderDeadline, text)
		}
		deadline = min(deadline, time.Duration(min(ms, 1<<31))*time.Millisecond)
	}
	if op.Parameters != nil && r.URL.RawQuery != "" {
		if body, failure = buffer.Read(w, r, api.MaxBody); failure == nil && len(body) > 0 {
			failure = api.Errorf(api.CodeMalformed, "the request has parameters in the URL and a body; send one of them")
		}
		if failure == nil {
			contentType = api.JSON
			body, failure = inURL(r, op.Parameters...)
		}
		return contentType, body, deadline, failure
	}
	if name, _, _ := strings.Cut(r.URL.RawQuery, "="); r.URL.RawQuery != "" {
		return contentType, nil, 0, api.Errorf(api.CodeMalformed,
			"%s accepts no parameters in the URL, such as %.40s; put parameters into the body", r.URL.Path, name)
	}
	body, failure = buffer.Read(w, r, api.MaxBody)
	return contentType, body, deadline, failure
}

// inURL converts the parameters of a URL to a request. Every known parameter may occur once.
func inURL(r *http.Request, known ...string) ([]byte, *api.Error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "the URL's parameters cannot be read: %v", err)
	}
	fields := map[string]string{}
	for name, list := range values {
		switch {
		case !slices.Contains(known, name) || len(list) != 1:
			return nil, api.Errorf(api.CodeMalformed, "%s accepts the parameters %s once, not %.40q", r.URL.Path,
				strings.Join(known, " and "), name)
		case !utf8.ValidString(list[0]):
			return nil, api.Errorf(api.CodeMalformed, "the URL's parameter %s is not valid UTF-8: %.64q", name, list[0])
		}
		fields[name] = list[0]
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return nil, api.Errorf(api.CodeInternal, "%v", err)
	}
	return body, nil
}

// refuse sends an error, and counts the request.
func (f *httpFront) refuse(w http.ResponseWriter, r *http.Request, op, contentType string, failure *api.Error) {
	f.ended(op, web.Reply(w, r, contentType, failure.Body(contentType), failure.Code.HTTPStatus(), failure.Outcome()))
}
