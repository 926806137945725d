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
)

// Codes of service errors: numbers as in HTTP. Those that this package itself answers with; handlers have others.
const (
	CodeBad      = 400 // a header is not what it should be
	CodeTooLarge = 413 // the body is above [ServiceConfig.MaxBody]
	CodeBusy     = 429 // all workers are busy and the queue is full: ask another, or later
	CodeInternal = 500 // the answer does not fit into a message
	CodeStopping = 503 // this instance is being stopped
	CodeFault    = 520 // the handler panicked
)

// ServiceConfig describes a service: a set of endpoints under one name, which `nats micro` can list and ask for
// statistics.
type ServiceConfig struct {
	Name        string // letters, digits, '-', '_'
	Version     string // semantic version
	Description string

	Endpoints []Endpoint

	Workers    int // requests handled at once; default 4
	Queue      int // requests that wait for a worker; default 64. Beyond it the answer is [CodeBusy], at once
	QueueBytes int // bytes of their bodies; default 64 MiB. Beyond it the same
	MaxBody    int // bytes of a request's body; default 900 kB

	Timeout time.Duration // how long a request that carries no deadline may take; default 5 s.

	Traced bool // Request.Trace is read

	// Forwarded makes the service reply where a [Conn.Forward] says. Only nodes may be permitted to publish on its
	// subjects.
	Forwarded bool

	// AnswerOn returns the subject of the answer to a request of [Namespace.AskShims] with this id. Nil: such requests
	// are answered as others.
	AnswerOn func(id string) string

	// Refuse makes the answer to a request that no handler answers, or whose answer does not fit into a message: code
	// is one of those above, and why the words that go with it. Nil: the two alone.
	Refuse func(r Request, code int, why string) Response

	Hooks ServiceHooks
}

// Endpoint is one subject of a service.
type Endpoint struct {
	Name       string // letters, digits, '-', '_'
	Subject    string
	QueueGroup string // one member of it gets each request; empty: every subscriber gets every request
	Handler    Handler
}

// Handler answers one request. It is called from several goroutines at once. The context ends with the caller's
// patience or when a stop does not want to wait any longer.
type Handler func(ctx context.Context, r Request) Response

// ServiceHooks are called from the service's goroutines. Each may be nil.
type ServiceHooks struct {
	// Ended tells what became of a request, once for each: the outcome of the response that was sent, or one of these.
	Ended func(endpoint, outcome string)

	// Panicked tells that a handler did, and where. Its request is refused with [CodeFault], and the service goes on:
	// clients repeat a request elsewhere, which must not end one node after the other.
	Panicked func(endpoint string, why any, stack []byte)
}

// What becomes of requests to which no answer was sent.
const (
	OutcomeExpired = "expired" // the caller's deadline passed while it waited for a worker
	OutcomeUnsent  = "unsent"  // there was an answer, and it could not be sent

	// OutcomeReplyRefused: the request names a reply subject that is no inbox; see [ReplyAllowed]. It was not handled.
	OutcomeReplyRefused = "reply_refused"
)

// Request is what a caller sent.
type Request struct {
	Subject     string
	ContentType string // empty if the caller did not say
	ID          string // that the caller gives what it asks, for what follows; empty if it does not
	Trace       string // the header of its trace, as [rpc.Traceparent] makes it; see [ServiceConfig.Traced]
	Reply       string // the subject of its reply; empty if it wants none
	Body        []byte
}

// Response is what a handler answers. With Code 0 it is a success. Else it is a service error: Code and
// Description travel in the headers Nats-Service-Error-Code and Nats-Service-Error, and the body may say more.
type Response struct {
	ContentType string // a success says it only if it is not the request's: those who ask know that
	Body        []byte
	Code        int
	Description string

	Outcome string // what the request is counted as; default "ok", or the code

	// Later, if it is not nil, is called in place of sending this: the answer is what answer is called with, once, from
	// any goroutine. Until then the handler's context goes on, and [Service.Stop] waits.
	Later func(answer func(Response))

	// Elsewhere says that nothing is to be sent: somebody else has answered, or will.
	Elsewhere bool

	// Undelivered is where the NATS server says, as to a request without a responder, that nobody is there to receive
	// this. Empty: nowhere.
	Undelivered string

	// Sent, if it is not nil, is called when this was handed to the connection, with the error if it could not be.
	Sent func(error)
}

// Service answers requests until it is stopped.
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
	idle    []chan job // of workers that wait, the last one first: its memory is still in the caches
	jobs    chan job   // that wait for a worker; empty while one is idle
	bytes   int        // of their bodies
}

type endings struct {
	mu       sync.Mutex
	errors   uint64
	outcomes map[string]uint64
}

// job is a request that was accepted.
type job struct {
	endpoint *Endpoint
	Request
	patience string // header
	deadline time.Time
}

