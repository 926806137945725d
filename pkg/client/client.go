package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// What is asked and answered, by the names that it has in pkg/api.
type (
	Query      = api.Query
	MediaItem  = events.MediaItem
	Answer     = api.Answer
	WorkerList = api.WorkerList
	Worker     = api.Worker
	Status     = api.Status
	Error      = api.Error

	SelectRequest    = api.SelectRequest
	Selection        = api.Selection
	BookRequest      = api.BookRequest
	Booking          = api.Booking
	RequestRef       = api.RequestRef
	LoadList         = api.LoadList
	PotentialRequest = api.PotentialRequest
	PotentialList    = api.PotentialList
	Code             = api.Code
)

// Why a request is asked again.
const (
	AgainLost    = "lost"    // the connection was, or there is none yet
	AgainAbsent  = "absent"  // nobody served at that moment
	AgainRefused = "refused" // who was asked cannot answer now (503): it is being stopped, or not ready
	AgainSlow    = "slow"    // no answer yet: another request is sent beside the first
)

// Options are how a client asks. The zero value of each is a good choice.
type Options struct {
	// Absent is how long a request is asked again while nobody can answer it, as when an indexer or a NATS server
	// restarts, but never more than half of its time; default 2 s. More suits who would rather wait, less who has
	// another way.
	Absent time.Duration

	// AskedAgain, if not nil, is told why each time that a request is asked again, from any goroutine.
	AskedAgain func(why string)

	// Over HTTP only: the bearer token that the port wants, if any, and the client that carries requests, with its TLS
	// settings; default [http.DefaultClient].
	Token string
	HTTP  *http.Client
}

// Client asks an indexer. Any number of goroutines may use it.
type Client struct {
	to transport
	o  Options
}

func newClient(to transport, o Options) *Client {
	if o.Absent <= 0 {
		o.Absent = 2 * time.Second
	}
	if o.AskedAgain == nil {
		o.AskedAgain = func(string) {}
	}
	return &Client{to: to, o: o}
}

// Find asks who holds how much of a prompt.
func (c *Client) Find(ctx context.Context, q *Query) (*Answer, error) {
	a, err := call[Answer](ctx, c, api.OpFind, q)
	if q.Diagnostic && refusesDiagnostic(err) {
		plain := *q
		plain.Diagnostic = false
		return call[Answer](ctx, c, api.OpFind, &plain)
	}
	return a, err
}

// refusesDiagnostic reports whether a node of version 0.4 or earlier has refused a query because it does not have the
// field diagnostic.
func refusesDiagnostic(err error) bool {
	return CodeOf(err) == api.CodeMalformed && strings.Contains(err.Error(), `no field "diagnostic"`)
}

// Workers asks for all ranks that the log knows. They travel in parts: those that come or go meanwhile may be in the
// list or not.
func (c *Client) Workers(ctx context.Context) (*WorkerList, error) {
	all := &WorkerList{Workers: []api.WorkerInfo{}}
	for {
		next := &api.WorkersRequest{After: all.Next, Limit: api.WorkersPage}
		part, err := call[WorkerList](ctx, c, api.OpWorkers, next)
		if err != nil {
			return nil, err
		}
		if all.Append(part); all.Next == nil {
			return all, nil
		}
	}
}

// RegisterWorker registers a worker, in place of what was registered of it before.
func (c *Client) RegisterWorker(ctx context.Context, r *api.WorkerRegistration) (*Worker, error) {
	return call[Worker](ctx, c, api.OpRegisterWorker, r)
}

// ChangeWorker changes what is said of a worker; fields that are not set change nothing. Every node knows within a
// heartbeat, the one that answers at once. The same change twice is one.
func (c *Client) ChangeWorker(ctx context.Context, change *api.WorkerChange) (*Worker, error) {
	return about[Worker](ctx, c, api.OpChangeWorker, change.Instance, change)
}

// RemoveWorker ends the registration of a worker that has no shim, or one that an indexer runs, and forgets what was
// changed of it.
func (c *Client) RemoveWorker(ctx context.Context, instance events.WorkerID) (*Worker, error) {
	return about[Worker](ctx, c, api.OpRemoveWorker, instance, &api.WorkerRemoval{Instance: instance})
}

// Status asks how the node is doing that answers.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	return call[Status](ctx, c, api.OpStatus, nil)
}

// StatusOf asks how one node is doing, by way of whichever takes the request.
func (c *Client) StatusOf(ctx context.Context, node string) (*Status, error) {
	s, err := call[Status](ctx, c, api.OpStatus, &api.StatusRequest{Node: node})
	if err == nil && s.Node != node {
		return nil, api.Errorf(api.CodeUnavailable,
			"node %s answered, whose version does not ask others: %s", s.Node, s.Version)
	}
	return s, err
}

// Verify asks how the node is doing, with a checksum of each partition, and in a cluster with those of all nodes. Of
// partitions in at the checksum is of that place in the log, if the node has not passed it.
func (c *Client) Verify(ctx context.Context, at []api.PartitionSeq) (*Status, error) {
	return call[Status](ctx, c, api.OpVerify, &api.VerifyRequest{At: at})
}

// Snapshot has every partition's snapshot written now.
func (c *Client) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	return call[api.SnapshotList](ctx, c, api.OpSnapshot, nil)
}

// Prefixes asks for the largest part of the tree of prefixes that the workers of a model share, as one node has it.
func (c *Client) Prefixes(ctx context.Context, r *api.PrefixesRequest) (*api.PrefixTree, error) {
	return call[api.PrefixTree](ctx, c, api.OpPrefixes, r)
}

