package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// HTTPConfig is what the HTTP side of a node is made of.
type HTTPConfig struct {
	Handler Handler
	Ready   func() error    // nil if the node may be asked
	Notes   func() []string // what answers lack though the node may be asked, for people; may be nil
	Metrics http.Handler

	// Ended is told what became of each request, by its operation ([OpOther] if it has none). May be nil.
	Ended func(op, outcome string)

	// Deadline bounds a request that names none. Default 5 s.
	Deadline time.Duration
}

// deadlineHeader is how many milliseconds the caller will wait.
const deadlineHeader = "Kv-Deadline-Ms"

// routes are the operations' paths.
var routes = []struct{ method, path, op string }{
	{http.MethodPost, "/v1/find", OpFind}, {http.MethodGet, "/v1/workers", OpWorkers},
	{http.MethodGet, "/v1/status", OpStatus}, {http.MethodGet, "/v1/verify", OpVerify},
	{http.MethodPost, "/v1/snapshot", OpSnapshot},
}

// NewHTTP returns the handler of a node's HTTP port:
//
//	POST /v1/find      a Query, as JSON or MessagePack by Content-Type → an Answer
//	GET  /v1/workers   → a WorkerList
//	GET  /v1/status    → a Status
//	GET  /v1/verify    → a Status with a checksum of each partition
//	POST /v1/snapshot  → a SnapshotList
//	GET  /healthz      200 while the process runs
//	GET  /readyz       200 once every partition is restored and caught up, with what answers lack all the same;
//	                   else 503 and why not
//	GET  /metrics      for Prometheus
func NewHTTP(cfg HTTPConfig) http.Handler {
	if cfg.Deadline <= 0 {
		cfg.Deadline = 5 * time.Second
	}
	if cfg.Ended == nil {
		cfg.Ended = func(string, string) {}
	}
	mux := http.NewServeMux()
	for _, route := range routes {
		mux.HandleFunc(route.path, func(w http.ResponseWriter, r *http.Request) {
			if Allowed(w, r, route.method) {
				cfg.serve(w, r, route.op)
			} else {
				cfg.refuse(w, route.op, JSON, wrongMethod(r, route.method))
			}
		})
	}
	get := func(path string, handle http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if Allowed(w, r, http.MethodGet) {
				handle(w, r)
			} else {
				cfg.refuse(w, OpOther, JSON, wrongMethod(r, http.MethodGet))
			}
		})
	}
	get("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	get("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := cfg.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
		if cfg.Notes != nil {
			for _, note := range cfg.Notes() {
				fmt.Fprintln(w, note)
			}
		}
	})
	get("/metrics", cfg.Metrics.ServeHTTP)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		cfg.refuse(w, OpOther, JSON, Errorf(CodeUnknownOperation, "there is no %s %s", r.Method, r.URL.Path))
	})
	return mux
}

// Allowed reports whether a request has the method that a path takes; else the answer's header says which that is.
// Where GET is taken, so is HEAD.
func Allowed(w http.ResponseWriter, r *http.Request, method string) bool {
	if r.Method == method || r.Method == http.MethodHead && method == http.MethodGet {
		return true
	}
	if method == http.MethodGet {
		method += ", " + http.MethodHead
	}
	w.Header().Set("Allow", method)
	return false
}

func wrongMethod(r *http.Request, method string) *Error {
	return Errorf(CodeWrongMethod, "%s takes %s, not %s", r.URL.Path, method, shorten(r.Method))
}

// serve answers one request, and counts it.
func (cfg *HTTPConfig) serve(w http.ResponseWriter, r *http.Request, op string) {
	contentType, body, deadline, failure := cfg.open(w, r, op)
	if failure != nil {
		cfg.refuse(w, op, contentType, failure)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), deadline)
	defer cancel()
	reply, failure := cfg.Handler.Handle(ctx, op, contentType, body)
	status := http.StatusOK
	if failure != nil {
		status = failure.Code.HTTPStatus()
	}
	if errors.Is(r.Context().Err(), context.Canceled) {
		cfg.Ended(op, OutcomeExpired)
		return
	}
	cfg.send(w, op, contentType, reply, status, Outcome(failure))
}

// open reads a request. The failure is to be sent in the content type.
func (cfg *HTTPConfig) open(w http.ResponseWriter, r *http.Request, op string) (
	contentType string, body []byte, deadline time.Duration, failure *Error,
) {
	header := r.Header.Get("Content-Type")
	contentType, known := ContentType(header)
	// A web page may send some forms, or none, to any address without asking first; these are refused even where they
	// would be understood.
	if !known || header == "" && r.ContentLength != 0 {
		return contentType, nil, 0, WrongContentType(header)
	}
	deadline = cfg.Deadline
	if text := r.Header.Get(deadlineHeader); text != "" {
		ms, ok := parseUint([]byte(text))
		if !ok || ms == 0 {
			return contentType, nil, 0, Errorf(CodeMalformed,
				"the header %s is %s, not a whole number of milliseconds above 0", deadlineHeader, shorten(text))
		}
		deadline = min(deadline, time.Duration(min(ms, 1<<31))*time.Millisecond)
	}
	if name, _, _ := strings.Cut(r.URL.RawQuery, "="); r.URL.RawQuery != "" {
		return contentType, nil, 0, Errorf(CodeMalformed,
			"%s takes no parameters in its URL, such as %s; they belong into the body", r.URL.Path, shorten(name))
	}
	body, failure = ReadBody(w, r)
	if failure == nil && op == OpFind {
		if err := cfg.Ready(); err != nil {
			failure = Errorf(CodeNotReady, "%v", err)
		}
	}
	return contentType, body, deadline, failure
}

// ReadBody reads a request's body.
func ReadBody(w http.ResponseWriter, r *http.Request) ([]byte, *Error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody))
	var large *http.MaxBytesError
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, &large):
		return nil, Errorf(CodeTooLarge,
			"the request has more than %d bytes (8 MiB); ask with hashes instead of tokens, or for a part at a time",
			MaxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, Errorf(CodeRequestTimeout, "of the body %d bytes came in time, and not its end", len(body))
	}
	return nil, Errorf(CodeMalformed, "the body ends too early, after %d bytes", len(body))
}

func (cfg *HTTPConfig) refuse(w http.ResponseWriter, op, contentType string, failure *Error) {
	cfg.send(w, op, contentType, failure.Body(contentType), failure.Code.HTTPStatus(), Outcome(failure))
}

// send sends an answer, and counts its request.
func (cfg *HTTPConfig) send(w http.ResponseWriter, op, contentType string, body []byte, status int, outcome string) {
	if send(w, contentType, body, status) != nil {
		outcome = OutcomeUnsent
	}
	cfg.Ended(op, outcome)
}

// WriteError answers a request with an error, in JSON.
func WriteError(w http.ResponseWriter, failure *Error) {
	_ = send(w, JSON, failure.Body(JSON), failure.Code.HTTPStatus()) // an error means that the caller has gone
}

func send(w http.ResponseWriter, contentType string, body []byte, status int) error {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}
