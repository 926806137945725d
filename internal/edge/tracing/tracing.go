// Package tracing sends spans to an OpenTelemetry collector.
//
// A process has one [Tracer]. The receiver of a request begins a span with [Tracer.Serve], from the caller's header
// traceparent. Functions on the path of the request add spans through its context: [Start], [Stage].
//
//	ctx, span := tracer.Serve(ctx, "kvatlas.find", header)
//	defer span.End()
//	tracing.Stage(ctx, "hash", took)
//
// The sampling decision is made once, where the request arrives. An unsampled request has no span in its context, and
// costs one context look-up at each stage. A nil Tracer is disabled. While all tracers of the process are disabled, no
// function of the package allocates memory or looks into a context.
//
// Attributes never contain prompts, tokens, hashes or credentials.
//
// All functions are safe for concurrent use. A [Span] belongs to the goroutine that began it.
package tracing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
)

// scope is the instrumentation scope of all spans.
const scope = "github.com/kvatlas/kvatlas"

// maxWaiting bounds the spans that wait to be sent. Further spans are dropped and counted.
const maxWaiting = 8192

// Config configures the destination and the sampling of a Tracer's spans.
type Config struct {
	// Endpoint is the URL of the collector's OTLP receiver over HTTP, such as http://127.0.0.1:4318/v1/traces. Headers,
	// TLS and timeouts are also read from the variables OTEL_EXPORTER_OTLP_....
	Endpoint string
	Headers  map[string]string // added to the headers of the environment, with priority

	Sampling Sampling

	Service  string // service.name; OTEL_SERVICE_NAME has priority
	Version  string
	Instance string // service.instance.id

	Failed func(error) // called with the error of unsent spans; nil disables it
}

// Sampling selects the traces to send.
type Sampling struct {
	Ratio float64 // share of the traces that begin here: 0 none, 1 all

	// IgnoreParent applies Ratio also to traces that began elsewhere. Without it, the caller's decision is kept.
	IgnoreParent bool
}

// Tracer sends the spans of one process. A nil Tracer is disabled.
type Tracer struct {
	sampling Sampling
	tracer   trace.Tracer
	provider *sdktrace.TracerProvider
	out      *outlet
}

// tracers is the number of open tracers. While it is 0, no context is searched for spans.
var tracers atomic.Int32

// New returns a Tracer. The caller must call Close. New does not wait for the collector.
func New(ctx context.Context, cfg Config) (*Tracer, error) {
	sender, err := newSender(cfg.Endpoint, cfg.Headers)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	exporter, err := otlptrace.New(ctx, sender)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	return newTracer(ctx, cfg, exporter)
}

func newTracer(ctx context.Context, cfg Config, exporter sdktrace.SpanExporter) (*Tracer, error) {
	of, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", cfg.Service), attribute.String("service.version", cfg.Version),
		attribute.String("service.instance.id", cfg.Instance)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("traces: OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	if cfg.Failed == nil {
		cfg.Failed = func(error) {}
	}
	out := &outlet{exporter: exporter, failed: cfg.Failed}
	out.batches = sdktrace.NewBatchSpanProcessor(out, sdktrace.WithMaxQueueSize(maxWaiting))
	t := &Tracer{sampling: cfg.Sampling, out: out, provider: sdktrace.NewTracerProvider(sdktrace.WithResource(of),
		sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithSpanProcessor(bounded{out}))}
	t.tracer = t.provider.Tracer(scope)
	tracers.Add(1)
	return t, nil
}

// Close sends the waiting spans, until ctx ends.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	tracers.Add(-1)
	return t.provider.Shutdown(ctx)
}

// On reports whether spans may be sent.
func (t *Tracer) On() bool { return t != nil }

// Counts returns the number of spans by result: sent, failed (the collector did not accept them) or dropped (too many
// waiting spans). It returns nil for a disabled tracer.
func (t *Tracer) Counts() map[string]uint64 {
	if t == nil {
		return nil
	}
	return map[string]uint64{"sent": t.out.sent.Load(), "failed": t.out.unsent.Load(), "dropped": t.out.dropped.Load()}
}

