package jetstream

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/ops"
)

// Codes of service errors: numbers as in HTTP. This package itself answers with these codes; handlers have others.
const (
	CodeBad      = 400 // an invalid header
	CodeTooLarge = 413 // the body is above [ServiceConfig.MaxBody]
	CodeBusy     = 429 // all workers are busy and the queue is full: use another service, or retry later
	CodeInternal = 500 // the answer does not fit into a message
	CodeStopping = 503 // this instance is stopping
	CodeFault    = 520 // the handler panicked
)

// ServiceConfig configures a service: a set of endpoints under one name, which `nats micro` can list with statistics.
type ServiceConfig struct {
	Name        string // letters, digits, '-', '_'
	Version     string // semantic version
	Description string

	Endpoints []Endpoint

	Workers    int // concurrent requests; default 4
	Queue      int // waiting requests; default 64. Beyond it, the answer is [CodeBusy], at once
	QueueBytes int // bytes of their bodies; default 64 MiB. Beyond it, the same
	MaxBody    int // bytes of a request's body; default 900 kB

	Timeout time.Duration // time for a request without a deadline; default [ops.Deadline]

	Traced bool // read Request.Trace

	// Forwarded makes the service reply to the subject of a [Conn.Forward]. Only nodes may be permitted to publish on
	// its subjects.
	Forwarded bool

	// AnswerOn returns the subject of the answer to a request of [Namespace.AskShims] with this id. Nil: such requests
	// are answered on their reply subjects.
	AnswerOn func(id string) string

	// Refuse returns the answer to a request without a handler, or in place of an answer that does not fit into a
	// message. code is one of the codes above, and why is the text. Nil: the answer has only code and text.
	Refuse func(r Request, code int, why string) Response

	// Ended, if not nil, is called once for each request, with the outcome of the sent response or an Outcome constant
	// of this package. Several goroutines call it.
	Ended func(endpoint, outcome string)

	// Panicked, if not nil, is called after a panic of a handler, with the stack. The request is refused with
	// [CodeFault], and the service continues: clients repeat a request at another node, which must not end all nodes.
	Panicked func(endpoint string, why any, stack []byte)
}

// Endpoint is a subject of a service.
type Endpoint struct {
	Name       string // letters, digits, '-', '_'
	Subject    string
	QueueGroup string // one member gets each request; empty: every subscriber gets every request
	Handler    Handler
}

// Handler answers a request. It is called from several goroutines at once. The context ends with the caller's patience,
// or when Stop ends its wait.
type Handler func(ctx context.Context, r Request) Response

// Request is a received request.
type Request struct {
	Subject     string
	ContentType string // empty if absent
	ID          string // the caller's id for later requests; empty if absent
	Trace       string // the header of its trace, in the form of [rpc.Traceparent]; see [ServiceConfig.Traced]
	Reply       string // the reply subject; empty: no reply
	Body        []byte

	Headers map[string][]string // all headers of a request to a Service; nil without headers
}

// Response is the answer of a handler. Code 0 is a success. Other values are a service error: the headers
// Nats-Service-Error-Code and Nats-Service-Error have Code and Description, and the body may have details.
type Response struct {
	ContentType string // sent in a success only if it differs from the request's
	Body        []byte
	Code        int
	Description string

	Outcome string // the counted outcome of the request; default "ok", or the code

	// Later, if set, is called in place of sending the response. The handler's answer is the argument of answer, which
	// must be called once, from any goroutine. Until then the handler's context continues, and [Service.Stop] waits.
	Later func(answer func(Response))

	// Elsewhere: no response is sent here; another service answers.
	Elsewhere bool

	// Undelivered is the subject of the NATS server's report that this response has no subscriber. Empty: no report.
	Undelivered string

	// Sent, if set, is called after the response was passed to the connection, with the error of a failure.
	Sent func(error)
}

// Service answers requests until Stop.
type Service struct {
	c     *Conn
	cfg   ServiceConfig
	micro micro.Service

	ended map[string]*endings // by endpoint; read-only after Serve

	base    context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
	stopped atomic.Bool

	mu      sync.Mutex
	closed  bool
	started int        // workers
	idle    []chan job // channels of waiting workers, the last one first: its memory is still in the caches
	jobs    chan job   // jobs that wait for a worker; empty while a worker is idle
	bytes   int        // of the waiting jobs' bodies
}