// Serve registers a service and answers from now on.
func Serve(c *Conn, cfg ServiceConfig) (*Service, error) {
	cfg.Workers = cmp.Or(cfg.Workers, 4)
	cfg.Queue = cmp.Or(cfg.Queue, 64)
	cfg.QueueBytes = cmp.Or(cfg.QueueBytes, 64<<20)
	cfg.MaxBody = cmp.Or(cfg.MaxBody, MaxValue)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	if cfg.Refuse == nil {
		cfg.Refuse = func(_ Request, code int, why string) Response { return Response{Code: code, Description: why} }
	}
	if cfg.Hooks.Ended == nil {
		cfg.Hooks.Ended = func(string, string) {}
	}
	if cfg.Hooks.Panicked == nil {
		cfg.Hooks.Panicked = func(string, any, []byte) {}
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

// accept runs in the subscription's goroutine, which must not wait: it hands the request to a worker or answers
// that there is none.
func (s *Service) accept(e *Endpoint, req micro.Request) {
	j := jobOf(e, req)
	if s.cfg.Traced {
		j.Trace = req.Headers().Get(headerTrace)
	}
	if !s.route(&j, req.Headers()) {
		s.count(e, 0, OutcomeReplyRefused)
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

// route decides where the answer to a request goes. It returns false if the request names a subject that it must not.
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

// hand gives a request to a worker, or lets it wait for one, or says why not.
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
		return CodeBusy, fmt.Sprintf("all workers (%d) are busy, and %d MiB of requests wait for them", s.cfg.Workers,
			s.cfg.QueueBytes>>20)
	case len(s.jobs) == cap(s.jobs):
		return CodeBusy, fmt.Sprintf("all workers (%d) are busy, and %d requests wait for them", s.cfg.Workers,
			s.cfg.Queue)
	default:
		s.jobs <- *j
		s.bytes += len(j.Body)
	}
	return 0, ""
}

// next waits for a worker's next request on its channel, which has room for one. It returns false when the service is
// stopped.
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

// parseDeadline reads what the header says: how long the caller will wait. More than a day is a day.
func parseDeadline(text string) (time.Duration, bool) {
	ms, err := strconv.ParseUint(text, 10, 64)
	return min(time.Duration(min(ms, 1<<31))*time.Millisecond, 24*time.Hour), err == nil && ms > 0
}

// work is a worker, which begins with a request.
func (s *Service) work(j job) {
	mine := make(chan job, 1)
	for ok := true; ok; j, ok = s.next(mine) {
		if !time.Now().Before(j.deadline) {
			s.count(j.endpoint, 0, OutcomeExpired)
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
			s.cfg.Hooks.Panicked(j.endpoint.Name, why, debug.Stack())
			r = s.cfg.Refuse(j.Request, CodeFault, "a fault in this program ended the request; its log has more")
		}
	}()
	return j.endpoint.Handler(ctx, j.Request)
}

// later lets a request be answered when this worker has gone on.
func (s *Service) later(ctx *deadline, j job, begin func(answer func(Response))) {
	s.workers.Add(1)
	begin(func(r Response) {
		defer s.workers.Done()
		ctx.end()
		s.respond(&j, r)
	})
}

// jobOf reads a request. Names of headers may have any letter case, as in HTTP; if one is there twice, the one in ours
// counts.
func jobOf(e *Endpoint, req micro.Request) job {
	j := job{endpoint: e, Request: Request{Subject: req.Subject(), Reply: req.Reply(), Body: req.Data()}}
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
	// Not by the request's own methods: they write what the subscription's goroutine reads once accept has returned.
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
		r.Outcome = OutcomeUnsent
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
	s.cfg.Hooks.Ended(e.Name, outcome)
}

// stats adds to what micro counts of an endpoint what became of its requests: micro sees only what is given before its
// handler returns.
func (s *Service) stats(e *micro.Endpoint) any {
	n := s.ended[e.Name]
	n.mu.Lock()
	defer n.mu.Unlock()
	return map[string]any{"errors": n.errors, "outcomes": maps.Clone(n.outcomes)}
}

// oneLine makes a text fit for a header.
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

// Stop drains: no new requests are taken, those that were are answered. It returns when that is done; when the context
// ends, handlers under way see theirs end, and Stop still waits for them. Calling it again does nothing.
func (s *Service) Stop(ctx context.Context) {
	if s.stopped.Swap(true) {
		return
	}
	_ = s.micro.Stop() // fails only without a connection, and then nothing can come in
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
	_ = s.c.flush(ctx) // so that answers leave before the connection is closed; without one there is nobody to answer
}

// settle returns when all handlers have been called with what the server had sent, or ctx ends. Calls at the same time
// share the work, which grows with the number of subscriptions: each waits for a round that begins after the call.
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

// settleOnce gives up after an attempt's time if a handler does not return.
func (c *Conn) settleOnce() {
	ctx, cancel := context.WithTimeout(context.Background(), c.attempt)
	defer cancel()
	if c.flush(ctx) != nil { // after the server's PONG all that it sent is in our queues, and handled after the barrier
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

// flush returns when the server has all that was sent and all that it sent before is here, or with an error if
// that does not happen soon.
func (c *Conn) flush(ctx context.Context) error {
	if !c.nc.IsConnected() {
		return errDisconnected
	}
	return c.try(ctx, "", c.nc.FlushWithContext)
}

// Subscribe calls handle with every message on a subject (wildcards allowed) until the returned function is
// called, which waits for a handle under way. It is for hints that may be lost; handle is called from one
// goroutine and must return soon.
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

// Listen calls heard with each message on a subject, one at a time, until ctx ends; it then returns ctx's error. While
// heard works messages wait in memory, up to the client's bounds of 64 MiB; beyond, they are dropped and
// ConnHooks.AsyncError is told. What is published while there is no connection is not heard.
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

// KeepSubscribed calls heard with each message on a subject, as [Conn.Subscribe] does, until ctx ends. If there can be
// no subscription failed is told why, and it is tried again.
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

// inOrder is how many messages of a [Conn.KeepSubscribedInOrder] wait; more are dropped.
const inOrder = 1 << 16

// KeepSubscribedInOrder is [Conn.KeepSubscribed] for several subjects without wildcards. Messages of one sender are
// handled in the order in which they were sent, whatever their subjects.
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
