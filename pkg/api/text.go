package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/vmihailenco/msgpack/v5"
)

// Text is a prompt that the node tokenizes as the model's engines would: either Prompt, as of a completion, or
// Messages, as of a chat, with the further inputs of an engine's chat template. Names and meanings equal the engines'
// OpenAI-compatible requests.
type Text struct {
	Prompt   string `json:"prompt,omitempty" msgpack:"prompt,omitempty"`
	Messages Value  `json:"messages,omitzero" msgpack:"messages,omitempty"` // a list of objects

	// Valid with messages only: a list of objects; a template in place of the model's; and an object.
	Tools              Value  `json:"tools,omitzero" msgpack:"tools,omitempty"`
	ChatTemplate       string `json:"chat_template,omitempty" msgpack:"chat_template,omitempty"`
	ChatTemplateKwargs Value  `json:"chat_template_kwargs,omitzero" msgpack:"chat_template_kwargs,omitempty"`

	// By default, the generation prompt is added, and the final message is not continued.
	AddGenerationPrompt  *bool `json:"add_generation_prompt,omitempty" msgpack:"add_generation_prompt,omitempty"`
	ContinueFinalMessage *bool `json:"continue_final_message,omitempty" msgpack:"continue_final_message,omitempty"`

	// API names the engines' API that Request belongs to: completions, chat, responses, messages, embeddings, score or
	// rerank. If it is empty, the fields decide.
	API string `json:"api,omitempty" msgpack:"api,omitempty"`

	// Request has the fields of a request to an engine, as an object: in place of the other fields, or beside them. Each
	// field has its effect in the engine. A request with a field of unknown effect is not looked up.
	Request Value `json:"request,omitzero" msgpack:"request,omitempty"`

	// ReturnTokenIDs adds the tokens to the answer, so that the client can send them to an engine.
	ReturnTokenIDs bool `json:"return_token_ids,omitempty" msgpack:"return_token_ids,omitempty"`
}

// Tokenization is the result for a [Text].
type Tokenization struct {
	// Tokenized is false if the text could not be tokenized, for the reason in TokenizeError. A query then finds
	// nothing, and a choice ignores the cache.
	Tokenized     bool   `json:"tokenized" msgpack:"tokenized"`
	TokenizeError string `json:"tokenize_error,omitempty" msgpack:"tokenize_error,omitempty"`

	// PromptTokens is the number of tokens. The lookup covers only the tokens before the first image if the hashes of
	// images are unknown.
	PromptTokens int `json:"prompt_tokens" msgpack:"prompt_tokens"`

	TokenIDs Tokens `json:"token_ids,omitzero" msgpack:"token_ids,omitempty"` // if Text.ReturnTokenIDs is set

	// KeepText, for callers in the same process, means that the engine must receive the text: its tokens are compared
	// with TokenIDs, or differed in an earlier comparison.
	KeepText bool `json:"-" msgpack:"-"`

	// Took, for callers in the same process, is the time in which the tokenizer made the tokens, also for tokens from a
	// cache.
	Took time.Duration `json:"-" msgpack:"-"`

	// UnsupportedFields has the names of the fields that prevented a look-up: unknown fields, and fields of the tokens or
	// of the tenant whose effect the node cannot reproduce.
	UnsupportedFields []string `json:"unsupported_fields,omitempty" msgpack:"unsupported_fields,omitempty"`
}

// Value is a JSON value that is forwarded unchanged. In MessagePack it is text with JSON, or a value, whose maps keep
// their order.
type Value []byte

// IsZero reports whether the value is absent.
func (v Value) IsZero() bool { return v == nil }

// MarshalJSON returns the value itself.
func (v Value) MarshalJSON() ([]byte, error) { return json.RawMessage(v).MarshalJSON() }

// UnmarshalJSON keeps the value.
func (v *Value) UnmarshalJSON(data []byte) error {
	if *v = nil; string(data) != "null" { // like an absent field
		*v = bytes.Clone(data)
	}
	return nil
}

// EncodeMsgpack writes text that is JSON.
func (v Value) EncodeMsgpack(e *msgpack.Encoder) error { return e.EncodeString(string(v)) }

// DecodeMsgpack reads both forms.
func (v *Value) DecodeMsgpack(d *msgpack.Decoder) error {
	raw, err := d.DecodeRaw()
	if err != nil {
		return err
	}
	s := &packSource{unpacker{msgp.Reader{Data: raw}}}
	*v, err = s.value()
	return err
}

// value reads a list or an object to forward.
func (r *reader) value(field string, want kind, to *Value) (err error) {
	shown := r.shown()
	if *to, err = r.source.value(); err != nil {
		return err
	}
	if is := (&jsonSource{data: *to}).kind(); is != want {
		return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), shown, want)
	}
	return nil
}

func (s *jsonSource) value() (Value, error) {
	raw, err := s.raw()
	return bytes.Clone(raw), err
}

func (s *packSource) value() (Value, error) {
	if k := s.kind(); k == kindText || k == kindBytes {
		text, _, err := s.text()
		in := &jsonSource{data: []byte(text)}
		if err == nil {
			err = in.skip()
		}
		if err == nil {
			err = in.checkEnd()
		}
		if err != nil {
			return nil, Errorf(CodeMalformed, "%s is text that is not JSON", shorten(text))
		}
		return in.data, nil
	}
	return s.appendJSON(nil)
}

