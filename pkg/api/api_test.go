package api

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// echo is an indexer that returns the query.
type echo struct {
	last       *Query
	registered *WorkerRegistration
	change     *WorkerChange
	removed    events.WorkerID
}

func (e *echo) Find(_ context.Context, q *Query) (*Answer, error) {
	e.last = q
	return &Answer{Model: q.Model, Complete: true, Workers: []Overlap{{Instance: "w1", Device: 12, Host: 3}}}, nil
}
func (*echo) Workers(context.Context, WorkersRequest) (*WorkerList, error) {
	return &WorkerList{}, nil
}
func (*echo) Status(context.Context) (*Status, error) { return nil, errors.New("disk on fire") }
func (*echo) StatusOf(_ context.Context, node string) (*Status, error) {
	return &Status{Node: node}, nil
}
func (*echo) Verify(context.Context, []PartitionSeq) (*Status, error) { return &Status{}, nil }
func (*echo) Prefixes(context.Context, *PrefixesRequest) (*PrefixTree, error) {
	return &PrefixTree{}, nil
}

func (*echo) Snapshot(context.Context) (*SnapshotList, error) {
	return nil, Errorf(CodeNotReady, "restoring")
}
func (e *echo) RegisterWorker(_ context.Context, w *WorkerRegistration) (*Worker, error) {
	e.registered = w
	return &Worker{Instance: w.Instance}, nil
}
func (e *echo) ChangeWorker(_ context.Context, c *WorkerChange) (*Worker, error) {
	e.change = c
	return &Worker{Instance: c.Instance}, nil
}
func (e *echo) RemoveWorker(_ context.Context, instance events.WorkerID) (*Worker, error) {
	e.removed = instance
	return &Worker{Instance: instance}, nil
}

func TestErrorsNameWhatIsWrong(t *testing.T) {
	cases := []struct {
		op, contentType, body string
		code                  Code
		message               string
	}{
		{ops.Find, JSON, ``, CodeMalformed, "the body is empty"},
		{ops.Find, JSON, `{"model":"m"`, CodeMalformed, "too early"},
		{ops.Find, JSON, `{"model":"m","tokens":[1]} x`, CodeMalformed, "something follows"},
		{ops.Find, JSON, `{"tokens":[1,2]}`, CodeMissingModel, "has no model"},
		{ops.Find, JSON, `{"model":"m"}`, CodeMalformed, "neither tokens nor hashes"},
		{ops.Find, JSON, `{"model":"m","tokens":[1],"hashes":[1]}`, CodeMalformed, "tokens and hashes"},
		{ops.Find, JSON, `{"model":"m","hashes":[1],"cache_salt":"s"}`, CodeMalformed, "valid with tokens only"},
		{ops.Find, JSON, `{"model":"m","tokens":[1],"hashed":[{"lookahead":1,"hashes":[1]}]}`, CodeMalformed,
			"tokens and hashes"},
		{ops.Find, JSON, `{"model":"m","hashed":[{"lookahead":1,"hashes":[1]}],"lora_name":"l"}`, CodeMalformed,
			"valid with tokens only"},
		{ops.Find, JSON, `{"model":"m","hashed":[` + strings.Repeat("{},", 16) + `{}]}`, CodeTooLarge, "more than 16"},
		{ops.Find, JSON, `{"model":"m","tokens":[1,-5]}`, CodeBadTokens,
			"tokens[1] is -5, not an unsigned 32-bit number"},
		{ops.Find, JSON, `{"model":"m","tokens":[4294967296]}`, CodeBadTokens, "tokens[0] is 4294967296"},
		{ops.Find, JSON, `{"model":"m","tokens":[1.5]}`, CodeBadTokens, "tokens[0] is 1.5"},
		{ops.Find, JSON, `{"model":"m","tokens":["a"]}`, CodeBadTokens, `tokens[0] is "a"`},
		{ops.Find, JSON, `{"model":"m","tokens":"abc"}`, CodeBadTokens, "tokens must be an array"},
		{ops.Find, JSON, `{"model":"m","hashes":[18446744073709551616]}`, CodeMalformed,
			"hashes[0] is 18446744073709551616"},
		{ops.Find, JSON, `{"model":"m","hashes":[1,18446744073709551620]}`, CodeMalformed,
			"hashes[1] is 18446744073709551620"},
		{ops.Find, JSON, `{"model":"m","hashes":[184467440737095516150]}`, CodeMalformed,
			"hashes[0] is 184467440737095516150"},
		{ops.Find, JSON, `{"model":"m","tokens":[18446744073709551615]}`, CodeBadTokens,
			"tokens[0] is 18446744073709551615"},
		{ops.Find, MsgPack, "\xc1", CodeMalformed, "MessagePack"},
		{ops.Find, MsgPack, "\x82\xa5model\xa1m\xa6tokens\x92\x01\xff", CodeBadTokens, "tokens[1]"},
		{ops.Find, MsgPack, "\x82\xa5model\xa1m\xa6tokens\xc4\x03abc", CodeBadTokens, "not a multiple of 4"},
		{ops.Find, JSON, strings.Repeat(" ", MaxBody+1), CodeTooLarge, "more than 8388608"},
		{ops.Find, JSON, `{"model":"m","tokens":[` + strings.Repeat("1,", MaxTokens) + `1]}`, CodeTooLarge,
			"more than 1048576 elements"},
		{"fetch", JSON, `{}`, CodeUnknownOperation, `"fetch"`},
		{ops.Status, JSON, ``, CodeInternal, "disk on fire"},
		{ops.Snapshot, JSON, ``, CodeNotReady, "restoring"},
	}
	for _, c := range cases {
		reply, failure := Handler{Indexer: &echo{}}.Handle(context.Background(), c.op, c.contentType, []byte(c.body))
		if failure == nil || failure.Code != c.code || !strings.Contains(failure.Message, c.message) {
			t.Errorf("%s %.60q: got %v, want %s with %q", c.op, c.body, failure, c.code, c.message)
			continue
		}
		var answer Answer
		if err := DecodeReply(c.contentType, reply, &answer); !reflect.DeepEqual(err, error(failure)) {
			t.Errorf("%s %.60q: the reply decodes to %v, want %v", c.op, c.body, err, failure)
		}
	}
}

