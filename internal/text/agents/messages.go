package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// Template contains the properties of a chat template that a conversion of Messages depends on.
type Template struct {
	// MergeSystem means that the template refuses system messages after the first message.
	MergeSystem bool

	// DisabledEffort is the reasoning effort for disabled thinking: none, or low if the template ignores none.
	DisabledEffort string
}

// messagesRequest has the fields of a Messages request that determine tokens.
type messagesRequest struct {
	Messages           []anthropicMessage `json:"messages"`
	System             json.RawMessage    `json:"system"` // a text, or a list of blocks
	Tools              []anthropicTool    `json:"tools"`
	ChatTemplateKwargs json.RawMessage    `json:"chat_template_kwargs"`
	Thinking           *struct {
		Type string `json:"type"`
	} `json:"thinking"`
	ToolChoice *struct {
		Type string `json:"type"`
	} `json:"tool_choice"`
	OutputConfig *struct {
		Effort string `json:"effort"`
	} `json:"output_config"`
}

type anthropicMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"` // a text, or a list of blocks
}

type anthropicTool struct {
	Name         string          `json:"name"`
	Description  *string         `json:"description"`
	InputSchema  json.RawMessage `json:"input_schema"`
	Strict       *bool           `json:"strict"`
	DeferLoading *bool           `json:"defer_loading"`
}

// block is a block of a content.
type block struct {
	Type      string                     `json:"type"`
	Text      *string                    `json:"text"`
	Source    map[string]json.RawMessage `json:"source"` // of an image
	ID        string                     `json:"id"`
	ToolUseID string                     `json:"tool_use_id"`
	Name      string                     `json:"name"`
	Input     json.RawMessage            `json:"input"`   // an object
	Content   json.RawMessage            `json:"content"` // a text, or a list of objects
	Thinking  *string                    `json:"thinking"`
	Tool      *struct {                  // of tool_addition and tool_removal
		Type       string         `json:"type"`
		Name       string         `json:"name"`
		Definition *anthropicTool `json:"definition"`
	} `json:"tool"`
}

// blockTypes are the types of blocks that vLLM accepts.
var blockTypes = []string{"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
	"tool_addition", "tool_removal"}

// billingHeader begins a line of Claude Code that differs in each request. vLLM drops system blocks that begin with it.
const billingHeader = "x-anthropic-billing-header"

// Messages converts a request of Anthropic's Messages API. A nil template means that its properties are unknown; then
// requests that depend on a property are errors.
func Messages(body []byte, template *Template) (*Chat, error) {
	var r messagesRequest
	if err := readBody(body, &r); err != nil {
		return nil, err
	}
	x := converter{template: template}
	if err := x.system(&r); err != nil {
		return nil, fmt.Errorf("system: %w", err)
	}
	for i := range r.Messages {
		if err := x.message(&r.Messages[i]); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
	}
	tools, err := x.tools(r.Tools)
	if err != nil {
		return nil, err
	}
	if len(tools) > 0 && r.ToolChoice != nil && r.ToolChoice.Type == "none" {
		return nil, errNoChoice
	}
	effort, err := x.effort(&r)
	if err != nil {
		return nil, err
	}
	kwargs, err := kwargs(r.ChatTemplateKwargs, effort)
	if err != nil {
		return nil, err
	}
	return chat(x.list, tools, kwargs)
}

// converter collects the messages of a chat, and the changes of tools.
type converter struct {
	template *Template
	list     []message
	changes  []block
}

// system adds the leading system message.
func (x *converter) system(r *messagesRequest) error {
	var text strings.Builder
	of, err := blocks(r.System)
	if err != nil {
		return err
	}
	if plain, is := plainText(r.System); is {
		text.WriteString(plain)
	}
	text.WriteString(systemText(of))
	for _, b := range of {
		if b.Type == "tool_addition" || b.Type == "tool_removal" {
			return fmt.Errorf("a block of type %s belongs in a system message", b.Type)
		}
	}
	for i := range r.Messages {
		if r.Messages[i].Role != "system" {
			continue
		}
		if x.template == nil {
			return errors.New("the treatment of system messages among the others depends on the template; give the model " +
				"a render URL of vLLM 0.33")
		}
		if x.template.MergeSystem {
			inline, err := inlineSystem(&r.Messages[i])
			if err != nil {
				return err
			}
			text.WriteString(inline)
		}
	}
	if text.Len() > 0 {
		x.list = append(x.list, message{Role: "system", Content: text.String()})
	}
	return nil
}

// inlineSystem returns the text of a system message among the others.
func inlineSystem(m *anthropicMessage) (string, error) {
	if plain, is := plainText(m.Content); is {
		if strings.HasPrefix(plain, billingHeader) {
			return "", nil
		}
		return plain, nil
	}
	of, err := blocks(m.Content)
	return systemText(of), err
}

