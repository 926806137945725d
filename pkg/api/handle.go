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

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Content types of requests and replies. A reply has its request's.
const (
	JSON    = "application/json"
	MsgPack = "application/msgpack"
)

// ContentType is the form of a body by its header Content-Type; none is JSON. It is false for forms that nobody reads
// here.
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

// WrongContentType is the error of a body of another form.
func WrongContentType(header string) *Error {
	return Errorf(CodeWrongContentType, "Content-Type is %q; send the header \"Content-Type: %s\" or %s",
		shorten(header), JSON, MsgPack)
}

// errForwarded is for a query that somebody else is to answer.
var errForwarded = errors.New("the query is forwarded")

// Observer is called after every request that Handle answered: with its operation, its outcome ([OutcomeOf]) and the
// time it took.
type Observer func(op, outcome string, took time.Duration)

// Handler answers requests, whatever carries them. Any number of goroutines may use it.
type Handler struct {
	Indexer   Indexer
	Registrar Registrar     // nil: operations that register and change workers are not served
	Router    Router        // nil: the operations of routing are not served
	Funnels   Funnels       // nil: the funnel is not served
	Observe   Observer      // may be nil
	Unknown   UnknownFields // what becomes of fields of requests that are not known

	// Forward, if it is not nil, is offered each query that was read and is right. It returns true if somebody else is to
	// answer it: then Handle returns nothing, and observes nothing.
	Forward func(ctx context.Context, q *Query) bool

	// Instance is the worker that the request is about, where something beside the body says so; else empty.
	Instance events.WorkerID
}

// Handle answers one request. The reply is in the request's content type, which is JSON unless it is
// MsgPack. failure is not nil if the reply is an error; the reply holds it too.
func (h Handler) Handle(ctx context.Context, op, contentType string, body []byte) (reply []byte, failure *Error) {
	begun := time.Now()
	answer, err := h.dispatch(ctx, op, contentType, body)
	if err == errForwarded {
		return nil, nil
	}
	outcome := OutcomeOf(err)
	if err != nil {
		failure = AsError(err)
		answer = ErrorBody{Error: failure}
	}
	if reply, err = Marshal(contentType, answer); err != nil {
		failure = Errorf(CodeInternal, "encode the answer: %v", err)
		reply, outcome = failure.Body(contentType), Outcome(failure)
	}
	if h.Observe != nil {
		h.Observe(op, outcome, time.Since(begun))
	}
	return reply, failure
}

// AsError is an error as clients get it. err is not nil.
func AsError(err error) *Error {
	switch e, is := errors.AsType[*Error](err); {
	case is:
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return Errorf(CodeBehind, "the deadline passed before there was an answer")
	case errors.Is(err, context.Canceled):
		return Errorf(CodeUnavailable, "it was given up: whoever asked has gone, or this node stops")
	}
	return Errorf(CodeInternal, "%v", err)
}

// HasCode reports whether an error is an [Error] of a code, or wraps one.
func HasCode(err error, code Code) bool {
	e, is := errors.AsType[*Error](err)
	return is && e.Code == code
}

// dispatch reads a request of an operation and returns its answer.
func (h Handler) dispatch(ctx context.Context, op, contentType string, body []byte) (any, error) {
	if len(body) > MaxBody {
		return nil, Errorf(CodeTooLarge, "the request has %d bytes, more than %d", len(body), MaxBody)
	}
	o := OperationOf(op)
	if o == nil {
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

func unknownOperation(op string) error {
	return Errorf(CodeUnknownOperation, "there is no operation %q", op)
}

// requestBody is a request that was not read yet.
type requestBody struct {
	contentType string
	body        []byte
	optional    bool // the body may be null
}

// readRequest reads a request, enters the worker that the path names, and runs the request's check, if it has one.
func readRequest(h Handler, b requestBody, q object) error {
	err := (&reader{unknown: h.Unknown, what: "the request", optional: b.optional}).read(b.contentType, b.body, q)
	if about, is := q.(workerRequest); is && err == nil {
		err = h.completeInstance(about.instance())
	}
	if check, is := q.(interface{ Check() error }); is && err == nil {
		err = check.Check()
	}
	return err
}

// workerRequest is a request about one worker, which the path may name in place of the body.
type workerRequest interface{ instance() *events.WorkerID }

func (c *WorkerChange) instance() *events.WorkerID  { return &c.Instance }
func (w *WorkerRemoval) instance() *events.WorkerID { return &w.Instance }

// completeInstance sets the worker of a request to the one that the path names. It refuses two different workers, and a
// request without one.
func (h Handler) completeInstance(instance *events.WorkerID) error {
	switch {
	case *instance == "":
		*instance = h.Instance
	case h.Instance != "" && h.Instance != *instance:
		return Errorf(CodeMalformed, "the path names worker %q, and the body %q", shorten(string(h.Instance)),
			shorten(string(*instance)))
	}
	if *instance == "" {
		return Errorf(CodeMalformed, "the request names no instance")
	}
	return nil
}

// find reads and answers a query. It returns errForwarded if Forward accepts the query.
func (h Handler) find(ctx context.Context, b requestBody) (any, error) {
	var q Query
	if err := h.readQuery(b.contentType, b.body, &q); err != nil {
		return nil, err
	}
	if err := q.Check(); err != nil {
		return nil, err
	}
	if q.Explain && q.EngineHashes != nil {
		return nil, Errorf(CodeMalformed, "explain goes with tokens or hashes, not with engine_hashes")
	}
	q.Idle = q.Idle || q.Explain
	ctx, done := q.Bounded(ctx)
	defer done()
	q.DeadlineMS = 0 // the context carries the deadline to other nodes
	if h.Forward != nil && h.Forward(ctx, &q) {
		return nil, errForwarded
	}
	return h.Indexer.Find(ctx, &q)
}

// readQuery reads a query: in MessagePack most are as our own clients write them.
func (h Handler) readQuery(contentType string, body []byte, q *Query) error {
	if contentType == MsgPack && unpackQuery(body, q, h.Unknown) {
		return nil
	}
	return (&reader{unknown: h.Unknown, what: "the query"}).read(contentType, body, q)
}

// Bounded is the context with the query's own deadline, if it has one.
func (q *Query) Bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if q.DeadlineMS == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Duration(q.DeadlineMS)*time.Millisecond)
}

