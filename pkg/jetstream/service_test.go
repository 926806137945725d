package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/testkit"
)

// contentMsgpack is a content type other than JSON.
const contentMsgpack = "application/msgpack"

func pair(t testing.TB) (server, client *Conn) {
	t.Helper()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	return connect(t, ConnOptions{URLs: []string{s.URL()}}), connect(t, ConnOptions{URLs: []string{s.URL()}})
}

func serve(t testing.TB, c *Conn, cfg ServiceConfig) *Service {
	t.Helper()
	cfg.Name, cfg.Version = "test", "1.2.3"
	s, err := Serve(c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Stop(context.Background()) })
	if _, err := c.Request(ctxFor(t), "$SRV.PING.test", "", nil); err != nil { // the server has our subscriptions
		t.Fatal(err)
	}
	return s
}

func wantCode(t testing.TB, err error, code int) {
	t.Helper()
	var se *ServiceError
	if !errors.As(err, &se) || se.Code != code || se.Description == "" {
		t.Fatalf("%v, want code %d", err, code)
	}
}

// waitStats waits until the service's statistics contain a text: answers are counted after they were sent.
func waitStats(t testing.TB, client *Conn, want string) {
	t.Helper()
	ctx := ctxFor(t)
	testkit.Eventually(t, "the statistics have "+want, func() (bool, string) {
		stats, err := client.Request(ctx, "$SRV.STATS.test", "", nil)
		if err != nil {
			t.Fatalf("%s, want %s: %v", stats.Body, want, err)
		}
		return strings.Contains(string(stats.Body), want), string(stats.Body)
	})
}

