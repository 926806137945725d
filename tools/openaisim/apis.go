package openaisim

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	_ "image/png" // the format of images in requests
	"strings"
)

// request has the fields that the engine reads, of all APIs.
type request struct {
	Model                string
	Prompt, Input        json.RawMessage // a text, token ids, or a list of either; messages of Responses
	System, Instructions json.RawMessage
	Messages             []message
	Tools                []json.RawMessage
	Query, Queries       string
	Documents            []string
	Stream               bool

	path string
}

// message is a message of any API.
type message struct {
	Role    string
	Content json.RawMessage // a text, or a list of parts
}

// part is a part of a message.
type part struct {
	Text     string
	ImageURL json.RawMessage `json:"image_url"` // the URL, or an object with it
	Source   struct{ Data string }
}

// is reports whether the request has a path.
func (q *request) is(path string) bool { return strings.HasSuffix(q.path, path) }

// chat reports whether the request has messages or items instead of prompts.
func (q *request) chat() bool {
	return q.Prompt == nil && q.Queries == "" && q.Query == "" && !q.is("/embeddings")
}

// prompts returns the tokens of all prompts.
func (e *Engine) prompts(q *request) (list [][]uint32, err error) {
	if query := q.Query + q.Queries; query != "" {
		for _, d := range q.Documents {
			list = append(list, append(e.Encode(query), e.Encode(d)...))
		}
		return list, nil
	}
	if q.chat() {
		prompt, err := e.messages(q)
		return [][]uint32{prompt}, err
	}
	value := q.Prompt
	if value == nil {
		value = q.Input
	}
	var texts []string
	var one []uint32
	switch {
	case json.Unmarshal(value, &one) == nil:
		return [][]uint32{one}, nil
	case json.Unmarshal(value, &list) == nil:
		return list, nil
	case json.Unmarshal(value, &texts) != nil:
		texts = make([]string, 1)
		err = json.Unmarshal(value, &texts[0])
	}
	for _, text := range texts {
		list = append(list, e.Encode(text))
	}
	return list, err
}

// messages returns the tokens of a chat. It has a token before each message, a token after it, and a token before the
// answer. Tools are a message, in JSON.
func (e *Engine) messages(q *request) (tokens []uint32, err error) {
	list := q.Messages
	if q.Input != nil && json.Unmarshal(q.Input, &list) != nil {
		list = []message{{"user", q.Input}}
	}
	for _, system := range []json.RawMessage{q.Instructions, q.System} {
		if system != nil {
			list = append([]message{{"system", system}}, list...)
		}
	}
	for _, tool := range q.Tools {
		tokens = append(tokens, e.Encode(string(tool))...)
	}
	for _, m := range list {
		tokens = append(tokens, word("<|"+m.Role+"|>"))
		var text string
		var parts []part
		if json.Unmarshal(m.Content, &text) == nil {
			parts = []part{{Text: text}}
		} else if err := json.Unmarshal(m.Content, &parts); err != nil {
			return nil, err
		}
		for _, p := range parts {
			tokens = append(tokens, e.Encode(p.Text)...)
			tokens = append(tokens, p.image()...)
		}
		tokens = append(tokens, word("<|end|>"))
	}
	return append(tokens, word("<|assistant|>")), nil
}

// image returns the tokens of a part's image, as many as Qwen 2.5 VL has: one for each square of 28 pixels after the
// sides are rounded, and two around them.
func (p *part) image() []uint32 {
	var data string
	var object struct{ URL string }
	if json.Unmarshal(p.ImageURL, &data) != nil && json.Unmarshal(p.ImageURL, &object) == nil {
		data = object.URL
	}
	if data == "" {
		data = p.Source.Data
	}
	_, after, isURL := strings.Cut(data, ",")
	if isURL {
		data = after
	}
	raw, _ := base64.StdEncoding.DecodeString(data) // other data is no image
	c, _, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil {
		return nil
	}
	squares := max(1, (c.Width+14)/28) * max(1, (c.Height+14)/28)
	return make([]uint32, squares+2)
}

// form is an answer, in the form of the request's API.
type form struct {
	first, token, last string // events of a stream; token is the event of each token
	whole              string // without a stream
}

// form returns the answer to a request with n tokens.
func (q *request) form(prompt, cached, n int) form {
	text := strings.Repeat("x ", n)
	switch {
	case q.is("/responses"):
		usage := fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d}`, prompt,
			cached, n)
		done := fmt.Sprintf(`{"id":"resp_1","object":"response","output":[{"type":"message","content":[{"type":`+
			`"output_text","text":%q}]}],"usage":%s}`, text, usage)
		return form{"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\"}}\n\n",
			"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x \"}\n\n",
			"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":" + done + "}\n\n", done}
	case q.is("/messages"):
		usage := func(n int) string {
			return fmt.Sprintf(`{"input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":%d}`, prompt-cached, cached, n)
		}
		return form{"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":" + usage(0) + "}}\n\n",
			"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"x \"}}\n\n",
			"event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":" + usage(n) + "}\n\n" +
				"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
			fmt.Sprintf(`{"type":"message","content":[{"type":"text","text":%q}],"usage":%s}`, text, usage(n))}
	}
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`,
		prompt, n, cached)
	choices := func(name, text string) string {
		if q.chat() {
			return fmt.Sprintf(`{"choices":[{"index":0,%q:{"role":"assistant","content":%q}}]}`, name, text)
		}
		return fmt.Sprintf(`{"choices":[{"index":0,"text":%q}]}`, text)
	}
	whole := strings.TrimSuffix(choices("message", text), "}") + `,"usage":` + usage + "}"
	if q.is("/embeddings") || q.is("/score") || q.is("/rerank") {
		whole = `{"data":[],"results":[],"usage":` + usage + "}"
	}
	return form{"", "data: " + choices("delta", "x ") + "\n\n",
		"data: {\"choices\":[],\"usage\":" + usage + "}\n\ndata: [DONE]\n\n", whole}
}