func TestQueriesAreTheSameInEveryForm(t *testing.T) {
	want := &Query{Model: "m", Tokens: Tokens{0, 1, 1<<32 - 1}, LoRA: "a",
		MinSeq: []PartitionSeq{{Partition: 3, Seq: 9}}}
	asJSON, _ := json.Marshal(want)
	asMsgPack, err := msgpack.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	array, _ := msgpack.Marshal(map[string]any{"model": "m", "tokens": []uint64{0, 1, 1<<32 - 1}, "lora_name": "a",
		"min_seq": want.MinSeq})
	for _, c := range []struct {
		contentType string
		body        []byte
	}{{JSON, asJSON}, {"", asJSON}, {MsgPack, asMsgPack}, {MsgPack, array}} {
		e := &echo{}
		reply, failure := Handler{Indexer: e}.Handle(context.Background(), ops.Find, c.contentType, c.body)
		if failure != nil {
			t.Fatalf("%q: %v", c.body, failure)
		}
		if !reflect.DeepEqual(e.last, want) {
			t.Errorf("%s: got %+v, want %+v", c.contentType, e.last, want)
		}
		var answer Answer
		if err := DecodeReply(c.contentType, reply, &answer); err != nil || len(answer.Workers) != 1 ||
			answer.Workers[0].Total() != 15 {
			t.Errorf("%s: the answer came back as %+v, %v", c.contentType, answer, err)
		}
	}
}

func TestHashesKeepAllTheirBits(t *testing.T) {
	e := &echo{}
	body := `{"model":"m","hashes":[18446744073709551615, -1 ,9223372036854775808,0,10000000000000000000]}`
	if _, failure := (Handler{Indexer: e}).Handle(context.Background(), ops.Find, JSON, []byte(body)); failure != nil {
		t.Fatal(failure)
	}
	want := Hashes{1<<64 - 1, 1<<64 - 1, 1 << 63, 0, 1e19}
	if !reflect.DeepEqual(e.last.Hashes, want) {
		t.Fatalf("got %v, want %v", e.last.Hashes, want)
	}
	var q Query
	packed, _ := msgpack.Marshal(&Query{Model: "m", Hashes: want})
	if err := Unmarshal(MsgPack, packed, &q); err != nil || !reflect.DeepEqual(q.Hashes, want) {
		t.Fatalf("got %v, %v", q.Hashes, err)
	}
	if err := Unmarshal(JSON, []byte(`{"model":"m","hashes":[]}`), &q); err != nil || q.Hashes == nil {
		t.Fatalf("an empty list is a list: %v, %v", q.Hashes, err)
	}
}

func FuzzHandle(f *testing.F) {
	f.Add(true, []byte(`{"model":"m","tokens":[1,2,3]}`))
	packed, _ := msgpack.Marshal(&Query{Model: "m", Hashes: Hashes{1, 2}})
	f.Add(false, packed)
	f.Fuzz(func(t *testing.T, asJSON bool, body []byte) {
		contentType := MsgPack
		if asJSON {
			contentType = JSON
		}
		e := &echo{}
		reply, failure := Handler{Indexer: e}.Handle(context.Background(), ops.Find, contentType, body)
		var answer Answer
		err := DecodeReply(contentType, reply, &answer)
		if (failure == nil) != (err == nil) {
			t.Fatalf("the node's error is %v, the client's %v", failure, err)
		}
	})
}
