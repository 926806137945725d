package harness

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collectorToken is the token that a collector requires.
const collectorToken = "collectors-own-token"

// Collector receives traces as an OpenTelemetry collector does.
type Collector struct {
	URL     string
	Headers string // path of a file with the required headers

	mu    sync.Mutex
	spans []CollectedSpan
}

// CollectedSpan is a received span. Identifiers are in hex.
type CollectedSpan struct {
	Service, Instance, Name string
	Kind                    tracepb.Span_SpanKind
	Trace, ID, Parent       string
	Links                   []string          // identifiers of trace and span
	Attributes              map[string]string // in Go's default format
}

// StartCollector runs a collector until the test ends.
func StartCollector(t testing.TB) *Collector {
	c := &Collector{Headers: filepath.Join(t.TempDir(), "headers")}
	if err := os.WriteFile(c.Headers, []byte("Authorization: Bearer "+collectorToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var m collectorpb.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(body, &m)
		}
		switch {
		case err != nil, r.URL.Path != "/v1/traces", r.Header.Get("Content-Type") != "application/x-protobuf":
			t.Errorf("the collector got %s %s, %s: %v", r.Method, r.URL, r.Header.Get("Content-Type"), err)
			w.WriteHeader(http.StatusBadRequest)
		case r.Header.Get("Authorization") != "Bearer "+collectorToken:
			t.Errorf("the collector got Authorization %q", r.Header.Get("Authorization"))
			w.WriteHeader(http.StatusUnauthorized)
		default:
			c.take(&m)
			w.Header().Set("Content-Type", "application/x-protobuf")
		}
	}))
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

func (c *Collector) take(m *collectorpb.ExportTraceServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range m.ResourceSpans {
		resource := map[string]string{}
		for _, a := range of.Resource.Attributes {
			resource[a.Key] = a.Value.GetStringValue()
		}
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				span := CollectedSpan{Service: resource["service.name"], Instance: resource["service.instance.id"],
					Name: s.Name, Kind: s.Kind, Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId),
					Parent: hex.EncodeToString(s.ParentSpanId), Attributes: map[string]string{}}
				for _, l := range s.Links {
					span.Links = append(span.Links, hex.EncodeToString(l.TraceId)+" "+hex.EncodeToString(l.SpanId))
				}
				for _, a := range s.Attributes {
					v := a.Value
					switch {
					case v.GetStringValue() != "":
						span.Attributes[a.Key] = v.GetStringValue()
					case v.GetBoolValue():
						span.Attributes[a.Key] = "true"
					default:
						span.Attributes[a.Key] = fmt.Sprint(v.GetIntValue())
					}
				}
				c.spans = append(c.spans, span)
			}
		}
	}
}

// Spans lists the received spans that satisfy is.
func (c *Collector) Spans(is func(*CollectedSpan) bool) (list []CollectedSpan) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.spans {
		if is(&c.spans[i]) {
			list = append(list, c.spans[i])
		}
	}
	return list
}