type endings struct {
	mu       sync.Mutex
	errors   uint64
	outcomes map[string]uint64
}

// job is an accepted request.
type job struct {
	endpoint *Endpoint
	Request
	patience string // header
	deadline time.Time
}

// Serve registers a service and starts to answer.
func Serve(c *Conn, cfg ServiceConfig) (*Service, error) {
	cfg.Workers = cmp.Or(cfg.Workers, 4)
	cfg.Queue = cmp.Or(cfg.Queue, 64)
	cfg.QueueBytes = cmp.Or(cfg.QueueBytes, 64<<20)
	cfg.MaxBody = cmp.Or(cfg.MaxBody, MaxValue)
	cfg.Timeout = cmp.Or(cfg.Timeout, ops.Deadline)
	if cfg.Refuse == nil {
		cfg.Refuse = func(_ Request, code int, why string) Response { return Response{Code: code, Description: why} }
	}
	s := &Service{c: c, cfg: cfg, ended: map[string]*endings{}, jobs: make(chan job, cfg.Queue)}
	for _, e := range cfg.Endpoints {
		s.ended[e.Name] = &endings{outcomes: map[string]uint64{}}
	}
	m, err := micro.AddService(c.nc, micro.Config{Name: cfg.Name, Version: cfg.Version, Description: cfg.Description,
		StatsHandler: s.stats})
	if err != nil {
		return nil, failed("serve "+cfg.Name, err)
	}
	s.micro = m
	s.base, s.cancel = context.WithCancel(context.Background())
	for i := range s.cfg.Endpoints {
		e := &s.cfg.Endpoints[i]
		queue := micro.WithEndpointQueueGroupDisabled()
		if e.QueueGroup != "" {
			queue = micro.WithEndpointQueueGroup(e.QueueGroup)
		}
		err := m.AddEndpoint(e.Name, micro.HandlerFunc(func(req micro.Request) { s.accept(e, req) }),
			micro.WithEndpointSubject(e.Subject), queue)
		if err != nil {
			s.Stop(context.Background())
			return nil, failed(fmt.Sprintf("serve %s, endpoint %s on %s", cfg.Name, e.Name, e.Subject), err)
		}
	}
	// Otherwise a request on another connection could arrive at the server before the subscriptions. Without a
	// connection, the client library subscribes when it reconnects.
	flushing, cancel := context.WithTimeout(s.base, subscribeWithin)
	defer cancel()
	_ = c.nc.FlushWithContext(flushing)
	return s, nil
}

// subscribeWithin bounds the wait for the server's answer to the subscriptions of a service.
const subscribeWithin = 2 * time.Second

// accept runs in the subscription's goroutine, which must not wait. accept passes the request to a worker or answers
// that all workers are busy.
func (s *Service) accept(e *Endpoint, req micro.Request) {
	j := jobOf(e, req)
	if s.cfg.Traced {
		j.Trace = req.Headers().Get(headerTrace)
	}
	if !s.route(&j, req.Headers()) {
		s.count(e, 0, ops.ReplyRefused)
		return
	}
	if len(j.Body) > s.cfg.MaxBody {
		s.refuse(&j, CodeTooLarge, fmt.Sprintf("the request has %d bytes, more than %d", len(j.Body), s.cfg.MaxBody))
		return
	}
	patience := s.cfg.Timeout
	if j.patience != "" {
		var ok bool
		if patience, ok = parseDeadline(j.patience); !ok {
			s.refuse(&j, CodeBad, fmt.Sprintf("the header %s is %.40q, not a whole number of milliseconds above 0",
				headerDeadline, j.patience))
			return
		}
	}
	j.deadline = time.Now().Add(patience)
	if code, why := s.hand(&j); code != 0 {
		s.refuse(&j, code, why)
	}
}