// systemText joins the texts of system blocks.
func systemText(of []block) string {
	var text strings.Builder
	for _, b := range of {
		if b.Type == "text" && b.Text != nil && !strings.HasPrefix(*b.Text, billingHeader) {
			text.WriteString(*b.Text)
		}
	}
	return text.String()
}

// plainText returns a content that is a text.
func plainText(content json.RawMessage) (text string, is bool) {
	return text, opens(content, '"') && strictjson.Unmarshal(content, &text) == nil
}

// blocks returns the blocks of a content; none of a text.
func blocks(content json.RawMessage) (list []block, err error) {
	if missing(content) || opens(content, '"') {
		return nil, nil
	}
	if err := read(content, &list); err != nil {
		return nil, err
	}
	for i := range list {
		if b := &list[i]; !slices.Contains(blockTypes, b.Type) {
			return nil, fmt.Errorf("block %d has the type %.40q, which engines refuse", i, b.Type)
		}
	}
	return list, nil
}

// message adds a message, after the results of tools in it.
func (x *converter) message(m *anthropicMessage) error {
	of, err := blocks(m.Content)
	if err != nil {
		return err
	}
	switch {
	case missing(m.Content):
		return errors.New("the message has no content")
	case m.Role == "system":
		return x.inline(m, of)
	case m.Role != "user" && m.Role != "assistant":
		return fmt.Errorf("the role is %.40q, which engines refuse", m.Role)
	}
	out := message{Role: m.Role}
	if plain, is := plainText(m.Content); is {
		out.Content = plain
	} else if err := x.convert(of, &out); err != nil {
		return err
	}
	if m.Role == "assistant" || out.Content != nil {
		x.list = append(x.list, out)
	}
	return nil
}

// inline adds a system message among the others.
func (x *converter) inline(m *anthropicMessage, of []block) error {
	for _, b := range of {
		if b.Type == "tool_addition" || b.Type == "tool_removal" {
			x.changes = append(x.changes, b)
		}
	}
	text, err := inlineSystem(m)
	if err == nil && text != "" && !x.template.MergeSystem {
		x.list = append(x.list, message{Role: "system", Content: text})
	}
	return err
}

// convert adds blocks to a message.
func (x *converter) convert(of []block, out *message) error {
	var parts []part
	var thoughts []string
	for i := range of {
		b := &of[i]
		switch b.Type {
		case "text":
			if b.Text != nil && *b.Text != "" {
				parts = append(parts, textPart(*b.Text))
			}
		case "image":
			if len(b.Source) > 0 {
				url, err := imageSource(b.Source)
				if err != nil {
					return err
				}
				parts = append(parts, imagePart(url))
			}
		case "thinking":
			if b.Thinking != nil {
				thoughts = append(thoughts, *b.Thinking)
			}
		case "tool_use":
			call, err := b.call()
			if err != nil {
				return err
			}
			out.ToolCalls = append(out.ToolCalls, call)
		case "tool_result":
			if out.Role == "user" {
				if err := x.result(b); err != nil {
					return err
				}
				continue
			}
			text, is := plainText(b.Content)
			if !is && !missing(b.Content) {
				return errors.New("an assistant's tool_result with blocks becomes a text of Python")
			}
			parts = append(parts, textPart("Tool result: "+text))
		case "tool_addition", "tool_removal":
			return fmt.Errorf("a block of type %s belongs in a system message", b.Type)
		}
	}
	if thoughts != nil {
		all := strings.Join(thoughts, "")
		out.Reasoning = &all
	}
	switch {
	case len(parts) == 1 && parts[0].Type == "text":
		out.Content = *parts[0].Text
	case parts != nil:
		out.Content = parts
	}
	return nil
}

// call returns the call of a tool_use block.
func (b *block) call() (toolCall, error) {
	arguments := "{}"
	switch {
	case b.ID == "":
		return toolCall{}, errors.New("a tool_use block has no id, and engines make one of the time")
	case missing(b.Input):
	case !opens(b.Input, '{'):
		return toolCall{}, errors.New("the input of a tool_use block is not an object")
	default:
		arguments = string(b.Input)
	}
	return toolCall{b.ID, "function", callFunction{b.Name, arguments}}, nil
}

