package grpcserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// MaxMessage bounds the bytes of a message.
const MaxMessage = 8 << 20

// drain bounds the time for running calls after the stop of the port.
const drain = 2 * time.Second

// Limits of slow messages. A call has no slot during the receipt of its message. After quickly it needs one of
// slowMessages slots, which bound the memory of slow messages to 64 MiB.
const (
	readTimeout  = 30 * time.Second // equals the limit of HTTP requests
	quickly      = time.Second
	slowMessages = 64 << 20 / MaxMessage
)

// forHealth is the number of grpc.health.v1 calls for which a connection has extra room.
const forHealth = 16

// Config configures the access and the limits of a port.
type Config struct {
	Tokens *rights.Tokens          // a call must present one of the tokens; nil disables the check
	Needs  map[string]rights.Roles // roles by method, such as /package.Service/Method; required for every method
	Open   []string                // methods without a token

	// TLS configures the port; nil means plain text. A client with a verified certificate needs no token. With ClientCAs
	// and without Tokens, a call needs such a certificate.
	TLS *tls.Config

	Calls   int // bound on concurrent unary calls
	Streams int // bound on concurrent streams; each holds at most one message

	Ready func() error                 // returns nil if the node answers
	Ended func(method, outcome string) // called with the outcome of each call: "ok", or an error's code

	// Panicked is called after a panic in a handler, with its stack. The call fails, and the port continues, as over
	// HTTP.
	Panicked func(method string, why any, stack []byte)

	Tracer *tracing.Tracer // traces all calls except grpc.health.v1; nil disables tracing
}

// port is the state of one listener.
type port struct {
	Config
	services       map[string]grpc.ServiceInfo
	calls, streams places
	slow           places
}

// places counts running calls.
type places struct {
	taken atomic.Int64
	most  int64
}

// acquire acquires a slot. It returns an error if no slot is free.
func (p *places) acquire() error {
	if p.taken.Add(1) > p.most {
		p.taken.Add(-1)
		return api.Errorf(api.CodeBusy, "%d gRPC calls are in progress; retry later", p.most)
	}
	return nil
}

func (p *places) release() { p.taken.Add(-1) }

func newPort(cfg Config) *port {
	p := &port{Config: cfg}
	p.calls.most, p.streams.most, p.slow.most = int64(cfg.Calls), int64(cfg.Streams), slowMessages
	return p
}

// Serve listens and serves until stop is called. stop may be called repeatedly. register adds the services.
func Serve(listen string, cfg Config, register func(grpc.ServiceRegistrar)) (stop func(), at net.Addr, err error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, nil, err
	}
	p := newPort(cfg)
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
		grpc.MaxConcurrentStreams(uint32(min(cfg.Calls+cfg.Streams+forHealth, math.MaxUint32))), // per connection
		grpc.StatsHandler(counter{p}), grpc.UnaryInterceptor(p.call), grpc.StreamInterceptor(p.stream),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(s)
			return api.Errorf(api.CodeUnknownOperation, "unknown method %.100s", method)
		}),
	}
	if cfg.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(cfg.TLS)))
	}
	server := grpc.NewServer(options...)
	register(registrar{server, p})
	grpc_health_v1.RegisterHealthServer(server, &health{p: p})
	p.services = server.GetServiceInfo()
	go server.Serve(l)
	return func() {
		force := time.AfterFunc(drain, server.Stop)
		defer force.Stop()
		server.GracefulStop()
	}, l.Addr(), nil
}

// isHealth reports whether a method belongs to grpc.health.v1, which always has room.
func isHealth(method string) bool {
	return strings.HasPrefix(method, "/"+grpc_health_v1.Health_ServiceDesc.ServiceName+"/")
}

// certified reports whether the TLS library has verified a certificate of the caller.
func certified(ctx context.Context) bool {
	caller, known := peer.FromContext(ctx)
	if !known {
		return false
	}
	info, is := caller.AuthInfo.(credentials.TLSInfo)
	return is && len(info.State.VerifiedChains) > 0
}