// appendJSON appends the next value as JSON.
func (s *packSource) appendJSON(to []byte) ([]byte, error) {
	switch s.kind() {
	case kindNull:
		s.null()
		return append(to, "null"...), nil
	case kindTruth:
		return strconv.AppendBool(to, s.truth()), nil
	case kindNumber:
		if s.Next() == msgp.Float {
			v, err := s.number()
			number, failed := json.Marshal(v)
			if !bytes.ContainsAny(number, ".e") {
				number = append(number, ".0"...) // unchanged: a template distinguishes the two
			}
			return append(to, number...), errors.Join(err, failed)
		}
		switch v, is, err := s.whole(); is {
		case negative:
			return strconv.AppendInt(to, int64(v), 10), err
		default:
			return strconv.AppendUint(to, v, 10), err
		}
	case kindText:
		text, valid, err := s.text()
		if !valid {
			return nil, Errorf(CodeMalformed, "%s is not UTF-8", shorten(text))
		}
		return appendQuoted(to, text), err
	case kindList:
		to = append(to, '[')
		err := s.list(func(i int) (err error) {
			if i > 0 {
				to = append(to, ',')
			}
			to, err = s.appendJSON(to)
			return err
		})
		return append(to, ']'), err
	case kindObject:
		to = append(to, '{')
		first := true
		err := s.object(func(key []byte) (err error) {
			if !first {
				to = append(to, ',')
			}
			first = false
			to, err = s.appendJSON(append(appendQuoted(to, string(key)), ':'))
			return err
		})
		return append(to, '}'), err
	}
	return nil, Errorf(CodeMalformed, "%s stands for nothing in JSON", s.shown())
}

// ObjectJSON converts a map in MessagePack to an object in JSON. Members with bytes are tokens as little-endian int32.
func ObjectJSON(packed []byte) ([]byte, error) {
	opened, err := openSource(MsgPack, packed)
	if err == nil && opened.kind() != kindObject {
		err = Errorf(CodeMalformed, "the body is %s, not an object", opened.shown())
	}
	if err != nil {
		return nil, notForm(MsgPack, err)
	}
	s, to := opened.(*packSource), []byte{'{'}
	err = s.object(func(key []byte) (err error) {
		if len(to) > 1 {
			to = append(to, ',')
		}
		to = append(appendQuoted(to, string(key)), ':')
		if s.kind() != kindBytes {
			to, err = s.appendJSON(to)
			return err
		}
		tokens, err := s.tokens(string(key))
		for i, t := range tokens {
			to = strconv.AppendInt(append(to, "[,"[min(i, 1)]), int64(int32(t)), 10)
		}
		if len(tokens) == 0 {
			to = append(to, '[')
		}
		to = append(to, ']')
		return err
	})
	if err == nil {
		err = s.checkEnd()
	}
	return append(to, '}'), notForm(MsgPack, err)
}

// appendQuoted appends text in quotation marks.
func appendQuoted(to []byte, text string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(text) // a string cannot fail
	return append(to, bytes.TrimSuffix(b.Bytes(), []byte("\n"))...)
}

// HasTemplate reports whether the text has a chat template of its own, which is a program. Engines also accept a
// template among the arguments of templates.
func (t *Text) HasTemplate() bool {
	if t.ChatTemplate != "" {
		return true
	}
	s, has := &jsonSource{data: t.ChatTemplateKwargs}, false
	if s.kind() != kindObject {
		return false
	}
	err := s.object(func(key []byte) error {
		has = has || string(key) == "chat_template" && s.kind() != kindNull
		return s.skip()
	})
	return has || err != nil
}

// Whole reports whether the text has a prompt or messages of its own, and not only the fields of Request.
func (t *Text) Whole() bool { return t.Prompt != "" || t.Messages != nil }

// Check returns an error for a text that cannot be tokenized. The error is an [Error].
func (t *Text) Check() error {
	for _, f := range []struct {
		name  string
		value Value
		want  kind
	}{{"messages", t.Messages, kindList}, {"tools", t.Tools, kindList},
		{"chat_template_kwargs", t.ChatTemplateKwargs, kindObject}, {"request", t.Request, kindObject}} {
		if s := (&jsonSource{data: f.value}); f.value != nil && s.kind() != f.want {
			return Errorf(CodeMalformed, "%s is %s, not %s", f.name, s.shown(), f.want)
		}
	}
	chat := t.Tools != nil || t.ChatTemplate != "" || t.ChatTemplateKwargs != nil || t.AddGenerationPrompt != nil ||
		t.ContinueFinalMessage != nil
	switch {
	case t.Prompt == "" && t.Messages == nil && t.Request == nil:
		return Errorf(CodeMalformed, "the query has neither a prompt nor messages")
	case t.Prompt != "" && t.Messages != nil:
		return Errorf(CodeMalformed, "the query has a prompt and messages; give one of them")
	case t.Messages == nil && t.Request == nil && chat:
		return Errorf(CodeMalformed, "tools and other inputs of a chat template are valid with messages only")
	case len(t.ChatTemplate) > MaxChatTemplate:
		return Errorf(CodeTooLarge, "chat_template has %d bytes, more than %d; give the model's file a template of that size",
			len(t.ChatTemplate), MaxChatTemplate)
	case t.Messages != nil && (&jsonSource{data: t.Messages}).empty():
		return Errorf(CodeMalformed, "messages is an empty list")
	case t.on(t.AddGenerationPrompt) && t.on(t.ContinueFinalMessage):
		return Errorf(CodeMalformed, "add_generation_prompt and continue_final_message exclude each other")
	}
	return nil
}

func (*Text) on(b *bool) bool { return b != nil && *b }

// empty reports whether a list has no elements.
func (s *jsonSource) empty() bool {
	s.at++
	return s.next() == ']'
}
