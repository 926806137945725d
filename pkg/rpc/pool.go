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
	HeaderDeadline    = "Kv-Deadline-Ms" // how many milliseconds the caller will still wait
	HeaderContentType = "Content-Type"
	HeaderTrace       = "traceparent" // of W3C: the span that a request is a part of

	HeaderErrorCode = "Nats-Service-Error-Code" // on a reply that says that a request failed
	HeaderError     = "Nats-Service-Error"
)

// maxInFlight bounds the requests of a pool that wait for a reply.
const maxInFlight = 16384

// Why a request is not answered. Errors wrap them.
var (
	ErrNoResponder  = errors.New("nobody serves this subject")
	ErrTooLarge     = errors.New("the request is larger than the NATS server takes")
	ErrBusy         = fmt.Errorf("%d requests wait for their replies", maxInFlight)
	ErrDisconnected = errors.New("there is no connection to a NATS server")
	ErrDenied       = errors.New("permission denied")
)

// ServiceError is a reply that says that a request failed. Its body may say more.
type ServiceError struct {
	Code        int // as in HTTP
	Description string
}

func (e *ServiceError) Error() string { return fmt.Sprintf("%s (%d)", e.Description, e.Code) }

// Reply is what came back for a request. Err is nil, [ErrNoResponder] or a [*ServiceError].
type Reply struct {
	ContentType string // its request's, if the reply says nothing else
	Body        []byte
	Err         error
}

// Receiver takes replies. tag is what its request was sent with. See the package comment for what it may do.
type Receiver interface{ Receive(tag int, r Reply) }

// Pool is the requests in flight on one connection.
type Pool struct {
	Hedges Budget // the budget of all who send requests through this pool.

	conn  *nats.Conn
	inbox string // ends in '.'
	sub   *nats.Subscription
	ended chan struct{} // closed by Close

	mu      sync.Mutex
	last    uint64
	flights map[uint64]flight
	lost    chan struct{} // closed when the connection is lost
	refused error         // the server does not let this user subscribe to the inbox
}

// flight is a request in flight.
type flight struct {
	to      Receiver
	tag     int
	form    string    // content type
	expires time.Time // then nobody answers any more
}

// NewPool returns a pool on a connection, which stays the caller's.
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

// watch tells those who wait when the connection is lost.
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

// Lost returns a channel that is closed when the connection is lost the next time: what is in flight then will hardly
// be answered.
func (p *Pool) Lost() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// Closed reports whether the connection is closed for good.
func (p *Pool) Closed() bool { return p.conn.IsClosed() }

// Send sends a request. Its reply goes to the receiver, with the tag. patience travels with it: nobody works on it for
// longer; so does the header of its trace, unless that is empty. The error wraps [ErrTooLarge], [ErrBusy] or
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

// Redirect gives the reply to a request, if it is still to come, to another receiver.
func (p *Pool) Redirect(id uint64, to Receiver, tag int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, waits := p.flights[id]; waits {
		f.to, f.tag = to, tag
		p.flights[id] = f
	}
}

// Drop lets go of a request: its reply is given to nobody.
func (p *Pool) Drop(id uint64) {
	p.mu.Lock()
	delete(p.flights, id)
	p.mu.Unlock()
}

// InFlight is how many requests wait for a reply.
func (p *Pool) InFlight() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.flights)
}

// Refusal returns the error, which wraps [ErrDenied], if the server has refused this user the inbox, or since an error
// that [Pool.LastError] returned, the subject. NATS tells that by itself and not in a reply.
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

// LastError is the last error that the connection had.
func (p *Pool) LastError() error { return p.conn.LastError() }

// Close ends the pool: replies that come later are given to nobody.
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
	_ = p.sub.Unsubscribe() // fails only without a connection, and then nothing comes
}

func (p *Pool) receive(m *nats.Msg) {
	id, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 36, 64)
	if err != nil {
		return // somebody publishes here whom nobody asked
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, waits := p.flights[id]; waits {
		delete(p.flights, id)
		f.to.Receive(f.tag, ReadReply(m, f.form))
	}
}

// ReadReply reads a message that answers a request of a content type.
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
		r.Err = &ServiceError{Code: code, Description: m.Header.Get(HeaderError)}
	}
	return r
}

func connectionError(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, nats.ErrPermissionViolation), errors.Is(err, nats.ErrAuthorization):
		return fmt.Errorf("%w: %w", ErrDenied, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded): // nothing is kept back to be sent later
		return ErrDisconnected
	case errors.Is(err, nats.ErrBadSubject):
		return err
	}
	return fmt.Errorf("%w: %w", ErrDisconnected, err)
}
