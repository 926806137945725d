package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Reasons for a retry. [Options.AskedAgain] receives them.
const (
	AgainLost    = "lost"    // the connection was lost, or is not yet established
	AgainAbsent  = "absent"  // no node served the request
	AgainRefused = "refused" // the node replied 503: it is stopping or not ready
	AgainSlow    = "slow"    // no answer yet: a hedged request follows
)

// Options configure a [Client]. The zero value is a good choice.
type Options struct {
	// Absent limits the retries of a request while no node can answer, such as during a restart of an indexer or a NATS
	// server. The default is 2 s, and the limit never exceeds half of the deadline. A longer value waits for a restart.
	// A shorter value suits a caller with a fallback.
	Absent time.Duration

	// HedgeAfter is the wait for an answer before the client sends the request a second time, beside the first. The
	// default is 250 ms, and the wait never exceeds a quarter of the deadline. Each further wait is twice as long.
	HedgeAfter time.Duration

	// AskedAgain is called with the reason of every retry, from any goroutine. nil disables it.
	AskedAgain func(why string)

	// Token is the bearer token for the HTTP port. HTTP sends the requests, with its TLS settings; the default is
	// [http.DefaultClient]. NATS ignores the two fields.
	Token string
	HTTP  *http.Client
}

// Client sends requests to an indexer. It is safe for concurrent use.
type Client struct {
	to transport
	o  Options
}

func newClient(to transport, o Options) *Client {
	if o.Absent <= 0 {
		o.Absent = 2 * time.Second
	}
	if o.HedgeAfter <= 0 {
		o.HedgeAfter = 250 * time.Millisecond
	}
	if o.AskedAgain == nil {
		o.AskedAgain = func(string) {}
	}
	return &Client{to: to, o: o}
}

// Find returns the workers that hold blocks of a prompt.
func (c *Client) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	a, err := call[api.Answer](ctx, c, ops.Find, q)
	if q.Diagnostic && refusesDiagnostic(err) {
		plain := *q
		plain.Diagnostic = false
		return call[api.Answer](ctx, c, ops.Find, &plain)
	}
	return a, err
}

// refusesDiagnostic reports whether a node of version 0.4 or earlier rejected a query with the field diagnostic.
func refusesDiagnostic(err error) bool {
	return CodeOf(err) == api.CodeMalformed && strings.Contains(err.Error(), `no field "diagnostic"`)
}

// Workers returns all ranks in the log. The list arrives in pages: it may lack a rank that appears or disappears
// meanwhile.
func (c *Client) Workers(ctx context.Context) (*api.WorkerList, error) {
	all := &api.WorkerList{Workers: []api.WorkerInfo{}}
	for {
		next := &api.WorkersRequest{After: all.Next, Limit: api.WorkersPage}
		part, err := call[api.WorkerList](ctx, c, ops.Workers, next)
		if err != nil {
			return nil, err
		}
		if all.Append(part); all.Next == nil {
			return all, nil
		}
	}
}

// RegisterWorker registers a worker and replaces an earlier registration.
func (c *Client) RegisterWorker(ctx context.Context, r *api.WorkerRegistration) (*api.Worker, error) {
	return call[api.Worker](ctx, c, ops.RegisterWorker, r)
}

// ChangeWorker changes the attributes of a worker. Unset fields stay as they are. The answering node applies the change
// at once, and all nodes apply it within a heartbeat. ChangeWorker is idempotent.
func (c *Client) ChangeWorker(ctx context.Context, change *api.WorkerChange) (*api.Worker, error) {
	return callFor[api.Worker](ctx, c, ops.ChangeWorker, change.Instance, change)
}

// RemoveWorker removes the registration of a worker without a shim, or of a worker with a shim in an indexer. It
// also discards the changes of [Client.ChangeWorker].
func (c *Client) RemoveWorker(ctx context.Context, instance events.WorkerID) (*api.Worker, error) {
	return callFor[api.Worker](ctx, c, ops.RemoveWorker, instance, &api.WorkerRemoval{Instance: instance})
}

// Status returns the state of the answering node.
func (c *Client) Status(ctx context.Context) (*api.Status, error) {
	return call[api.Status](ctx, c, ops.Status, nil)
}

// StatusOf returns the state of the given node. Any node forwards the request.
func (c *Client) StatusOf(ctx context.Context, node string) (*api.Status, error) {
	s, err := call[api.Status](ctx, c, ops.Status, &api.StatusRequest{Node: node})
	if err == nil && s.Node != node {
		return nil, api.Errorf(api.CodeUnavailable,
			"node %s answered in its place: its version %s does not forward status requests", s.Node, s.Version)
	}
	return s, err
}

