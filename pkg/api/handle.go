package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Content types of requests and replies. A reply has the content type of the request.
const (
	JSON    = "application/json"
	MsgPack = "application/msgpack"
)

// ContentType returns the content type for a header Content-Type; JSON for an empty header. known is false for
// unsupported types.
func ContentType(header string) (contentType string, known bool) {
	switch header {
	case "", JSON:
		return JSON, true
	case MsgPack:
		return MsgPack, true
	}
	name, _, err := mime.ParseMediaType(header)
	switch {
	case err != nil:
	case name == JSON, strings.HasPrefix(name, "application/") && strings.HasSuffix(name, "+json"):
		return JSON, true
	case name == MsgPack, name == "application/x-msgpack", name == "application/vnd.msgpack":
		return MsgPack, true
	}
	return JSON, false
}

// WrongContentType returns the error for a body of an unsupported type.
func WrongContentType(header string) *Error {
	return Errorf(CodeWrongContentType, "Content-Type is %q; send the header \"Content-Type: %s\" or %s",
		shorten(header), JSON, MsgPack)
}

// Handler answers requests of all transports. It is safe for concurrent use.
type Handler struct {
	Indexer   Indexer
	Registrar Registrar // nil: operations that register and change workers are not served
	Router    Router    // nil: the operations of routing are not served
	Funnels   Funnels   // nil: the funnel is not served
	Insights  Insights  // nil: sessions, tenants, scaling and the order of removal are not served
	Hots      Hots      // nil: hot prefixes are not served

	// Further serves operations that [Operations] lacks, by name; nil: there are none.
	Further map[string]func(ctx context.Context, contentType string, body []byte) (answer any, err error)

	// Observe, if not nil, is called after every request that Handle answered, with the operation, the outcome
	// ([OutcomeOf]) and the duration.
	Observe func(op, outcome string, took time.Duration)

	// IgnoreUnknown accepts unknown fields, for requests between nodes: a newer version may send further fields. Such a
	// field must be optional. Requests of clients with unknown fields are refused.
	IgnoreUnknown bool

	// Instance is the worker in the path of the request; empty: the body names the worker.
	Instance events.WorkerID
}

func (h Handler) unknown() unknownFields {
	if h.IgnoreUnknown {
		return ignoreUnknown
	}
	return refuseUnknown
}

// Handle answers a request. The reply has the request's content type: MsgPack, or JSON for all other values. failure is
// set if the reply is an error. The reply contains the error too.
func (h Handler) Handle(ctx context.Context, op, contentType string, body []byte) (reply []byte, failure *Error) {
	begun := time.Now()
	answer, err := h.dispatch(ctx, op, contentType, body)
	return h.reply(op, contentType, answer, err, begun)
}

// ReadQuery reads and checks a query, which [Handler.AnswerQuery] answers. It is the first half of Handle, for a caller
// that may pass the query to another node.
func (h Handler) ReadQuery(contentType string, body []byte) (*Query, error) {
	if err := checkSize(body); err != nil {
		return nil, err
	}
	q := &Query{}
	if err := h.readQuery(contentType, body, q); err != nil {
		return nil, err
	}
	if err := q.Check(); err != nil {
		return nil, err
	}
	if q.Explain && q.EngineHashes != nil {
		return nil, Errorf(CodeMalformed, "explain is valid with tokens or hashes, not with engine_hashes")
	}
	q.Idle = q.Idle || q.Explain
	return q, nil
}

// AnswerQuery is the second half of Handle: it answers a query of ReadQuery. begun is the start of ReadQuery, for the
// duration in Observe.
func (h Handler) AnswerQuery(ctx context.Context, contentType string, q *Query, begun time.Time) ([]byte, *Error) {
	answer, err := h.find(ctx, q)
	return h.reply(ops.Find, contentType, answer, err, begun)
}

