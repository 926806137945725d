package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// counts are the counted calls of a port.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) ended(method, outcome string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[method+" "+outcome]++
}

func (c *counts) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprint(c.n)
}

// echo is a service with a unary method and a stream. The text of a call selects the result; the stream echoes.
func echo(answer func(ctx context.Context, text string) error) func(grpc.ServiceRegistrar) {
	return func(r grpc.ServiceRegistrar) {
		r.RegisterService(&grpc.ServiceDesc{ServiceName: "test.Echo", HandlerType: (*any)(nil),
			Methods: []grpc.MethodDesc{{MethodName: "Repeat", Handler: func(_ any, ctx context.Context, decode func(any) error,
				around grpc.UnaryServerInterceptor) (any, error) {
				q := &wrapperspb.StringValue{}
				if err := decode(q); err != nil {
					return nil, err
				}
				return around(ctx, q, &grpc.UnaryServerInfo{FullMethod: "/test.Echo/Repeat"},
					func(ctx context.Context, q any) (any, error) {
						return q, answer(ctx, q.(*wrapperspb.StringValue).Value)
					})
			}}},
			Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true,
				Handler: func(_ any, s grpc.ServerStream) error {
					for {
						q := &wrapperspb.StringValue{}
						if err := s.RecvMsg(q); err != nil {
							return nil
						}
						if err := s.SendMsg(q); err != nil {
							return err
						}
					}
				}}},
		}, struct{}{})
	}
}

