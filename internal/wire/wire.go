// Package wire carries the api over NATS: it serves an indexer as a micro service and gives clients what they ask it
// with. Subjects are kv.v1.<namespace>.q.<operation>, where whichever node answers for the cluster, and
// kv.v1.<namespace>.node.<node>.<operation>, where one node answers for what it holds itself.
package wire

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// queueGroup is whom a request goes to: one node of all that serve.
const queueGroup = "kvatlas"

// NewClient returns a client of whatever node serves a namespace on a connection.
func NewClient(conn *jetstream.Conn, namespace string) *api.Client {
	return newClient(conn, func(op string) string { return jetstream.QuerySubject(namespace, op) },
		fmt.Sprintf("no indexer of namespace %q answers on this NATS server: it is not running, or still restoring",
			namespace))
}

// NewNodeClient returns a client of one node of a namespace, which answers for what it holds itself. The error wraps
// [jetstream.ErrBadName].
func NewNodeClient(conn *jetstream.Conn, namespace, node string) (*api.Client, error) {
	if _, err := jetstream.NodeSubject(namespace, node, ""); err != nil {
		return nil, fmt.Errorf("node %.64q: %w", node, err)
	}
	subject := func(op string) string {
		subject, _ := jetstream.NodeSubject(namespace, node, op) // its name was found to be good
		return subject
	}
	return newClient(conn, subject, fmt.Sprintf(
		"node %q of namespace %q does not answer on this NATS server: it is not running", node, namespace)), nil
}

// newClient returns a client that asks on the subject of each operation. absent says that nobody serves it. Operations
// that change nothing and cost little are asked again where that may help ([jetstream.Conn.Ask]).
func newClient(conn *jetstream.Conn, subject func(op string) string, absent string) *api.Client {
	return api.NewClient(func(ctx context.Context, op, contentType string, body []byte) ([]byte, error) {
		request := conn.Request
		if op == api.OpFind || op == api.OpWorkers || op == api.OpStatus {
			request = conn.Ask
		}
		reply, err := request(ctx, subject(op), contentType, body)
		var refused *jetstream.ServiceError
		if err == nil || errors.As(err, &refused) && len(reply.Body) > 0 {
			return reply.Body, nil // which holds the error, if it is one
		}
		failure := Failure(err)
		switch {
		case failure == nil:
			return nil, fmt.Errorf("ask %s: %w", op, err)
		case errors.Is(err, jetstream.ErrNoResponder):
			failure.Message = absent
		}
		return nil, failure
	})
}

// withoutBody are the codes that nodes of the version before sent without a body.
var withoutBody = []int{jetstream.CodeTooLarge, jetstream.CodeBusy, jetstream.CodeStopping}

// Failure says what an error of asking means to whoever asked; nil if err is nil or no client can do anything about it.
func Failure(err error) *api.Error {
	var refused *jetstream.ServiceError
	switch {
	case errors.As(err, &refused) && slices.Contains(withoutBody, refused.Code):
		return refusal(refused.Code, refused.Description) // by a node of the version before, which says no more
	case errors.Is(err, jetstream.ErrTooLarge):
		return api.Errorf(api.CodeTooLarge,
			"%v; ask with hashes instead of tokens, or over HTTP, which takes %d bytes (8 MiB)", err, api.MaxBody)
	case errors.Is(err, jetstream.ErrNoResponder):
		return api.Errorf(api.CodeNotReady, "%v", err)
	case errors.Is(err, jetstream.ErrTimeout):
		return api.Errorf(api.CodeUnavailable, "no answer in time: %v", err)
	}
	return nil
}

// Asker asks nodes by their names, without waiting for them. It is a scatter's transport.
type Asker struct {
	outbox    *jetstream.Outbox
	namespace string
}

// NewAsker returns an asker of a namespace's nodes. take is given what comes back, from one goroutine, and must return
// soon: a body in MessagePack, or why there is none.
func NewAsker(conn *jetstream.Conn, namespace string, take func(id uint64, body []byte, err *api.Error)) (*Asker,
	error) {
	outbox, err := conn.OpenOutbox(func(id uint64, r jetstream.Reply, err error) {
		if err == nil {
			take(id, r.Body, nil)
			return
		}
		var body api.ErrorBody
		if len(r.Body) > 0 && api.Unmarshal(api.MsgPack, r.Body, &body) == nil && body.Error != nil {
			take(id, nil, body.Error)
		} else if failure := Failure(err); failure != nil {
			take(id, nil, failure)
		} else {
			take(id, nil, api.Errorf(api.CodeUnavailable, "%v", err))
		}
	})
	if err != nil {
		return nil, err
	}
	return &Asker{outbox, namespace}, nil
}

