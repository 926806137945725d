package rpc

import (
	"context"

	"go.opentelemetry.io/otel/trace"
)

// Traceparent is the header [HeaderTrace] of the OpenTelemetry span that a context has; empty if it has none.
func Traceparent(ctx context.Context) string {
	of := trace.SpanContextFromContext(ctx)
	if !of.IsValid() {
		return ""
	}
	flags := of.TraceFlags() & trace.FlagsSampled
	return "00-" + of.TraceID().String() + "-" + of.SpanID().String() + "-" + flags.String()
}