// result adds the messages of a tool's result: texts, images, and references to tools.
func (x *converter) result(b *block) error {
	var texts []string
	var images, references []part
	if text, is := plainText(b.Content); is {
		texts = []string{text}
	} else if !missing(b.Content) {
		var items []map[string]json.RawMessage
		if err := read(b.Content, &items); err != nil {
			return err
		}
		for _, item := range items {
			kind, _ := plainText(item["type"])
			switch kind {
			case "text":
				text, is := plainText(item["text"])
				if !is && item["text"] != nil {
					return errors.New("the text of a tool_result is not a string")
				}
				texts = append(texts, text)
			case "image":
				source := map[string]json.RawMessage{}
				if item["source"] != nil {
					if err := read(item["source"], &source); err != nil {
						return err
					}
				}
				url, err := imageSource(source)
				if err != nil {
					return err
				}
				if url != "" {
					images = append(images, imagePart(url))
				}
			case "tool_reference":
				name, _ := plainText(item["tool_name"])
				if name == "" {
					name, _ = plainText(item["name"])
				}
				if name != "" {
					references = append(references, part{Type: "tool_reference", Name: name})
				}
			}
		}
	}
	id := b.ToolUseID
	x.list = append(x.list, message{Role: "tool", Content: strings.Join(texts, "\n"), ToolCallID: &id})
	if images != nil {
		x.list = append(x.list, message{Role: "user", Content: images})
	}
	if references != nil {
		x.list = append(x.list, message{Role: "tool", Content: references, ToolCallID: &id})
	}
	return nil
}

// imageSource returns the URL of an image's source.
func imageSource(source map[string]json.RawMessage) (string, error) {
	field := func(name, missing string) (string, error) {
		if source[name] == nil {
			return missing, nil
		}
		text, is := plainText(source[name])
		if !is {
			return "", fmt.Errorf("the field %s of an image's source is not a string", name)
		}
		return text, nil
	}
	if kind, _ := plainText(source["type"]); kind == "url" {
		return field("url", "")
	}
	media, err := field("media_type", "image/jpeg")
	if err != nil {
		return "", err
	}
	data, err := field("data", "")
	return "data:" + media + ";base64," + data, err
}

// tools returns the tools at the end of the conversation; nil without any field tools.
func (x *converter) tools(given []anthropicTool) ([]tool, error) {
	if given == nil && x.changes == nil {
		return nil, nil
	}
	if x.changes != nil {
		var err error
		if given, err = changed(given, x.changes); err != nil {
			return nil, err
		}
	}
	list := make([]tool, 0, len(given))
	for i := range given {
		t := &given[i]
		parameters, err := t.parameters()
		if err != nil {
			return nil, fmt.Errorf("tool %.40q: %w", t.Name, err)
		}
		list = append(list, tool{"function", toolFunction{t.Name, t.Description, parameters, t.Strict, t.DeferLoading}})
	}
	return list, nil
}

// changed applies the changes of tools among the messages. A tool that is named twice keeps its first place.
func changed(given []anthropicTool, changes []block) (list []anthropicTool, err error) {
	var names []string
	tools, removed := map[string]anthropicTool{}, map[string]bool{}
	put := func(t anthropicTool) {
		if _, has := tools[t.Name]; !has {
			names = append(names, t.Name)
		}
		tools[t.Name] = t
	}
	for _, t := range given {
		put(t)
	}
	for _, b := range changes {
		of := b.Tool
		switch {
		case of == nil || of.Type != "tool_reference" && (of.Type != "tool_definition" || b.Type == "tool_removal"):
			return nil, fmt.Errorf("a block of type %s has another tool than engines accept", b.Type)
		case of.Type == "tool_definition" && of.Definition == nil:
			return nil, fmt.Errorf("a block of type %s has no definition", b.Type)
		case of.Type == "tool_definition":
			put(*of.Definition)
			delete(removed, of.Definition.Name)
			continue
		}
		t, has := tools[of.Name]
		if !has {
			return nil, fmt.Errorf("a block of type %s names the tool %.40q, which is not declared", b.Type, of.Name)
		}
		if removed[of.Name] = b.Type == "tool_removal"; !removed[of.Name] {
			t.DeferLoading = nil
			tools[of.Name] = t
		}
	}
	list = []anthropicTool{}
	for _, name := range names {
		if !removed[name] {
			list = append(list, tools[name])
		}
	}
	return list, nil
}

// parameters returns a tool's schema, which has a type.
func (t *anthropicTool) parameters() (json.RawMessage, error) {
	if !opens(t.InputSchema, '{') {
		return nil, errors.New("the tool has no input_schema, so engines refuse it")
	}
	var fields map[string]json.RawMessage
	if err := read(t.InputSchema, &fields); err != nil {
		return nil, err
	}
	if _, has := fields["type"]; has {
		return t.InputSchema, nil
	}
	text := strings.TrimSpace(string(t.InputSchema))
	text = strings.TrimRight(text[:len(text)-1], " \t\r\n")
	if len(fields) > 0 {
		text += ","
	}
	return json.RawMessage(text + `"type":"object"}`), nil
}

// effort returns the reasoning effort of a request; empty without one.
func (x *converter) effort(r *messagesRequest) (effort string, err error) {
	if r.OutputConfig != nil {
		effort = r.OutputConfig.Effort
	}
	if r.Thinking == nil || r.Thinking.Type != "disabled" {
		return effort, nil
	}
	if x.template == nil {
		return "", errors.New("the effect of disabled thinking depends on the template; give the model a render URL of " +
			"vLLM 0.33")
	}
	return x.template.DisabledEffort, nil
}
