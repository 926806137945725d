package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// HTTPConfig is what the HTTP side of a node is made of.
type HTTPConfig struct {
	Handler Handler
	Ready   func() error    // nil if the node may be asked
	Notes   func() []string // what answers lack though the node may be asked, for people; may be nil
	Metrics http.Handler

	// Deadline bounds a request that names none. Default 5 s.
	Deadline time.Duration
}

// deadlineHeader is how many milliseconds the caller will wait.
const deadlineHeader = "Kv-Deadline-Ms"

// NewHTTP returns the handler of a node's HTTP port:
//
//	POST /v1/find      a Query, as JSON or MessagePack by Content-Type → an Answer
//	GET  /v1/workers   → a WorkerList
//	GET  /v1/status    → a Status
//	GET  /v1/verify    → a Status with a checksum of each partition
//	POST /v1/snapshot  → a SnapshotList
//	GET  /healthz      200 while the process runs
//	GET  /readyz       200 once every partition is restored and caught up, with what answers lack all the same; else 503 and why not
//	GET  /metrics      for Prometheus
func NewHTTP(cfg HTTPConfig) http.Handler {
	if cfg.Deadline <= 0 {
		cfg.Deadline = 5 * time.Second
	}
	mux := http.NewServeMux()
	for pattern, op := range map[string]string{
		"POST /v1/find": OpFind, "GET /v1/workers": OpWorkers, "GET /v1/status": OpStatus, "GET /v1/verify": OpVerify, "POST /v1/snapshot": OpSnapshot,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { cfg.serve(w, r, op) })
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
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
	mux.Handle("GET /metrics", cfg.Metrics)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		write(w, JSON, ErrorBody{Error: Errorf(CodeUnknownOperation, "there is no %s %s", r.Method, r.URL.Path)}, CodeUnknownOperation.HTTPStatus())
	})
	return mux
}

func (cfg *HTTPConfig) serve(w http.ResponseWriter, r *http.Request, op string) {
	contentType := JSON
	if strings.Contains(r.Header.Get("Content-Type"), "msgpack") {
		contentType = MsgPack
	}
	deadline := cfg.Deadline
	if text := r.Header.Get(deadlineHeader); text != "" {
		if ms, ok := parseUint([]byte(text)); ok && ms > 0 {
			deadline = min(deadline, time.Duration(ms)*time.Millisecond)
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), deadline)
	defer cancel()
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody+1))
	if err != nil && len(body) <= MaxBody {
		failure := Errorf(CodeMalformed, "read the body: %v", err)
		write(w, contentType, ErrorBody{Error: failure}, failure.Code.HTTPStatus())
		return
	}
	if op == OpFind {
		if err := cfg.Ready(); err != nil {
			failure := Errorf(CodeNotReady, "%v", err)
			write(w, contentType, ErrorBody{Error: failure}, failure.Code.HTTPStatus())
			return
		}
	}
	status := http.StatusOK
	reply, failure := cfg.Handler.Handle(ctx, op, contentType, body)
	if failure != nil {
		status = failure.Code.HTTPStatus()
	}
	send(w, contentType, reply, status)
}

// WriteError answers a request with an error, in JSON.
func WriteError(w http.ResponseWriter, status int, failure *Error) {
	write(w, JSON, ErrorBody{Error: failure}, status)
}

func write(w http.ResponseWriter, contentType string, v any, status int) {
	body, err := Marshal(contentType, v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	send(w, contentType, body, status)
}

func send(w http.ResponseWriter, contentType string, body []byte, status int) {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	w.Write(body) // an error means that the caller has gone
}
