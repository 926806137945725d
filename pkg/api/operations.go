package api

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/ops"
)

// Operation describes one operation. [Operations] has a row for each operation. The HTTP port, the NATS services and
// their permissions, OpenAPI and the reference are made from these rows. [github.com/kvatlas/kvatlas/pkg/client] has a
// method for each row.
type Operation struct {
	// Name is also the last token of the operation's NATS subjects.
	Name string

	// Summary is a line for OpenAPI and the reference.
	Summary string

	// Routes are the operation's methods and paths over HTTP. Clients use the last one.
	Routes []Route

	// Access is a set of rights. A bearer token over HTTP needs one of them.
	Access Access

	// Costly marks an operation that takes seconds of work. Web pages of other sites cannot start it with GET.
	Costly bool

	// AnyNode serves kv.v1.<namespace>.q.<name>: NATS delivers each request to one node, which answers for the cluster.
	// NATS users other than nodes may publish there if Granted is set and their role has the Access.
	AnyNode, Granted bool

	// OneNode serves kv.v1.<namespace>.node.<node>.<name>: the named node answers from its own data.
	OneNode bool

	// Once marks an operation that a client must not send twice. See [Operation.SentOnce].
	Once bool

	// Empty lets a request be empty or null.
	Empty bool

	// Parameters are parameters of the URL that may replace the body.
	Parameters []string

	// Codes are the errors of the operation, in addition to the errors of all operations.
	Codes []Code

	// Schema is the name of the request's schema in OpenAPI. Empty: the name of its type.
	Schema string

	method
}

// Route is a method and a path over HTTP. The path may contain {instance}.
type Route struct{ Method, Path string }

// Access is a set of rights.
type Access uint8

// The rights. internal/edge/rights has their names, in the same order.
const (
	AccessRead     Access = 1 << iota // query
	AccessRoute                       // choose workers and book requests
	AccessRegister                    // register workers and report their load
	AccessOperate                     // change workers, write snapshots, compare replicas
)

// method is the Go side of an operation.
type method struct {
	Request reflect.Type // nil: a request has no fields
	Answer  reflect.Type

	// serve reads a request and calls the method of the service. It returns errNotServed if the handler lacks the
	// service.
	serve func(ctx context.Context, h Handler, b requestBody) (any, error)
}

var errNotServed = errors.New("the operation is not served")

var (
	modelCodes   = []Code{CodeUnknownModel, CodeBlockSizeMismatch, CodeMissingModel, CodeBadTokens}
	bookingCodes = []Code{CodeMissingModel, CodeUnknownRequest}
)

