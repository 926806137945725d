package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/vmihailenco/msgpack/v5"
)

// Text is a prompt that the node makes tokens of, as the model's engines would: either Prompt, as of a completion, or
// Messages, as of a chat, with what an engine's chat template is given beside them. Names and meanings are those of the
// engines' OpenAI-compatible requests.
type Text struct {
	Prompt   string `json:"prompt,omitempty" msgpack:"prompt,omitempty"`
	Messages Value  `json:"messages,omitzero" msgpack:"messages,omitempty"` // a list of objects

	// What goes with messages only: a list of objects; the template, if not the model's own; and an object.
	Tools              Value  `json:"tools,omitzero" msgpack:"tools,omitempty"`
	ChatTemplate       string `json:"chat_template,omitempty" msgpack:"chat_template,omitempty"`
	ChatTemplateKwargs Value  `json:"chat_template_kwargs,omitzero" msgpack:"chat_template_kwargs,omitempty"`

	// By default the generation prompt is added, and the final message is not continued.
	AddGenerationPrompt  *bool `json:"add_generation_prompt,omitempty" msgpack:"add_generation_prompt,omitempty"`
	ContinueFinalMessage *bool `json:"continue_final_message,omitempty" msgpack:"continue_final_message,omitempty"`

	// ReturnTokenIDs asks for the tokens in the answer, so that they can be sent on to an engine.
	ReturnTokenIDs bool `json:"return_token_ids,omitempty" msgpack:"return_token_ids,omitempty"`
}

// Tokenization says what became of a [Text].
type Tokenization struct {
	// Tokenized is false if no tokens could be made, as TokenizeError says. The answer is that of a prompt of which
	// nobody holds anything then, and a choice goes by load.
	Tokenized     bool   `json:"tokenized" msgpack:"tokenized"`
	TokenizeError string `json:"tokenize_error,omitempty" msgpack:"tokenize_error,omitempty"`

	// PromptTokens is how many tokens there are. Fewer are looked up if there are images of which the source does not say
	// how engines hash them: those before the first.
	PromptTokens int `json:"prompt_tokens" msgpack:"prompt_tokens"`

	TokenIDs Tokens `json:"token_ids,omitzero" msgpack:"token_ids,omitempty"` // if they were asked for
}

// Value is a JSON value that is passed on as it is. In MessagePack it may be text that is JSON, or a value itself,
// whose maps keep their order.
type Value []byte

// IsZero reports whether there is none.
func (v Value) IsZero() bool { return v == nil }

// MarshalJSON returns the value itself.
func (v Value) MarshalJSON() ([]byte, error) { return json.RawMessage(v).MarshalJSON() }

// UnmarshalJSON keeps the value.
func (v *Value) UnmarshalJSON(data []byte) error {
	if *v = nil; string(data) != "null" { // which is as if the field were absent
		*v = bytes.Clone(data)
	}
	return nil
}

// EncodeMsgpack writes text that is JSON.
func (v Value) EncodeMsgpack(e *msgpack.Encoder) error { return e.EncodeString(string(v)) }

// DecodeMsgpack reads either form.
func (v *Value) DecodeMsgpack(d *msgpack.Decoder) error {
	raw, err := d.DecodeRaw()
	if err != nil {
		return err
	}
	s := &packSource{unpacker{msgp.Reader{Data: raw}}}
	*v, err = s.value()
	return err
}

// value reads a list or an object that is passed on.
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
			err = in.end()
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
				number = append(number, ".0"...) // as it was: a template shows the two otherwise
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

// ObjectJSON is a map in MessagePack as an object in JSON. Of its members, bytes are tokens as int32, little-endian.
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
		err = s.end()
	}
	return append(to, '}'), notForm(MsgPack, err)
}

// appendQuoted appends text in quotation marks.
func appendQuoted(to []byte, text string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(text) // which text cannot fail at
	return append(to, bytes.TrimSuffix(b.Bytes(), []byte("\n"))...)
}

// HasTemplate reports whether the text brings a chat template: a program that makes its prompt. Engines also accept one
// among the arguments of templates.
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

// Check refuses what nobody could make tokens of. The error is an [Error].
func (t *Text) Check() error {
	for _, f := range []struct {
		name  string
		value Value
		want  kind
	}{{"messages", t.Messages, kindList}, {"tools", t.Tools, kindList},
		{"chat_template_kwargs", t.ChatTemplateKwargs, kindObject}} {
		if s := (&jsonSource{data: f.value}); f.value != nil && s.kind() != f.want {
			return Errorf(CodeMalformed, "%s is %s, not %s", f.name, s.shown(), f.want)
		}
	}
	chat := t.Tools != nil || t.ChatTemplate != "" || t.ChatTemplateKwargs != nil || t.AddGenerationPrompt != nil ||
		t.ContinueFinalMessage != nil
	switch {
	case t.Prompt == "" && t.Messages == nil:
		return Errorf(CodeMalformed, "the query has neither a prompt nor messages")
	case t.Prompt != "" && t.Messages != nil:
		return Errorf(CodeMalformed, "the query has a prompt and messages; give one of them")
	case t.Messages == nil && chat:
		return Errorf(CodeMalformed, "tools and what else a chat template is given go with messages only")
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
