package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Content types of requests and replies. A reply has its request's.
const (
	JSON    = "application/json"
	MsgPack = "application/msgpack"
)

// Observer is told of every request that Handle answered: its operation, "ok" or the error's code, and the time it took.
type Observer func(op, outcome string, took time.Duration)

// Handler answers requests, whatever carries them. Any number of goroutines may use it.
type Handler struct {
	Indexer Indexer
	Observe Observer // may be nil
}

// Handle is [Handle] with the handler's indexer, observed.
func (h Handler) Handle(ctx context.Context, op, contentType string, body []byte) (reply []byte, failure *Error) {
	begun := time.Now()
	reply, failure = Handle(ctx, h.Indexer, op, contentType, body)
	if h.Observe != nil {
		outcome := "ok"
		if failure != nil {
			outcome = string(failure.Code)
		}
		h.Observe(op, outcome, time.Since(begun))
	}
	return reply, failure
}

// Handle answers one request. The reply is in the request's content type, which is JSON unless it is
// MsgPack. failure is not nil if the reply is an error; the reply holds it too.
func Handle(ctx context.Context, ix Indexer, op, contentType string, body []byte) (reply []byte, failure *Error) {
	answer, err := dispatch(ctx, ix, op, contentType, body)
	if err != nil {
		failure = AsError(err)
		answer = ErrorBody{Error: failure}
	}
	reply, err = Marshal(contentType, answer)
	if err != nil {
		failure = Errorf(CodeInternal, "encode the answer: %v", err)
		reply, _ = Marshal(contentType, ErrorBody{Error: failure})
	}
	return reply, failure
}

// AsError is an error as clients get it. err is not nil.
func AsError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return Errorf(CodeBehind, "the deadline passed before there was an answer")
	}
	return Errorf(CodeInternal, "%v", err)
}

func dispatch(ctx context.Context, ix Indexer, op, contentType string, body []byte) (any, error) {
	if len(body) > MaxBody {
		return nil, Errorf(CodeTooLarge, "the request has %d bytes, more than %d", len(body), MaxBody)
	}
	switch op {
	case OpFind:
		var q Query
		if err := Unmarshal(contentType, body, &q); err != nil {
			return nil, err
		}
		if err := q.Check(); err != nil {
			return nil, err
		}
		q.Idle = q.Idle || q.Explain
		return ix.Find(ctx, &q)
	case OpWorkers:
		var r WorkersRequest
		if len(body) > 0 {
			if err := Unmarshal(contentType, body, &r); err != nil {
				return nil, err
			}
		}
		return ix.Workers(ctx, r)
	case OpStatus:
		return ix.Status(ctx)
	case OpVerify:
		var v VerifyRequest
		if len(body) > 0 {
			if err := Unmarshal(contentType, body, &v); err != nil {
				return nil, err
			}
		}
		return ix.Verify(ctx, v.At)
	case OpSnapshot:
		return ix.Snapshot(ctx)
	}
	return nil, Errorf(CodeUnknownOperation, "there is no operation %q", op)
}

// maxHashed is how many ways of reading ahead one query may tell apart.
const maxHashed = 16

// Check refuses what no model could answer. The error is an [Error].
func (q *Query) Check() error {
	switch {
	case q.Model == "":
		return Errorf(CodeMissingModel, "the query names no model")
	case q.Tokens == nil && q.Hashes == nil && q.Hashed == nil:
		return Errorf(CodeMalformed, "the query has neither tokens nor hashes")
	case q.Tokens != nil && q.Hashes != nil, q.Hashed != nil && (q.Tokens != nil || q.Hashes != nil):
		return Errorf(CodeMalformed, "the query has tokens and hashes; give one of them")
	case q.Tokens == nil && (q.LoRA != "" || q.CacheSalt != ""):
		return Errorf(CodeMalformed, "lora_name and cache_salt are part of the hashes already; they go with tokens only")
	case len(q.Hashed) > maxHashed:
		return Errorf(CodeTooLarge, "hashed has more than %d elements", maxHashed)
	case q.L3 != "" && q.L3 != L3All && q.L3 != L3Beyond && q.L3 != L3Off:
		return Errorf(CodeMalformed, "l3 is %.40q; it may be %q, %q or %q", string(q.L3), L3All, L3Beyond, L3Off)
	}
	return nil
}

// Marshal encodes v in a content type.
func Marshal(contentType string, v any) ([]byte, error) {
	if contentType != MsgPack {
		return json.Marshal(v)
	}
	switch v := v.(type) {
	case *Query:
		return packQuery(v), nil
	case *Answer:
		return packAnswer(v)
	}
	return reflected(v)
}

// Unmarshal decodes data of a content type into v. An error is an *Error that says where the data is wrong. Fields that v does
// not have are ignored, so that newer clients can talk to older nodes.
func Unmarshal(contentType string, data []byte, v any) error {
	var err error
	if contentType == MsgPack {
		err = unpack(data, v)
	} else {
		dec := json.NewDecoder(bytes.NewReader(data))
		if err = dec.Decode(v); err == nil {
			if _, more := dec.Token(); more != io.EOF {
				err = errors.New("something follows the JSON value")
			}
		}
	}
	var e *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.Is(err, io.EOF):
		err = errors.New("the body is empty")
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = errors.New("it ends too early")
	}
	kind := "JSON"
	if contentType == MsgPack {
		kind = "MessagePack"
	}
	return Errorf(CodeMalformed, "the request is not the %s that it should be: %v", kind, err)
}

// unpack decodes MessagePack.
func unpack(data []byte, v any) error {
	switch v := v.(type) {
	case *Query:
		if unpackQuery(data, v) {
			return nil
		}
	case *Answer:
		if unpackAnswer(data, v) {
			return nil
		}
	}
	return unpackReflected(data, v)
}

// DecodeReply decodes a node's reply into v, or returns the error that it holds.
func DecodeReply(contentType string, data []byte, v any) error {
	if a, find := v.(*Answer); find && contentType == MsgPack && unpackAnswer(data, a) {
		return nil // an error is not read as an answer
	}
	var failed ErrorBody
	if err := Unmarshal(contentType, data, &failed); err == nil && failed.Error != nil {
		return failed.Error
	}
	if err := Unmarshal(contentType, data, v); err != nil {
		return fmt.Errorf("decode the reply: %w", err)
	}
	return nil
}