// route sets the subject of the answer. It returns false if the request names a forbidden subject.
func (s *Service) route(j *job, h micro.Headers) bool {
	if s.cfg.Forwarded {
		if to := h.Get(headerReply); to != "" {
			j.Reply = to
		}
	}
	if s.cfg.AnswerOn != nil {
		if id := h.Get(headerAnswer); id != "" && !s.c.answersDirectly() {
			j.Reply = s.cfg.AnswerOn(id)
			return answerID(id)
		}
	}
	return j.Reply == "" || ReplyAllowed(j.Reply)
}

// hand passes a request to a worker, or to the queue, or returns the code and text of a refusal.
func (s *Service) hand(j *job) (code int, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch n := len(s.idle); {
	case s.closed:
		return CodeStopping, "this instance is being stopped"
	case n > 0:
		s.idle[n-1] <- *j
		s.idle = s.idle[:n-1]
	case s.started < s.cfg.Workers:
		s.started++
		first := *j
		s.workers.Go(func() { s.work(first) })
	case s.bytes > 0 && s.bytes+len(j.Body) > s.cfg.QueueBytes:
		return CodeBusy, fmt.Sprintf("all workers (%d) are busy, and %d MiB of requests are waiting", s.cfg.Workers,
			s.cfg.QueueBytes>>20)
	case len(s.jobs) == cap(s.jobs):
		return CodeBusy, fmt.Sprintf("all workers (%d) are busy, and %d requests are waiting", s.cfg.Workers,
			s.cfg.Queue)
	default:
		s.jobs <- *j
		s.bytes += len(j.Body)
	}
	return 0, ""
}

// next waits for a worker's next request on the worker's channel of capacity 1. The result is false after Stop.
func (s *Service) next(mine chan job) (j job, ok bool) {
	s.mu.Lock()
	select {
	case j = <-s.jobs:
		s.bytes -= len(j.Body)
		s.mu.Unlock()
		return j, true
	default:
	}
	if s.closed {
		s.mu.Unlock()
		return j, false
	}
	s.idle = append(s.idle, mine)
	s.mu.Unlock()
	j, ok = <-mine
	return j, ok
}

// parseDeadline parses the caller's patience, at most a day.
func parseDeadline(text string) (time.Duration, bool) {
	ms, err := strconv.ParseUint(text, 10, 64)
	return min(time.Duration(min(ms, 1<<31))*time.Millisecond, 24*time.Hour), err == nil && ms > 0
}

// work runs a worker, which begins with a request.
func (s *Service) work(j job) {
	mine := make(chan job, 1)
	for ok := true; ok; j, ok = s.next(mine) {
		if !time.Now().Before(j.deadline) {
			s.count(j.endpoint, 0, ops.Expired)
			continue
		}
		ctx := withDeadline(s.base, j.deadline)
		answer := s.handle(ctx, &j)
		if answer.Later != nil {
			s.later(ctx, j, answer.Later)
			continue
		}
		ctx.end()
		s.respond(&j, answer)
	}
}

func (s *Service) handle(ctx context.Context, j *job) (r Response) {
	defer func() {
		if why := recover(); why != nil {
			if s.cfg.Panicked != nil {
				s.cfg.Panicked(j.endpoint.Name, why, debug.Stack())
			}
			r = s.cfg.Refuse(j.Request, CodeFault, "a fault in this program ended the request; its log has more")
		}
	}()
	return j.endpoint.Handler(ctx, j.Request)
}

// later lets a handler answer a request after this worker has continued.
func (s *Service) later(ctx *deadline, j job, begin func(answer func(Response))) {
	s.workers.Add(1)
	begin(func(r Response) {
		defer s.workers.Done()
		ctx.end()
		s.respond(&j, r)
	})
}

// jobOf reads a request. Names of headers may have any letter case, as in HTTP. Of two values, the one with our
// spelling counts.
func jobOf(e *Endpoint, req micro.Request) job {
	j := job{endpoint: e, Request: Request{Subject: req.Subject(), Reply: req.Reply(), Body: req.Data(),
		Headers: req.Headers()}}
	for key, values := range req.Headers() {
		if len(values) == 0 {
			continue
		}
		for _, h := range [...]struct {
			name  string
			value *string
		}{{headerContentType, &j.ContentType}, {headerDeadline, &j.patience}, {headerRequestID, &j.ID}} {
			if key == h.name || *h.value == "" && strings.EqualFold(key, h.name) {
				*h.value = values[0]
			}
		}
	}
	return j
}