// tokens parses the text of a token file.
func tokens(t *testing.T, text string) *rights.Tokens {
	t.Helper()
	list, err := rights.New([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// serve serves until the test ends.
func serve(t *testing.T, cfg Config, register func(grpc.ServiceRegistrar)) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	if cfg.Ready == nil {
		cfg.Ready = func() error { return nil }
	}
	if cfg.Ended == nil {
		cfg.Ended = func(string, string) {}
	}
	if cfg.Needs == nil {
		cfg.Needs = map[string]rights.Roles{"/test.Echo/Repeat": rights.Read, "/test.Echo/Chat": rights.Route}
	}
	stop, at, err := Serve("127.0.0.1:0", cfg, register)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	conn, err = grpc.NewClient(at.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, stop
}

func say(ctx context.Context, conn *grpc.ClientConn, text string) error {
	return conn.Invoke(ctx, "/test.Echo/Repeat", wrapperspb.String(text), &wrapperspb.StringValue{})
}

// TestPanics: a call that panics returns an error, and the port continues.
func TestPanics(t *testing.T) {
	panicked := make(chan string, 1)
	conn, _ := serve(t, Config{Calls: 1, Streams: 1, Panicked: func(method string, why any, stack []byte) {
		panicked <- fmt.Sprint(method, " ", why, " ", len(stack) > 0)
	}}, echo(func(_ context.Context, text string) error {
		if text == "bad" {
			panic(text)
		}
		return nil
	}))
	if err := say(t.Context(), conn, "bad"); status.Code(err) != codes.Internal {
		t.Errorf("%v", err)
	}
	if got := <-panicked; got != "/test.Echo/Repeat bad true" {
		t.Errorf("panicked %s", got)
	}
	if err := say(t.Context(), conn, "good"); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// TestStatuses: errors of the catalogue arrive as statuses. Every call is counted by its outcome, including calls that
// the library refuses.
func TestStatuses(t *testing.T) {
	var counted counts
	answer := func(_ context.Context, text string) error {
		if text == "" || strings.HasPrefix(text, "x") {
			return nil
		}
		return api.Errorf(api.Code(text), "because")
	}
	conn, stop := serve(t, Config{Calls: 10, Streams: 10, Ended: counted.ended}, echo(answer))
	ctx := t.Context()
	for text, want := range map[string]codes.Code{
		"": codes.OK, string(api.CodeNotReady): codes.Unavailable, string(api.CodeMalformed): codes.InvalidArgument,
		string(api.CodeBusy): codes.ResourceExhausted, "internal": codes.Internal,
		strings.Repeat("x", MaxMessage+1): codes.ResourceExhausted, strings.Repeat("x", 1<<20): codes.OK,
	} {
		if err := say(ctx, conn, text); status.Code(err) != want {
			t.Errorf("%.20q: %v, want %v", text, err, want)
		}
	}
	if err := conn.Invoke(ctx, "/test.Echo/Shout", wrapperspb.String(""), &wrapperspb.StringValue{}); status.Code(err) !=
		codes.Unimplemented {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := say(ended, conn, ""); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	stop()
	const want = "map[Repeat busy:1 Repeat internal:1 Repeat malformed:1 Repeat not_ready:1 Repeat ok:2 Repeat " +
		"too_large:1 other unknown_operation:1]"
	if got := counted.String(); got != want {
		t.Errorf("counted %s, want %s", got, want)
	}
}

// TestCanceledCalls: a call that its caller ends is counted as canceled, and a call after its deadline as expired.
// Neither is ok, even if the handler has an answer.
func TestCanceledCalls(t *testing.T) {
	var counted counts
	begun := make(chan struct{}, 1)
	start := func() (conn *grpc.ClientConn, stop func()) {
		counted = counts{}
		return serve(t, Config{Calls: 10, Streams: 10, Ended: counted.ended},
			echo(func(ctx context.Context, text string) error {
				if text == "canceled" {
					begun <- struct{}{}
				}
				<-ctx.Done()
				if text == "fails" {
					return ctx.Err()
				}
				return nil
			}))
	}
	conn, stop := start()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	if err := say(ctx, conn, "canceled"); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	stop()
	if got := counted.String(); got != "map[Repeat canceled:1]" {
		t.Errorf("counted %s", got)
	}
	// On a busy machine, the client may end a call before the server's own deadline: the call is canceled for the server.
	for _, text := range []string{"answers", "fails"} {
		conn, stop := start()
		testkit.Eventually(t, text+": a call is counted as expired", func() (bool, string) {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if err := say(ctx, conn, text); status.Code(err) != codes.DeadlineExceeded {
				t.Error(err)
			}
			return strings.Contains(counted.String(), "expired"), counted.String()
		})
		stop()
		if got := counted.String(); strings.Contains(got, "ok") {
			t.Errorf("%s: counted %s", text, got)
		}
	}
}

// TestToken: calls without the token are refused, except health checks.
func TestToken(t *testing.T) {
	ready := errors.New("not yet")
	var mu sync.Mutex
	conn, _ := serve(t, Config{Tokens: tokens(t, "0123456789abcdef"), Calls: 10, Streams: 10, Ready: func() error {
		mu.Lock()
		defer mu.Unlock()
		return ready
	}}, echo(func(context.Context, string) error { return nil }))
	for header, want := range map[string]codes.Code{"": codes.Unauthenticated, "Bearer 0123456789abcdef": codes.OK,
		"bearer 0123456789abcdef": codes.OK, "Basic 0123456789abcdef": codes.Unauthenticated,
		"Bearer 0123456789abcdee": codes.Unauthenticated} {
		ctx := t.Context()
		if header != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", header)
		}
		if err := say(ctx, conn, ""); status.Code(err) != want {
			t.Errorf("%q: %v", header, err)
		}
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Chat")
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SendMsg(wrapperspb.String("x")) // Recv returns the status
		if err := s.RecvMsg(&wrapperspb.StringValue{}); status.Code(err) != want {
			t.Errorf("a stream with %q: %v", header, err)
		}
	}
	check := func(service string) string {
		q := &grpc_health_v1.HealthCheckRequest{Service: service}
		a, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), q)
		if err != nil {
			return status.Code(err).String()
		}
		return a.Status.String()
	}
	for _, is := range []string{"NOT_SERVING", "SERVING"} {
		if live := check(Liveness); live != "SERVING" {
			t.Error("liveness is", live)
		}
		for _, service := range []string{"", Readiness, "test.Echo"} {
			if got := check(service); got != is {
				t.Errorf("%q is %s, want %s", service, got, is)
			}
		}
		mu.Lock()
		ready = nil
		mu.Unlock()
	}
	if got := check("unknown"); got != "NotFound" {
		t.Error(got)
	}
}

// TestRoom: calls and streams have separate bounds. Health checks are never refused.
func TestRoom(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	conn, _ := serve(t, Config{Calls: 1, Streams: 1}, echo(func(_ context.Context, text string) error {
		if text == "wait" {
			close(begun)
			<-end
		}
		return nil
	}))
	waited := make(chan error)
	go func() { waited <- say(t.Context(), conn, "wait") }()
	<-begun
	if err := say(t.Context(), conn, ""); status.Code(err) != codes.ResourceExhausted {
		t.Error("a second call:", err)
	}
	open := func() (grpc.ClientStream, error) {
		s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Chat")
		if err != nil {
			return nil, err
		}
		_ = s.SendMsg(wrapperspb.String("x")) // Recv returns the status
		return s, s.RecvMsg(&wrapperspb.StringValue{})
	}
	first, err := open()
	if err != nil {
		t.Fatal("a stream beside the call:", err)
	}
	if _, err := open(); status.Code(err) != codes.ResourceExhausted {
		t.Error("a second stream:", err)
	}
	health := grpc_health_v1.NewHealthClient(conn)
	if _, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
	close(end)
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if err := first.CloseSend(); err != nil {
		t.Error(err)
	}
	for first.RecvMsg(&wrapperspb.StringValue{}) == nil { // until the server has ended the stream
	}
}

// TestNoMessage: a call is refused and counted from its headers alone.
func TestNoMessage(t *testing.T) {
	var counted counts
	begun, end := make(chan struct{}), make(chan struct{})
	conn, stop := serve(t, Config{Tokens: tokens(t, "0123456789abcdef"), Calls: 1, Streams: 1, Ended: counted.ended},
		echo(func(context.Context, string) error {
			close(begun)
			<-end
			return nil
		}))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience) // bounds the test
	defer cancel()
	sendNothing := func(ctx context.Context) error {
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, "/test.Echo/Repeat")
		if err != nil {
			return err
		}
		return s.RecvMsg(&wrapperspb.StringValue{})
	}
	if err := sendNothing(ctx); status.Code(err) != codes.Unauthenticated {
		t.Fatal("without the token:", err)
	}
	if err := say(ctx, conn, strings.Repeat("x", MaxMessage+1)); status.Code(err) != codes.Unauthenticated {
		t.Error("without the token, and too large:", err)
	}
	known := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer 0123456789abcdef")
	waited := make(chan error)
	go func() { waited <- say(known, conn, "") }()
	<-begun
	if err := sendNothing(known); status.Code(err) != codes.ResourceExhausted {
		t.Error("a second call:", err)
	}
	if err := sendNothing(ctx); status.Code(err) != codes.Unauthenticated {
		t.Error("without the token, while there is no room:", err)
	}
	close(end)
	if err := <-waited; err != nil {
		t.Error(err)
	}
	stop()
	if got := counted.String(); got != "map[Repeat busy:1 Repeat ok:1 Repeat unauthorized:3]" {
		t.Errorf("counted %s", got)
	}
}