// Select asks which worker should serve a prompt, and books the request there if it says so. One that books is sent
// once: if the answer is lost, the request may be booked all the same. One that does not is asked again as
// [Client.Find] is; with a RequestID, the choice that is kept for Book is then any of those.
func (c *Client) Select(ctx context.Context, r *SelectRequest) (*Selection, error) {
	s, err := call[Selection](ctx, c, api.OpSelect, r)
	if r.Diagnostic && refusesDiagnostic(err) {
		plain := *r
		plain.Diagnostic = false
		return call[Selection](ctx, c, api.OpSelect, &plain)
	}
	return s, err
}

// Book books a request on the worker that it names, or on the one that Select chose for its id. It is sent once.
func (c *Client) Book(ctx context.Context, r *BookRequest) (*Booking, error) {
	return call[Booking](ctx, c, api.OpBook, r)
}

// PrefillComplete says that the first output token of a request has come. It may be said again.
func (c *Client) PrefillComplete(ctx context.Context, model, requestID string) error {
	_, err := call[api.Done](ctx, c, api.OpPrefillComplete, &RequestRef{Model: model, RequestID: requestID})
	return err
}

// OutputBlock says that a request has filled another block with output. It is sent once.
func (c *Client) OutputBlock(ctx context.Context, r *RequestRef) error {
	_, err := call[api.Done](ctx, c, api.OpOutputBlock, r)
	return err
}

// Free says that a request has ended. It is sent once; what is not freed expires.
func (c *Client) Free(ctx context.Context, model, requestID string) error {
	_, err := call[api.Done](ctx, c, api.OpFree, &RequestRef{Model: model, RequestID: requestID})
	return err
}

// Loads asks what workers have to do: of one model, or of all if it is empty.
func (c *Client) Loads(ctx context.Context, model string) (*LoadList, error) {
	return call[LoadList](ctx, c, api.OpLoads, &api.LoadsRequest{Model: model})
}

// PotentialLoads asks what each worker would have to do with a prompt beside what it has.
func (c *Client) PotentialLoads(ctx context.Context, r *PotentialRequest) (*PotentialList, error) {
	return call[PotentialList](ctx, c, api.OpPotentialLoads, r)
}

// EngineLoad reports how full engines are. A report may be said again; one that is older than what is known changes
// nothing.
func (c *Client) EngineLoad(ctx context.Context, loads ...api.EngineLoad) error {
	_, err := call[api.Done](ctx, c, api.OpEngineLoad, &api.EngineLoads{Loads: loads})
	return err
}

// EngineLoads asks what is known of how full engines are.
func (c *Client) EngineLoads(ctx context.Context) (*api.EngineLoads, error) {
	return call[api.EngineLoads](ctx, c, api.OpEngineLoads, nil)
}

// Recorded asks for the newest requests that were recorded of a model, or for one of them.
func (c *Client) Recorded(ctx context.Context, r *api.RecordedRequest) (*api.RecordedList, error) {
	return call[api.RecordedList](ctx, c, api.OpRecorded, r)
}

// Funnel asks where a model's tokens are lost that could have been reused.
func (c *Client) Funnel(ctx context.Context, r *api.FunnelRequest) (*api.Funnel, error) {
	return call[api.Funnel](ctx, c, api.OpFunnel, r)
}

// Report says what an engine has reused of a prompt for which Select has chosen a worker. It is sent once.
func (c *Client) Report(ctx context.Context, r *api.Report) error {
	_, err := call[api.Done](ctx, c, api.OpReport, r)
	return err
}

// BlockHistory asks one node what it remembers of blocks. Nodes ask each other so.
func (c *Client) BlockHistory(ctx context.Context, q *api.BlockHistoryRequest) (*api.BlockHistory, error) {
	return call[api.BlockHistory](ctx, c, api.OpBlockHistory, q)
}

// Close ends the client. A connection that it was given stays the caller's.
func (c *Client) Close() { c.to.close() }

// CodeOf is the code of an error of this package; empty if it has none.
func CodeOf(err error) Code {
	if e, is := errors.AsType[*Error](err); is {
		return e.Code
	}
	return ""
}

func call[T any](ctx context.Context, c *Client, op string, q any) (*T, error) {
	return about[T](ctx, c, op, "", q)
}

// about is call for a request about one worker.
func about[T any](ctx context.Context, c *Client, op string, instance events.WorkerID, q any) (*T, error) {
	var body []byte
	if q != nil {
		var err error
		if body, err = api.Marshal(api.MsgPack, q); err != nil {
			return nil, err
		}
	}
	once := asksOnce[op]
	if s, choice := q.(*SelectRequest); choice {
		once = s.Book
	}
	reply, err := c.ask(ctx, op, instance, body, once)
	if err != nil {
		return nil, err
	}
	out := new(T)
	if err := api.DecodeReply(api.MsgPack, reply, out); err != nil {
		return nil, err
	}
	return out, nil
}

// failure is an error with a code and its cause.
type failure struct {
	as    *Error
	cause error
}

func (f *failure) Error() string   { return f.as.Error() }
func (f *failure) Unwrap() []error { return []error{f.as, f.cause} }

// failed makes an error of its cause, which the message says too.
func failed(code Code, cause error, format string, args ...any) error {
	return &failure{api.Errorf(code, "%s: %v", fmt.Sprintf(format, args...), cause), cause}
}
