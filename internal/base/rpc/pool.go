package rpc

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Headers of requests and replies.
const (
	HeaderDeadline    = "Kv-Deadline-Ms" // milliseconds until the caller stops waiting
	HeaderContentType = "Content-Type"
	HeaderTrace       = "traceparent" // W3C trace context: the caller's span

	HeaderErrorCode = "Nats-Service-Error-Code" // only on a reply to a failed request
	headerError     = "Nats-Service-Error"
)

// maxInFlight limits the requests of a pool without a reply.
const maxInFlight = 16384

// Reasons for a missing reply. The errors of [Pool] and [Reply] wrap the sentinels.
var (
	ErrNoResponder  = errors.New("no service is subscribed to this subject")
	ErrTooLarge     = errors.New("the request is larger than the NATS server permits")
	ErrBusy         = fmt.Errorf("%d requests are waiting for replies", maxInFlight)
	ErrDisconnected = errors.New("there is no connection to a NATS server")
	ErrDenied       = errors.New("permission denied")
)

// ServiceError is the failure that a service reports. The body of the reply may have details.
type ServiceError struct {
	Code        int // an HTTP status code
	Description string
}

func (e *ServiceError) Error() string { return fmt.Sprintf("%s (%d)", e.Description, e.Code) }

// Reply is the reply to a request. Err is nil, [ErrNoResponder] or a [*ServiceError].
type Reply struct {
	ContentType string // the content type of the request, if the reply has none
	Body        []byte
	Err         error
}

// Receiver receives replies. The tag is the argument of [Pool.Send]. The package comment has the rules for receivers.
type Receiver interface{ Receive(tag int, r Reply) }

// Pool keeps the requests in flight on a connection.
type Pool struct {
	Hedges Budget // shared by all senders of requests through the pool

	conn  *nats.Conn
	inbox string // ends in '.'
	sub   *nats.Subscription
	ended chan struct{} // closed by Close

	mu      sync.Mutex
	last    uint64
	flights map[uint64]flight
	lost    chan struct{} // closed when the connection is lost
	refused error         // set while the server forbids the subscription to the inbox
}

// flight is a request in flight.
type flight struct {
	to      Receiver
	tag     int
	form    string    // content type
	expires time.Time // deadline for a reply
}

// NewPool returns a pool on a connection. The caller still owns the connection.
func NewPool(conn *nats.Conn) (*Pool, error) {
	p := &Pool{
		conn: conn, inbox: conn.NewInbox() + ".", ended: make(chan struct{}),
		flights: map[uint64]flight{}, lost: make(chan struct{}),
	}
	var err error
	if p.sub, err = conn.Subscribe(p.inbox+"*", p.receive); err != nil {
		return nil, fmt.Errorf("subscribe to %s*: %w", p.inbox, connectionError(err))
	}
	go p.watch(conn.StatusChanged(nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED))
	return p, nil
}

// watch closes the channel of [Pool.Lost] when the connection is lost.
func (p *Pool) watch(changes chan nats.Status) {
	for status := nats.CONNECTED; status != nats.CLOSED; {
		select {
		case status = <-changes:
			p.mu.Lock()
			close(p.lost)
			p.lost, p.refused = make(chan struct{}), nil
			p.mu.Unlock()
		case <-p.ended:
			p.conn.RemoveStatusListener(changes)
			return
		}
	}
}

// Lost returns a channel that the pool closes when the connection is lost the next time. Requests in flight at that
// time rarely get a reply.
func (p *Pool) Lost() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// Closed reports whether the connection is closed for good.
func (p *Pool) Closed() bool { return p.conn.IsClosed() }