// admit returns an error if the caller may not call the method.
func (p *port) admit(ctx context.Context, method string) error {
	if slices.Contains(p.Open, method) || certified(ctx) {
		return nil
	}
	how := "metadata authorization: Bearer ..."
	if p.TLS != nil && p.TLS.ClientCAs != nil {
		if p.Tokens == nil {
			return api.Errorf(api.CodeUnauthorized, "this port wants a client certificate of an authority in --grpc-client-ca")
		}
		how += ", or a client certificate of an authority in --grpc-client-ca"
	}
	given := ""
	if values := metadata.ValueFromIncomingContext(ctx, "authorization"); len(values) == 1 {
		given = values[0]
	}
	needs := cmp.Or(p.Needs[method], rights.Any) // the default is for unknown methods
	if failure := p.Tokens.Check(given, needs, how); failure != nil {
		return failure
	}
	return nil
}

// registrar registers services. It admits calls before their messages are read. Interceptors run later. It panics for a
// method without roles.
type registrar struct {
	grpc.ServiceRegistrar
	p *port
}

func (r registrar) RegisterService(desc *grpc.ServiceDesc, service any) {
	admitting := *desc
	for _, name := range methods(desc) {
		if r.p.Needs["/"+desc.ServiceName+"/"+name] == 0 {
			panic(desc.ServiceName + "/" + name + " has no roles")
		}
	}
	admitting.Methods = slices.Clone(desc.Methods)
	for i := range admitting.Methods {
		m := &admitting.Methods[i]
		m.Handler = r.p.admitting("/"+desc.ServiceName+"/"+m.MethodName, m.Handler)
	}
	r.ServiceRegistrar.RegisterService(&admitting, service)
}

// methods returns the names of a service's methods.
func methods(desc *grpc.ServiceDesc) (names []string) {
	for _, m := range desc.Methods {
		names = append(names, m.MethodName)
	}
	for _, s := range desc.Streams {
		names = append(names, s.StreamName)
	}
	return names
}

func (p *port) admitting(method string, handle grpc.MethodHandler) grpc.MethodHandler {
	return func(service any, ctx context.Context, read func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
		err := p.admit(ctx, method)
		if err == nil {
			err = p.calls.acquire()
		}
		if err != nil {
			return nil, outcome(ctx, err)
		}
		placed := true
		defer func() {
			if placed {
				p.calls.release()
			}
		}()
		return handle(service, ctx, func(q any) error {
			placed = false
			err := p.receive(&p.calls, func() error { return read(q) })
			placed = err == nil
			if _, ours := errors.AsType[*api.Error](err); ours {
				err = outcome(ctx, err)
			}
			return err
		}, around)
	}
}

// receive reads a call's message. It releases the call's slot meanwhile, and acquires the slot again after a success.
// After an error the read continues until the library ends the call, because a read cannot be aborted.
func (p *port) receive(of *places, read func() error) error {
	of.release()
	done := make(chan error, 1)
	go func() { done <- read() }()
	quick := time.NewTimer(quickly)
	defer quick.Stop()
	select {
	case err := <-done:
		return arrived(of, err)
	case <-quick.C:
	}
	if p.slow.acquire() != nil {
		return api.Errorf(api.CodeRequestTimeout,
			"the message did not arrive within %v, and %d other messages are as slow", quickly,
			slowMessages)
	}
	defer p.slow.release()
	select {
	case err := <-done:
		return arrived(of, err)
	case <-time.After(readTimeout - quickly):
		return api.Errorf(api.CodeRequestTimeout, "the message did not arrive within %v", readTimeout)
	}
}

// arrived acquires the slot of a call again after its message has arrived.
func arrived(of *places, err error) error {
	if err == nil {
		err = of.acquire()
	}
	return err
}

// firstInTime is a stream that limits its first message like a call's message.
type firstInTime struct {
	grpc.ServerStream
	p      *port
	begun  bool
	placed bool
}

