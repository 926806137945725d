package tracing

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
)

func open(t *testing.T, s Sampling, to sdktrace.SpanExporter) *Tracer {
	t.Helper()
	tracer, err := newTracer(t.Context(), Config{Service: "test", Sampling: s}, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tracer.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return tracer
}

// everything runs all stages of a request.
func everything(ctx context.Context, t *Tracer, header string) {
	ctx, span := t.Serve(ctx, "request", header)
	Stage(ctx, "stage", time.Millisecond)
	inner, part := Start(ctx, "part")
	asking, peer := Ask(inner, "peer")
	if peer.On() {
		peer.Set(attribute.String("to", rpc.Traceparent(asking)))
	}
	peer.End()
	part.End()
	if s := Of(ctx); s.On() {
		s.Set(attribute.Bool("seen", true))
	}
	span.Fail("code", true)
	span.End()
	_, batch := t.Produce(ctx, "batch")
	batch.End()
}

const (
	sampled   = "00-0102030405060708090a0b0c0d0e0f10-0102030405060708-01"
	unsampled = "00-0102030405060708090a0b0c0d0e0f10-0102030405060708-00"
)

// TestOffCostsNothing: a disabled tracer allocates nothing and does not parse headers. An enabled tracer allocates
// nothing for an unsampled request, unless a header must be parsed.
func TestOffCostsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if n := testing.AllocsPerRun(1000, func() { everything(ctx, nil, sampled) }); n != 0 {
		t.Errorf("off: %v allocations", n)
	}
	tracer := open(t, Sampling{Ratio: 0}, tracetest.NewInMemoryExporter())
	if n := testing.AllocsPerRun(1000, func() { everything(ctx, tracer, "") }); n != 0 {
		t.Errorf("not sampled: %v allocations", n)
	}
	if n := testing.AllocsPerRun(1000, func() { _, _ = tracer.Join(ctx, "own", "") }); n != 0 {
		t.Errorf("a node's request without a span: %v allocations", n)
	}
}

// TestSpans: the spans of a request are below its span, and its span is below the caller's.
func TestSpans(t *testing.T) {
	to := tracetest.NewInMemoryExporter()
	tracer := open(t, Sampling{Ratio: 1}, to)
	everything(t.Context(), tracer, sampled)
	tracer.Consumed("apply", time.Second, []string{"", "nonsense", unsampled, sampled},
		func() []attribute.KeyValue { return nil })
	tracer.Consumed("nothing", time.Second, []string{"", "nonsense", unsampled},
		func() []attribute.KeyValue { t.Error("attributes of no span"); return nil })
	if err := tracer.provider.ForceFlush(t.Context()); err != nil {
		t.Fatal(err)
	}
	spans := map[string]tracetest.SpanStub{}
	for _, s := range to.GetSpans() {
		spans[s.Name] = s
	}
	of := parse(sampled)
	for name, parent := range map[string]trace.SpanContext{"request": of, "stage": spans["request"].SpanContext,
		"part": spans["request"].SpanContext, "peer": spans["part"].SpanContext, "batch": {}, "apply": {}} {
		s := spans[name]
		if s.Parent.SpanID() != parent.SpanID() || parent.IsValid() && s.SpanContext.TraceID() != of.TraceID() ||
			!parent.IsValid() && s.SpanContext.TraceID() == of.TraceID() {
			t.Errorf("%s: the parent of %+v is %+v, not %+v", name, s.SpanContext, s.Parent, parent)
		}
	}
	if len(spans) != 6 || tracer.Counts()["sent"] != 6 {
		t.Errorf("%d spans, %v", len(spans), tracer.Counts())
	}
	if l := spans["apply"].Links; len(l) != 1 || l[0].SpanContext.SpanID() != of.SpanID() ||
		spans["apply"].EndTime.Sub(spans["apply"].StartTime) != time.Second {
		t.Errorf("applied: %+v", spans["apply"])
	}
	header := spans["peer"].Attributes[0].Value.AsString()
	if back := parse(header); back.SpanID() != spans["peer"].SpanContext.SpanID() || !back.IsSampled() {
		t.Errorf("the header %q has the span context %+v", header, back)
	}
}

