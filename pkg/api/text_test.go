package api

import (
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/vmihailenco/msgpack/v5"
)

// asked is an indexer that keeps the query.
type asked struct {
	Indexer
	query *Query
}

func (a *asked) Find(_ context.Context, q *Query) (*Answer, error) {
	a.query = q
	return &Answer{Tokenization: &Tokenization{Tokenized: true, PromptTokens: 2, TokenIDs: Tokens{1, 2}}}, nil
}

// TestText sends a text in each form. The forwarded JSON keeps its order.
func TestText(t *testing.T) {
	no := false
	want := Text{Messages: Value(`[{"role":"user","content":"<é> \" \\ \n"}]`),
		Tools:               Value(`[{"z":1,"a":[1.0,-2,1e+300,null,true,18446744073709551615],"m":{}}]`),
		ChatTemplate:        "{{ x }}",
		ChatTemplateKwargs:  Value(`{"enable_thinking":false}`),
		AddGenerationPrompt: &no, ReturnTokenIDs: true}
	var native []byte
	for _, v := range []any{"model", "m", "return_token_ids", true, "add_generation_prompt", false, "chat_template",
		"{{ x }}", "chat_template_kwargs", map[string]any{"enable_thinking": false}} {
		b, err := msgpack.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		native = append(native, b...)
	}
	native = append([]byte("\x87"), native...)
	native = append(native, "\xa8messages\x91\x82\xa4role\xa4user\xa7content\xaa<é> \" \\ \n\xa5tools\x91\x83\xa1z\x01\xa1a\x96"+
		"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xfe\xcb\x7e\x37\xe4\x3c\x88\x00\x75\x9c\xc0\xc3"+
		"\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa1m\x80"...)
	q := &Query{Model: "m", Text: &want}
	asJSON, err := Marshal(JSON, q)
	if err != nil {
		t.Fatal(err)
	}
	asPack, err := Marshal(MsgPack, q)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		contentType string
		body        []byte
	}{"JSON": {JSON, asJSON}, "our MessagePack": {MsgPack, asPack}, "native MessagePack": {MsgPack, native}} {
		x := &asked{}
		reply, failure := Handler{Indexer: x}.Handle(t.Context(), ops.Find, c.contentType, c.body)
		if failure != nil {
			t.Errorf("%s: %v", name, failure)
			continue
		}
		got := *x.query.Text
		if name == "JSON" { // may escape other characters
			got.Messages = want.Messages
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%s\n%s\nwant\n%s\n%s", name, got.Messages, got.Tools, want.Messages, want.Tools)
		}
		var a Answer
		if err := DecodeReply(c.contentType, reply, &a); err != nil || !a.Tokenized || a.PromptTokens != 2 ||
			!reflect.DeepEqual(a.TokenIDs, Tokens{1, 2}) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}

	// A choice accepts the same text.
	s := SelectRequest{Query: *q, RequestID: "r", Book: true}
	for _, contentType := range []string{JSON, MsgPack} {
		body, err := Marshal(contentType, &s)
		if err != nil {
			t.Fatal(err)
		}
		var got SelectRequest
		if err := new(reader).read(contentType, body, &got); err !=
			nil || got.Check() != nil || got.ChatTemplate != want.ChatTemplate || got.RequestID != "r" ||
			!reflect.DeepEqual(got.Tools, want.Tools) {
			t.Errorf("%s: %+v, %v", contentType, got, err)
		}
	}
}

// TestTextCheck has values of the wrong kind that the strict reader would refuse.
func TestTextCheck(t *testing.T) {
	for body, says := range map[string]string{
		`{"messages":1}`:                              "messages is 1, not a list",
		`{"messages": {"role":"user"}}`:               `messages is {"role":"user"}, not a list`,
		`{"messages":"]"}`:                            `messages is "]", not a list`,
		`{"messages":[{}],"tools":"x"}`:               `tools is "x", not a list`,
		`{"messages":[{}],"tools":[]}`:                "",
		`{"messages":[{}],"tools":null}`:              "",
		`{"messages":false,"prompt":"x"}`:             "messages is false, not a list",
		`{"messages":[{}],"chat_template_kwargs":[]}`: "chat_template_kwargs is [], not an object",
		`{"messages":[{}],"chat_template_kwargs":{}}`: "",
	} {
		var text Text
		if err := json.Unmarshal([]byte(body), &text); err != nil {
			t.Fatal(err)
		}
		if err := text.Check(); (err != nil) != (says != "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", body, err, says)
		}
	}
}

