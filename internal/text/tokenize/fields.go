package tokenize

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// unsupported returns the error for fields that a source does not support; nil without fields.
func unsupported(names []string) error {
	if len(names) == 0 {
		return nil
	}
	return &Error{Outcome: Refused, Fields: names, Err: fmt.Errorf("the source does not support %s; use a render URL",
		strings.Join(names, ", "))}
}

// idle reports whether a field of Text.Request has no effect in this text, for every engine.
func idle(t *api.Text, name string, value []byte) bool {
	switch name {
	case "truncation_side":
		return true // truncate_prompt_tokens is a field of its own
	case "tool_choice":
		return t.Tools == nil || string(value) == `"auto"`
	case "response_format":
		var f struct {
			Type string `json:"type"`
		}
		return strictjson.Unmarshal(value, &f) == nil && f.Type == "text"
	case "media_io_kwargs", "mm_processor_kwargs":
		return !hasMedia(t.Messages)
	}
	return false
}

// forTokenizer returns a text with the fields that /tokenize has, or an error that names the other fields.
func forTokenizer(t *api.Text) (*api.Text, error) {
	own := *t
	own.Request = nil
	var names []string
	fields.Each(t.Request, func(name string, value []byte) {
		switch {
		case name == "add_special_tokens":
			own.Request = api.Value(fmt.Sprintf(`{"add_special_tokens":%s}`, value))
		case !idle(t, name, value):
			names = append(names, name)
		}
	})
	return &own, unsupported(names)
}

// options are the fields of Text.Request that a [Local] supports. The zero value has the engine's defaults.
type options struct {
	special   *bool  // add_special_tokens
	effort    string // reasoning_effort
	agents    bool   // the text is a converted request of an agents' API
	responses bool   // the API is Responses
	documents []byte
}

// localOptions returns the options of a text, or an error that names the unsupported fields.
func localOptions(t *api.Text) (o options, err error) {
	var names []string
	o.agents, o.responses = fields.API(t.API).Agents(), fields.API(t.API) == fields.Responses
	fields.Each(t.Request, func(name string, value []byte) {
		supported := idle(t, name, value)
		switch name {
		case "add_special_tokens":
			supported = strictjson.Unmarshal(value, &o.special) == nil
		case "reasoning_effort":
			supported = strictjson.Unmarshal(value, &o.effort) == nil && slices.Contains(efforts, o.effort)
		case "documents":
			o.documents, supported = value, value[0] == '['
		case "tool_choice": // vLLM can be set to omit the tools of a request with "none"
			supported = supported || string(value) != `"none"`
		case "response_format":
			supported = true // no chat template receives it
		}
		if !supported {
			names = append(names, name)
		}
	})
	return o, unsupported(names)
}

// efforts are the values of reasoning_effort in vLLM.
var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// variables adds the options to the variables of a chat template, as in vLLM's ChatCompletionRequest.build_chat_params.
func (o *options) variables(ctx context.Context, vars jinja.Vars) error {
	if o.effort != "" {
		vars["reasoning_effort"] = o.effort
		if _, given := vars["enable_thinking"]; !given {
			vars["enable_thinking"] = o.effort != "none"
		}
	}
	if o.documents == nil {
		return nil
	}
	v, err := jinja.Decode(ctx, o.documents)
	if err != nil {
		return errors.New("documents is not valid")
	}
	vars["documents"] = v
	return nil
}