// maxHashed is how many ways of reading ahead one query may tell apart.
const maxHashed = 16

// maxWithin is how many sets of tiers one query may name: all that there are.
const maxWithin = 1<<events.NumTiers - 1

// MaxMedia is how many items one prompt may have.
const MaxMedia = 1 << 12

// checkMedia refuses items of which it cannot be said in which blocks an engine has them.
func checkMedia(media []events.MediaItem, tokens Tokens) error {
	if media != nil && tokens == nil {
		return Errorf(CodeMalformed, "media says which tokens stand for images; it goes with tokens only")
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

// Check refuses what no model could answer. The error is an [Error].
func (q *Query) Check() error {
	switch {
	case q.Model == "":
		return Errorf(CodeMissingModel, "the query names no model")
	case q.Text != nil && (q.Tokens != nil || q.Hashes != nil || q.Hashed != nil || q.EngineHashes != nil):
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
			"lora_name and cache_salt are part of the hashes already; they go with tokens only")
	case q.Hashed != nil && len(q.Hashed) == 0:
		return Errorf(CodeMalformed, "hashed is an empty list; it has one element for each way of reading ahead")
	case q.Workers != nil && len(q.Workers) == 0:
		return Errorf(CodeMalformed, "workers is an empty list, which allows none; leave it out to allow all")
	case q.Ranks != nil && len(q.Ranks) == 0:
		return Errorf(CodeMalformed, "ranks is an empty list, which allows none; leave it out to allow all")
	case q.Ranks != nil && q.Workers != nil:
		return Errorf(CodeMalformed, "the query has workers and ranks; give one of them")
	case q.Endpoints != nil && len(q.Endpoints) == 0:
		return Errorf(CodeMalformed, "endpoints is an empty list, which allows none; leave it out to allow all")
	case slices.Contains(q.Endpoints, ""):
		return Errorf(CodeMalformed, "endpoints has one that is empty")
	case q.Endpoints != nil && (q.Workers != nil || q.Ranks != nil):
		return Errorf(CodeMalformed, "the query has endpoints, and workers or ranks; give one of them")
	case q.Partitions != nil && len(q.Partitions) == 0:
		return Errorf(CodeMalformed, "partitions is an empty list; leave it out to look at all")
	case len(q.Hashed) > maxHashed:
		return Errorf(CodeTooLarge, "hashed has more than %d elements", maxHashed)
	case q.Within != nil && (len(q.Within) == 0 || len(q.Within) > maxWithin):
		return Errorf(CodeMalformed, "within has %d sets of tiers; it may have 1 to %d", len(q.Within), maxWithin)
	case q.L3 != "" && q.L3 != L3All && q.L3 != L3Beyond && q.L3 != L3Off:
		return Errorf(CodeMalformed, "l3 is %.40q; it may be %q, %q or %q", string(q.L3), L3All, L3Beyond, L3Off)
	}
	if i := slices.IndexFunc(q.Ranks, func(r RankPlace) bool { return r.Instance == "" }); i >= 0 {
		return Errorf(CodeMalformed, "ranks[%d] names no instance", i)
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

// Unmarshal decodes data of a content type into v. An error is an *Error that says where the data is wrong. Fields that
// v does not have are ignored, so that nodes of different versions can talk to each other, and older clients to newer
// nodes.
func Unmarshal(contentType string, data []byte, v any) error {
	if q, query := v.(*Query); query {
		return Handler{Unknown: IgnoreUnknown}.readQuery(contentType, data, q)
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

// DecodeReply decodes a node's reply into v, or returns the error that it holds.
func DecodeReply(contentType string, data []byte, v any) error {
	if a, find := v.(*Answer); find && contentType == MsgPack && unpackAnswer(data, a) {
		return nil // an error is not read as an answer
	}
	if bytes.Contains(data, []byte("error")) { // else it is none
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