func TestService(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	ctx := ctxFor(t)
	deadline, _ := ctx.Deadline()
	serve(t, server, ServiceConfig{MaxBody: 1000, Endpoints: []Endpoint{
		{Name: "echo", Subject: "t.echo", QueueGroup: "q", Handler: func(ctx context.Context, r Request) Response {
			d, ok := ctx.Deadline() // relative to the arrival of the request, in whole milliseconds
			known := ok && !d.Before(deadline.Add(-time.Millisecond)) && d.Before(time.Now().Add(patience))
			return Response{ContentType: r.ContentType, Body: fmt.Appendf(nil, "%s %s %v", r.Subject, r.Body, known)}
		}},
		{Name: "fail", Subject: "t.fail", Handler: func(context.Context, Request) Response {
			return Response{ContentType: ContentJSON, Body: []byte(`{"error":"stale"}`), Code: 409,
				Description: "stale\r\nX: y"}
		}},
		{Name: "huge", Subject: "t.huge",
			Handler: func(context.Context, Request) Response { return Response{Body: make([]byte, 1<<20)} }},
		{Name: "packed", Subject: "t.packed",
			Handler: func(context.Context, Request) Response { return Response{ContentType: contentMsgpack} }},
	}})
	reply, err := client.Request(ctx, "t.echo", contentMsgpack, []byte("hello"))
	if err != nil || reply.ContentType != contentMsgpack || string(reply.Body) != "t.echo hello true" {
		t.Fatalf("%q %v", reply, err)
	}
	for asked, says := range map[string]string{contentMsgpack: "", ContentJSON: contentMsgpack, "": contentMsgpack} {
		raw, err := client.nc.RequestMsgWithContext(ctx, message("t.packed", asked, nil))
		if err != nil || raw.Header.Get(headerContentType) != says {
			t.Errorf("request as %q: the reply has %q, %v", asked, raw.Header, err)
		}
		reply, err := client.Request(ctx, "t.packed", asked, nil)
		if err != nil || reply.ContentType != contentMsgpack {
			t.Errorf("request as %q: %q %v", asked, reply.ContentType, err)
		}
	}
	if _, err := client.Request(ctx, "t.echo", "", make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	_, err = client.Request(ctx, "t.echo", "", make([]byte, 1001))
	wantCode(t, err, CodeTooLarge)
	reply, err = client.Request(ctx, "t.fail", "", nil)
	wantCode(t, err, 409)
	if reply.ContentType != ContentJSON || string(reply.Body) != `{"error":"stale"}` ||
		strings.ContainsAny(err.Error(), "\r\n") {
		t.Fatalf("%q %v", reply, err)
	}
	_, err = client.Request(ctx, "t.huge", "", nil)
	wantCode(t, err, CodeInternal)
	for range 200 { // immediate answers too come from another goroutine than micro's
		_, err = client.Request(ctx, "t.fail", "", nil)
		wantCode(t, err, 409)
	}
	waitStats(t, client, `"data":{"errors":201,"outcomes":{"409":201}}`)
	if _, err := client.Request(ctx, "_INBOX.t.nobody", "", nil); !errors.Is(err, ErrNoResponder) {
		t.Fatal(err)
	}
	if _, err := client.Request(ctx, "t.echo", "", make([]byte, 2<<20)); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
	// `nats micro` lists it.
	info, err := client.Request(ctx, "$SRV.INFO.test", "", nil)
	if err != nil || !bytes.Contains(info.Body, []byte("t.echo")) || !bytes.Contains(info.Body, []byte("1.2.3")) {
		t.Fatalf("%s %v", info.Body, err)
	}
	// A message without a reply subject is no fault.
	if err := client.Send("t.echo", ContentJSON, nil); err != nil {
		t.Fatal(err)
	}
}

func TestServiceBusyAndLate(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	entered, release := make(chan struct{}, 10), make(chan struct{})
	var busy, expired, ended atomic.Int32
	serve(t, server, ServiceConfig{
		Workers: 1, Queue: 1,
		Ended: func(_, outcome string) {
			ended.Add(1)
			switch outcome {
			case "429":
				busy.Add(1)
			case ops.Expired:
				expired.Add(1)
			}
		},
		Endpoints: []Endpoint{{Name: "slow", Subject: "t.slow", Handler: func(ctx context.Context, r Request) Response {
			entered <- struct{}{}
			<-release
			return Response{Body: r.Body}
		}}},
	})
	ctx := ctxFor(t)
	first := make(chan error, 1)
	go func() {
		_, err := client.Request(ctx, "t.slow", "", nil)
		first <- err
	}()
	<-entered // the worker has it
	answers := make(chan error, 10)
	pool, err := rpc.NewPool(client.nc)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	const soon = 200 * time.Millisecond
	for range 5 { // the first waits for the worker
		if _, err := pool.Send("t.slow", "", soon, "", nil, told(answers), 0); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 {
		wantCode(t, <-answers, CodeBusy)
	}
	// each is counted after it was sent
	testkit.Eventually(t, "four requests are refused", func() bool { return busy.Load() >= 4 })
	time.Sleep(soon) // the service counts from the arrival of the request, before it refused the later ones
	close(release)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "a request expires", func() bool { return expired.Load() > 0 })
	if _, err := client.Request(ctx, "t.slow", "", nil); err != nil {
		t.Fatal(err)
	}
	if len(answers) > 0 {
		t.Fatalf("a late answer: %v", <-answers)
	}
	testkit.Eventually(t, "seven requests end", func() bool { return ended.Load() >= 7 })
	if ended.Load() != 7 || busy.Load() != 4 || expired.Load() != 1 {
		t.Errorf("of 7 requests %d ended, %d busy, %d expired", ended.Load(), busy.Load(), expired.Load())
	}
	past, cancel := context.WithDeadline(ctx, time.Now())
	defer cancel()
	if _, err := client.Request(past, "t.slow", "", nil); !errors.Is(err, ErrTimeout) {
		t.Fatal(err)
	}
	stop, err := server.Subscribe("t.silent", func(Request) {})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := server.flush(ctx); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := client.Request(short, "t.silent", "", nil); !errors.Is(err, ErrTimeout) {
		t.Fatal(err)
	}
}

// TestServiceRefuses: the service's own function answers requests without a handler, and answers that do not fit into a
// message.
func TestServiceRefuses(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	ctx := ctxFor(t)
	entered, release := make(chan struct{}, 10), make(chan struct{})
	s := serve(t, server, ServiceConfig{
		Workers: 1, QueueBytes: 100, MaxBody: 1000,
		Refuse: func(r Request, code int, why string) Response {
			return Response{ContentType: r.ContentType, Body: fmt.Appendf(nil, "%s %d %s", r.Subject, code, why),
				Code: code, Description: why, Outcome: "refused"}
		},
		Endpoints: []Endpoint{
			{Name: "huge", Subject: "t.huge",
				Handler: func(context.Context, Request) Response { return Response{Body: make([]byte, 1<<20)} }},
			{Name: "slow", Subject: "t.slow", Handler: func(context.Context, Request) Response {
				entered <- struct{}{}
				<-release
				return Response{}
			}},
		},
	})
	want := func(subject string, body []byte, header map[string][]string, code int, why string) {
		t.Helper()
		m := &nats.Msg{Subject: subject, Data: body, Header: header}
		reply, err := client.nc.RequestMsgWithContext(ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprintf("%s %d %s", subject, code, why); !strings.HasPrefix(string(reply.Data), text) ||
			reply.Header.Get(rpc.HeaderErrorCode) != fmt.Sprint(code) {
			t.Errorf("%.100q %v, want %q", reply.Data, reply.Header, text)
		}
	}
	want("t.huge", nil, nil, CodeInternal, "the answer has 1048576 bytes, more than ")
	want("t.huge", make([]byte, 1001), nil, CodeTooLarge, "the request has 1001 bytes, more than 1000")
	for _, bad := range []string{"soon", "0", "-1", "1.5", "18446744073709551616"} {
		want("t.huge", nil, map[string][]string{headerDeadline: {bad}}, CodeBad, `the header Kv-Deadline-Ms is "`+bad+
			`"`)
	}
	want("t.huge", nil, map[string][]string{"kv-deadline-ms": {"soon"}}, CodeBad, `the header Kv-Deadline-Ms is "soon"`)
	for text, want := range map[string]time.Duration{"1": time.Millisecond, "5000": 5 * time.Second,
		"2147483648": 24 * time.Hour, "18446744073709551615": 24 * time.Hour} {
		if got, ok := parseDeadline(text); !ok || got != want {
			t.Errorf("%s ms are %v, %v, want %v", text, got, ok, want)
		}
	}
	done := make(chan error, 2)
	ask := func(body []byte) {
		_, err := client.Request(ctx, "t.slow", "", body)
		done <- err
	}
	go ask(nil)
	<-entered
	go ask(make([]byte, 200)) // a single request may be larger
	testkit.Eventually(t, "a request waits", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.jobs) > 0
	})
	want("t.slow", []byte("x"), nil, CodeBusy, "all workers (1) are busy, and 0 MiB of requests are waiting")
	close(release)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	waitStats(t, client, `"data":{"errors":8,"outcomes":{"refused":8}}`)
}