// reply encodes an answer or an error, and observes the request.
func (h Handler) reply(op, contentType string, answer any, err error, begun time.Time) (reply []byte, failure *Error) {
	outcome := OutcomeOf(err)
	if err != nil {
		failure = AsError(err)
		answer = ErrorBody{Error: failure}
	}
	if reply, err = Marshal(contentType, answer); err != nil {
		failure = Errorf(CodeInternal, "encode the answer: %v", err)
		reply, outcome = failure.Body(contentType), failure.Outcome()
	}
	if h.Observe != nil {
		h.Observe(op, outcome, time.Since(begun))
	}
	return reply, failure
}

// AsError returns an error in the form for clients. err must not be nil.
func AsError(err error) *Error {
	switch e, is := errors.AsType[*Error](err); {
	case is:
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return Errorf(CodeBehind, "the deadline passed before there was an answer")
	case errors.Is(err, context.Canceled):
		return Errorf(CodeUnavailable, "the request was cancelled: the client has gone, or this node stops")
	}
	return Errorf(CodeInternal, "%v", err)
}

// HasCode reports whether an error is, or wraps, an [Error] with the code.
func HasCode(err error, code Code) bool {
	e, is := errors.AsType[*Error](err)
	return is && e.Code == code
}

// dispatch reads a request of an operation and returns the answer.
func (h Handler) dispatch(ctx context.Context, op, contentType string, body []byte) (any, error) {
	if err := checkSize(body); err != nil {
		return nil, err
	}
	o := OperationOf(op)
	if o == nil {
		if serve := h.Further[op]; serve != nil {
			return serve(ctx, contentType, body)
		}
		return nil, unknownOperation(op)
	}
	b := requestBody{contentType, body, o.Empty}
	if len(body) == 0 && o.Empty {
		b.contentType, b.body = JSON, []byte("null")
	}
	answer, err := o.serve(ctx, h, b)
	if err == errNotServed {
		err = unknownOperation(op)
	}
	return answer, err
}

func checkSize(body []byte) error {
	if len(body) > MaxBody {
		return Errorf(CodeTooLarge, "the request has %d bytes, more than %d", len(body), MaxBody)
	}
	return nil
}

func unknownOperation(op string) error {
	return Errorf(CodeUnknownOperation, "there is no operation %q", op)
}

// requestBody is an undecoded request.
type requestBody struct {
	contentType string
	body        []byte
	optional    bool // the body may be null
}

// readRequest reads a request, inserts the worker of the path, and runs the request's check, if there is one.
func readRequest(h Handler, b requestBody, q object) error {
	err := (&reader{unknown: h.unknown(), what: "the request", optional: b.optional}).read(b.contentType, b.body, q)
	if about, is := q.(workerRequest); is && err == nil {
		err = h.completeInstance(about.instance())
	}
	if check, is := q.(interface{ Check() error }); is && err == nil {
		err = check.Check()
	}
	return err
}

// workerRequest is a request about one worker. The path or the body names the worker.
type workerRequest interface{ instance() *events.WorkerID }

func (c *WorkerChange) instance() *events.WorkerID  { return &c.Instance }
func (w *WorkerRemoval) instance() *events.WorkerID { return &w.Instance }

// completeInstance sets the worker of a request to the worker of the path. It refuses two different workers, and a
// request without a worker.
func (h Handler) completeInstance(instance *events.WorkerID) error {
	switch {
	case *instance == "":
		*instance = h.Instance
	case h.Instance != "" && h.Instance != *instance:
		return Errorf(CodeMalformed, "the path names worker %q, and the body %q", shorten(string(h.Instance)),
			shorten(string(*instance)))
	}
	if *instance == "" {
		return Errorf(CodeMalformed, "the request has no instance")
	}
	return nil
}

// find answers a query within the query's deadline.
func (h Handler) find(ctx context.Context, q *Query) (any, error) {
	ctx, done := q.Bounded(ctx)
	defer done()
	q.DeadlineMS = 0 // the context carries the deadline to other nodes
	return h.Indexer.Find(ctx, q)
}

// readQuery reads a query. A fast path decodes the MessagePack form of our own clients.
func (h Handler) readQuery(contentType string, body []byte, q *Query) error {
	if contentType == MsgPack && unpackQuery(body, q, h.unknown()) {
		return nil
	}
	return (&reader{unknown: h.unknown(), what: "the query"}).read(contentType, body, q)
}