func (s *firstInTime) RecvMsg(m any) error {
	if s.begun {
		return s.ServerStream.RecvMsg(m)
	}
	s.begun, s.placed = true, false
	err := s.p.receive(&s.p.streams, func() error { return s.ServerStream.RecvMsg(m) })
	s.placed = err == nil
	return err
}

func (p *port) call(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (a any, err error) {
	traced, span := p.begin(ctx, info.FullMethod)
	err = p.guard(info.FullMethod, func() (err error) {
		a, err = next(traced, q)
		return err
	})
	finish(span, err)
	if err == nil {
		err = ended(ctx) // the caller does not receive the answer
	}
	return a, outcome(ctx, err)
}

func (p *port) stream(service any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if isHealth(info.FullMethod) {
		return outcome(s.Context(), p.guard(info.FullMethod, func() error { return next(service, s) }))
	}
	err := p.admit(s.Context(), info.FullMethod)
	if err == nil {
		err = p.streams.acquire()
	}
	if err != nil {
		return outcome(s.Context(), err)
	}
	first := &firstInTime{ServerStream: s, p: p, placed: true}
	defer func() {
		if first.placed {
			p.streams.release()
		}
	}()
	s = first
	traced, span := p.begin(s.Context(), info.FullMethod)
	if span.On() {
		s = tracedStream{s, traced}
	}
	err = p.guard(info.FullMethod, func() error { return next(service, s) })
	finish(span, err)
	return outcome(s.Context(), err)
}

// guard converts a panic to an error.
func (p *port) guard(method string, handle func() error) (err error) {
	defer func() {
		if why := recover(); why != nil {
			p.Panicked(method, why, debug.Stack())
			err = api.Errorf(api.CodeInternal, "a fault in this program ended the call; see its log")
		}
	}()
	return handle()
}

// begin begins the span of a call, in the trace of the caller's metadata, if any.
func (p *port) begin(ctx context.Context, method string) (context.Context, tracing.Span) {
	if !p.Tracer.On() || isHealth(method) {
		return ctx, tracing.Span{}
	}
	parent := ""
	if values := metadata.ValueFromIncomingContext(ctx, rpc.HeaderTrace); len(values) == 1 {
		parent = values[0]
	}
	ctx, span := p.Tracer.Serve(ctx, strings.TrimPrefix(method, "/"), parent)
	if span.On() {
		service, name, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
		span.Set(attribute.String("rpc.system", "grpc"), attribute.String("rpc.service", service),
			attribute.String("rpc.method", name))
	}
	return ctx, span
}

// finish ends the span of a finished call.
func finish(span tracing.Span, err error) {
	if err != nil && span.On() {
		code, blame := status.Code(err).String(), false
		if failure, is := errors.AsType[*api.Error](err); is {
			code, blame = failure.Outcome(), failure.Code.HTTPStatus() >= http.StatusInternalServerError
		}
		span.Fail(code, blame)
	}
	span.End()
}

// tracedStream has the span of its call in its context.
type tracedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s tracedStream) Context() context.Context { return s.ctx }

// outcome records the outcome of a call, and converts its error to a status.
func outcome(ctx context.Context, err error) error {
	c := ctx.Value(callKey{}).(*call)
	switch failure, is := errors.AsType[*api.Error](err); {
	case err == nil:
		c.outcome = ops.OK
	case ctx.Err() != nil:
		err = status.FromContextError(ended(ctx)).Err()
	case is:
		c.outcome = failure.Outcome()
		err = Status(failure)
	}
	return err
}

// deadlineSlack bounds the delay of the server's timer after the client's timer for the same deadline.
const deadlineSlack = 100 * time.Millisecond