func (s *Service) refuse(j *job, code int, why string) {
	s.respond(j, s.cfg.Refuse(j.Request, code, why))
}

func (s *Service) respond(j *job, r Response) {
	if limit := s.c.maxMessage(0); len(r.Body) > limit {
		r = s.cfg.Refuse(j.Request, CodeInternal, fmt.Sprintf("the answer has %d bytes, more than %d", len(r.Body),
			limit))
	}
	switch {
	case r.Outcome != "":
	case r.Code != 0:
		r.Outcome = strconv.Itoa(r.Code)
	default:
		r.Outcome = "ok"
	}
	if j.Reply == "" || r.Elsewhere {
		s.count(j.endpoint, r.Code, r.Outcome)
		return
	}
	// micro's own methods are not used: they write a field that the subscription's goroutine reads after accept.
	m := &nats.Msg{Subject: j.Reply, Reply: r.Undelivered, Data: r.Body}
	if r.Code != 0 {
		m.Header = nats.Header{micro.ErrorCodeHeader: {strconv.Itoa(r.Code)},
			micro.ErrorHeader: {cmp.Or(oneLine(r.Description), "error "+strconv.Itoa(r.Code))}}
	}
	if r.ContentType != "" && (r.Code != 0 || r.ContentType != j.ContentType) {
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header[headerContentType] = []string{r.ContentType}
	}
	err := s.c.nc.PublishMsg(m)
	if err != nil {
		r.Outcome = ops.Unsent
	}
	if r.Sent != nil {
		r.Sent(err)
	}
	s.count(j.endpoint, r.Code, r.Outcome)
}

func (s *Service) count(e *Endpoint, code int, outcome string) {
	n := s.ended[e.Name]
	n.mu.Lock()
	if n.outcomes[outcome]++; code != 0 {
		n.errors++
	}
	n.mu.Unlock()
	if s.cfg.Ended != nil {
		s.cfg.Ended(e.Name, outcome)
	}
}

// stats adds the outcomes of an endpoint to the statistics of micro, which counts only answers before the handler's
// return.
func (s *Service) stats(e *micro.Endpoint) any {
	n := s.ended[e.Name]
	n.mu.Lock()
	defer n.mu.Unlock()
	return map[string]any{"errors": n.errors, "outcomes": maps.Clone(n.outcomes)}
}

// oneLine converts a text to the form of a header.
func oneLine(text string) string {
	b := []byte(text)
	if len(b) > headerRoom/2 {
		b = b[:headerRoom/2]
	}
	for i, c := range b {
		if c < ' ' || c == 0x7f {
			b[i] = ' '
		}
	}
	return string(b)
}

// Stop drains: new requests are refused, and accepted ones are answered. It returns after the last answer. When the
// context ends, the contexts of handlers end too, and Stop still waits for the handlers. A repeated call has no effect.
func (s *Service) Stop(ctx context.Context) {
	if s.stopped.Swap(true) {
		return
	}
	_ = s.micro.Stop() // fails only without a connection, and then no request arrives
	s.c.settle(ctx)
	s.mu.Lock()
	s.closed = true
	for _, worker := range s.idle {
		close(worker)
	}
	s.idle = nil
	s.mu.Unlock()
	unblock := context.AfterFunc(ctx, s.cancel)
	s.workers.Wait()
	unblock()
	s.cancel()
	_ = s.c.flush(ctx) // sends the answers before the connection is closed; without a connection there is no caller
}

// settle returns when all handlers have received the messages that the server had sent, or ctx ends. Concurrent calls
// share the work, which grows with the number of subscriptions: every call waits for a round that begins after the
// call.
func (c *Conn) settle(ctx context.Context) {
	c.settling.Lock()
	round := c.nextRound
	if round == nil {
		round = make(chan struct{})
		c.nextRound = round
	}
	if !c.inRound {
		c.inRound = true
		go c.settleRounds()
	}
	c.settling.Unlock()
	select {
	case <-round:
	case <-ctx.Done():
	}
}