// Serve begins the span of a request with the header traceparent, which may be empty.
func (t *Tracer) Serve(ctx context.Context, name, traceparent string) (context.Context, Span) {
	return t.begin(ctx, name, traceparent, true)
}

// Join is Serve for a request that gets a span only if its caller's span is sampled.
func (t *Tracer) Join(ctx context.Context, name, traceparent string) (context.Context, Span) {
	return t.begin(ctx, name, traceparent, false)
}

func (t *Tracer) begin(ctx context.Context, name, traceparent string, root bool) (context.Context, Span) {
	if t == nil || traceparent == "" && !root {
		return ctx, Span{}
	}
	parent := parse(traceparent)
	if !t.samples(parent, root) {
		return ctx, Span{}
	}
	if parent.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, parent)
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer))
	return ctx, Span{span}
}

// parse decodes a traceparent header. The result is invalid for a malformed header.
func parse(traceparent string) trace.SpanContext {
	if traceparent == "" {
		return trace.SpanContext{}
	}
	carrier := propagation.MapCarrier{rpc.HeaderTrace: traceparent}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}

// samples decides whether a trace is sampled.
func (t *Tracer) samples(parent trace.SpanContext, root bool) bool {
	switch {
	case parent.IsValid() && (!root || !t.sampling.IgnoreParent):
		return parent.IsSampled()
	case !root:
		return false
	case parent.IsValid(): // consistent with other samplers of the trace id
		p := sdktrace.SamplingParameters{ParentContext: context.Background(), TraceID: parent.TraceID()}
		return sdktrace.TraceIDRatioBased(t.sampling.Ratio).ShouldSample(p).Decision == sdktrace.RecordAndSample
	}
	return t.sampling.Ratio > 0 && rand.Float64() < t.sampling.Ratio
}

// Produce begins a trace with the span of a message for a log.
func (t *Tracer) Produce(ctx context.Context, name string) (context.Context, Span) {
	if t == nil || !t.samples(trace.SpanContext{}, true) {
		return ctx, Span{}
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindProducer))
	return ctx, Span{span}
}

// maxLinks bounds the links of a span.
const maxLinks = 128

// Consumed adds a span, in a separate trace, for messages read from a log. The span ends now. It is linked to the
// producers' spans by their traceparent headers; messages without a header have no link. attrs is called only if the
// span is sampled.
func (t *Tracer) Consumed(
	name string, took time.Duration, traceparents []string, attrs func() []attribute.KeyValue,
) {
	if t == nil {
		return
	}
	var links []trace.Link
	for _, header := range traceparents {
		if of := parse(header); of.IsSampled() && len(links) < maxLinks {
			links = append(links, trace.Link{SpanContext: of})
		}
	}
	if links == nil {
		return
	}
	end := time.Now()
	_, span := t.tracer.Start(context.Background(), name, trace.WithNewRoot(), trace.WithLinks(links...),
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithTimestamp(end.Add(-took)), trace.WithAttributes(attrs()...))
	span.End(trace.WithTimestamp(end))
}

// Span is a span in progress. The zero value records nothing.
type Span struct{ span trace.Span }

// On reports whether the span is recorded. Attributes should be created only then, because they cost memory.
func (s Span) On() bool { return s.span != nil }

// Set adds attributes.
func (s Span) Set(attrs ...attribute.KeyValue) {
	if s.span != nil {
		s.span.SetAttributes(attrs...)
	}
}

// Name changes the span's name.
func (s Span) Name(name string) {
	if s.span != nil {
		s.span.SetName(name)
	}
}

// Fail records the error code of a failed request. blame marks a fault of this process.
func (s Span) Fail(code string, blame bool) {
	if s.span == nil {
		return
	}
	s.span.SetAttributes(attribute.String("error.type", code))
	if blame {
		s.span.SetStatus(codes.Error, code)
	}
}

// End ends the span.
func (s Span) End() {
	if s.span != nil {
		s.span.End()
	}
}

// Of returns the sampled span of a context, or the zero Span.
func Of(ctx context.Context) Span {
	if tracers.Load() == 0 {
		return Span{}
	}
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		return Span{span}
	}
	return Span{}
}

// Start begins a child of the context's span, if the context has a span.
func Start(ctx context.Context, name string) (context.Context, Span) {
	return start(ctx, name, trace.SpanKindInternal)
}