// TestRoles: a call needs a token with the role of its method.
func TestRoles(t *testing.T) {
	conn, _ := serve(t, Config{Tokens: tokens(t, "read 0123456789abcdef-r\nroute 0123456789abcdef-c\n"+
		"register 0123456789abcdef-e"), Calls: 10, Streams: 10}, echo(func(context.Context, string) error { return nil }))
	for token, want := range map[string][2]codes.Code{"r": {codes.OK, codes.PermissionDenied},
		"c": {codes.OK, codes.OK}, "e": {codes.PermissionDenied, codes.PermissionDenied},
		"x": {codes.Unauthenticated, codes.Unauthenticated}} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer 0123456789abcdef-"+token)
		err := say(ctx, conn, "")
		if status.Code(err) != want[0] || want[0] == codes.PermissionDenied && !strings.Contains(err.Error(), "role read") {
			t.Errorf("a call of %s: %v", token, err)
		}
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Chat")
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SendMsg(wrapperspb.String("x")) // Recv returns the status
		if err := s.RecvMsg(&wrapperspb.StringValue{}); status.Code(err) != want[1] {
			t.Errorf("a stream of %s: %v", token, err)
		}
		if err := conn.Invoke(ctx, "/test.Echo/Other", wrapperspb.String(""), &wrapperspb.StringValue{}); token != "x" &&
			status.Code(err) != codes.Unimplemented {
			t.Errorf("another method of %s: %v", token, err)
		}
	}
}

