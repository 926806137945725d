package fields

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Request has the parts of a request to an engine that matter for a choice.
type Request struct {
	API   API
	Model string

	// Tokens, or else Text, is the first prompt. Text.Request has the fields of the class Tokens that have no field in
	// Text.
	Tokens api.Tokens
	Text   api.Text

	Salt, LoRA string
	Previous   string // id of the response that a request of the Responses API continues

	// Length is the content of all prompts, for an [Estimator]. Further is that of the prompts after the first.
	Length, Further Length

	// Partial means that Length lacks tokens of the engine's prompts: the tokens of an earlier request or of a field with
	// NaN, or repetitions of the query (score, rerank). An unknown API is also partial.
	Partial bool

	// Prompts is the number of prompts in a list; 0: the request has one prompt, which is no list.
	Prompts int

	// Unsupported has the names of the fields that prevent a look-up, each once.
	Unsupported []string
}

// maxNames bounds the names in [Request].Unsupported.
const maxNames = 16

// Read reads the body of a request. With an empty API, the fields of the body decide. The error is an [api.Error] for a
// body that no engine accepts, and for a body with two fields of one name: readers of such a body differ.
func Read(a API, body []byte) (*Request, error) {
	list, err := readObject(body)
	if err != nil {
		return nil, err
	}
	has := func(name string) bool {
		return slices.ContainsFunc(list, func(f field) bool { return f.name == name && string(f.value) != "null" })
	}
	switch {
	case a != "":
	case has("messages"):
		a = Chat
	case has("prompt"):
		a = Completions
	}
	r := &Request{API: a, Partial: a == "" || a == Score || a == Rerank}
	table := tables[a]
	for _, f := range list {
		class, known := table[f.name]
		switch {
		case string(f.value) == "null":
			continue
		case f.name == "model":
			if strictjson.Unmarshal(f.value, &r.Model) != nil {
				return nil, api.Errorf(api.CodeMalformed, "model is not text")
			}
			continue
		case class == Irrelevant || class == Ignored:
			continue
		case f.name == "previous_response_id" && strictjson.Unmarshal(f.value, &r.Previous) != nil:
			return nil, api.Errorf(api.CodeMalformed, "previous_response_id is not text")
		}
		if f.finite {
			r.Length.value(f.value, false)
		}
		if !f.finite || continues[f.name] && !neutral(f.value) {
			r.Partial = true
		}
		supported := class != Unsupported && f.finite && r.set(f.name, f.value, class)
		if table != nil && !supported && !(known && neutral(f.value)) {
			r.refuse(f.name)
		}
	}
	r.finish()
	return r, nil
}

// continues has the fields that add the tokens of an earlier request to the prompt.
var continues = map[string]bool{"previous_response_id": true, "session_params": true}

// finish adds the template to the length, and removes the fields that do not change token ids.
func (r *Request) finish() {
	if r.API == Chat || r.API.Agents() {
		r.Length.amount[partTemplate] = perRequest
	}
	if r.Tokens == nil {
		return
	}
	Each(r.Text.Request, func(name string, _ []byte) {
		if name == "truncate_prompt_tokens" || name == "suffix" {
			r.refuse(name)
		}
	})
	r.Text = api.Text{}
}

// neutral reports whether a value is one without effect, for any field.
func neutral(value []byte) bool {
	switch string(value) {
	case "false", `""`, "[]", "{}":
		return true
	}
	return false
}

// refuse adds a name to Unsupported.
func (r *Request) refuse(name string) {
	if name = Label(name); len(r.Unsupported) < maxNames && !slices.Contains(r.Unsupported, name) {
		r.Unsupported = append(r.Unsupported, name)
	}
}

// maxLabel bounds the bytes of a name in reports.
const maxLabel = 48

// Label returns a field's name for reports: "other" for a long name, and for a name with other characters than ASCII
// letters, digits and "_.-".
func Label(name string) string {
	if name == "" || len(name) > maxLabel {
		return "other"
	}
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '.', c == '-':
		default:
			return "other"
		}
	}
	return name
}

