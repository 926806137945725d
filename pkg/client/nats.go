package client

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
)

var namespaces = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// NATS returns a client of the nodes that serve a namespace. JetStream is not required. The connection should reconnect
// without a limit (nats.MaxReconnects(-1)).
func NATS(conn *nats.Conn, namespace string, o Options) (*Client, error) {
	if !namespaces.MatchString(namespace) {
		return nil, api.Errorf(api.CodeMalformed,
			"namespace %q: use 1 to 32 of a-z, 0-9 and '-', first a letter or digit", namespace)
	}
	pool, err := rpc.NewPool(conn)
	if err != nil {
		return nil, Failure(rpc.Reply{Err: err})
	}
	c := OverPool(pool, func(op string) string { return "kv.v1." + namespace + ".q." + op }, fmt.Sprintf(
		"no indexer of namespace %q answers on this NATS server: it is not running, or still restoring", namespace), o)
	c.to.(*natsTransport).own = true
	return c, nil
}

// OverPool returns a client that sends requests through a pool. subject returns the subject of an operation. absent is
// the error text for a subject without a service. OverPool suits programs with several clients, such as nodes. Only
// this module can call it, because the pool is internal.
func OverPool(pool *rpc.Pool, subject func(op string) string, absent string, o Options) *Client {
	return newClient(&natsTransport{pool: pool, subject: subject, absent: absent}, o)
}

type natsTransport struct {
	pool    *rpc.Pool
	own     bool // only this client uses the pool
	subject func(op string) string
	absent  string
}

func (t *natsTransport) send(ctx context.Context, r *request, patience time.Duration) (outcome, error) {
	if len(r.flights) == 0 {
		r.since, r.absent = t.pool.LastError(), t.absent
	}
	id, err := t.pool.Send(t.subject(r.op), api.MsgPack, patience, rpc.Traceparent(ctx), r.body, r, 0)
	if err == nil {
		r.flights = append(r.flights, id)
		return outcome{}, nil
	}
	o := outcome{}
	if errors.Is(err, rpc.ErrDisconnected) && !t.pool.Closed() {
		o.again = AgainLost
	}
	return o, Failure(rpc.Reply{Err: err})
}

// Receive implements [rpc.Receiver].
func (r *request) Receive(_ int, reply rpc.Reply) {
	o := outcome{reply: reply.Body}
	if reply.Err != nil {
		r.refuse(&o, reply)
	}
	r.put(o)
}

// refuse converts an error reply to an outcome.
func (r *request) refuse(o *outcome, reply rpc.Reply) {
	switch refused, is := errors.AsType[*rpc.ServiceError](reply.Err); {
	case errors.Is(reply.Err, rpc.ErrNoResponder):
		o.err, o.again = failed(api.CodeNotReady, reply.Err, "%s", r.absent), AgainAbsent
		return
	case is && refused.Code == api.CodeNotReady.HTTPStatus():
		form, _ := api.ContentType(reply.ContentType)
		o.again = refusal(form, reply.Body)
	}
	if len(reply.Body) == 0 {
		o.err = Failure(reply)
	}
}

func (t *natsTransport) end(r *request) {
	for _, id := range r.flights {
		t.pool.Drop(id)
	}
}

func (t *natsTransport) refused(r *request) error {
	if err := t.pool.Refusal(t.subject(r.op), r.since); err != nil {
		return failed(api.CodeForbidden, err, "this NATS user has no permission for the request")
	}
	return nil
}

func (t *natsTransport) lost() <-chan struct{} { return t.pool.Lost() }
func (t *natsTransport) budget() *rpc.Budget   { return &t.pool.Hedges }

func (t *natsTransport) close() {
	if t.own {
		t.pool.Close()
	}
}

// Failure returns the error in a reply, or nil. The error is or wraps an [*api.Error]. Only this module can call it,
// because the reply is internal.
func Failure(r rpc.Reply) error {
	if r.Err == nil {
		return nil
	}
	refused, isRefused := errors.AsType[*rpc.ServiceError](r.Err)
	var body api.ErrorBody
	switch _, own := errors.AsType[*api.Error](r.Err); {
	case own:
		return r.Err
	case len(r.Body) > 0 && api.Unmarshal(api.MsgPack, r.Body, &body) == nil && body.Error != nil:
		return body.Error
	case isRefused:
		return api.Refusal(refused.Code, refused.Description) // a node before v0.4.0 sends only a description
	case errors.Is(r.Err, rpc.ErrTooLarge):
		return api.Errorf(api.CodeTooLarge,
			"%v; send hashes instead of tokens, or use HTTP, which accepts %d bytes (8 MiB)", r.Err, api.MaxBody)
	case errors.Is(r.Err, rpc.ErrBusy):
		return failed(api.CodeBusy, r.Err, "this process has too many requests in flight")
	case errors.Is(r.Err, rpc.ErrDenied):
		return failed(api.CodeForbidden, r.Err, "this NATS user has no permission for the request")
	case errors.Is(r.Err, rpc.ErrNoResponder):
		return failed(api.CodeNotReady, r.Err, "nobody answers")
	}
	return failed(api.CodeUnavailable, r.Err, "cannot send the request")
}