// TestOpen: an open method needs no token, and other methods do.
func TestOpen(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := rights.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	p := newPort(Config{Tokens: tokens, Open: []string{"/test.Echo/Chat"},
		Needs: map[string]rights.Roles{"/test.Echo/Repeat": rights.Read, "/test.Echo/Chat": rights.Route}})
	if err := p.admit(t.Context(), "/test.Echo/Chat"); err != nil {
		t.Errorf("the open method: %v", err)
	}
	for _, method := range []string{"/test.Echo/Repeat", "/test.Echo/Other"} {
		if p.admit(t.Context(), method) == nil {
			t.Errorf("%s is open", method)
		}
	}
}

// TestUnclassified: a method without roles is a bug.
func TestUnclassified(t *testing.T) {
	defer func() {
		if why := fmt.Sprint(recover()); !strings.Contains(why, "test.Echo/Chat has no roles") {
			t.Errorf("the method is registered: %v", why)
		}
	}()
	p := newPort(Config{Needs: map[string]rights.Roles{"/test.Echo/Repeat": rights.Read}})
	echo(nil)(registrar{grpc.NewServer(), p})
}

// TestLateMessage: late messages hold no slots, and only slowMessages late messages are awaited for long.
func TestLateMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, begun := newPort(Config{Calls: 1}), time.Now()
		never := make(chan struct{})
		defer close(never)
		handle := p.admitting("/test.Echo/Repeat", func(_ any, _ context.Context, read func(any) error,
			_ grpc.UnaryServerInterceptor) (any, error) {
			return nil, read(nil)
		})
		const late = 3 * slowMessages
		ended := make(chan time.Duration, late)
		for range late {
			go func() {
				c := &call{}
				_, err := handle(nil, context.WithValue(t.Context(), callKey{}, c), func(any) error {
					<-never
					return nil
				}, nil)
				if status.Code(err) != codes.DeadlineExceeded || c.outcome != string(api.CodeRequestTimeout) {
					t.Errorf("%v, counted as %s", err, c.outcome)
				}
				ended <- time.Since(begun)
			}()
			synctest.Wait()
		}
		c := &call{}
		_, err := handle(nil, context.WithValue(t.Context(), callKey{}, c), func(any) error { return nil }, nil)
		if err != nil {
			t.Error("a call beside late ones:", err)
		}
		after := map[time.Duration]int{}
		for range late {
			after[<-ended]++
		}
		if after[quickly] != late-slowMessages || after[readTimeout] != slowMessages || len(after) != 2 {
			t.Errorf("the late calls end after %v", after)
		}
		if n, m := p.calls.taken.Load(), p.slow.taken.Load(); n != 0 || m != 0 {
			t.Errorf("%d and %d slots are in use", n, m)
		}
	})
}

// TestSilentStreams: streams without a first message do not block others.
func TestSilentStreams(t *testing.T) {
	conn, _ := serve(t, Config{Calls: 1, Streams: 2}, echo(func(context.Context, string) error { return nil }))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience) // bounds the test
	defer cancel()
	open := func() grpc.ClientStream {
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Chat")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	var silent []grpc.ClientStream
	for range 10 { // all streams that one connection has room for
		silent = append(silent, open())
	}
	s := open()
	if err := s.SendMsg(wrapperspb.String("x")); err != nil {
		t.Fatal(err)
	}
	if err := s.RecvMsg(&wrapperspb.StringValue{}); err != nil {
		t.Error("a stream beside silent ones:", err)
	}
	ended := make(chan error)
	for _, s := range silent {
		go func() { ended <- s.RecvMsg(&wrapperspb.StringValue{}) }()
	}
	for range len(silent) - slowMessages {
		if err := <-ended; !errors.Is(err, io.EOF) { // the service ends its stream in this way
			t.Error("a silent stream:", err)
		}
	}
	cancel()
	for range slowMessages {
		<-ended
	}
}

// TestStop stops a port under an open stream.
func TestStop(t *testing.T) {
	conn, stop := serve(t, Config{Calls: 1, Streams: 1}, echo(func(context.Context, string) error { return nil }))
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Chat")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SendMsg(wrapperspb.String("x")); err != nil {
		t.Fatal(err)
	}
	if err := s.RecvMsg(&wrapperspb.StringValue{}); err != nil {
		t.Fatal(err)
	}
	stop()
	stop()
	if err := s.RecvMsg(&wrapperspb.StringValue{}); err == nil {
		t.Error("the stream continues")
	}
}
