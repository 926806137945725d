package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// responsesRequest has the fields of a Responses request that determine tokens.
type responsesRequest struct {
	Input                 json.RawMessage `json:"input"` // a text, or a list of items
	Instructions          string          `json:"instructions"`
	Tools                 []responsesTool `json:"tools"`
	ToolChoice            json.RawMessage `json:"tool_choice"` // a text, or an object
	ChatTemplateKwargs    json.RawMessage `json:"chat_template_kwargs"`
	PreviousResponse      *string         `json:"previous_response_id"`
	PreviousInputMessages json.RawMessage `json:"previous_input_messages"`
	Prompt                json.RawMessage `json:"prompt"` // a stored prompt
	Truncation            json.RawMessage `json:"truncation"`
	Reasoning             *struct {
		Effort string `json:"effort"`
	} `json:"reasoning"`
}

type responsesTool struct {
	Type         string          `json:"type"`
	Name         string          `json:"name"`
	Description  *string         `json:"description"`
	Parameters   json.RawMessage `json:"parameters"`
	Strict       *bool           `json:"strict"`
	DeferLoading *bool           `json:"defer_loading"`
	Tools        []responsesTool `json:"tools"`  // of a namespace
	Format       *itemType       `json:"format"` // of a custom tool
}

type itemType struct {
	Type string `json:"type"`
}

// item is an item of an input.
type item struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Status    string          `json:"status"`
	Content   json.RawMessage `json:"content"` // a text, or a list of parts
	Summary   []contentPart   `json:"summary"` // of reasoning
	Encrypted string          `json:"encrypted_content"`
	CallID    *string         `json:"call_id"` // of calls and their outputs
	Name      *string         `json:"name"`
	Namespace string          `json:"namespace"`
	Arguments *string         `json:"arguments"`
	Input     *string         `json:"input"`
	Output    json.RawMessage `json:"output"` // a text, or a list of parts
}

// contentPart is a part of a content.
type contentPart struct {
	Type     string  `json:"type"`
	Text     *string `json:"text"`
	ImageURL *string `json:"image_url"`
}

// customInput is the only argument of a custom tool, which vLLM gives to templates as a function.
const customInput = `{"type":"object","properties":{"input":{"type":"string","description":` +
	`"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}`

// hiddenTools are the types of tools that vLLM accepts and does not give to templates.
var hiddenTools = []string{"file_search", "computer", "computer_use_preview", "web_search", "web_search_2025_08_26",
	"web_search_preview", "web_search_preview_2025_03_11", "mcp", "code_interpreter", "image_generation", "local_shell",
	"shell", "tool_search", "apply_patch"}