// Verify returns the state of the node with a checksum of each partition, and in a cluster the checksums of all nodes.
// For a partition in at, the checksum is of that position in the log, unless the node has passed the position.
func (c *Client) Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error) {
	return call[api.Status](ctx, c, ops.Verify, &api.VerifyRequest{At: at})
}

// Snapshot writes a snapshot of every partition now.
func (c *Client) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	return call[api.SnapshotList](ctx, c, ops.Snapshot, nil)
}

// Prefixes returns the largest part of the prefix tree of a model, from the index of a single node.
func (c *Client) Prefixes(ctx context.Context, r *api.PrefixesRequest) (*api.PrefixTree, error) {
	return call[api.PrefixTree](ctx, c, ops.Prefixes, r)
}

// Select chooses a worker for a prompt, and books the request there if Book is set. The client sends a booking once: if
// the answer is lost, the request may still be booked. Without Book, the client retries like [Client.Find]; with a
// RequestID, the nodes keep the choice of any attempt for Book.
func (c *Client) Select(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
	s, err := call[api.Selection](ctx, c, ops.Select, r)
	if r.Diagnostic && refusesDiagnostic(err) {
		plain := *r
		plain.Diagnostic = false
		return call[api.Selection](ctx, c, ops.Select, &plain)
	}
	return s, err
}

// Book books a request on the named worker, or on the worker that Select chose for the id. The client sends it once.
func (c *Client) Book(ctx context.Context, r *api.BookRequest) (*api.Booking, error) {
	return call[api.Booking](ctx, c, ops.Book, r)
}

// PrefillComplete reports the first output token of a request. It is idempotent.
func (c *Client) PrefillComplete(ctx context.Context, model, requestID string) error {
	_, err := call[api.Done](ctx, c, ops.PrefillComplete, &api.RequestRef{Model: model, RequestID: requestID})
	return err
}

// Progress reports that a request is still running: its expiry starts again. It is idempotent.
func (c *Client) Progress(ctx context.Context, model, requestID string) error {
	_, err := call[api.Done](ctx, c, ops.Progress, &api.RequestRef{Model: model, RequestID: requestID})
	return err
}

// OutputBlock reports another full block of output of a request. The client sends it once.
func (c *Client) OutputBlock(ctx context.Context, r *api.RequestRef) error {
	_, err := call[api.Done](ctx, c, ops.OutputBlock, r)
	return err
}

// Free reports the end of a request. The client sends it once. A booking without Free expires after a time without
// Progress.
func (c *Client) Free(ctx context.Context, model, requestID string) error {
	_, err := call[api.Done](ctx, c, ops.Free, &api.RequestRef{Model: model, RequestID: requestID})
	return err
}

// FreeResult is [Client.Free] with the result of the request at its worker. A failure penalises the worker for a
// moment.
func (c *Client) FreeResult(ctx context.Context, model, requestID string, result api.Result) error {
	_, err := call[api.Done](ctx, c, ops.Free, &api.RequestRef{Model: model, RequestID: requestID, Result: result})
	return err
}

// ReportResult reports the result of a request without a booking at a worker, as FreeResult does for a booked request.
func (c *Client) ReportResult(ctx context.Context, worker events.WorkerID, result api.Result) error {
	_, err := call[api.Done](ctx, c, ops.EngineLoad,
		&api.EngineLoads{Results: []api.WorkerResult{{Worker: worker, Result: result}}})
	return err
}

// Loads returns the loads of the workers of a model, or of all models if the model is empty.
func (c *Client) Loads(ctx context.Context, model string) (*api.LoadList, error) {
	return call[api.LoadList](ctx, c, ops.Loads, &api.LoadsRequest{Model: model})
}

// PotentialLoads returns the load of each worker as it would be with an additional prompt.
func (c *Client) PotentialLoads(ctx context.Context, r *api.PotentialRequest) (*api.PotentialList, error) {
	return call[api.PotentialList](ctx, c, ops.PotentialLoads, r)
}

// EngineLoad reports the loads of engines. A repeated or older report has no effect.
func (c *Client) EngineLoad(ctx context.Context, loads ...api.EngineLoad) error {
	_, err := call[api.Done](ctx, c, ops.EngineLoad, &api.EngineLoads{Loads: loads})
	return err
}

// EngineLoads returns the latest reports of the loads of engines.
func (c *Client) EngineLoads(ctx context.Context) (*api.EngineLoads, error) {
	return call[api.EngineLoads](ctx, c, ops.EngineLoads, nil)
}

// Recorded returns the latest recorded requests of a model, or a single recorded request.
func (c *Client) Recorded(ctx context.Context, r *api.RecordedRequest) (*api.RecordedList, error) {
	return call[api.RecordedList](ctx, c, ops.Recorded, r)
}

// Funnel returns the counts of a model's reusable tokens, and the reasons for the lost tokens.
func (c *Client) Funnel(ctx context.Context, r *api.FunnelRequest) (*api.Funnel, error) {
	return call[api.Funnel](ctx, c, ops.Funnel, r)
}

