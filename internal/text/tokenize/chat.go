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

	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// renderer renders chats as vLLM does, by a model's chat template.
type renderer struct {
	template *jinja.Template
	text     string
	tokens   map[string]string // the tokens of tokenizer_config.json, such as bos_token; empty without the file
	clock    bool              // the template reads the time
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
	if c, err = c.with(context.Background(), string(text)); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// with returns a copy with another template. It returns the context's error if the context is done before the end.
func (c *renderer) with(ctx context.Context, text string) (*renderer, error) {
	t, err := jinja.ParseContext(ctx, text)
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
func (c *renderer) render(ctx context.Context, t *api.Text) (string, error) {
	vars := jinja.Vars{"tools": nil, "documents": nil, "add_generation_prompt": true}
	for name, text := range c.tokens {
		if text != "" {
			vars[name] = text
		}
	}
	if err := arguments(ctx, vars, t.ChatTemplateKwargs); err != nil {
		return "", err
	}
	messages, err := messages(ctx, t.Messages)
	if err != nil {
		return "", err
	}
	if t.Tools != nil {
		if vars["tools"], err = tools(ctx, t.Tools); err != nil {
			return "", err
		}
	}
	if t.AddGenerationPrompt != nil {
		vars["add_generation_prompt"] = *t.AddGenerationPrompt
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

// arguments adds chat_template_kwargs to the variables.
func arguments(ctx context.Context, vars jinja.Vars, kwargs api.Value) error {
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
func messages(ctx context.Context, data api.Value) ([]any, error) {
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
		if list[i], err = message(ctx, item); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
	}
	return list, nil
}

func message(ctx context.Context, v any) (*jinja.Dict, error) {
	in, is := v.(*jinja.Dict)
	if !is {
		return nil, errors.New("not an object")
	}
	out := jinja.NewDict()
	role, _ := in.Get("role")
	if role != "system" && role != "user" && role != "assistant" && role != "tool" {
		return nil, fmt.Errorf("the role is %.40q; engines treat other roles than system, user, assistant and tool "+
			"differently; %s", fmt.Sprint(role), adviceURL)
	}
	out.Set("role", role)
	of, _ := in.Get("content")
	text, err := content(of)
	if err != nil {
		return nil, err
	}
	if role == "system" && strings.Contains(text, "x-anthropic-billing-header") {
		return nil, errors.New("the text has x-anthropic-billing-header, which some engines remove; " +
			"remove the line, or " + adviceURL)
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
				if made[i], err = toolCall(ctx, call); err != nil {
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
	if name, _ := in.Get("name"); name != nil {
		if _, is := name.(string); is {
			out.Set("name", name)
		}
	}
	return out, nil
}

// content returns a message's content as one text.
func content(v any) (string, error) {
	switch v := v.(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	}
	items, is := jinja.Items(v)
	if !is {
		return "", errors.New("the content is neither text nor a list")
	}
	texts := make([]string, len(items))
	for i, item := range items {
		part, is := item.(*jinja.Dict)
		if !is {
			return "", fmt.Errorf("part %d of the content is not an object", i)
		}
		kind, _ := part.Get("type")
		text, _ := part.Get("text")
		if texts[i], is = text.(string); !is || kind != "text" {
			return "", fmt.Errorf("part %d of the content is %.40q, not text; %s", i, fmt.Sprint(kind), adviceURL)
		}
	}
	return strings.Join(texts, "\n"), nil
}

// fields returns an object with some keys of another, in the given order. Other keys are an error.
func fields(v any, names ...string) (*jinja.Dict, error) {
	in, is := v.(*jinja.Dict)
	if !is {
		return nil, errors.New("not an object")
	}
	out := jinja.NewDict()
	for _, name := range names {
		if v, has := in.Get(name); has {
			out.Set(name, v)
		}
	}
	for _, name := range in.Keys() {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("the field %.40q is not supported; %s", name, adviceURL)
		}
	}
	return out, nil
}

// toolCall returns a tool call with its arguments as an object.
func toolCall(ctx context.Context, v any) (*jinja.Dict, error) {
	call, err := fields(v, "id", "function", "type")
	if err != nil {
		return nil, err
	}
	if kind, has := call.Get("type"); has && kind != "function" {
		return nil, errors.New("not a function")
	}
	of, _ := call.Get("function")
	function, err := fields(of, "arguments", "name")
	if err != nil {
		return nil, fmt.Errorf("function: %w", err)
	}
	given, _ := function.Get("arguments")
	if text, is := given.(string); is && text != "" {
		if given, err = jinja.Decode(ctx, []byte(text)); err != nil {
			return nil, fmt.Errorf("the arguments are not JSON: %w", err)
		}
	} else if given == nil || is {
		given = jinja.NewDict()
	}
	if _, is := given.(*jinja.Dict); !is {
		return nil, errors.New("the arguments are not an object")
	}
	function.Set("arguments", given)
	call.Set("function", function)
	return call, nil
}

// tools decodes tools in vLLM's form for templates: with all keys, in vLLM's order.
func tools(ctx context.Context, data api.Value) (any, error) {
	v, err := jinja.Decode(ctx, data)
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	items, is := jinja.Items(v)
	if !is {
		return nil, errors.New("tools is not a list")
	}
	if len(items) == 0 {
		return nil, errors.New("tools is empty, which engines refuse; omit the field")
	}
	list := make([]any, len(items))
	for i, item := range items {
		tool, err := fields(item, "type", "function")
		if err != nil {
			return nil, fmt.Errorf("tool %d: %w", i, err)
		}
		if kind, has := tool.Get("type"); has && kind != "function" {
			return nil, fmt.Errorf("tool %d is not a function", i)
		}
		of, _ := tool.Get("function")
		given, err := fields(of, "name", "description", "parameters", "strict")
		if err != nil {
			return nil, fmt.Errorf("tool %d: function: %w", i, err)
		}
		function := jinja.NewDict()
		for _, name := range []string{"name", "description", "parameters", "strict"} {
			if v, _ := given.Get(name); v != nil || name != "strict" {
				function.Set(name, v)
			}
		}
		made := jinja.NewDict()
		made.Set("type", "function")
		made.Set("function", function)
		list[i] = made
	}
	return jinja.List(list...), nil
}