// Operations has one row for each operation.
var Operations = []*Operation{
	{
		Name: ops.Find, Routes: post("/v1/find"), Access: AccessRead, AnyNode: true, Granted: true, OneNode: true,
		Summary: "The depths of all workers for a prompt. Exactly one of `tokens`, `hashes`, `hashed`, `engine_hashes`, `prompt` " +
			"and `messages` is given",
		Codes: modelCodes,
		method: method{Request: reflect.TypeFor[Query](), Answer: reflect.TypeFor[Answer](),
			serve: func(ctx context.Context, h Handler, b requestBody) (any, error) {
				q, err := h.ReadQuery(b.contentType, b.body)
				if err != nil {
					return nil, err
				}
				return h.find(ctx, q)
			}},
	},
	{
		Name: ops.Workers, Routes: get("/v1/workers"), Access: AccessRead, AnyNode: true, Granted: true, OneNode: true,
		Summary: "All workers, with the numbers of their blocks", Empty: true,
		method: indexer(func(x Indexer, ctx context.Context, r *WorkersRequest) (*WorkerList, error) {
			return x.Workers(ctx, *r)
		}),
	},
	{
		Name: ops.Status, Routes: get("/v1/status"), Access: AccessRead, AnyNode: true, Granted: true, OneNode: true,
		Summary: "A node's status", Empty: true,
		method: indexer(func(x Indexer, ctx context.Context, r *StatusRequest) (*Status, error) {
			if r.Node != "" {
				return x.StatusOf(ctx, r.Node)
			}
			return x.Status(ctx)
		}),
	},
	{
		Name: ops.Verify, Routes: get("/v1/verify"), Access: AccessOperate, Costly: true, AnyNode: true, OneNode: true,
		Summary: "A node's status, with checksums of all replicas compared", Once: true, Empty: true,
		method: indexer(func(x Indexer, ctx context.Context, r *VerifyRequest) (*Status, error) {
			return x.Verify(ctx, r.At)
		}),
	},
	{
		Name: ops.Snapshot, Routes: post("/v1/snapshot"), Access: AccessOperate, AnyNode: true, OneNode: true,
		Summary: "Write snapshots now", Once: true, Empty: true,
		method: indexer(func(x Indexer, ctx context.Context, _ *noFields) (*SnapshotList, error) {
			return x.Snapshot(ctx)
		}),
	},
	{
		Name: ops.Prefixes, Routes: post("/v1/prefixes"), Access: AccessRead, OneNode: true,
		Summary: "The largest part of a model's tree of prefixes, of all nodes or of one",
		Codes:   []Code{CodeUnknownModel, CodeBlockSizeMismatch, CodeMissingModel},
		method:  indexer(Indexer.Prefixes),
	},
	{
		Name: ops.Select, Routes: post("/v1/select"), Access: AccessRoute, AnyNode: true, Granted: true, Once: true,
		Summary: "Choose a worker for a prompt. The prompt is given as for `/v1/find`",
		Codes:   slices.Concat([]Code{CodeNoWorkers, CodeOverloaded, CodeQuota, CodeConflict}, modelCodes),
		method:  router(Router.Select),
	},
	{
		Name: ops.Book, Routes: post("/v1/book"), Access: AccessRoute, AnyNode: true, Granted: true, Once: true,
		Summary: "Book a request on a worker",
		Codes: slices.Concat([]Code{CodeUnknownWorker, CodeUnknownRequest, CodeOverloaded, CodeConflict},
			modelCodes),
		method: router(Router.Book),
	},
	{
		Name: ops.PrefillComplete, Routes: post("/v1/prefill_complete"), Access: AccessRoute, AnyNode: true, Granted: true,
		Summary: "The prompt of a booked request is computed", Codes: bookingCodes,
		method: router(done(Router.PrefillComplete)),
	},
	{
		Name: ops.Progress, Routes: post("/v1/progress"), Access: AccessRoute, AnyNode: true, Granted: true,
		Summary: "A booked request is still running: `--request-expiry` starts again", Codes: bookingCodes,
		method: router(done(Router.Progress)),
	},
	{
		Name: ops.OutputBlock, Routes: post("/v1/output_block"), Access: AccessRoute, AnyNode: true, Granted: true,
		Once:    true,
		Summary: "A booked request has a further block of output", Codes: bookingCodes, Schema: "OutputBlockRequest",
		method: router(done(func(r Router, ctx context.Context, q *outputRef) error {
			return r.OutputBlock(ctx, (*RequestRef)(q))
		})).request(reflect.TypeFor[RequestRef]()),
	},
	{
		Name: ops.Free, Routes: post("/v1/free"), Access: AccessRoute, AnyNode: true, Granted: true, Once: true,
		Summary: "A booked request has ended", Codes: bookingCodes,
		method: router(done(func(r Router, ctx context.Context, q *endRef) error {
			return r.Free(ctx, (*RequestRef)(q))
		})),
	},
	{
		Name: ops.Loads, Routes: slices.Concat(get("/v1/loads"), post("/v1/loads")), Access: AccessRead,
		AnyNode: true, Granted: true,
		Summary: "The outstanding work of workers", Empty: true, Codes: []Code{CodeUnknownModel},
		method: router(Router.Loads),
	},
	{
		Name: ops.PotentialLoads, Routes: post("/v1/potential_loads"), Access: AccessRead, AnyNode: true, Granted: true,
		Summary: "The outstanding work of each worker with a further prompt", Codes: modelCodes,
		method: router(Router.PotentialLoads),
	},
	{
		Name: ops.EngineLoads, Routes: get("/v1/engine_load"), Access: AccessRead, AnyNode: true, Granted: true,
		Summary: "The used memory of engines", Empty: true,
		method: router(func(r Router, ctx context.Context, _ *noFields) (*EngineLoads, error) {
			return r.EngineLoads(ctx)
		}),
	},
	{
		// for a router, or a program beside an engine
		Name: ops.EngineLoad, Routes: post("/v1/engine_load"), Access: AccessRoute | AccessRegister,
		AnyNode: true, Granted: true,
		Summary: "Report the used memory of engines", Schema: "EngineLoadReports",
		method: router(done(Router.EngineLoad)),
	},
	{
		// not granted to NATS users: the answer has hashes of all tenants
		Name: ops.Recorded, Routes: post("/v1/recorded"), Access: AccessRead, AnyNode: true, OneNode: true,
		Summary: "The newest recorded requests of a model, or one of them, by hashes",
		Codes:   []Code{CodeMissingModel, CodeUnknownRequest},
		method:  funnels(Funnels.Recorded),
	},
	{
		Name: ops.Funnel, Routes: get("/v1/funnel"), Access: AccessRead, AnyNode: true, Granted: true, OneNode: true,
		Summary: "Where reusable tokens of a model are lost: parameters of the URL, or a body",
		Empty:   true, Parameters: []string{"model", "since"}, Codes: []Code{CodeMissingModel, CodeUnknownModel},
		method: funnels(Funnels.Funnel),
	},
	{
		Name: ops.Report, Routes: post("/v1/report"), Access: AccessRoute, AnyNode: true, Granted: true, OneNode: true,
		Summary: "Report the tokens that an engine reused after a choice", Once: true,
		Codes:  []Code{CodeUnknownRequest},
		method: funnels(done(Funnels.Report)),
	},
	{
		// not for readers: the answer has the ids of all clients' sessions
		Name: ops.Sessions, Routes: slices.Concat(get("/v1/sessions"), post("/v1/sessions")),
		Access: AccessRoute | AccessOperate, AnyNode: true, Granted: true,
		Summary: "The sessions with a worker, the last used first: parameters of the URL, or a body",
		Empty:   true, Parameters: []string{"model", "session_id"},
		method: insights(Insights.Sessions),
	},
	{
		Name: ops.EndSession, Routes: post("/v1/sessions/end"), Access: AccessRoute | AccessOperate, AnyNode: true,
		Granted: true,
		Summary: "End a session: the next request of the session is chosen freely",
		method:  insights(Insights.EndSession),
	},
	{
		Name: ops.Capacity, Routes: get("/v1/capacity"), Access: AccessRead, AnyNode: true, Granted: true,
		Summary: "The hit rate of a model's prompts by size of the cache: parameters of the URL, or a body",
		Empty:   true, Parameters: []string{"model"}, Codes: []Code{CodeMissingModel, CodeUnknownModel},
		method: funnels(Funnels.Capacity),
	},
	{
		Name: ops.RemovalOrder, Routes: slices.Concat(get("/v1/removal_order"), post("/v1/removal_order")),
		Access: AccessRead, Costly: true, AnyNode: true, Granted: true,
		Summary: "The workers of a model in the order of removal, by the lost reuse",
		Empty:   true, Parameters: []string{"model"},
		Codes:  []Code{CodeMissingModel, CodeUnknownModel, CodeBlockSizeMismatch},
		method: insights(Insights.RemovalOrder),
	},
	{
		Name: ops.Scaling, Routes: slices.Concat(get("/v1/scaling"), post("/v1/scaling")), Access: AccessRead, AnyNode: true,
		Granted: true, OneNode: true,
		Summary: "The waiting work of a model, for an autoscaler",
		Empty:   true, Parameters: []string{"model"}, Codes: []Code{CodeMissingModel, CodeUnknownModel},
		method: insights(Insights.Scaling),
	},
	{
		Name: ops.HotPrefixes, Routes: slices.Concat(get("/v1/prefixes/hot"), post("/v1/prefixes/hot")), Access: AccessRead,
		AnyNode: true, Granted: true,
		Summary: "The prefixes of a model with more demand than their holders serve, with the benefit of a copy, and the copies",
		Empty:   true, Parameters: []string{"model"},
		Codes:  []Code{CodeMissingModel, CodeUnknownModel},
		method: hots(Hots.HotPrefixes),
	},
	{
		Name: ops.Warm, Routes: post("/v1/prefixes/warm"), Access: AccessOperate, AnyNode: true, Granted: true,
		OneNode: true, Once: true,
		Summary: "Compute a prefix on a worker, by a request for one token, for later requests",
		Codes: []Code{CodeMissingModel, CodeUnknownModel, CodeUnknownWorker, CodeUnknownRequest, CodeConflict,
			CodeOverloaded, CodeBadTokens},
		method: hots(Hots.Warm),
	},
	{
		// not for readers: the answer has the names of all tenants
		Name: ops.Tenants, Routes: slices.Concat(get("/v1/tenants"), post("/v1/tenants")), Access: AccessOperate,
		Costly: true, AnyNode: true, Granted: true,
		Summary: "The tokens and held blocks of tenants: parameters of the URL, or a body",
		Empty:   true, Parameters: []string{"model", "since"},
		Codes:  []Code{CodeMissingModel, CodeUnknownModel, CodeBlockSizeMismatch},
		method: insights(Insights.Tenants),
	},
	{
		Name: ops.RegisterWorker, Routes: post("/v1/workers"), Access: AccessRegister, AnyNode: true, Granted: true,
		Once:    true,
		Summary: "Register a worker",
		Codes:   []Code{CodeMissingModel, CodeRegistered, CodeConflict, CodeBlockSizeMismatch},
		method:  registrar(Registrar.RegisterWorker),
	},
	{
		Name: ops.ChangeWorker, Routes: []Route{{http.MethodPatch, "/v1/workers/{instance}"}}, Access: AccessOperate,
		AnyNode: true, Granted: true,
		Summary: "Change a worker's settings", Codes: []Code{CodeUnknownWorker, CodeConflict},
		method: registrar(Registrar.ChangeWorker),
	},
	{
		Name: ops.RemoveWorker, Routes: []Route{{http.MethodDelete, "/v1/workers/{instance}"}},
		Access: AccessRegister | AccessOperate, AnyNode: true, Granted: true, OneNode: true, Once: true, Empty: true,
		Summary: "End a worker's registration", Codes: []Code{CodeUnknownWorker, CodeConflict},
		method: indexer(func(x Indexer, ctx context.Context, r *WorkerRemoval) (*Worker, error) {
			return x.RemoveWorker(ctx, r.Instance)
		}),
	},
}

