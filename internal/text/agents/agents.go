package agents

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// MaxDepth is the maximum nesting of a request.
const MaxDepth = 128

// Chat is a request in the form of a chat completion.
type Chat struct {
	api.Text

	// SpecialTokens means that the tokenizer adds its tokens around the rendered text.
	SpecialTokens bool
}

// message is a message of a chat.
type message struct {
	Role       string     `json:"role"`
	Content    any        `json:"content,omitempty"` // a string or []part; nil without content
	Reasoning  *string    `json:"reasoning,omitempty"`
	ToolCalls  []toolCall `json:"tool_calls,omitempty"`
	ToolCallID *string    `json:"tool_call_id,omitempty"`
}

// part is a part of a content: a text or an image.
type part struct {
	Type  string    `json:"type"`
	Text  *string   `json:"text,omitempty"`
	Image *imageURL `json:"image_url,omitempty"`
	Name  string    `json:"name,omitempty"` // of a tool_reference
}

type imageURL struct {
	URL string `json:"url"`
}

func textPart(text string) part { return part{Type: "text", Text: &text} }
func imagePart(url string) part { return part{Type: "image_url", Image: &imageURL{url}} }

// toolCall is a call in an assistant's message.
type toolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function callFunction `json:"function"`
}

type callFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"` // JSON
}

// tool is a tool as engines give it to templates.
type tool struct {
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

type toolFunction struct {
	Name         string          `json:"name"`
	Description  *string         `json:"description"`
	Parameters   json.RawMessage `json:"parameters"`
	Strict       *bool           `json:"strict,omitempty"`
	DeferLoading *bool           `json:"defer_loading,omitempty"`
}

// read decodes a request, or a part of a request.
func read(data []byte, to any) error {
	err := strictjson.Unmarshal(data, to)
	switch {
	case err != nil && errors.Is(err, strictjson.ErrTwice):
		return err
	case err != nil:
		return fmt.Errorf("a field has another type than engines expect: %w", err)
	}
	return nil
}

// readBody decodes a whole request, after checking the bounds.
func readBody(body []byte, to any) error {
	switch {
	case len(body) > api.MaxBody:
		return fmt.Errorf("the request has %d bytes, more than %d", len(body), api.MaxBody)
	case deeper(body, MaxDepth):
		return fmt.Errorf("the request is nested deeper than %d", MaxDepth)
	case !opens(body, '{'):
		return errors.New("the request is not a JSON object")
	}
	return read(body, to)
}

// deeper reports whether JSON is nested deeper than a bound.
func deeper(data []byte, most int) bool {
	depth, text := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == '{' || c == '[':
			if depth++; depth > most {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

// opens reports whether JSON begins with a byte.
func opens(data []byte, with byte) bool {
	data = bytes.TrimLeft(data, " \t\r\n")
	return len(data) > 0 && data[0] == with
}

// missing reports whether a field is absent or null.
func missing(data json.RawMessage) bool {
	return data == nil || string(bytes.TrimSpace(data)) == "null"
}

// write encodes a value without escapes for HTML.
func write(v any) (api.Value, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// kwargs returns chat_template_kwargs with the arguments of a reasoning effort, as vLLM adds them to a template's
// arguments.
func kwargs(given json.RawMessage, effort string) (api.Value, error) {
	all := map[string]json.RawMessage{}
	if !missing(given) {
		if err := read(given, &all); err != nil {
			return nil, fmt.Errorf("chat_template_kwargs: %w", err)
		}
	}
	if effort != "" && effort != "auto" {
		value, err := write(effort)
		if err != nil {
			return nil, err
		}
		all["reasoning_effort"] = json.RawMessage(value)
	}
	if _, has := all["enable_thinking"]; !has && effort != "" {
		all["enable_thinking"] = json.RawMessage(fmt.Sprint(effort != "none"))
	}
	if len(all) == 0 {
		return nil, nil
	}
	var b bytes.Buffer
	for i, name := range slices.Sorted(maps.Keys(all)) {
		key, err := write(name)
		if err != nil {
			return nil, err
		}
		b.WriteByte("{,"[min(i, 1)])
		b.Write(key)
		b.WriteByte(':')
		b.Write(all[name])
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// errNoChoice is the error for tools that the model must not call.
var errNoChoice = errors.New("tool_choice is none, and engines can be set to omit the tools then")

// chat returns a chat of messages and tools; nil tools mean none.
func chat(messages []message, tools []tool, kwargs api.Value) (c *Chat, err error) {
	c = &Chat{}
	if len(messages) == 0 {
		return nil, errors.New("the request has no message with a content")
	}
	if c.Messages, err = write(messages); err != nil {
		return nil, err
	}
	if tools != nil {
		if c.Tools, err = write(tools); err != nil {
			return nil, err
		}
	}
	c.ChatTemplateKwargs = kwargs
	return c, nil
}
