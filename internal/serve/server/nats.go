package server

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// queueGroup is the NATS queue group of all serving nodes. NATS delivers a request to a single node.
const queueGroup = "kvatlas"

// selectService serves choices if requests may wait for a worker. It has separate workers, so that waiting requests do
// not block the ends of running requests.
const selectService = "kvatlas-select"

// service serves NATS subjects. kv.v1.<namespace>.q.<operation> reaches any node, which answers for the cluster.
// kv.v1.<namespace>.node.<node>.<operation> reaches a single node, which answers from its own data.
type service struct {
	s      *Server
	answer api.Handler
	shared []*jetstream.Service // any node's subjects
	own    []*jetstream.Service // the subjects of this node
	stops  []func()             // end subscriptions
}

// newService returns the service of a node without any subscriptions.
func (s *Server) newService() *service { return &service{s: s, answer: s.requests()} }

// serveStatus serves the operations of a node before readiness.
func (v *service) serveStatus() error {
	return v.serve(&v.shared, "kvatlas-node", queueGroup, api.OverNATS, v.answer, v.anyNode, ops.Status)
}

// serveOwn serves all operations on the node's own subjects, from the node's own data. It has separate workers, so that
// nodes with workers waiting for each other still answer each other.
func (v *service) serveOwn() error {
	subject := func(op string) (string, error) { return jetstream.Names(v.s.Namespace).Node(v.s.ID, op) }
	answer := api.Handler{
		Indexer: local{v.s}, Funnels: local{v.s}, Insights: local{v.s}, Hots: local{v.s},
		Further:       peerapi.Operations(local{v.s}),
		IgnoreUnknown: true, // other nodes may have a newer version
		Observe:       func(op, outcome string, took time.Duration) { v.s.queries.Observe("own_"+op, outcome, took) },
	}
	names := append(operations(func(o *api.Operation) bool { return o.OneNode }), peerapi.Names()...)
	return v.serve(&v.own, "kvatlas-own", "", api.FromNodes, answer, subject, names...)
}

// serveQueries serves the other operations of any node, after the node is ready.
func (v *service) serveQueries() error {
	if err := v.serveDynamo(); err != nil {
		return err
	}
	queued := v.s.Routing.Queue != nil
	if queued {
		if err := v.serve(&v.shared, selectService, queueGroup, api.OverNATS, v.answer, v.anyNode,
			ops.Select); err != nil {
			return err
		}
	}
	names := operations(func(o *api.Operation) bool {
		return o.AnyNode && o.Name != ops.Status && (o.Name != ops.Select || !queued)
	})
	return v.serve(&v.shared, "kvatlas-indexer", queueGroup, api.OverNATS, v.answer, v.anyNode, names...)
}

// operations returns the names of the operations that satisfy is.
func operations(is func(*api.Operation) bool) (names []string) {
	for _, o := range api.Operations {
		if is(o) {
			names = append(names, o.Name)
		}
	}
	return names
}

// requests returns the handler of clients' requests.
func (s *Server) requests() api.Handler {
	return api.Handler{Indexer: s, Registrar: s, Router: s, Funnels: s, Insights: s, Hots: s,
		Observe: s.queries.Observe}
}

func (v *service) anyNode(op string) (string, error) {
	return jetstream.Names(v.s.Namespace).Query(op), nil
}

func (v *service) serve(
	list *[]*jetstream.Service, name, group string, by api.Transport, answer api.Handler,
	subject func(op string) (string, error), names ...string,
) error {
	cfg := v.config(name, by)
	if name == selectService {
		cfg.Workers += v.s.Routing.Queue.Most()
	}
	for _, op := range names {
		on, err := subject(op)
		if err != nil {
			return err
		}
		handler := overNATS(answer, op)
		if op == ops.Find && by == api.OverNATS && !v.s.NoForwarding {
			handler = v.findOverNATS(answer)
		}
		cfg.Endpoints = append(cfg.Endpoints, jetstream.Endpoint{Name: op, Subject: on, QueueGroup: group,
			Handler: v.s.tracedNATS(op, by, v.s.attributedNATS(by, handler))})
	}
	service, err := jetstream.Serve(v.s.Conn, cfg)
	if err == nil {
		*list = append(*list, service)
	}
	return err
}

// config returns the configuration of a NATS service, without its endpoints.
func (v *service) config(name string, by api.Transport) jetstream.ServiceConfig {
	return jetstream.ServiceConfig{
		Name: name, Version: serviceVersion(v.s.Version),
		Description: "index of KV cache, namespace " + v.s.Namespace,
		Workers:     v.s.QueryWorkers, Queue: v.s.QueryQueue, MaxBody: jetstream.MaxValue, Refuse: refuse,
		Traced:   v.s.Tracer.On(),
		Ended:    func(op, outcome string) { v.s.outcomes.Count(by, op, outcome) },
		Panicked: v.s.panicked,
	}
}

// panicked logs a panic during a request.
func (s *Server) panicked(op string, why any, stack []byte) {
	s.log.Error("a bug in this program ended a request; the node continues", "operation", op, "fault", why, "stack",
		string(stack), "what_to_do", "report the bug with these lines and the output of indexer version")
}

// serviceVersion returns a semantic version, as micro services require.
func serviceVersion(version string) string {
	if len(version) > 1 && version[0] == 'v' {
		return version[1:]
	}
	return "0.0.0"
}

// refuse converts a refusal of the micro service to an API error.
func refuse(r jetstream.Request, code int, why string) jetstream.Response {
	contentType, _ := api.ContentType(r.ContentType)
	return failed(contentType, api.Refusal(code, why))
}

func failed(contentType string, failure *api.Error) jetstream.Response {
	return jetstream.Response{
		ContentType: contentType, Body: failure.Body(contentType),
		Code: failure.Code.HTTPStatus(), Description: failure.Error(), Outcome: failure.Outcome(),
	}
}

func overNATS(answer api.Handler, op string) jetstream.Handler {
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		contentType, known := api.ContentType(r.ContentType)
		if !known {
			return failed(contentType, api.WrongContentType(r.ContentType))
		}
		reply, failure := answer.Handle(ctx, op, contentType, r.Body)
		return natsReply(contentType, reply, failure)
	}
}

// natsReply returns the response to a served request.
func natsReply(contentType string, reply []byte, failure *api.Error) jetstream.Response {
	out := jetstream.Response{ContentType: contentType, Body: reply, Outcome: ops.OK}
	if failure != nil {
		out.Code, out.Description, out.Outcome = failure.Code.HTTPStatus(), failure.Error(), failure.Outcome()
	}
	return out
}

// leave ends the subscriptions for any node and waits for running requests. The node's own subjects remain.
func (v *service) leave(ctx context.Context) {
	for _, service := range v.shared {
		service.Stop(ctx)
	}
	v.shared = nil
}

// stop ends all subscriptions and waits for running requests.
func (v *service) stop(ctx context.Context) {
	v.leave(ctx)
	for _, service := range v.own {
		service.Stop(ctx)
	}
	v.own = nil
	for _, stop := range v.stops {
		stop()
	}
	v.stops = nil
}