// TestServiceWorkers: the number of concurrent requests equals the number of workers, and all are answered, also after
// idle times. One worker handles requests in order of arrival. TestServicePanics: a panic of a handler ends only its
// request.
func TestServicePanics(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	told := make(chan string, 1)
	serve(t, server, ServiceConfig{Workers: 1, Endpoints: []Endpoint{{Name: "e", Subject: "e",
		Handler: func(_ context.Context, r Request) Response {
			if len(r.Body) == 0 {
				panic("nothing")
			}
			return Response{Body: r.Body}
		}}}, Panicked: func(endpoint string, why any, stack []byte) {
		told <- fmt.Sprint(endpoint, " ", why, " ", bytes.Contains(stack, []byte("TestServicePanics")))
	}})
	_, err := client.Request(ctxFor(t), "e", "", nil)
	wantCode(t, err, CodeFault)
	if got := <-told; got != "e nothing true" {
		t.Errorf("the hook received %s", got)
	}
	if r, err := client.Request(ctxFor(t), "e", "", []byte("x")); err != nil || string(r.Body) != "x" {
		t.Errorf("the next request: %q, %v", r.Body, err)
	}
}

func TestServiceWorkers(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	ctx := ctxFor(t)
	pool, err := rpc.NewPool(client.nc)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	const rounds, each = 4, 100
	for _, workers := range []int{1, 3} {
		var mu sync.Mutex
		var order, want []byte
		now, most := 0, 0
		hold, entered := make(chan struct{}), make(chan struct{}, each)
		s := serve(t, server, ServiceConfig{Workers: workers, Queue: each, Endpoints: []Endpoint{
			{Name: "echo", Subject: fmt.Sprint("t.echo.", workers), Handler: func(_ context.Context, r Request) Response {
				mu.Lock()
				now++
				most = max(most, now)
				order = append(order, r.Body[0])
				mu.Unlock()
				entered <- struct{}{}
				<-hold
				mu.Lock()
				now--
				mu.Unlock()
				return Response{Body: r.Body}
			}}}})
		answers := make(chan error, each)
		for range rounds {
			hold = make(chan struct{})
			for i := range each {
				want = append(want, byte(i))
				_, err := pool.Send(fmt.Sprint("t.echo.", workers), "", patience, "", []byte{byte(i)}, told(answers), 0)
				if err != nil {
					t.Fatal(err)
				}
			}
			for range workers {
				<-entered
			}
			close(hold)
			for range each {
				if err := <-answers; err != nil {
					t.Fatal(err)
				}
			}
			for range each - workers {
				<-entered
			}
		}
		if most != workers || workers == 1 && !slices.Equal(order, want) {
			t.Errorf("%d requests were handled at once, not %d, in the order %d", most, workers, order)
		}
		s.Stop(ctx)
		if s.started != workers || len(s.jobs) != 0 || s.bytes != 0 {
			t.Errorf("%d workers; %d requests with %d bytes wait", s.started, len(s.jobs), s.bytes)
		}
	}
}

