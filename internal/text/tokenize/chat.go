package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// renderer renders chats as vLLM does, by a model's chat template.
type renderer struct {
	template *jinja.Template
	text     string
	tokens   map[string]string // the tokens of tokenizer_config.json, such as bos_token; empty without the file
	clock    bool              // the template reads the time

	known atomic.Pointer[knownProperties] // nil before the first request that depends on them
}

// noTemplate, in place of a template's path, disables chats.
const noTemplate = "none"

// readChat reads the files that transformers reads beside a tokenizer.json: chat_template.jinja, or the template in
// tokenizer_config.json. It returns nil without a template.
func readChat(dir, path string, read func(string) ([]byte, error)) (*renderer, error) {
	if path == noTemplate {
		return nil, nil
	}
	var config map[string]any
	data, err := read(filepath.Join(dir, "tokenizer_config.json"))
	if err == nil {
		err = json.Unmarshal(data, &config)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	beside := path == ""
	if beside {
		path = filepath.Join(dir, "chat_template.jinja")
	}
	text, err := read(path)
	if beside && errors.Is(err, fs.ErrNotExist) {
		switch of := config["chat_template"].(type) {
		case nil:
			return nil, nil
		case string:
			path, text, err = "tokenizer_config.json", []byte(of), nil
		default:
			return nil, errors.New("tokenizer_config.json has several chat templates; name a file as chat_template")
		}
	}
	if err != nil {
		return nil, err
	}
	c := &renderer{tokens: map[string]string{}}
	for _, name := range specialTokens {
		v, has := config[name]
		if o, is := v.(map[string]any); is {
			v = o["content"]
		}
		if text, is := v.(string); is || has && v == nil {
			c.tokens[name] = text
		}
	}
	if c, err = c.withTemplate(context.Background(), string(text)); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// withTemplate returns a copy with another template. It returns the context's error if the context is done before the
// end.
func (c *renderer) withTemplate(ctx context.Context, text string) (*renderer, error) {
	t, err := jinja.Parse(ctx, text)
	if err != nil {
		return nil, err
	}
	own := &renderer{template: t, text: text, tokens: c.tokens}
	for _, name := range t.Reads() {
		own.clock = own.clock || name == "strftime_now"
		if _, has := c.tokens[name]; strings.HasSuffix(name, "_token") && !has {
			return nil, fmt.Errorf("the template uses %.40s, which tokenizer_config.json does not define", name)
		}
	}
	switch {
	case strings.Contains(text, "<|channel|>") && strings.Contains(text, "<|start|>"):
		return nil, errors.New("the template is gpt-oss's, and vLLM renders gpt-oss chats with the library oss-harmony")
	case t.LoopsOver("content"):
		return nil, errors.New("the template requires contents in parts, for example for images")
	}
	return own, nil
}

// adviceURL is the end of errors about chats.
const adviceURL = "use a render or tokenize URL"

// render renders a chat to one text.
func (c *renderer) render(ctx context.Context, t *api.Text, o *options) (string, error) {
	vars := jinja.Vars{"tools": nil, "documents": nil, "add_generation_prompt": true}
	for name, text := range c.tokens {
		if text != "" {
			vars[name] = text
		}
	}
	if err := templateArguments(ctx, vars, t.ChatTemplateKwargs); err != nil {
		return "", err
	}
	if err := o.variables(ctx, vars); err != nil {
		return "", err
	}
	messages, err := messages(ctx, t.Messages, o.responses)
	if err != nil {
		return "", err
	}
	if t.Tools != nil {
		if vars["tools"], err = tools(ctx, t.Tools, o.agents); err != nil {
			return "", err
		}
	}
	if t.AddGenerationPrompt != nil {
		vars["add_generation_prompt"] = *t.AddGenerationPrompt
	}
	if messages, err = c.developers(messages); err != nil {
		return "", err
	}
	vars["messages"] = jinja.List(messages...)
	if t.ContinueFinalMessage == nil || !*t.ContinueFinalMessage {
		return c.template.Render(ctx, vars)
	}
	if vars["add_generation_prompt"] == true {
		return "", errors.New("continue_final_message and add_generation_prompt exclude each other")
	}
	return c.continued(ctx, vars, messages)
}

// continueTag is the marker of transformers after a continued message, which locates the end of the message.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// continued renders a chat up to the end of its last message.
func (c *renderer) continued(ctx context.Context, vars jinja.Vars, messages []any) (string, error) {
	if len(messages) == 0 {
		return "", errors.New("no final message to continue")
	}
	last := messages[len(messages)-1].(*jinja.Dict)
	content, _ := last.Get("content")
	final := content.(string)
	last.Set("content", final+continueTag)
	text, err := c.template.Render(ctx, vars)
	if err != nil {
		return "", err
	}
	at := strings.LastIndex(text, strings.TrimSpace(continueTag))
	shown, err := jinja.Contains(ctx, text, strings.TrimFunc(final, jinja.IsSpace))
	if err != nil {
		return "", err
	}
	if at < 0 || !shown || !strings.Contains(c.text, "content") {
		return "", errors.New("the template changes the final message, which therefore cannot be continued")
	}
	if strings.HasPrefix(text[at:], continueTag) {
		return text[:at], nil
	}
	return strings.TrimRightFunc(text[:at], jinja.IsSpace), nil
}

// specialTokens are the names of the tokens in templates.
var specialTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// ownArguments are arguments of the engine's own call of its template, which chat_template_kwargs must not contain.
var ownArguments = []string{"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
	"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
	"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}

// templateArguments adds chat_template_kwargs to the variables.
func templateArguments(ctx context.Context, vars jinja.Vars, kwargs api.Value) error {
	if kwargs == nil {
		return nil
	}
	v, err := jinja.Decode(ctx, kwargs)
	if err != nil {
		return fmt.Errorf("chat_template_kwargs: %w", err)
	}
	d, is := v.(*jinja.Dict)
	if !is {
		return errors.New("chat_template_kwargs is not an object")
	}
	for _, name := range d.Keys() {
		v, _ := d.Get(name)
		if slices.Contains(ownArguments, name) || v == nil || v == "auto" {
			return fmt.Errorf("engines treat chat_template_kwargs.%.40s differently; %s", name, adviceURL)
		}
		vars[name] = v
	}
	return nil
}

// messages decodes messages, and converts each message to vLLM's form for templates with text contents.
func messages(ctx context.Context, data api.Value, responses bool) ([]any, error) {
	v, err := jinja.Decode(ctx, data)
	if err != nil {
		return nil, fmt.Errorf("messages: %w", err)
	}
	items, is := jinja.Items(v)
	if !is {
		return nil, errors.New("messages is not a list")
	}
	list := make([]any, len(items))
	for i, item := range items {
		if list[i], err = message(ctx, item, responses); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
	}
	return list, nil
}

func message(ctx context.Context, v any, responses bool) (*jinja.Dict, error) {
	in, is := v.(*jinja.Dict)
	if !is {
		return nil, errors.New("not an object")
	}
	out := jinja.NewDict()
	role, _ := in.Get("role")
	if !slices.Contains([]any{"system", developer, "user", "assistant", "tool"}, role) {
		return nil, fmt.Errorf("the role is %.40q; engines treat other roles than system, developer, user, assistant and "+
			"tool differently; %s", fmt.Sprint(role), adviceURL)
	}
	out.Set("role", role)
	of, _ := in.Get("content")
	text, err := content(of, role == "system")
	if err != nil {
		return nil, err
	}
	out.Set("content", text)
	if role == "assistant" {
		calls, _ := in.Get("tool_calls")
		if calls != nil {
			items, is := jinja.Items(calls)
			if !is {
				return nil, errors.New("tool_calls is not a list")
			}
			made := make([]any, len(items))
			for i, call := range items {
				if made[i], err = toolCall(ctx, call, responses); err != nil {
					return nil, fmt.Errorf("tool call %d: %w", i, err)
				}
			}
			if len(made) > 0 {
				out.Set("tool_calls", jinja.List(made...))
			}
		}
		reasoning, _ := in.Get("reasoning")
		if reasoning == nil {
			reasoning, _ = in.Get("reasoning_content")
		}
		if reasoning != nil {
			if _, is := reasoning.(string); !is {
				return nil, errors.New("the reasoning is not a text")
			}
			out.Set("reasoning", reasoning)
			out.Set("reasoning_content", reasoning)
		}
	}
	if id, has := in.Get("tool_call_id"); has && role == "tool" {
		out.Set("tool_call_id", id)
	}
	for _, field := range []string{"name", "task"} {
		if v, _ := in.Get(field); v != nil {
			if _, is := v.(string); is {
				out.Set(field, v)
			}
		}
	}
	if role == developer {
		if v, _ := in.Get("tools"); v != nil {
			return nil, errors.New("a developer message has tools; " + adviceURL)
		}
		out.Set("tools", nil)
	}
	return out, nil
}

// developer is the role of instructions in place of system.
const developer = "developer"

// developers returns the messages in the form for templates that do not contain the role developer: each developer
// message is a system message, and all system messages are one message at the front.
func (c *renderer) developers(messages []any) ([]any, error) {
	if strings.Contains(c.text, `"developer"`) || strings.Contains(c.text, "'developer'") {
		return messages, nil
	}
	var system []string
	var others []any
	some, merge := false, false
	for i, m := range messages {
		m := m.(*jinja.Dict)
		role, _ := m.Get("role")
		some = some || role == developer
		if role != developer && role != "system" {
			others = append(others, m)
			continue
		}
		merge = merge || i > 0 || len(system) > 0
		if text, _ := m.Get("content"); text != "" {
			system = append(system, text.(string))
		}
	}
	if !some {
		return messages, nil
	}
	first := jinja.NewDict()
	first.Set("role", "system")
	if merge {
		first.Set("content", strings.Join(system, "\n\n"))
	} else {
		only := messages[0].(*jinja.Dict)
		for _, field := range only.Keys() {
			if v, _ := only.Get(field); field != "role" && field != "tools" {
				first.Set(field, v)
			}
		}
	}
	return append([]any{first}, others...), nil
}

// billingHeader begins a line of Claude Code that differs in each request. vLLM removes it from system messages.
const billingHeader = "x-anthropic-billing-header"

// textParts are the fields with the text of a content's part, by its type.
var textParts = map[any]string{"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
	"thinking": "thinking", "tool_reference": "name"}

// content returns a message's content as one text. Empty parts are dropped.
func content(v any, system bool) (string, error) {
	items, is := jinja.Items(v)
	switch v := v.(type) {
	case nil:
	case string:
		part := jinja.NewDict()
		part.Set("type", "text")
		part.Set("text", v)
		items = []any{part}
	default:
		if !is {
			return "", errors.New("the content is neither text nor a list")
		}
	}
	var texts []string
	for i, item := range items {
		part, is := item.(*jinja.Dict)
		if !is {
			return "", fmt.Errorf("part %d of the content is not an object", i)
		}
		kind, _ := part.Get("type")
		of, _ := part.Get(textParts[kind])
		text, is := of.(string)
		if uuid, _ := part.Get("uuid"); !is || uuid != nil {
			return "", fmt.Errorf("part %d of the content is %.40q, not text; %s", i, fmt.Sprint(kind), adviceURL)
		}
		if system && kind == "text" && strings.HasPrefix(text, billingHeader) {
			_, text, _ = strings.Cut(text, "\n")
		}
		if text != "" {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n"), nil
}

// ordered returns an object with some keys of another first, in the given order, and the other keys after them.
func ordered(v any, names ...string) (*jinja.Dict, error) {
	in, is := v.(*jinja.Dict)
	if !is {
		return nil, errors.New("not an object")
	}
	out := jinja.NewDict()
	for _, name := range append(names, in.Keys()...) {
		if v, has := in.Get(name); has {
			out.Set(name, v)
		}
	}
	return out, nil
}

// toolCall returns a tool call with its arguments as an object. Engines keep further fields, such as index. Functions
// of Responses have another order of fields.
func toolCall(ctx context.Context, v any, responses bool) (*jinja.Dict, error) {
	call, err := ordered(v, "id", "function", "type")
	if err != nil {
		return nil, err
	}
	if kind, has := call.Get("type"); has && kind != "function" {
		return nil, errors.New("not a function")
	}
	of, _ := call.Get("function")
	order := []string{"arguments", "name"}
	if responses {
		slices.Reverse(order)
	}
	function, err := ordered(of, order...)
	if err != nil {
		return nil, fmt.Errorf("function: %w", err)
	}
	given, _ := function.Get("arguments")
	if text, is := given.(string); is {
		if given, err = arguments(ctx, text); err != nil {
			return nil, fmt.Errorf("arguments: %w", err)
		}
	}
	if _, is := given.(*jinja.Dict); !is {
		given = jinja.NewDict()
	}
	function.Set("arguments", given)
	call.Set("function", function)
	return call, nil
}

// arguments decodes the arguments of a tool call. It returns nil for a text that is not JSON, as engines do.
func arguments(ctx context.Context, text string) (any, error) {
	switch {
	case json.Valid([]byte(text)):
		return jinja.Decode(ctx, []byte(text))
	case strings.Contains(text, "NaN") || strings.Contains(text, "Infinity"):
		return nil, errors.New("engines may accept NaN and Infinity; " + adviceURL)
	}
	return nil, nil
}

// tools decodes tools in vLLM's form for templates: with all of vLLM's keys, in its order. vLLM drops other keys, such
// as cache_control. empty permits an empty list.
func tools(ctx context.Context, data api.Value, empty bool) (any, error) {
	v, err := jinja.Decode(ctx, data)
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	items, is := jinja.Items(v)
	if !is {
		return nil, errors.New("tools is not a list")
	}
	if len(items) == 0 && !empty {
		return nil, errors.New("tools is empty, which engines refuse; omit the field")
	}
	list := make([]any, len(items))
	for i, item := range items {
		tool, err := ordered(item, "type", "function")
		if err != nil {
			return nil, fmt.Errorf("tool %d: %w", i, err)
		}
		if kind, has := tool.Get("type"); has && kind != "function" {
			return nil, fmt.Errorf("tool %d is not a function", i)
		}
		of, _ := tool.Get("function")
		given, err := ordered(of)
		if err != nil {
			return nil, fmt.Errorf("tool %d: function: %w", i, err)
		}
		deferred, _ := tool.Get("defer_loading")
		if own, _ := given.Get("defer_loading"); own == nil {
			given.Set("defer_loading", deferred)
		}
		function := jinja.NewDict()
		for _, name := range []string{"name", "description", "parameters", "strict", "defer_loading"} {
			if v, _ := given.Get(name); v != nil || name != "strict" && name != "defer_loading" {
				function.Set(name, v)
			}
		}
		made := jinja.NewDict()
		made.Set("type", "function")
		made.Set("function", function)
		if deferred != nil {
			made.Set("defer_loading", deferred)
		}
		list[i] = made
	}
	return jinja.List(list...), nil
}