// TestSampling: the caller's decision is kept, unless IgnoreParent is set. Requests of nodes begin no traces.
func TestSampling(t *testing.T) {
	to := tracetest.NewInMemoryExporter()
	all, none := open(t, Sampling{Ratio: 1}, to), open(t, Sampling{Ratio: 0}, to)
	allAlone, noneAlone := open(t, Sampling{Ratio: 1, IgnoreParent: true}, to), open(t, Sampling{IgnoreParent: true}, to)
	for _, c := range []struct {
		name      string
		of        *Tracer
		header    string
		serve, in bool
	}{
		{"all, no caller", all, "", true, false}, {"all", all, sampled, true, true}, {"all", all, unsampled, false, false},
		{"none, no caller", none, "", false, false}, {"none", none, sampled, true, true},
		{"none", none, unsampled, false, false}, {"a bad header", all, "nonsense", true, false},
		{"all alone", allAlone, unsampled, true, false}, {"all alone", allAlone, sampled, true, true},
		{"none alone", noneAlone, sampled, false, true}, {"none alone", noneAlone, "", false, false},
	} {
		if _, s := c.of.Serve(t.Context(), "x", c.header); s.On() != c.serve {
			t.Errorf("%s, %q: a request has a span: %v", c.name, c.header, s.On())
		}
		if _, s := c.of.Join(t.Context(), "x", c.header); s.On() != c.in {
			t.Errorf("%s, %q: a request of a node has a span: %v", c.name, c.header, s.On())
		}
	}
	some := open(t, Sampling{Ratio: 0.5}, to)
	n := 0
	for range 4000 {
		if some.samples(trace.SpanContext{}, true) {
			n++
		}
	}
	if n < 1500 || n > 2500 { // a standard deviation is 32
		t.Errorf("a half of 4000 is %d", n)
	}
}

// stuck is a collector that blocks until it is released, and then fails.
type stuck struct{ let chan struct{} }

func (s *stuck) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	<-s.let
	return errors.New("no")
}
func (s *stuck) Shutdown(context.Context) error { return nil }

// TestBounded: spans that the collector does not accept in time are dropped and counted, and so are refused spans.
func TestBounded(t *testing.T) {
	to := &stuck{let: make(chan struct{})}
	tracer := open(t, Sampling{Ratio: 1}, to)
	failed := make(chan error, maxWaiting)
	tracer.out.failed = func(err error) { failed <- err }
	const more = 100
	for range maxWaiting + more {
		_, span := tracer.Serve(t.Context(), "x", "")
		span.End()
	}
	if c := tracer.Counts(); c["dropped"] != more || c["sent"]+c["failed"] != 0 {
		t.Errorf("%v", c)
	}
	close(to.let)
	if err := tracer.provider.ForceFlush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c := tracer.Counts(); c["dropped"] != more || c["failed"] != maxWaiting || len(failed) == 0 {
		t.Errorf("%v, told %d times", c, len(failed))
	}
}

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]string{
		"http://127.0.0.1:4318":      "http://127.0.0.1:4318/v1/traces",
		"https://collector.x/otlp/":  "https://collector.x/otlp/v1/traces",
		"127.0.0.1:4318":             "",
		"grpc://127.0.0.1:4317":      "",
		"http://user:secret@host":    "",
		"http://host:4318?key=value": "",
		"ftp://user:secret@host":     "",
		"user:secret@host:4318":      "",
		"http://":                    "",
		"":                           "",
	} {
		got, err := ParseEndpoint(text)
		if got != want || (err == nil) != (want != "") || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

func TestParseSampler(t *testing.T) {
	for _, c := range []struct {
		name, arg string
		want      Sampling
		bad       bool
	}{
		{"always_on", "", Sampling{1, true}, false}, {"always_off", "", Sampling{0, true}, false},
		{"traceidratio", "0.25", Sampling{0.25, true}, false}, {"parentbased_always_on", "x", Sampling{1, false}, false},
		{"parentbased_traceidratio", "0.5", Sampling{0.5, false}, false},
		{"parentbased_traceidratio", "", Sampling{1, false}, false},
		{"traceidratio", "2", Sampling{}, true}, {"traceidratio", "NaN", Sampling{}, true},
		{"traceidratio", "0.5x", Sampling{}, true}, {"jaeger_remote", "", Sampling{}, true},
	} {
		if got, err := ParseSampler(c.name, c.arg); (err != nil) != c.bad || err == nil && got != c.want {
			t.Errorf("%s %q: %+v, %v", c.name, c.arg, got, err)
		}
	}
}
