package jetstream

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// Codes of service errors: numbers as in HTTP. Those that this package itself answers with; handlers have others.
const (
	CodeTooLarge = 413 // the body is above [ServiceConfig.MaxBody]
	CodeBusy     = 429 // all workers are busy and the queue is full: ask another, or later
	CodeInternal = 500 // the answer does not fit into a message
	CodeStopping = 503 // this instance is being stopped
)

// ServiceConfig describes a service: a set of endpoints under one name, which `nats micro` can list and ask for
// statistics.
type ServiceConfig struct {
	Name        string // letters, digits, '-', '_'
	Version     string // semantic version
	Description string

	Endpoints []Endpoint

	Workers int // requests handled at once; default 4
	Queue   int // requests that wait for a worker; default 64. Beyond it the answer is [CodeBusy], at once
	MaxBody int // bytes of a request's body; default 900 kB

	// Timeout is how long a request that carries no deadline may take; default 5 s.
	Timeout time.Duration

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
	Busy    func(endpoint string)            // answered with CodeBusy
	Expired func(endpoint string)            // dropped: the caller's deadline passed while it waited
	Unsent  func(endpoint string, err error) // an answer could not be sent
}

// Request is what a caller sent.
type Request struct {
	Subject     string
	ContentType string // empty if the caller did not say
	Body        []byte
}

// Response is what a handler answers. With Code 0 it is a success. Else it is a service error: Code and
// Description travel in the headers Nats-Service-Error-Code and Nats-Service-Error, and the body may say more.
type Response struct {
	ContentType string
	Body        []byte
	Code        int
	Description string
}

// Service answers requests until it is stopped.
type Service struct {
	c     *Conn
	cfg   ServiceConfig
	micro micro.Service

	errors map[string]*atomic.Uint64 // by endpoint: answers that were service errors; read-only after Serve

	base    context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
	stopped atomic.Bool

	mu     sync.RWMutex // against closing jobs while sending to it
	closed bool
	jobs   chan job
}

type job struct {
	endpoint *Endpoint
	req      micro.Request
	deadline time.Time
}

// Serve registers a service and answers from now on.
func Serve(c *Conn, cfg ServiceConfig) (*Service, error) {
	cfg.Workers = or(cfg.Workers, 4)
	cfg.Queue = or(cfg.Queue, 64)
	cfg.MaxBody = or(cfg.MaxBody, MaxValue)
	cfg.Timeout = or(cfg.Timeout, 5*time.Second)
	s := &Service{c: c, cfg: cfg, errors: map[string]*atomic.Uint64{}, jobs: make(chan job, cfg.Queue)}
	for _, e := range cfg.Endpoints {
		s.errors[e.Name] = new(atomic.Uint64)
	}
	m, err := micro.AddService(c.nc, micro.Config{Name: cfg.Name, Version: cfg.Version, Description: cfg.Description, StatsHandler: s.stats})
	if err != nil {
		return nil, failed("serve "+cfg.Name, err)
	}
	s.micro = m
	s.base, s.cancel = context.WithCancel(context.Background())
	for range cfg.Workers {
		s.workers.Add(1)
		go s.work()
	}
	for i := range s.cfg.Endpoints {
		e := &s.cfg.Endpoints[i]
		queue := micro.WithEndpointQueueGroupDisabled()
		if e.QueueGroup != "" {
			queue = micro.WithEndpointQueueGroup(e.QueueGroup)
		}
		err := m.AddEndpoint(e.Name, micro.HandlerFunc(func(req micro.Request) { s.accept(e, req) }), micro.WithEndpointSubject(e.Subject), queue)
		if err != nil {
			s.Stop(context.Background())
			return nil, failed(fmt.Sprintf("serve %s, endpoint %s on %s", cfg.Name, e.Name, e.Subject), err)
		}
	}
	return s, nil
}