// TestServiceDrains: while instances of a queue group start and stop, no request is lost.
func TestServiceDrains(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	ctx := ctxFor(t)
	var handled atomic.Int64
	instance := func(c *Conn) *Service {
		return serve(t, c, ServiceConfig{Queue: 1000,
			Endpoints: []Endpoint{{Name: "echo", Subject: "t.echo", QueueGroup: "q",
				Handler: func(_ context.Context, r Request) Response {
					handled.Add(1)
					return Response{Body: r.Body}
				}}}})
	}
	current := instance(server)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var asked atomic.Int64
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				n := asked.Add(1)
				reply, err := client.Request(ctx, "t.echo", "", fmt.Append(nil, n))
				if err != nil || string(reply.Body) != fmt.Sprint(n) {
					t.Errorf("request %d: %q %v", n, reply.Body, err)
					return
				}
			}
		})
	}
	for range 20 {
		next := instance(server)
		before := asked.Load()
		testkit.Eventually(t, "20 more requests", func() bool { return asked.Load() >= before+20 })
		current.Stop(ctx)
		current.Stop(ctx)
		current = next
	}
	close(stop)
	wg.Wait()
	if handled.Load() != asked.Load() {
		t.Errorf("%d asked, %d handled", asked.Load(), handled.Load())
	}
}

// TestServiceStopEndsPatience: the context of a handler that does not return ends after Stop has waited long enough.
func TestServiceStopEndsPatience(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	entered := make(chan struct{})
	s := serve(t, server, ServiceConfig{Timeout: time.Hour,
		Endpoints: []Endpoint{{Name: "wait", Subject: "t.wait", Handler: func(ctx context.Context, r Request) Response {
			close(entered)
			<-ctx.Done()
			return Response{Code: 503, Description: "given up"}
		}}}})
	done := make(chan error, 1)
	go func() {
		_, err := client.Request(ctxFor(t), "t.wait", "", nil)
		done <- err
	}()
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	s.Stop(ctx)
	wantCode(t, <-done, 503)
	if _, err := client.Request(ctxFor(t), "t.wait", "", nil); !errors.Is(err, ErrNoResponder) {
		t.Fatal(err)
	}
}

func TestServiceRefusals(t *testing.T) {
	t.Parallel()
	server, _ := pair(t)
	handler := func(context.Context, Request) Response { return Response{} }
	for _, cfg := range []ServiceConfig{
		{Name: "a b", Version: "1.0.0"},
		{Name: "a", Version: "one"},
		{Name: "a", Version: "1.0.0", Endpoints: []Endpoint{{Name: "x y", Subject: "s", Handler: handler}}},
		{Name: "a", Version: "1.0.0", Endpoints: []Endpoint{{Name: "x", Subject: "a b", Handler: handler}}},
	} {
		if s, err := Serve(server, cfg); err == nil {
			s.Stop(ctxFor(t))
			t.Errorf("%+v was served", cfg)
		}
	}
}

