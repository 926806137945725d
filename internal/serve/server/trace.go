package server

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// measured measures queries, choices and the log for the parts of a node.
type measured struct {
	*metrics.Queries
	s *Server
}

// Stage records the duration of a part of a query, also as a span if requests are traced.
func (m measured) Stage(ctx context.Context, stage string, took time.Duration) {
	m.Queries.Stage(stage, took)
	if m.s.Tracer.On() && stage != scatter.StagePeers { // which has a span already
		tracing.Stage(ctx, stage, took)
	}
}

// selectionStageHook observes the parts of choices.
func (s *Server) selectionStageHook() func(ctx context.Context, stage string, took time.Duration) {
	if !s.Tracer.On() {
		return func(_ context.Context, stage string, took time.Duration) { s.queries.SelectionStage(stage, took) }
	}
	return func(ctx context.Context, stage string, took time.Duration) {
		s.queries.SelectionStage(stage, took)
		if stage != "match" { // the parts of the stage have spans
			tracing.Stage(ctx, stage, took)
		}
	}
}

// AppliedTraced adds a span for applied messages of a partition's log, with links to the spans of their publishers.
func (m measured) AppliedTraced(p events.Partition, messages []jetstream.Message, took time.Duration) {
	var of []string
	for i := range messages {
		if trace := messages[i].Trace; trace != "" && (len(of) == 0 || of[len(of)-1] != trace) {
			of = append(of, trace)
		}
	}
	m.s.Tracer.Consumed("apply", took, of, func() []attribute.KeyValue {
		return []attribute.KeyValue{
			attribute.String("messaging.system", "nats"), attribute.String("messaging.operation.type", "process"),
			attribute.String("messaging.operation.name", "apply"),
			attribute.String("messaging.destination.name", jetstream.Names(m.s.Namespace).Stream(p)),
			attribute.Int("messaging.batch.message_count", len(messages)),
			attribute.Int("kvatlas.partition", int(p)),
			attribute.Int64("kvatlas.log.sequence", int64(messages[len(messages)-1].Seq)),
		}
	})
}

// tracedNATS begins a span for every request over NATS. A request of another node has a span only with a parent span.
func (s *Server) tracedNATS(op string, by api.Transport, next jetstream.Handler) jetstream.Handler {
	if !s.Tracer.On() {
		return next
	}
	begin, name := s.Tracer.Serve, "kvatlas."+op
	if by == api.FromNodes {
		begin, name = s.Tracer.Join, "kvatlas.own_"+op
	}
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		ctx, span := begin(ctx, name, r.Trace)
		if !span.On() {
			return next(ctx, r)
		}
		out := next(ctx, r)
		span.Set(attribute.String("messaging.system", "nats"), attribute.String("messaging.destination.name", r.Subject),
			attribute.Int("messaging.message.body.size", len(r.Body)))
		if later := out.Later; later != nil {
			out.Later = func(answer func(jetstream.Response)) {
				later(func(out jetstream.Response) {
					endNATS(span, out)
					answer(out)
				})
			}
			return out
		}
		endNATS(span, out)
		return out
	}
}

// endNATS ends the span of a request over NATS.
func endNATS(span tracing.Span, out jetstream.Response) {
	if out.Code != 0 {
		span.Fail(cmp.Or(out.Outcome, strconv.Itoa(out.Code)), out.Code >= http.StatusInternalServerError)
	}
	span.End()
}

// tracedHTTP begins a span for every request over HTTP, except for streams.
func (s *Server) tracedHTTP(next *web.Mux) http.Handler {
	if !s.Tracer.On() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if next.Rule(r).Cost == web.Lasting {
			next.ServeHTTP(w, r)
			return
		}
		ctx, span := s.Tracer.Serve(r.Context(), r.Method, r.Header.Get(rpc.HeaderTrace))
		if !span.On() {
			next.ServeHTTP(w, r)
			return
		}
		defer span.End()
		r = r.WithContext(ctx)
		status := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(status, r)
		if op := opOf(r); op != ops.Other {
			span.Name("kvatlas." + op)
		} else if r.Pattern != "/" { // otherwise an unknown path
			span.Name(r.Method + " " + r.Pattern)
		}
		span.Set(attribute.String("http.request.method", r.Method), attribute.String("http.route", r.Pattern),
			attribute.Int("http.response.status_code", status.status))
		if status.status >= http.StatusBadRequest {
			span.Fail(strconv.Itoa(status.status), status.status >= http.StatusInternalServerError)
		}
	})
}

// statusWriter keeps the status of a reply.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for [http.ResponseController].
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// traceAnswer adds the query and the answer to the context's span, with llm-d's attribute names.
func traceAnswer(ctx context.Context, q *api.Query, a *api.Answer) {
	span := tracing.Of(ctx)
	if !span.On() {
		return
	}
	best := uint32(0)
	for i := range a.Workers {
		best = max(best, a.Workers[i].Total())
	}
	span.Set(attribute.String("gen_ai.request.model", q.Model),
		attribute.Int("llm_d.epp.producer.total_blocks", a.Blocks),
		attribute.Int("llm_d.epp.producer.max_match_blocks", int(best)),
		attribute.Int("kvatlas.holders", len(a.Workers)), attribute.Bool("kvatlas.complete", a.Complete))
	if a.Reason != "" {
		span.Set(attribute.String("llm_d.epp.producer.result", string(a.Reason)))
	}
}

// traceChoice adds the choice to the context's span.
func traceChoice(ctx context.Context, q *api.SelectRequest, policy string, out *api.Selection) {
	span := tracing.Of(ctx)
	if !span.On() {
		return
	}
	span.Set(attribute.String("gen_ai.request.model", q.Model), attribute.String("kvatlas.policy", policy))
	if q.RequestID != "" {
		span.Set(attribute.String("gen_ai.request.id", q.RequestID))
	}
	if out != nil {
		span.Set(attribute.String("kvatlas.worker", string(out.Worker)), attribute.Int("kvatlas.rank", int(out.Rank)),
			attribute.Int("llm_d.epp.picker.candidate_endpoints", out.Candidates),
			attribute.Int("llm_d.epp.producer.total_blocks", out.Blocks),
			attribute.Int("kvatlas.cached_tokens", int(out.CachedTokens)), attribute.Bool("kvatlas.complete", out.Complete))
	}
}

// tracedFind is Find with a span, for faces with several finds in a request.
func (s *Server) tracedFind(ctx context.Context, q *api.Query) (*api.Answer, error) {
	ctx, span := tracing.Start(ctx, "kvatlas."+ops.Find)
	defer span.End()
	a, err := s.find(ctx, q)
	failSpan(span, err)
	return a, err
}

// tracedSelect is Select with a span, for faces with more than a choice in a request.
func (s *Server) tracedSelect(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	ctx, span := tracing.Start(ctx, "kvatlas."+ops.Select)
	defer span.End()
	out, err := s.Select(ctx, q)
	failSpan(span, err)
	return out, err
}

// failSpan adds the error of a request to a span.
func failSpan(span tracing.Span, err error) {
	if err != nil && span.On() {
		e := api.AsError(err)
		span.Fail(e.Outcome(), e.Code.HTTPStatus() >= http.StatusInternalServerError)
	}
}