// accept runs in the subscription's goroutine, which must not wait: it hands the request to a worker or answers
// that there is none.
func (s *Service) accept(e *Endpoint, req micro.Request) {
	if len(req.Data()) > s.cfg.MaxBody {
		s.refuse(e, req, CodeTooLarge, fmt.Sprintf("the request has %d bytes, the limit is %d", len(req.Data()), s.cfg.MaxBody))
		return
	}
	patience := s.cfg.Timeout
	if text := req.Headers().Get(headerDeadline); text != "" {
		if ms, err := strconv.ParseUint(text, 10, 31); err == nil {
			patience = time.Duration(ms) * time.Millisecond
		}
	}
	j := job{e, req, time.Now().Add(patience)}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		s.refuse(e, req, CodeStopping, "this instance is being stopped")
		return
	}
	select {
	case s.jobs <- j:
	default:
		if s.cfg.Hooks.Busy != nil {
			s.cfg.Hooks.Busy(e.Name)
		}
		s.refuse(e, req, CodeBusy, "all workers are busy and the queue is full")
	}
}

func (s *Service) work() {
	defer s.workers.Done()
	for j := range s.jobs {
		if !time.Now().Before(j.deadline) {
			if s.cfg.Hooks.Expired != nil {
				s.cfg.Hooks.Expired(j.endpoint.Name)
			}
			continue
		}
		ctx, cancel := context.WithDeadline(s.base, j.deadline)
		answer := j.endpoint.Handler(ctx, Request{Subject: j.req.Subject(), ContentType: j.req.Headers().Get(headerContentType), Body: j.req.Data()})
		cancel()
		s.respond(j.endpoint, j.req, answer)
	}
}

func (s *Service) refuse(e *Endpoint, req micro.Request, code int, text string) {
	s.respond(e, req, Response{Code: code, Description: text})
}

func (s *Service) respond(e *Endpoint, req micro.Request, r Response) {
	if req.Reply() == "" {
		return
	}
	if limit := s.c.maxMessage(0); len(r.Body) > limit {
		r = Response{Code: CodeInternal, Description: fmt.Sprintf("the answer has %d bytes, the limit is %d", len(r.Body), limit)}
	}
	// Not by the request's own methods: they write what the subscription's goroutine reads once accept has returned.
	m := &nats.Msg{Subject: req.Reply(), Header: nats.Header{}, Data: r.Body}
	if r.ContentType != "" {
		m.Header.Set(headerContentType, r.ContentType)
	}
	if r.Code != 0 {
		m.Header.Set(micro.ErrorCodeHeader, strconv.Itoa(r.Code))
		m.Header.Set(micro.ErrorHeader, or(oneLine(r.Description), "error "+strconv.Itoa(r.Code)))
		s.errors[e.Name].Add(1)
	}
	err := s.c.nc.PublishMsg(m)
	if err != nil && s.cfg.Hooks.Unsent != nil {
		s.cfg.Hooks.Unsent(e.Name, err)
	}
}

// stats adds to what micro counts of an endpoint the answers that were errors: micro sees only those given before its
// handler returns.
func (s *Service) stats(e *micro.Endpoint) any {
	return map[string]uint64{"errors": s.errors[e.Name].Load()}
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

// Stop drains: no new requests are taken, those that were are answered. It returns when that is done; when the
// context ends, handlers under way see theirs end, and Stop still waits for them. Calling it again does
// nothing.
func (s *Service) Stop(ctx context.Context) {
	if s.stopped.Swap(true) {
		return
	}
	_ = s.micro.Stop() // fails only without a connection, and then nothing can come in
	// What the server sent before it knew is on the way: after its PONG it is in our queues, after the barrier
	// with accept.
	if s.c.flush(ctx) == nil {
		passed := make(chan struct{})
		if s.c.nc.Barrier(func() { close(passed) }) == nil {
			select {
			case <-passed:
			case <-ctx.Done():
			}
		}
	}
	s.mu.Lock()
	s.closed = true
	close(s.jobs)
	s.mu.Unlock()
	unblock := context.AfterFunc(ctx, s.cancel)
	s.workers.Wait()
	unblock()
	s.cancel()
	_ = s.c.flush(ctx) // so that answers leave before the connection is closed; without one there is nobody to answer
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
