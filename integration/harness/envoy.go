package harness

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/tools/envoy"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// EnvoyDuplex are the edits of deploy/envoy for the other mode of bodies.
var EnvoyDuplex = []string{"request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED",
	"request_trailer_mode: SKIP", "request_trailer_mode: SEND",
	"response_body_mode: STREAMED", "response_body_mode: FULL_DUPLEX_STREAMED",
	"response_trailer_mode: SKIP", "response_trailer_mode: SEND"}

// StartEnvoy runs a real Envoy with the configuration in deploy/envoy until the end of the test. root is the folder of
// this module, with a time limit of two minutes for an answer of the indexer. indexer is the HOST:PORT of an indexer's
// gRPC port, and engines are the addresses of the engines. edits change the configuration: old, new, old, new.
func StartEnvoy(t testing.TB, root, indexer string, engines []string, edits ...string) *envoy.Envoy {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	e, err := envoy.Start(ctx, envoy.Config{Python: pyenv.PythonWith(t, "envoy.txt"),
		File: root + "/deploy/envoy/envoy.yaml", Dir: t.TempDir(), Indexer: indexer, Engines: engines,
		Edits: append([]string{"message_timeout: 5s", "message_timeout: 120s"}, edits...), Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	Eventually(t, "Envoy passes requests on", func() (bool, string) {
		r, err := http.Get(e.URL + "/v1/models")
		if err != nil {
			return false, err.Error()
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK, r.Status
	})
	return e
}

// GRPC returns the HOST:PORT of the indexer's gRPC port.
func (x *Indexer) GRPC() string {
	x.t.Helper()
	return x.WaitFor(`gRPC is served" listen=(\S+)`)[1]
}

// Metric returns the sum of all series of an indexer's metric. A name with labels means one series.
func (x *Indexer) Metric(name string) (v float64) {
	x.t.Helper()
	_, text, err := Request(x.HTTP, "GET", "/metrics", "")
	if err != nil {
		x.t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == '{' || rest[0] == ' ') {
			var n float64
			fmt.Sscan(rest[strings.LastIndexByte(rest, ' '):], &n)
			v += n
		}
	}
	return v
}

// TestID is the header with the id of a request at a [Recorder].
const TestID = "X-Test-Id"

// Recorder is an HTTP proxy before an engine. It records the last request of every id.
type Recorder struct {
	Addr string // HOST:PORT

	mu       sync.Mutex
	requests map[string]Recorded
}

// Recorded is a request at a [Recorder].
type Recorded struct {
	Header http.Header
	Body   []byte
}

// StartRecorder starts a proxy before the engine at HOST:PORT.
func StartRecorder(t testing.TB, engine string) *Recorder {
	t.Helper()
	r := &Recorder{requests: map[string]Recorded{}}
	behind := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: engine})
	behind.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { // also of cancelled requests
		w.WriteHeader(http.StatusBadGateway)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body) // an incomplete body fails at the engine
		r.mu.Lock()
		r.requests[q.Header.Get(TestID)] = Recorded{q.Header.Clone(), body}
		r.mu.Unlock()
		q.Body = io.NopCloser(bytes.NewReader(body))
		behind.ServeHTTP(w, q)
	}))
	t.Cleanup(s.Close)
	r.Addr = strings.TrimPrefix(s.URL, "http://")
	return r
}

// Got returns the request with an id; false without the request.
func (r *Recorder) Got(id string) (Recorded, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q, ok := r.requests[id]
	return q, ok
}
