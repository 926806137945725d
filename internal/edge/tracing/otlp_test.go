package tracing

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// TestCollector: a collector with OpenTelemetry's own decoder receives the spans, with the headers and compression of
// the variables. An overloaded collector receives the spans again.
func TestCollector(t *testing.T) {
	var requests atomic.Int32
	got := make(chan *coltracepb.ExportTraceServiceRequest, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		if r.Header.Get("Content-Type") != "application/x-protobuf" || r.Header.Get("X-Own") != "flag" ||
			r.Header.Get("X-Env") != "a b" || r.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("headers %v", r.Header)
		}
		body, err := gzip.NewReader(r.Body)
		if err != nil {
			t.Error(err)
			return
		}
		text, err := io.ReadAll(body)
		request := new(coltracepb.ExportTraceServiceRequest)
		if err == nil {
			err = proto.Unmarshal(text, request)
		}
		if err != nil {
			t.Error(err)
		}
		reply, err := proto.Marshal(&coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.
			ExportTracePartialSuccess{RejectedSpans: 1, ErrorMessage: "too old"}})
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/x-protobuf")
		_, _ = w.Write(reply)
		got <- request
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-env=a%20b,x-own=environment")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "240000")
	defer func(was time.Duration) { firstRetry = was }(firstRetry)
	firstRetry = time.Millisecond
	failed := make(chan error, 1)
	tracer, err := New(t.Context(), Config{Endpoint: collector.URL, Headers: map[string]string{"X-Own": "flag"},
		Service: "test", Sampling: Sampling{Ratio: 1}, Failed: func(err error) { failed <- err }})
	if err != nil {
		t.Fatal(err)
	}
	everything(t.Context(), tracer, "")
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, of := range (<-got).ResourceSpans {
		for _, scope := range of.ScopeSpans {
			for _, span := range scope.Spans {
				names[span.Name] = true
			}
		}
	}
	if !names["request"] || !names["stage"] || !names["batch"] {
		t.Errorf("spans %v", names)
	}
	if err := <-failed; !strings.Contains(err.Error(), "rejected 1 spans") || !strings.Contains(err.Error(), "too old") {
		t.Errorf("the rejected span is reported as %v", err)
	}
}

// TestSenderRefuses: an invalid variable is refused at the start. The error does not contain its value.
func TestSenderRefuses(t *testing.T) {
	for name, value := range map[string]string{"HEADERS": "secret", "COMPRESSION": "zstd", "TIMEOUT": "10s",
		"CERTIFICATE": "/nonexistent", "CLIENT_KEY": "/nonexistent"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OTEL_EXPORTER_OTLP_"+name, value)
			_, err := newSender("http://127.0.0.1:4318/v1/traces", nil)
			if err == nil || !strings.Contains(err.Error(), "OTEL_EXPORTER_OTLP_") || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s=%s: %v", name, value, err)
			}
		})
	}
}