// TestHasTemplate has a chat template in every place that engines accept.
func TestHasTemplate(t *testing.T) {
	for body, has := range map[string]bool{
		`{"messages":[{}]}`:                    false,
		`{"messages":[{}],"chat_template":""}`: false,
		`{"messages":[{}],"chat_template":null,"chat_template_kwargs":null}`:                     false,
		`{"messages":[{}],"chat_template":"x"}`:                                                  true,
		`{"messages":[{}],"chat_template_kwargs":{"enable_thinking":true}}`:                      false,
		`{"messages":[{}],"chat_template_kwargs":{"chat_template":null}}`:                        false,
		`{"messages":[{}],"chat_template_kwargs":{"x":{"chat_template":"x"}}}`:                   false,
		`{"messages":[{}],"chat_template_kwargs":{"chat_template":"x"}}`:                         true,
		`{"messages":[{}],"chat_template_kwargs":{"a":[1],"chat\u005ftemplate":1}}`:              true,
		`{"messages":[{}],"chat_template_kwargs":{"chat_template":"x","chat_template":null}}`:    true,
		`{"messages":[{}],"chat_template_kwargs": {"chat_template" : null,"chat_template":"x"}}`: true,
	} {
		var text Text
		if err := json.Unmarshal([]byte(body), &text); err != nil {
			t.Fatal(err)
		}
		if text.HasTemplate() != has {
			t.Errorf("%s: template: %v", body, !has)
		}
	}
	text := Text{Messages: Value(`[{}]`), ChatTemplate: strings.Repeat("x", MaxChatTemplate)}
	if err := text.Check(); err != nil {
		t.Error(err)
	}
	text.ChatTemplate += "x"
	if err := text.Check(); AsError(err).Code != CodeTooLarge {
		t.Error(err)
	}
}

// TestTextRefused has texts that cannot be tokenized.
func TestTextRefused(t *testing.T) {
	for body, says := range map[string]string{
		`"prompt":""`:                          "neither a prompt nor messages",
		`"prompt":"a","tokens":[1]`:            "give one of them",
		`"messages":[{}],"hashes":[1]`:         "give one of them",
		`"prompt":"a","messages":[{}]`:         "a prompt and messages",
		`"messages":[ ]`:                       "messages is an empty list",
		`"messages":{"role":"user"}`:           "messages is {\"role\":\"user\"}, not a list",
		`"messages":"[]"`:                      "not a list",
		`"messages":[{]`:                       "JSON",
		`"messages":[{"content":"\ud800"}]`:    "UTF-8",
		`"prompt":["a"]`:                       "one text only",
		`"prompt":"a","tools":[]`:              "valid with messages only",
		`"messages":[{}],"tools":{}`:           "tools is {}, not a list",
		`"return_token_ids":true,"tokens":[1]`: "give one of them",
		`"messages":[{}],"message":1`:          `did you mean "messages"?`,
		`"messages":[{}],"add_generation_prompt":true,"continue_final_message":true`: "exclude each other",
		`"messages":` + strings.Repeat("[", 40) + strings.Repeat("]", 40):            "deep",
	} {
		for _, op := range []string{ops.Find, ops.Select} {
			_, failure := Handler{Indexer: &asked{}, Router: noRouter{}}.Handle(t.Context(), op, JSON,
				[]byte(`{"model":"m",`+body+`}`))
			if failure == nil || failure.Code != CodeMalformed || !strings.Contains(failure.Message, says) {
				t.Errorf("%s %s: %v, want %q", op, body, failure, says)
			}
		}
	}
	for body, says := range map[string]string{
		"\xa2[]":           "empty list",
		"\xa3[]]":          "not JSON",
		"\xa2{}":           "not a list",
		"\x91\xc4\x01a":    "stands for nothing in JSON",
		"\x91\x81\x01\x01": "not text",
		"\x91\xa1\xff":     "not UTF-8",
		"\x91\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00": "NaN",
	} {
		_, failure := Handler{Indexer: &asked{}}.Handle(t.Context(), ops.Find, MsgPack,
			[]byte("\x82\xa5model\xa1m\xa8messages"+body))
		if failure == nil || failure.Code != CodeMalformed || !strings.Contains(failure.Message, says) {
			t.Errorf("%q: %v, want %q", body, failure, says)
		}
	}
	for body, says := range map[string]string{
		`{"model":"m","prompt":"a","isl_tokens":3}`:        "follow from the text",
		`{"model":"m","prompt":"a","sequence_hashes":[1]}`: "follow from the text",
	} {
		_, failure := Handler{Router: noRouter{}}.Handle(t.Context(), ops.Select, JSON, []byte(body))
		if failure == nil || !strings.Contains(failure.Message, says) {
			t.Errorf("%s: %v, want %q", body, failure, says)
		}
	}
}

// noRouter is a router without methods.
type noRouter struct{ Router }