// operationsByName has the rows of Operations.
var operationsByName = func() map[string]*Operation {
	byName := make(map[string]*Operation, len(Operations))
	for _, o := range Operations {
		byName[o.Name] = o
	}
	return byName
}()

// OperationOf returns the operation of a name; nil if there is none.
func OperationOf(name string) *Operation { return operationsByName[name] }

// SentOnce reports whether a client sends a request at most once, since a second request could have another effect. A
// choice can be repeated unless it books.
func (o *Operation) SentOnce(request any) bool {
	if s, choice := request.(*SelectRequest); choice {
		return s.Book
	}
	return o.Once
}

func get(path string) []Route  { return []Route{{http.MethodGet, path}} }
func post(path string) []Route { return []Route{{http.MethodPost, path}} }

// request returns the method with a different type in the documentation of its requests.
func (m method) request(t reflect.Type) method {
	m.Request = t
	return m
}

// indexer, registrar, router, funnels, insights and hots make the method of an operation from a method of their
// interface.
func indexer[Q, A any, P request[Q]](do func(Indexer, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Indexer { return h.Indexer }, do)
}

func registrar[Q, A any, P request[Q]](do func(Registrar, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Registrar { return h.Registrar }, do)
}

func router[Q, A any, P request[Q]](do func(Router, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Router { return h.Router }, do)
}