// Send sends a request. The receiver gets the reply with the tag. The request carries the patience: services stop
// working on a request afterwards. A non-empty trace becomes a header. The error wraps [ErrTooLarge], [ErrBusy] or
// [ErrDisconnected].
func (p *Pool) Send(
	subject, contentType string, patience time.Duration, trace string, body []byte, to Receiver, tag int,
) (id uint64, err error) {
	now := time.Now()
	p.mu.Lock()
	if len(p.flights) >= maxInFlight {
		for id, f := range p.flights {
			if now.After(f.expires) {
				delete(p.flights, id)
			}
		}
		if len(p.flights) >= maxInFlight {
			p.mu.Unlock()
			return 0, ErrBusy
		}
	}
	p.last++
	id = p.last
	p.flights[id] = flight{to: to, tag: tag, form: contentType, expires: now.Add(patience)}
	p.mu.Unlock()
	m := &nats.Msg{Subject: subject, Reply: p.inbox + strconv.FormatUint(id, 36), Data: body, Header: nats.Header{
		HeaderDeadline: []string{strconv.FormatInt(max(patience.Milliseconds(), 1), 10)},
	}}
	if contentType != "" {
		m.Header[HeaderContentType] = []string{contentType}
	}
	if trace != "" {
		m.Header[HeaderTrace] = []string{trace}
	}
	if err := p.conn.PublishMsg(m); err != nil {
		p.Drop(id)
		return 0, fmt.Errorf("request %s: %w", subject, connectionError(err))
	}
	return id, nil
}

// Redirect passes a reply to another receiver if the reply is outstanding.
func (p *Pool) Redirect(id uint64, to Receiver, tag int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, waiting := p.flights[id]; waiting {
		f.to, f.tag = to, tag
		p.flights[id] = f
	}
}

// Drop removes a request. The pool discards the reply.
func (p *Pool) Drop(id uint64) {
	p.mu.Lock()
	delete(p.flights, id)
	p.mu.Unlock()
}

// InFlight returns the number of requests without a reply.
func (p *Pool) InFlight() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.flights)
}

// Refusal returns an error that wraps [ErrDenied] if the server forbids the inbox. It also does so if the server has
// forbidden the subject since the error that [Pool.LastError] returned. NATS reports denials apart from replies.
func (p *Pool) Refusal(subject string, since error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := p.conn.LastError(); errors.Is(last, nats.ErrPermissionViolation) {
		text := last.Error()
		if strings.Contains(text, `Subscription to "`+p.inbox) {
			p.refused = last
		}
		if last != since && strings.Contains(text, `Publish to "`+subject+`"`) {
			return fmt.Errorf("request %s: %w: %w", subject, ErrDenied, last)
		}
	}
	if p.refused != nil {
		return fmt.Errorf("request %s: %w: %w", subject, ErrDenied, p.refused)
	}
	return nil
}

// LastError returns the most recent error of the connection.
func (p *Pool) LastError() error { return p.conn.LastError() }

// Close closes the pool. The pool discards later replies.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.ended:
		return
	default:
	}
	close(p.ended)
	clear(p.flights)
	_ = p.sub.Unsubscribe() // an error means that there is no connection, and so no replies
}

func (p *Pool) receive(m *nats.Msg) {
	id, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 36, 64)
	if err != nil {
		return // the message is no reply to a request of this pool
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, waiting := p.flights[id]; waiting {
		delete(p.flights, id)
		f.to.Receive(f.tag, ReadReply(m, f.form))
	}
}

// ReadReply converts a NATS message to the reply to a request. contentType is the request's.
func ReadReply(m *nats.Msg, contentType string) Reply {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return Reply{Err: ErrNoResponder}
	}
	r := Reply{ContentType: cmp.Or(m.Header.Get(HeaderContentType), contentType), Body: m.Data}
	if text := m.Header.Get(HeaderErrorCode); text != "" {
		code, err := strconv.Atoi(text)
		if err != nil {
			code = 500
		}
		r.Err = &ServiceError{Code: code, Description: m.Header.Get(headerError)}
	}
	return r
}

func connectionError(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, nats.ErrPermissionViolation), errors.Is(err, nats.ErrAuthorization):
		return fmt.Errorf("%w: %w", ErrDenied, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded): // nats.go buffers no requests for a later connection
		return ErrDisconnected
	case errors.Is(err, nats.ErrBadSubject):
		return err
	}
	return fmt.Errorf("%w: %w", ErrDisconnected, err)
}