// Bounded returns the context with the query's own deadline, if the query has a deadline.
func (q *Query) Bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if q.DeadlineMS == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Duration(q.DeadlineMS)*time.Millisecond)
}

// maxHashed is the largest number of lookaheads in a query.
const maxHashed = 16

// maxWithin is the largest number of sets of tiers in a query: all possible sets.
const maxWithin = 1<<events.NumTiers - 1

// MaxMedia is the largest number of items in a prompt.
const MaxMedia = 1 << 12

// checkMedia returns an error for items without a definite position in the blocks of an engine.
func checkMedia(media []events.MediaItem, tokens Tokens) error {
	if media != nil && tokens == nil {
		return Errorf(CodeMalformed, "media marks tokens of images; it is valid with tokens only")
	}
	if len(media) > MaxMedia {
		return Errorf(CodeTooLarge, "media has more than %d elements", MaxMedia)
	}
	end := uint64(0)
	for i, item := range media {
		switch {
		case item.Length == 0:
			return Errorf(CodeMalformed, "media[%d].length is 0", i)
		case uint64(item.Offset) < end:
			return Errorf(CodeMalformed, "media[%d].offset is %d, and media[%d] ends at %d: items must be in the order of "+
				"their offsets and not overlap", i, item.Offset, i-1, end)
		}
		if end = uint64(item.Offset) + uint64(item.Length); end > uint64(len(tokens)) {
			return Errorf(CodeMalformed, "media[%d] ends at %d; there are %d tokens", i, end, len(tokens))
		}
	}
	return nil
}

// Check returns an error for a query that is invalid for any model. The error is an [Error].
func (q *Query) Check() error {
	switch {
	case q.Model == "":
		return Errorf(CodeMissingModel, "the query has no model")
	case q.Text != nil && (q.Hashes != nil || q.Hashed != nil || q.EngineHashes != nil ||
		q.Tokens != nil && (q.Text.Whole() || q.Text.Request == nil)):
		return Errorf(CodeMalformed, "the query has a text, and tokens or hashes; give one of them")
	case q.Text != nil && q.Text.Check() != nil:
		return q.Text.Check()
	case q.EngineHashes != nil && (q.Tokens != nil || q.Hashes != nil || q.Hashed != nil):
		return Errorf(CodeMalformed, "the query has engine_hashes, and tokens or hashes; give one of them")
	case q.Tokens == nil && q.Hashes == nil && q.Hashed == nil && q.EngineHashes == nil && q.Text == nil:
		return Errorf(CodeMalformed, "the query has neither tokens nor hashes, and no prompt or messages")
	case q.Tokens != nil && q.Hashes != nil, q.Hashed != nil && (q.Tokens != nil || q.Hashes != nil):
		return Errorf(CodeMalformed, "the query has tokens and hashes; give one of them")
	case q.Tokens == nil && q.Text == nil && (q.LoRA != "" || q.CacheSalt != ""):
		return Errorf(CodeMalformed,
			"lora_name and cache_salt are valid with tokens only; hashes include them")
	case q.Hashed != nil && len(q.Hashed) == 0:
		return Errorf(CodeMalformed, "hashed is an empty list; it has an element for each lookahead")
	case q.Workers != nil && len(q.Workers) == 0:
		return Errorf(CodeMalformed, "workers is an empty list and allows none; omit it to allow all")
	case q.Ranks != nil && len(q.Ranks) == 0:
		return Errorf(CodeMalformed, "ranks is an empty list and allows none; omit it to allow all")
	case q.Ranks != nil && q.Workers != nil:
		return Errorf(CodeMalformed, "the query has workers and ranks; give one of them")
	case q.Endpoints != nil && len(q.Endpoints) == 0:
		return Errorf(CodeMalformed, "endpoints is an empty list and allows none; omit it to allow all")
	case slices.Contains(q.Endpoints, ""):
		return Errorf(CodeMalformed, "endpoints has an empty element")
	case q.Endpoints != nil && (q.Workers != nil || q.Ranks != nil):
		return Errorf(CodeMalformed, "the query has endpoints, and workers or ranks; give one of them")
	case q.WithEngineHashes && (len(q.Workers)+len(q.Ranks) != 1 || q.EngineHashes != nil):
		return Errorf(CodeMalformed,
			"with_engine_hashes is valid with tokens or hashes, and one worker in workers or ranks")
	case q.Partitions != nil && len(q.Partitions) == 0:
		return Errorf(CodeMalformed, "partitions is an empty list; omit it to search all")
	case len(q.Hashed) > maxHashed:
		return Errorf(CodeTooLarge, "hashed has more than %d elements", maxHashed)
	case q.Within != nil && (len(q.Within) == 0 || len(q.Within) > maxWithin):
		return Errorf(CodeMalformed, "within has %d sets of tiers; it may have 1 to %d", len(q.Within), maxWithin)
	case q.L3 != "" && q.L3 != L3All && q.L3 != L3Beyond && q.L3 != L3Off:
		return Errorf(CodeMalformed, "l3 is %.40q; it may be %q, %q or %q", string(q.L3), L3All, L3Beyond, L3Off)
	}
	if i := slices.IndexFunc(q.Ranks, func(r RankPlace) bool { return r.Instance == "" }); i >= 0 {
		return Errorf(CodeMalformed, "ranks[%d] has no instance", i)
	}
	for _, set := range q.Within {
		if _, err := set.List(); err != nil {
			return err
		}
	}
	return checkMedia(q.Media, q.Tokens)
}