func TestRequestWhileNobodyThere(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := connect(t, ConnOptions{URLs: []string{s.URL()}})
	svc, err := Serve(c, ServiceConfig{Name: "a", Version: "1.0.0"})
	if err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if _, err := c.Request(ctxFor(t), "x", "", nil); !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	svc.Stop(ctxFor(t)) // nothing to drain
}

func TestSubscribe(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	got := make(chan Request, 10)
	stop, err := server.Subscribe("t.ctl.>", func(r Request) { got <- r })
	if err != nil {
		t.Fatal(err)
	}
	if err := server.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := client.Send("t.ctl.3", ContentJSON, []byte("again")); err != nil {
		t.Fatal(err)
	}
	if r := <-got; r.Subject != "t.ctl.3" || r.ContentType != ContentJSON || string(r.Body) != "again" {
		t.Fatal(r)
	}
	stop()
	stop()
	if err := client.Send("t.ctl.3", "", nil); err != nil {
		t.Fatal(err)
	}
	if err := client.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	select {
	case r := <-got:
		t.Fatal(r)
	case <-time.After(10 * time.Millisecond):
	}
	if _, err := server.Subscribe("a b", nil); err == nil {
		t.Fatal("a bad subject")
	}
}

// told receives the errors of replies.
type told chan error

func (t told) Receive(_ int, r rpc.Reply) { t <- r.Err }