// settleRounds works until no call of settle waits.
func (c *Conn) settleRounds() {
	for {
		c.settling.Lock()
		round := c.nextRound
		c.nextRound, c.inRound = nil, round != nil
		c.settling.Unlock()
		if round == nil {
			return
		}
		c.settleOnce()
		close(round)
	}
}

// settleOnce ends after an attempt's time if a handler does not return.
func (c *Conn) settleOnce() {
	ctx, cancel := context.WithTimeout(context.Background(), c.attempt)
	defer cancel()
	if c.flush(ctx) != nil { // after the PONG all the server's messages are in our queues, before the barrier
		return
	}
	passed := make(chan struct{})
	if c.nc.Barrier(func() { close(passed) }) == nil {
		select {
		case <-passed:
		case <-ctx.Done():
		}
	}
}

// flush returns when the server has received everything sent and everything that it sent before has arrived, or soon
// with an error.
func (c *Conn) flush(ctx context.Context) error {
	if !c.nc.IsConnected() {
		return errDisconnected
	}
	return c.attemptOnce(ctx, "", c.nc.FlushWithContext)
}

// Subscribe calls handle with every message on a subject (wildcards allowed) until the returned function is called.
// That function waits for a running handle. Use Subscribe for hints that may be lost. A single goroutine calls handle,
// which must return soon.
func (c *Conn) Subscribe(subject string, handle func(Request)) (stop func(), err error) {
	sub, err := c.nc.Subscribe(subject, func(m *nats.Msg) {
		handle(Request{Subject: m.Subject, ContentType: m.Header.Get(headerContentType), Body: m.Data})
	})
	if err != nil {
		return nil, failed("subscribe to "+subject, err)
	}
	closed := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(closed) })
	return func() {
		if sub.Unsubscribe() == nil {
			<-closed
		}
	}, nil
}

// Listen calls heard with the messages on a subject, one at a time, until ctx ends, and returns ctx's error. Messages
// wait in memory meanwhile, up to the client's limit of 64 MiB. Further messages are dropped with a call of
// ConnOptions.AsyncError. Messages during a lost connection are lost.
func (c *Conn) Listen(ctx context.Context, subject string, heard func(data []byte)) error {
	stop, err := c.Subscribe(subject, func(r Request) {
		if ctx.Err() == nil {
			heard(r.Body)
		}
	})
	if err != nil {
		return err
	}
	defer stop()
	<-ctx.Done()
	return ctx.Err()
}

// KeepSubscribed calls heard with the messages on a subject, like [Conn.Subscribe], until ctx ends. If the subscription
// fails, KeepSubscribed calls failed and retries.
func (c *Conn) KeepSubscribed(ctx context.Context, subject string, heard func(Request), failed func(error)) {
	for ctx.Err() == nil {
		stop, err := c.Subscribe(subject, heard)
		if err == nil {
			<-ctx.Done()
			stop()
			return
		}
		failed(err)
		loop.Wait(ctx, time.Second)
	}
}

// inOrder is the largest number of waiting messages in [Conn.KeepSubscribedInOrder]. Further messages are dropped.
const inOrder = 1 << 16

// KeepSubscribedInOrder is [Conn.KeepSubscribed] for several subjects without wildcards. Messages of one sender are
// handled in the order in which they were sent, across subjects.
func (c *Conn) KeepSubscribedInOrder(
	ctx context.Context, subjects []string, heard func(Request), failed func(error),
) {
	queue := make(chan *nats.Msg, inOrder)
	for _, subject := range subjects {
		for ctx.Err() == nil {
			sub, err := c.nc.ChanSubscribe(subject, queue)
			if err == nil {
				defer func() { _ = sub.Unsubscribe() }()
				break
			}
			failed(fmt.Errorf("subscribe to %s: %w", subject, err))
			loop.Wait(ctx, time.Second)
		}
	}
	for {
		select {
		case m := <-queue:
			heard(Request{Subject: m.Subject, ContentType: m.Header.Get(headerContentType), Body: m.Data})
		case <-ctx.Done():
			return
		}
	}
}