// Responses converts a request of OpenAI's Responses API.
func Responses(body []byte) (*Chat, error) {
	var r responsesRequest
	if err := readBody(body, &r); err != nil {
		return nil, err
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	var x thread
	if r.Instructions != "" {
		x.list = append(x.list, message{Role: "system", Content: r.Instructions})
	}
	unfinished, err := x.input(r.Input)
	if err != nil {
		return nil, err
	}
	tools, err := responsesTools(r.Tools)
	if err != nil {
		return nil, err
	}
	if choice, _ := plainText(r.ToolChoice); choice == "none" && len(tools) > 0 {
		return nil, errNoChoice
	}
	effort := ""
	if r.Reasoning != nil {
		effort = r.Reasoning.Effort
	}
	kwargs, err := kwargs(r.ChatTemplateKwargs, effort)
	if err != nil {
		return nil, err
	}
	c, err := chat(x.list, tools, kwargs)
	if err != nil {
		return nil, err
	}
	c.SpecialTokens = true
	if unfinished {
		no, yes := false, true
		c.AddGenerationPrompt, c.ContinueFinalMessage = &no, &yes
	}
	return c, nil
}

// check refuses requests with tokens that depend on other state, such as stored responses.
func (r *responsesRequest) check() error {
	truncation, _ := plainText(r.Truncation)
	switch {
	case r.PreviousResponse != nil:
		return errors.New("the request continues a response that only its engine has stored (previous_response_id)")
	case !missing(r.PreviousInputMessages):
		return errors.New("previous_input_messages is not supported, because its form depends on the model")
	case !missing(r.Prompt):
		return errors.New("the request names a stored prompt, which engines refuse")
	case r.Truncation != nil && truncation != "disabled":
		return errors.New("the truncation depends on the engine's context length; omit the field, or set it to disabled")
	case missing(r.Input):
		return errors.New("the request has no input")
	}
	return nil
}

// thread collects the messages of a chat. Items of one turn of the assistant share a message.
type thread struct{ list []message }

// input adds the messages of an input. unfinished means that the last message is to be continued.
func (x *thread) input(input json.RawMessage) (unfinished bool, err error) {
	if text, is := plainText(input); is {
		x.list = append(x.list, message{Role: "user", Content: text})
		return false, nil
	}
	var items []item
	if err := read(input, &items); err != nil {
		return false, fmt.Errorf("input: %w", err)
	}
	for i := range items {
		if err := x.add(&items[i]); err != nil {
			return false, fmt.Errorf("input %d: %w", i, err)
		}
	}
	if len(items) > 0 {
		last := &items[len(items)-1]
		unfinished = slices.Contains([]string{"", "message", "reasoning"}, last.Type) &&
			(last.Status == "in_progress" || last.Status == "incomplete")
	}
	return unfinished, nil
}

// add adds an item: a message, or a part of the assistant's message before the item.
func (x *thread) add(it *item) error {
	switch it.Type {
	case "function_call":
		if it.CallID == nil || it.Name == nil || it.Arguments == nil {
			return errors.New("a function_call needs a call_id, a name and arguments")
		}
		name := *it.Name
		if it.Namespace != "" {
			name = namespaced(it.Namespace, name)
		}
		return x.call(*it.CallID, name, *it.Arguments)
	case "custom_tool_call":
		if it.CallID == nil || it.Name == nil || it.Input == nil {
			return errors.New("a custom_tool_call needs a call_id, a name and an input")
		}
		arguments, err := write(map[string]string{"input": *it.Input})
		if err != nil {
			return err
		}
		return x.call(*it.CallID, *it.Name, string(arguments))
	case "reasoning":
		return x.reasoning(it)
	case "function_call_output", "custom_tool_call_output":
		content, err := toolOutput(it.Output)
		if err == nil && it.CallID == nil {
			err = errors.New("an output needs a call_id")
		}
		if err != nil {
			return err
		}
		x.list = append(x.list, message{Role: "tool", Content: content, ToolCallID: it.CallID})
		return nil
	case "message", "":
		return x.message(it)
	}
	return fmt.Errorf("items of type %.40q are not supported by engines", it.Type)
}

// assistant returns the assistant's message before an item; nil without one.
func (x *thread) assistant() *message {
	if n := len(x.list); n > 0 && x.list[n-1].Role == "assistant" {
		return &x.list[n-1]
	}
	return nil
}

func (x *thread) call(id, name, arguments string) error {
	call := toolCall{id, "function", callFunction{name, arguments}}
	if last := x.assistant(); last != nil {
		last.ToolCalls = append(last.ToolCalls, call)
	} else {
		x.list = append(x.list, message{Role: "assistant", ToolCalls: []toolCall{call}})
	}
	return nil
}

func (x *thread) reasoning(it *item) error {
	if it.Encrypted != "" {
		return errors.New("engines refuse encrypted reasoning")
	}
	if it.Summary == nil {
		return errors.New("a reasoning item needs a summary")
	}
	var content []contentPart
	if !missing(it.Content) {
		if err := read(it.Content, &content); err != nil {
			return err
		}
	}
	text := ""
	for _, of := range [][]contentPart{content, it.Summary} {
		if len(of) > 0 {
			if of[0].Text == nil {
				return errors.New("the first part of a reasoning item has no text")
			}
			text = *of[0].Text
			break
		}
	}
	if last := x.assistant(); last != nil && last.Reasoning == nil {
		last.Reasoning = &text
	} else {
		x.list = append(x.list, message{Role: "assistant", Reasoning: &text})
	}
	return nil
}

// message adds a message. Of an assistant's content in parts, vLLM reads only the first part.
func (x *thread) message(it *item) error {
	if !slices.Contains([]string{"user", "assistant", "system", "developer"}, it.Role) {
		return fmt.Errorf("the role is %.40q, which engines refuse", it.Role)
	}
	if it.Role != "assistant" {
		content, err := inputContent(it.Content)
		if err == nil {
			x.list = append(x.list, message{Role: it.Role, Content: content})
		}
		return err
	}
	text, is := plainText(it.Content)
	if !is {
		var parts []contentPart
		if missing(it.Content) || read(it.Content, &parts) != nil || len(parts) == 0 {
			return errors.New("the content of an assistant's message is neither a text nor a list of parts")
		}
		for _, p := range parts {
			if p.Type != parts[0].Type || p.Text == nil || p.Type != "input_text" && (p.Type != "output_text" || it.Type == "") {
				return fmt.Errorf("an assistant's message has a part of type %.40q, which engines refuse there", p.Type)
			}
		}
		text = *parts[0].Text
	}
	if last := x.assistant(); last != nil && last.Content == nil {
		last.Content = text
	} else {
		x.list = append(x.list, message{Role: "assistant", Content: text})
	}
	return nil
}

// inputContent returns the content of a message that is not the assistant's.
func inputContent(content json.RawMessage) (any, error) {
	if text, is := plainText(content); is {
		return text, nil
	}
	var given []contentPart
	if missing(content) || read(content, &given) != nil {
		return nil, errors.New("the content is neither a text nor a list of parts")
	}
	parts := make([]part, len(given))
	for i := range given {
		switch p := &given[i]; {
		case p.Type == "input_text" && p.Text != nil:
			parts[i] = textPart(*p.Text)
		case p.Type == "input_image" && p.ImageURL != nil:
			parts[i] = imagePart(*p.ImageURL)
		default:
			return nil, fmt.Errorf("part %d has the type %.40q, and is neither a text nor an image with a URL", i, p.Type)
		}
	}
	return parts, nil
}

// toolOutput returns the content of a tool's message.
func toolOutput(output json.RawMessage) (any, error) {
	content, err := inputContent(output)
	if err != nil {
		return nil, fmt.Errorf("output: %w", err)
	}
	return content, nil
}

// namespaced returns the name of a namespace's function.
func namespaced(namespace, name string) string { return namespace + "__" + name }

// responsesTools returns the functions among the tools; nil without tools.
func responsesTools(given []responsesTool) ([]tool, error) {
	if len(given) == 0 {
		return nil, nil
	}
	list := []tool{}
	for i := range given {
		t := &given[i]
		switch t.Type {
		case "function":
			list = append(list, t.function(t.Name))
		case "custom":
			if t.Format != nil && t.Format.Type == "grammar" {
				return nil, fmt.Errorf("the custom tool %.40q has a grammar, so engines refuse it", t.Name)
			}
			list = append(list, tool{"function", toolFunction{t.Name, t.Description, json.RawMessage(customInput), nil, nil}})
		case "namespace":
			for j := range t.Tools {
				if of := &t.Tools[j]; of.Type == "function" {
					list = append(list, of.function(namespaced(t.Name, of.Name)))
				}
			}
		default:
			if !slices.Contains(hiddenTools, t.Type) {
				return nil, fmt.Errorf("tool %d has the unknown type %.40q", i, t.Type)
			}
		}
	}
	return list, nil
}

func (t *responsesTool) function(name string) tool {
	parameters := t.Parameters
	if missing(parameters) {
		parameters = json.RawMessage("null")
	}
	return tool{"function", toolFunction{name, t.Description, parameters, t.Strict, t.DeferLoading}}
}