// TestForward: a request whose reply goes to another subject is answered there once, later. The answering service can
// be informed that the reply was sent, and that it had no subscriber. A stopped service waits for its later answers.
func TestForward(t *testing.T) {
	t.Parallel()
	server, client := pair(t)
	ctx := ctxFor(t)
	later, sent := make(chan func(Response), 1), make(chan error, 3)
	s := serve(t, server, ServiceConfig{Endpoints: []Endpoint{
		{Name: "later", Subject: "t.later", Handler: func(ctx context.Context, r Request) Response {
			return Response{Later: func(answer func(Response)) {
				later <- func(out Response) {
					if ctx.Err() != nil {
						t.Errorf("before the answer: %v", ctx.Err())
					}
					answer(out)
				}
			}}
		}},
		{Name: "receipt", Subject: "t.receipt", Handler: func(_ context.Context, r Request) Response {
			return Response{Body: r.Body, Undelivered: "t.unheard.1", Sent: func(err error) { sent <- err }}
		}},
	}})
	unheard, heard := make(chan string, 1), make(chan Request, 1)
	for subject, f := range map[string]func(Request){"t.unheard.*": func(r Request) { unheard <- r.Subject },
		"_INBOX.t.heard": func(r Request) { heard <- r }} {
		stop, err := server.Subscribe(subject, f)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	if err := server.flush(ctx); err != nil {
		t.Fatal(err)
	}
	forward := func(subject, reply string) {
		t.Helper()
		if err := client.Forward(subject, ContentJSON, time.Second, "", reply, []byte(reply)); err != nil {
			t.Fatal(err)
		}
	}
	forward("t.receipt", "_INBOX.t.heard")
	if r := <-heard; string(r.Body) != "_INBOX.t.heard" || <-sent != nil {
		t.Errorf("heard %+v", r)
	}
	forward("t.receipt", "_INBOX.t.nobody")
	if at := <-unheard; at != "t.unheard.1" || <-sent != nil {
		t.Errorf("report of a missing subscriber at %s", at)
	}
	forward("t.later", "_INBOX.t.heard")
	(<-later)(Response{Body: []byte("now")})
	if r := <-heard; string(r.Body) != "now" {
		t.Errorf("heard %+v", r)
	}
	waitStats(t, client, `"outcomes":{"ok":1}`)
	forward("t.later", "_INBOX.t.heard")
	answer, stopped := <-later, make(chan struct{})
	go func() { s.Stop(ctx); close(stopped) }()
	select {
	case <-stopped:
		t.Error("the service has stopped, and has not answered")
	case <-time.After(50 * time.Millisecond):
	}
	answer(Response{Elsewhere: true})
	<-stopped
	select {
	case r := <-heard:
		t.Errorf("another service answers, but received %+v", r)
	default:
	}
}

// TestReplyAllowed: services reply to inboxes and to the server's own subjects, which no client can use.
func TestReplyAllowed(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	refused := make(chan error, 1)
	client := connect(t, ConnOptions{URLs: []string{s.URL()},
		AsyncError: func(err error) { refused <- err }})
	for _, reply := range []string{"_R_.a.b", "_GR_.abcdef.ghijkl.x", "_GR_.abcdef.ghijkl._INBOX.x",
		"$JS.ACK.S.C.1.30.4.5.6", "$JS.API.STREAM.PURGE.S", "$JS.hub.API.STREAM.PURGE.S"} {
		if err := client.NATS().PublishRequest("t.any", reply, nil); err != nil {
			t.Fatal(err)
		}
		if err := <-refused; !crossesAccounts(reply) || !strings.Contains(err.Error(), "ermission") {
			t.Errorf("%s: %v", reply, err)
		}
	}
	for reply, want := range map[string]bool{
		"_INBOX.x": true, "_INBOX_reader.x.1": true, "_R_.a.b": true, "_GR_.abcdef.ghijkl._INBOX.x": true,
		"$GR.abcdef._INBOX.x":                       true,
		"_GR_.abcdef.ghijkl.$JS.API.STREAM.PURGE.S": false, "_GR_.a._INBOX.x": false, "$GR.a.kv.v1.x": false,
		"$JS.API.STREAM.PURGE.S": false, "$KV.kvatlas_a.namespace": false, "kv.v1.a.ev.0.w.0": false,
		"$SYS.REQ.SERVER.PING": false, "$JS.ACK.x": false, "x": false, "": false, "_inbox.x": false,
	} {
		r, gateway := &Request{Reply: reply}, strings.HasPrefix(reply, "_GR_.") || strings.HasPrefix(reply, "$GR.")
		if r.MayForward() != (reply != "" && !gateway) {
			t.Errorf("MayForward is %v with the reply subject %q", r.MayForward(), reply)
		}
		if ReplyAllowed(reply) != want {
			t.Errorf("ReplyAllowed(%q) is %v", reply, !want)
		}
	}
}

// TestRepliesStayInInboxes: a request with another reply subject is counted, and not handled.
func TestRepliesStayInInboxes(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	conn := connect(t, ConnOptions{URLs: []string{s.URL()}})
	handled, ended := make(chan string, 10), make(chan string, 10)
	svc, err := Serve(conn, ServiceConfig{Name: "test", Version: "1.0.0",
		Endpoints: []Endpoint{{Name: "e", Subject: "t.e", Handler: func(_ context.Context, r Request) Response {
			handled <- r.Reply
			return Response{Body: []byte("x")}
		}}},
		AnswerOn: func(id string) string { return "t.answers." + id },
		Ended:    func(_, outcome string) { ended <- outcome }})
	if err != nil {
		t.Fatal(err)
	}
	defer svc.Stop(t.Context())
	if err := conn.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ reply, id, forwarded, handled, outcome string }{
		{reply: "_INBOX.a", handled: "_INBOX.a", outcome: "ok"},
		{outcome: "ok"},
		{reply: "t.other", outcome: ops.ReplyRefused},
		{reply: "$KV.b.key", outcome: ops.ReplyRefused},
		{reply: "_INBOX.a", id: "abcdefgh1234", handled: "t.answers.abcdefgh1234", outcome: "ok"},
		{reply: "_INBOX.a", id: "abcdefgh.>", outcome: ops.ReplyRefused},
		{reply: "_INBOX.a", id: "short", outcome: ops.ReplyRefused},
		// The service accepts no forwarded requests: the header has no effect.
		{reply: "_INBOX.a", forwarded: "_INBOX.b", handled: "_INBOX.a", outcome: "ok"},
	} {
		m := &nats.Msg{Subject: "t.e", Reply: c.reply, Header: nats.Header{}}
		for name, value := range map[string]string{headerAnswer: c.id, headerReply: c.forwarded} {
			if value != "" {
				m.Header.Set(name, value)
			}
		}
		if err := conn.NATS().PublishMsg(m); err != nil {
			t.Fatal(err)
		}
		if outcome := <-ended; outcome != c.outcome {
			t.Errorf("%+v: outcome %s", c, outcome)
		}
		if c.outcome == "ok" {
			if reply := <-handled; reply != c.handled {
				t.Errorf("%+v: replied to %s", c, reply)
			}
		}
	}
}