// Ask begins the span of a request to another process.
func Ask(ctx context.Context, name string) (context.Context, Span) {
	return start(ctx, name, trace.SpanKindClient)
}

func start(ctx context.Context, name string, kind trace.SpanKind) (context.Context, Span) {
	of := Of(ctx)
	if !of.On() {
		return ctx, of
	}
	ctx, span := of.span.TracerProvider().Tracer(scope).Start(ctx, name, trace.WithSpanKind(kind))
	return ctx, Span{span}
}

// Stage adds a child of the context's span, if the context has a span. The child lasted took and ends now.
func Stage(ctx context.Context, name string, took time.Duration) {
	of := Of(ctx)
	if !of.On() {
		return
	}
	end := time.Now()
	_, span := of.span.TracerProvider().Tracer(scope).Start(ctx, name, trace.WithTimestamp(end.Add(-took)))
	span.End(trace.WithTimestamp(end))
}

// outlet sends spans and counts them.
type outlet struct {
	exporter sdktrace.SpanExporter
	batches  sdktrace.SpanProcessor
	failed   func(error)

	waiting               atomic.Int64 // ended spans that are not sent yet
	sent, unsent, dropped atomic.Uint64
}

// ExportSpans implements [sdktrace.SpanExporter]. It is the only place that reports an export error.
func (o *outlet) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := o.exporter.ExportSpans(ctx, spans)
	o.waiting.Add(-int64(len(spans)))
	if err != nil {
		o.unsent.Add(uint64(len(spans)))
		o.failed(err)
	} else {
		o.sent.Add(uint64(len(spans)))
	}
	return nil
}

// Shutdown implements [sdktrace.SpanExporter].
func (o *outlet) Shutdown(ctx context.Context) error { return o.exporter.Shutdown(ctx) }

// bounded drops spans before the queue behind it does, because the queue does not count its drops.
type bounded struct{ *outlet }

func (b bounded) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

func (b bounded) OnEnd(s sdktrace.ReadOnlySpan) {
	if b.waiting.Add(1) > maxWaiting {
		b.waiting.Add(-1)
		b.dropped.Add(1)
		return
	}
	b.batches.OnEnd(s)
}

func (b bounded) Shutdown(ctx context.Context) error   { return b.batches.Shutdown(ctx) }
func (b bounded) ForceFlush(ctx context.Context) error { return b.batches.ForceFlush(ctx) }

// ParseEndpoint checks the address of a collector, and returns the URL of its receiver.
func ParseEndpoint(text string) (string, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return "", fmt.Errorf("%.80q is not http://HOST:PORT or https://HOST:PORT", redacted(u, text))
	case u.User != nil:
		return "", errors.New("the URL must not contain credentials; put them into headers")
	case u.RawQuery != "" || u.Fragment != "":
		return "", fmt.Errorf("%.80q has more than HOST:PORT and a path", redacted(u, text))
	}
	return strings.TrimSuffix(u.String(), "/") + "/v1/traces", nil
}

// redacted returns a text without secrets.
func redacted(u *url.URL, text string) string {
	if u == nil || u.User == nil && strings.Contains(text, "@") { // user:password@host:port is not a URL
		return "it"
	}
	return cmp.Or(u.Redacted(), text)
}

// ParseSampler parses OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG. Without an argument the ratio is 1.
func ParseSampler(name, arg string) (Sampling, error) {
	base, parents := strings.CutPrefix(name, "parentbased_")
	s := Sampling{Ratio: 1, IgnoreParent: !parents}
	switch base {
	case "always_on":
	case "always_off":
		s.Ratio = 0
	case "traceidratio":
		if arg == "" {
			return s, nil
		}
		var err error
		if s.Ratio, err = strconv.ParseFloat(arg, 64); err != nil || !(s.Ratio >= 0 && s.Ratio <= 1) {
			return s, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG %.20q is not a ratio from 0 to 1", arg)
		}
	default:
		return s, fmt.Errorf("OTEL_TRACES_SAMPLER %.40q is not always_on, always_off, traceidratio, or one of these "+
			"behind parentbased_", name)
	}
	return s, nil
}