// Ask sends a request to a node; patience says how long its reply is waited for.
func (a *Asker) Ask(id uint64, node, op string, patience time.Duration, body []byte) error {
	subject, err := jetstream.NodeSubject(a.namespace, node, op)
	if err != nil {
		return api.Errorf(api.CodeInternal, "%v", err)
	}
	if err := a.outbox.Send(id, subject, api.MsgPack, patience, body); err != nil {
		if failure := Failure(err); failure != nil {
			return failure
		}
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return nil
}

// Close ends it.
func (a *Asker) Close() { a.outbox.Close() }

// ServiceConfig says how a node serves.
type ServiceConfig struct {
	Version string

	Workers int // how many requests are answered at once; other nodes' beside them
	Queue   int // how many wait for a worker

	// Ended is told what became of each request. May be nil.
	Ended func(by api.Transport, op, outcome string)
}

// Service is what a node serves on NATS.
type Service struct {
	conn      *jetstream.Conn
	namespace string
	answer    api.Handler
	cfg       ServiceConfig
	shared    []*jetstream.Service // any node's subjects
	own       []*jetstream.Service // this node's
}

// NewService returns the service of a node. It serves nothing yet.
func NewService(conn *jetstream.Conn, namespace string, answer api.Handler, cfg ServiceConfig) *Service {
	if cfg.Ended == nil {
		cfg.Ended = func(api.Transport, string, string) {}
	}
	return &Service{conn: conn, namespace: namespace, answer: answer, cfg: cfg}
}

// Tell serves what may be asked of a node that is not ready: its status.
func (s *Service) Tell() error {
	return s.serve(&s.shared, "kvatlas-node", queueGroup, api.OverNATS, s.answer, s.anyNode, api.OpStatus)
}

// Own serves everything on the node's own subjects, for those who ask this node and no other, with an answer of its
// own: what it holds itself. It has workers of its own too, so that nodes whose workers all wait for each other still
// answer each other.
func (s *Service) Own(node string, answer api.Handler) error {
	own := func(op string) (string, error) { return jetstream.NodeSubject(s.namespace, node, op) }
	return s.serve(&s.own, "kvatlas-own", "", api.FromNodes, answer, own, api.OpFind, api.OpWorkers, api.OpStatus,
		api.OpVerify, api.OpSnapshot)
}

// Answer serves everything else, once the node is ready.
func (s *Service) Answer() error {
	return s.serve(&s.shared, "kvatlas-indexer", queueGroup, api.OverNATS, s.answer, s.anyNode, api.OpFind,
		api.OpWorkers, api.OpVerify, api.OpSnapshot)
}

func (s *Service) anyNode(op string) (string, error) {
	return jetstream.QuerySubject(s.namespace, op), nil
}

func (s *Service) serve(
	list *[]*jetstream.Service, name, group string, by api.Transport, answer api.Handler,
	subject func(op string) (string, error), ops ...string,
) error {
	cfg := jetstream.ServiceConfig{
		Name: name, Version: serviceVersion(s.cfg.Version), Description: "index of KV cache, namespace " + s.namespace,
		Workers: s.cfg.Workers, Queue: s.cfg.Queue, MaxBody: MaxBody, Refuse: refuse,
		Hooks: jetstream.ServiceHooks{Ended: func(op, outcome string) { s.cfg.Ended(by, op, outcome) }},
	}
	for _, op := range ops {
		on, err := subject(op)
		if err != nil {
			return err
		}
		cfg.Endpoints = append(cfg.Endpoints, jetstream.Endpoint{Name: op, Subject: on, QueueGroup: group,
			Handler: handler(answer, op)})
	}
	service, err := jetstream.Serve(s.conn, cfg)
	if err == nil {
		*list = append(*list, service)
	}
	return err
}

// serviceVersion is a semantic version, which micro services must have.
func serviceVersion(version string) string {
	if len(version) > 1 && version[0] == 'v' {
		return version[1:]
	}
	return "0.0.0"
}

// MaxBody is the size of a request over NATS, in bytes, beyond which it is refused: a message there has 1 MiB unless
// the server is told otherwise.
const MaxBody = jetstream.MaxValue

// refuse answers what the service itself refuses with an error as any other.
func refuse(r jetstream.Request, code int, why string) jetstream.Response {
	contentType, _ := api.ContentType(r.ContentType)
	return failed(contentType, refusal(code, why))
}

// refusal is the error that goes with a code of the service.
func refusal(code int, why string) *api.Error {
	switch code {
	case jetstream.CodeBad:
		return api.Errorf(api.CodeMalformed, "%s", why)
	case jetstream.CodeTooLarge:
		return api.Errorf(api.CodeTooLarge,
			"%s, the limit over NATS; ask with hashes instead of tokens, or over HTTP, which takes %d (8 MiB)", why,
			api.MaxBody)
	case jetstream.CodeBusy:
		return api.Errorf(api.CodeBusy, "%s; ask again a little later", why)
	case jetstream.CodeStopping:
		return api.Errorf(api.CodeNotReady, "%s; ask again a little later", why)
	}
	return api.Errorf(api.CodeTooLarge, "%s, the limit over NATS; ask for less (fewer workers, a limit), or over HTTP",
		why)
}

func failed(contentType string, failure *api.Error) jetstream.Response {
	return jetstream.Response{
		ContentType: contentType, Body: failure.Body(contentType),
		Code: failure.Code.HTTPStatus(), Description: failure.Error(), Outcome: api.Outcome(failure),
	}
}

func handler(answer api.Handler, op string) jetstream.Handler {
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		contentType, known := api.ContentType(r.ContentType)
		if !known {
			return failed(contentType, api.WrongContentType(r.ContentType))
		}
		reply, failure := answer.Handle(ctx, op, contentType, r.Body)
		out := jetstream.Response{ContentType: contentType, Body: reply, Outcome: api.OutcomeOK}
		if failure != nil {
			out.Code, out.Description, out.Outcome = failure.Code.HTTPStatus(), failure.Error(), api.Outcome(failure)
		}
		return out
	}
}

// Leave lets what is under way be answered and takes nothing new but what is asked of this node by its name.
func (s *Service) Leave(ctx context.Context) {
	for _, service := range s.shared {
		service.Stop(ctx)
	}
	s.shared = nil
}

// Stop lets what is under way be answered and takes nothing new.
func (s *Service) Stop(ctx context.Context) {
	s.Leave(ctx)
	for _, service := range s.own {
		service.Stop(ctx)
	}
	s.own = nil
}