// Marshal encodes v in a content type.
func Marshal(contentType string, v any) ([]byte, error) {
	if contentType != MsgPack {
		return marshalJSON(v)
	}
	switch v := v.(type) {
	case *Query:
		if !v.rare() {
			return packQuery(v, 0), nil
		}
	case *Answer:
		if v.Tokenization == nil {
			return packAnswer(v)
		}
	case *SelectRequest:
		if v.usual() {
			return packSelect(v), nil
		}
	case *Selection:
		if v.usual() {
			return packSelection(v), nil
		}
	}
	return marshalReflect(v)
}

func marshalJSON(v any) ([]byte, error) {
	var text []byte
	done := false
	switch v := v.(type) {
	case *Answer:
		if v != nil {
			text, done = jsonAnswer(v)
		}
	case *Selection:
		if v != nil && v.usual() {
			text, done = jsonSelection(v)
		}
	}
	if done {
		return text, nil
	}
	return json.Marshal(v)
}

// Unmarshal decodes data of a content type into v. It ignores unknown fields, so nodes and clients of different
// versions are compatible. An error is an *Error with the position of the fault.
func Unmarshal(contentType string, data []byte, v any) error {
	if q, query := v.(*Query); query {
		return Handler{IgnoreUnknown: true}.readQuery(contentType, data, q)
	}
	var err error
	if contentType == MsgPack {
		if a, answer := v.(*Answer); !answer || !unpackAnswer(data, a) {
			err = unmarshalReflect(data, v)
		}
	} else {
		dec := json.NewDecoder(bytes.NewReader(data))
		if err = dec.Decode(v); err == nil {
			if _, more := dec.Token(); more != io.EOF {
				err = errors.New("something follows the JSON value")
			}
		}
	}
	return notForm(contentType, err)
}

// DecodeReply decodes a node's reply into v, or returns the error in the reply.
func DecodeReply(contentType string, data []byte, v any) error {
	if a, find := v.(*Answer); find && contentType == MsgPack && unpackAnswer(data, a) {
		return nil // fails for an error
	}
	if bytes.Contains(data, []byte("error")) { // only then can it be an error
		var failed ErrorBody
		if err := Unmarshal(contentType, data, &failed); err == nil && failed.Error != nil {
			return failed.Error
		}
	}
	if err := Unmarshal(contentType, data, v); err != nil {
		return fmt.Errorf("decode the reply: %w", err)
	}
	return nil
}