func funnels[Q, A any, P request[Q]](do func(Funnels, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Funnels { return h.Funnels }, do)
}

func insights[Q, A any, P request[Q]](do func(Insights, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Insights { return h.Insights }, do)
}

func hots[Q, A any, P request[Q]](do func(Hots, context.Context, P) (A, error)) method {
	return methodOf(func(h Handler) Hots { return h.Hots }, do)
}

// request is a pointer to the type of a request.
type request[Q any] interface {
	*Q
	object
}

func methodOf[S comparable, Q, A any, P request[Q]](
	service func(Handler) S, do func(S, context.Context, P) (A, error),
) method {
	m := method{Request: reflect.TypeFor[Q](), Answer: reflect.TypeFor[A]()}
	if m.Request == reflect.TypeFor[noFields]() {
		m.Request = nil
	}
	if m.Answer.Kind() == reflect.Pointer {
		m.Answer = m.Answer.Elem()
	}
	m.serve = func(ctx context.Context, h Handler, b requestBody) (any, error) {
		s := service(h)
		if s == *new(S) {
			return nil, errNotServed
		}
		q := P(new(Q))
		if err := readRequest(h, b, q); err != nil {
			return nil, err
		}
		return do(s, ctx, q)
	}
	return m
}

// done returns a method with the answer [Done], for an operation without another answer.
func done[S, Q any](do func(S, context.Context, *Q) error) func(S, context.Context, *Q) (Done, error) {
	return func(s S, ctx context.Context, q *Q) (Done, error) { return Done{Done: true}, do(s, ctx, q) }
}
