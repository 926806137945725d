package rpc

import (
	"context"

	"go.opentelemetry.io/otel/trace"
)

// Traceparent returns the header [HeaderTrace] of the OpenTelemetry span in ctx, or "" without a span.
func Traceparent(ctx context.Context) string {
	span := trace.SpanContextFromContext(ctx)
	if !span.IsValid() {
		return ""
	}
	flags := span.TraceFlags() & trace.FlagsSampled
	return "00-" + span.TraceID().String() + "-" + span.SpanID().String() + "-" + flags.String()
}
