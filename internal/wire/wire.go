// Package wire carries the api over NATS: it serves an indexer as a micro service and gives clients what they ask it
// with. Subjects are kv.v1.<namespace>.q.<operation>, where whichever node answers for the cluster, and
// kv.v1.<namespace>.node.<node>.<operation>, where one node answers for what it holds itself.
package wire

import (
	"context"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// queueGroup is whom a request goes to: one node of all that serve.
const queueGroup = "kvatlas"

// Nodes reaches the nodes of a namespace by their names: each answers for what it holds itself. It is a scatter's
// transport.
type Nodes struct {
	*rpc.Pool
	Namespace string
}

// Send sends a request to a node. See [rpc.Pool.Send].
func (n *Nodes) Send(
	node, op string, patience time.Duration, body []byte, to rpc.Receiver, tag int,
) (id uint64, err error) {
	subject, err := jetstream.NodeSubject(n.Namespace, node, op)
	if err != nil {
		return 0, api.Errorf(api.CodeInternal, "%v", err)
	}
	return n.Pool.Send(subject, api.MsgPack, patience, body, to, tag)
}

// Client returns a client of one node. The error wraps [jetstream.ErrBadName].
func (n *Nodes) Client(node string) (*client.Client, error) {
	if _, err := jetstream.NodeSubject(n.Namespace, node, ""); err != nil {
		return nil, fmt.Errorf("node %.64q: %w", node, err)
	}
	subject := func(op string) string {
		subject, _ := jetstream.NodeSubject(n.Namespace, node, op) // its name was found to be good
		return subject
	}
	absent := fmt.Sprintf("node %q of namespace %q does not answer on this NATS server: it is not running",
		node, n.Namespace)
	return client.OverPool(n.Pool, subject, absent, client.Options{}), nil
}

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
	return failed(contentType, api.Refusal(code, why))
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