// set stores a field of the class Tokens or Identity. It returns false if the value is not supported.
func (r *Request) set(name string, value []byte, class Class) bool {
	t := &r.Text
	switch name {
	case "cache_salt":
		return strictjson.Unmarshal(value, &r.Salt) == nil && r.Salt != ""
	case "lora_path":
		return strictjson.Unmarshal(value, &r.LoRA) == nil && r.LoRA != ""
	case "lora_request":
		var lora struct {
			Number *uint64 `json:"lora_int_id"`
		}
		if strictjson.Unmarshal(value, &lora) != nil || lora.Number == nil {
			return false
		}
		r.LoRA = events.LoRAByID(strconv.FormatUint(*lora.Number, 10))
		return true
	}
	if class != Tokens {
		return false
	}
	if r.API.Agents() {
		t.API = string(r.API)
		return r.pass(name, value)
	}
	switch name {
	case "prompt", "input":
		return r.setPrompt(value)
	case "messages":
		t.Messages = bytes.Clone(value)
		return value[0] == '['
	case "tools":
		if string(value) != "[]" {
			t.Tools = bytes.Clone(value)
		}
		return value[0] == '['
	case "chat_template_kwargs":
		t.ChatTemplateKwargs = bytes.Clone(value)
		return value[0] == '{'
	case "chat_template":
		return strictjson.Unmarshal(value, &t.ChatTemplate) == nil
	case "add_generation_prompt":
		return strictjson.Unmarshal(value, &t.AddGenerationPrompt) == nil
	case "continue_final_message":
		return strictjson.Unmarshal(value, &t.ContinueFinalMessage) == nil
	}
	return r.pass(name, value)
}

// pass adds a field to Text.Request. It returns true.
func (r *Request) pass(name string, value []byte) bool {
	t := &r.Text
	if len(t.Request) == 0 {
		t.Request = api.Value("{")
	} else {
		t.Request[len(t.Request)-1] = ','
	}
	t.Request = append(strconv.AppendQuote(t.Request, name), ':')
	t.Request = append(append(t.Request, value...), '}')
	return true
}

// setPrompt stores the prompt of a completion, or the input of an embedding: a text, token ids, or a list of either.
func (r *Request) setPrompt(value []byte) bool {
	first := value
	if value[0] == '[' {
		var inner []byte
		eachItem(value, func(_ []byte, from, to int) {
			if inner == nil {
				inner = value[from:to]
			}
			r.Prompts++
		})
		if inner != nil && (inner[0] == '[' || inner[0] == '"') {
			first = inner
		} else {
			r.Prompts = 0 // token ids
		}
	}
	var one Length
	one.value(first, false)
	r.Further.value(value, false)
	r.Further.without(&one)
	switch {
	case first[0] == '[':
		tokens, err := api.ReadTokens("prompt", first)
		r.Tokens = tokens
		return err == nil && tokens != nil
	case r.API == Completions && first[0] == '"':
		return strictjson.Unmarshal(first, &r.Text.Prompt) == nil
	}
	return false
}

// Expand reads Text.Request of a query, and adds the other fields of the text. The error is an [api.Error].
func Expand(t *api.Text) (*Request, error) {
	r := &Request{API: API(t.API)}
	switch {
	case r.API != "" && !slices.Contains(APIs, r.API):
		return nil, api.Errorf(api.CodeMalformed, "api is %.40q; it may be one of %v", t.API, APIs)
	case r.API != "":
	case t.Messages != nil:
		r.API = Chat
	case t.Prompt != "":
		r.API = Completions
	}
	if t.Request != nil {
		var err error
		if r, err = Read(r.API, t.Request); err != nil {
			return nil, err
		}
	}
	if t.Whole() && r.API.Agents() {
		return nil, api.Errorf(api.CodeMalformed, "a request of the API %s is given as a whole in request", r.API)
	}
	if t.Whole() && (r.Tokens != nil || r.Text.Whole()) {
		return nil, api.Errorf(api.CodeMalformed, "the prompt is given twice: in request, and beside it")
	}
	measure(&r.Length, t.Prompt, false)
	for _, v := range []api.Value{t.Messages, t.Tools, t.ChatTemplateKwargs} {
		r.Length.value(v, false)
	}
	if t.Messages != nil {
		r.Length.amount[partTemplate] = perRequest
	}
	of := &r.Text
	of.API, of.ReturnTokenIDs = string(r.API), t.ReturnTokenIDs
	of.Prompt, of.ChatTemplate = cmp.Or(t.Prompt, of.Prompt), cmp.Or(t.ChatTemplate, of.ChatTemplate)
	of.AddGenerationPrompt = cmp.Or(t.AddGenerationPrompt, of.AddGenerationPrompt)
	of.ContinueFinalMessage = cmp.Or(t.ContinueFinalMessage, of.ContinueFinalMessage)
	for to, v := range map[*api.Value]api.Value{
		&of.Messages: t.Messages, &of.Tools: t.Tools, &of.ChatTemplateKwargs: t.ChatTemplateKwargs} {
		if v != nil {
			*to = v
		}
	}
	return r, nil
}

// Prompted reports whether the request has a prompt that can be looked up: tokens, or a text for the source of the
// model's tokens.
func (r *Request) Prompted() bool {
	text := r.Text.Whole() || r.API.Agents() && r.Text.Request != nil
	return len(r.Unsupported) == 0 && (r.Tokens != nil || text && r.Text.Check() == nil)
}