// ended returns the reason for the end of a call's context; nil while it is active. After its deadline a client resets
// the stream. The reset looks like a cancellation until the server's timer fires.
func ended(ctx context.Context) error {
	until, limited := ctx.Deadline()
	if ctx.Err() != nil && limited && time.Until(until) < deadlineSlack {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// call contains the labels of a call until the call is counted.
type call struct{ method, outcome string }

type callKey struct{}

// counter counts calls, including calls without a handler because of a too large message.
type counter struct{ p *port }

func (c counter) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	service, method, _ := strings.Cut(strings.TrimPrefix(info.FullMethodName, "/"), "/")
	known := slices.ContainsFunc(c.p.services[service].Methods, func(m grpc.MethodInfo) bool { return m.Name == method })
	if !known {
		method = ops.Other
	}
	return context.WithValue(ctx, callKey{}, &call{method: method})
}

func (c counter) HandleRPC(ctx context.Context, s stats.RPCStats) {
	end, ok := s.(*stats.End)
	if !ok {
		return
	}
	counted := ctx.Value(callKey{}).(*call)
	if counted.outcome == "" {
		counted.outcome = libraryOutcome(status.Code(end.Error))
	}
	c.p.Ended(counted.method, counted.outcome)
}

func (counter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (counter) HandleConn(context.Context, stats.ConnStats)                       {}

// libraryOutcome returns the outcome of a call that the gRPC library has ended.
func libraryOutcome(code codes.Code) string {
	switch code {
	case codes.OK:
		return ops.OK
	case codes.Canceled:
		return ops.Canceled
	case codes.DeadlineExceeded:
		return ops.Expired
	case codes.ResourceExhausted:
		return string(api.CodeTooLarge)
	case codes.Unimplemented:
		return string(api.CodeUnknownOperation)
	case codes.Unavailable:
		return ops.Unsent
	}
	return string(api.CodeMalformed)
}

// statuses maps error codes of the catalogue to gRPC codes. Other codes map to INTERNAL.
var statuses = map[api.Code]codes.Code{
	api.CodeMalformed: codes.InvalidArgument, api.CodeMissingModel: codes.InvalidArgument,
	api.CodeBadTokens: codes.InvalidArgument, api.CodeUnknownModel: codes.NotFound,
	api.CodeUnknownWorker: codes.NotFound, api.CodeUnknownRequest: codes.NotFound,
	api.CodeBlockSizeMismatch: codes.FailedPrecondition, api.CodeConflict: codes.FailedPrecondition,
	api.CodeUnauthorized: codes.Unauthenticated, api.CodeForbidden: codes.PermissionDenied,
	api.CodeUnknownOperation: codes.Unimplemented,
	api.CodeTooLarge:         codes.ResourceExhausted, api.CodeBusy: codes.ResourceExhausted,
	api.CodeOverloaded: codes.ResourceExhausted, api.CodeQuota: codes.ResourceExhausted,
	api.CodeNoWorkers: codes.Unavailable, api.CodeNotReady: codes.Unavailable, api.CodeUnavailable: codes.Unavailable,
	api.CodeBehind: codes.DeadlineExceeded, api.CodeRequestTimeout: codes.DeadlineExceeded,
}

// Status converts an error of the catalogue to a gRPC status.
func Status(failure *api.Error) error {
	code, ok := statuses[failure.Code]
	if !ok {
		code = codes.Internal
	}
	return status.Error(code, failure.Message)
}

// Names of grpc.health.v1 beside the names of services.
const (
	Liveness  = "liveness"
	Readiness = "readiness"
)

// health implements grpc.health.v1.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
	p *port
}

func (h *health) Check(_ context.Context, q *grpc_health_v1.HealthCheckRequest) (
	*grpc_health_v1.HealthCheckResponse, error) {
	_, service := h.p.services[q.Service]
	serving := grpc_health_v1.HealthCheckResponse_SERVING
	switch {
	case q.Service == Liveness:
	case q.Service != "" && q.Service != Readiness && !service:
		return nil, status.Errorf(codes.NotFound, "unknown service %.100q", q.Service)
	case h.p.Ready() != nil:
		serving = grpc_health_v1.HealthCheckResponse_NOT_SERVING
	}
	return &grpc_health_v1.HealthCheckResponse{Status: serving}, nil
}