// Sessions returns the sessions with a worker, the last used first. nil requests all of them, up to the usual limit.
func (c *Client) Sessions(ctx context.Context, r *api.SessionsRequest) (*api.SessionList, error) {
	if r == nil {
		r = &api.SessionsRequest{}
	}
	return call[api.SessionList](ctx, c, ops.Sessions, r)
}

// EndSession ends a session, so that the next request of the session is chosen freely. It returns the ended sessions,
// one for each model; an empty model means all models. It is idempotent.
func (c *Client) EndSession(ctx context.Context, model, session string) (*api.SessionList, error) {
	return call[api.SessionList](ctx, c, ops.EndSession, &api.SessionEnd{Model: model, SessionID: session})
}

// RemovalOrder returns the workers of a model in the order of removal, the smallest loss of reuse first.
func (c *Client) RemovalOrder(ctx context.Context, r *api.RemovalRequest) (*api.RemovalOrder, error) {
	return call[api.RemovalOrder](ctx, c, ops.RemovalOrder, r)
}

// Scaling returns the waiting work of a model.
func (c *Client) Scaling(ctx context.Context, model string) (*api.Scaling, error) {
	return call[api.Scaling](ctx, c, ops.Scaling, &api.ScalingRequest{Model: model})
}

// HotPrefixes returns the prefixes of a model that a further copy would help, and the copies.
func (c *Client) HotPrefixes(ctx context.Context, r *api.HotRequest) (*api.HotList, error) {
	return call[api.HotList](ctx, c, ops.HotPrefixes, r)
}

// Warm computes a prefix on a worker for later requests, and waits for the engine. The client sends it once.
func (c *Client) Warm(ctx context.Context, r *api.WarmRequest) (*api.PrefixCopy, error) {
	return call[api.PrefixCopy](ctx, c, ops.Warm, r)
}

// Report reports the tokens that an engine reused of a prompt after a Select. The client sends it once.
func (c *Client) Report(ctx context.Context, r *api.Report) error {
	_, err := call[api.Done](ctx, c, ops.Report, r)
	return err
}

// Capacity returns the hit rate of a model's prompts by size of the cache.
func (c *Client) Capacity(ctx context.Context, r *api.CapacityRequest) (*api.Capacity, error) {
	return call[api.Capacity](ctx, c, ops.Capacity, r)
}

// Tenants returns the tokens of the recorded requests by tenant, and the held blocks on request. nil requests all
// models.
func (c *Client) Tenants(ctx context.Context, r *api.TenantsRequest) (*api.TenantList, error) {
	if r == nil {
		r = &api.TenantsRequest{}
	}
	return call[api.TenantList](ctx, c, ops.Tenants, r)
}

// Call sends a request of an operation that has no method, and decodes the answer. Nodes call each other with it. The
// client retries the request like [Client.Find].
func (c *Client) Call(ctx context.Context, op string, request, answer any) error {
	return c.exchange(ctx, op, "", request, false, answer)
}

// Close closes the client. The caller still owns a connection that it passed to [NATS].
func (c *Client) Close() { c.to.close() }

// CodeOf returns the code of an error of this package, or "".
func CodeOf(err error) api.Code {
	if e, is := errors.AsType[*api.Error](err); is {
		return e.Code
	}
	return ""
}

func call[T any](ctx context.Context, c *Client, op string, q any) (*T, error) {
	return callFor[T](ctx, c, op, "", q)
}

// callFor is call for a request about a single worker.
func callFor[T any](ctx context.Context, c *Client, op string, instance events.WorkerID, q any) (*T, error) {
	out := new(T)
	if err := c.exchange(ctx, op, instance, q, api.OperationOf(op).SentOnce(q), out); err != nil {
		return nil, err
	}
	return out, nil
}

// exchange sends a request, which is sent at most once if once is set, and decodes the answer.
func (c *Client) exchange(
	ctx context.Context, op string, instance events.WorkerID, q any, once bool, answer any,
) error {
	var body []byte
	if q != nil {
		var err error
		if body, err = api.Marshal(api.MsgPack, q); err != nil {
			return err
		}
	}
	reply, err := c.ask(ctx, op, instance, body, once)
	if err != nil {
		return err
	}
	return api.DecodeReply(api.MsgPack, reply, answer)
}

// failure joins an error code and the cause.
type failure struct {
	as    *api.Error
	cause error
}

func (f *failure) Error() string   { return f.as.Error() }
func (f *failure) Unwrap() []error { return []error{f.as, f.cause} }

// failed returns an error with the code. The message ends with the cause.
func failed(code api.Code, cause error, format string, args ...any) error {
	return &failure{api.Errorf(code, "%s: %v", fmt.Sprintf(format, args...), cause), cause}
}
