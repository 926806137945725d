//go:build realvllm

package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// asker makes random requests of clients. The requests depend only on the seed.
type asker struct {
	rng     *rand.Rand
	samples *harness.Samples
}

// clientRequest is a request of a client.
type clientRequest struct {
	kind string // for people
	path string
	body map[string]any

	// replaceable means that the gateway may replace the text by token ids.
	replaceable bool
}

// api returns the name of the request's API in a query.
func (q *clientRequest) api() string {
	if strings.HasSuffix(q.path, "/chat/completions") {
		return "chat"
	}
	return "completions"
}

// tokens reports whether the prompt consists of token ids.
func (q *clientRequest) tokens() bool {
	_, is := q.body["prompt"].([]uint32)
	return is
}

func (q *clientRequest) String() string {
	text, _ := json.Marshal(q.body) // the value can be encoded
	return fmt.Sprintf("%s %.600s", q.kind, text)
}

// scripts are parts of random texts that tokenizers split in different ways.
var scripts = []string{"don't I'LL we've ", "Straße naïve Łódź ﬁn ", "e\u0301\u0327 \u212b \u1100\u1161\u11a8 ",
	"съешь ещё ", "中文字漢。", "コンピューター ", "키스의 고유조건은 ", "نص حكيم ", "हिन्दी ", "👩‍👩‍👧🏽❤️🇩🇪 ", "12345 3.14 ½٣ ", "\t\n\r\n  ",
	"\u00a0\u2003\u200d\ufeff", "<|im_start|>", "<|im_end|>\n", "<|endoftext|>", "{\"a\": [1, 2.50]}", "!!??... "}

// text returns a text of a random kind with about n bytes, as JSON.
func (a *asker) text(n int) json.RawMessage {
	kind := a.rng.IntN(len(harness.SampleKinds) + 3)
	var text string
	if kind < len(harness.SampleKinds) {
		text = a.samples.Text(a.rng, harness.SampleKinds[kind], n)
	} else {
		var b strings.Builder
		for b.Len() < n {
			b.WriteString(scripts[a.rng.IntN(len(scripts))])
		}
		text = b.String()
	}
	return harness.Quoted(text, a.rng.IntN(3) == 0)
}

// next returns a request: two completions for every chat.
func (a *asker) next() clientRequest {
	q := clientRequest{path: "/v1/completions", body: map[string]any{"model": gatewayModel,
		"max_tokens": 1 + a.rng.IntN(12), "temperature": 0, "seed": a.rng.IntN(1000)}}
	if a.rng.IntN(3) == 0 {
		q.path = "/v1/chat/completions"
		a.chat(&q)
	} else {
		a.completion(&q)
	}
	if _, several := q.body["n"]; several || a.rng.IntN(4) == 0 { // vLLM refuses several answers at temperature 0
		q.body["temperature"], q.body["top_p"] = 0.8, 0.9
	}
	if a.rng.IntN(5) == 0 {
		q.body["stop"] = []string{"e", "\n"}
	}
	if a.rng.IntN(4) > 0 {
		q.body["return_token_ids"] = true
	}
	if a.rng.IntN(2) == 0 {
		q.body["stream"], q.body["stream_options"] = true, map[string]any{"include_usage": true}
		q.kind += ", streamed"
	}
	return q
}

// completion makes a completion of a random kind.
func (a *asker) completion(q *clientRequest) {
	if a.rng.IntN(4) == 0 {
		q.body["logprobs"] = a.rng.IntN(4)
	}
	q.body["prompt"] = a.text(20 + a.rng.IntN(900))
	switch a.rng.IntN(12) {
	case 0:
		q.kind, q.replaceable = "a list with one text", true
		q.body["prompt"] = []any{q.body["prompt"]}
	case 1:
		q.kind = "several texts"
		q.body["prompt"] = []any{q.body["prompt"], a.text(200), a.text(200)}
	case 2:
		q.kind = "token ids"
		q.body["prompt"] = randomTokens(a.rng, 1+a.rng.IntN(300))
	case 3:
		q.kind = "a text with an echo"
		q.body["echo"] = true
	case 4:
		q.kind = "a text without special tokens"
		q.body["add_special_tokens"] = false
	case 5:
		q.kind = "a truncated text"
		q.body["truncate_prompt_tokens"] = 1 + a.rng.IntN(60)
	case 6:
		q.kind, q.replaceable = "a long text", true
		q.body["prompt"] = harness.Quoted(a.samples.Text(a.rng, "English", 4000+a.rng.IntN(2000)), false)
	case 7:
		q.kind, q.replaceable = "a text with two answers", true
		q.body["n"] = 2
	default:
		q.kind, q.replaceable = "a text", true
	}
}

func randomTokens(rng *rand.Rand, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(rng.IntN(100_000))
	}
	return tokens
}

// chat makes a chat of a random kind.
func (a *asker) chat(q *clientRequest) {
	q.kind = "a chat"
	var messages []any
	add := func(role string, n int) {
		messages = append(messages, map[string]any{"role": role, "content": a.text(n)})
	}
	if a.rng.IntN(2) == 0 {
		add("system", 300)
	}
	for range 1 + a.rng.IntN(3) {
		add("user", 20+a.rng.IntN(600))
		add("assistant", 10+a.rng.IntN(200))
	}
	messages = messages[:len(messages)-1]
	if a.rng.IntN(4) == 0 {
		q.body["logprobs"], q.body["top_logprobs"] = true, a.rng.IntN(3)
	}
	if a.rng.IntN(5) == 0 {
		q.kind = "a chat without a generation prompt"
		q.body["add_generation_prompt"] = false
	}
	if a.rng.IntN(5) == 0 {
		q.kind += " with arguments of the template"
		q.body["chat_template_kwargs"] = map[string]any{"mood": "calm"}
	}
	q.body["messages"] = messages
}

// clientReply is the answer of an engine to a client, without the parts that differ between equal requests.
type clientReply struct {
	status                         int
	choices                        []clientChoice
	promptTokens, completionTokens int
	cached                         int    // tokens
	unsupported                    string // header of the gateway
}

// clientChoice is an answer to a prompt. A stream's parts are joined.
type clientChoice struct {
	text, finish   string
	prompt, tokens []uint32         // if the client has requested token ids
	logprobs       map[string][]any // by the name of the list
}

// sameAs reports whether the answers are equal.
func (r *clientReply) sameAs(o *clientReply) bool { return r.compared() == o.compared() }

// compared describes the compared parts.
func (r *clientReply) compared() string {
	return fmt.Sprintf("status %d, %d prompt tokens, %d tokens, %+v", r.status, r.promptTokens, r.completionTokens,
		r.choices)
}

// wireReply is the body of an answer, or a part of a stream.
type wireReply struct {
	Choices []struct {
		Index    int
		Text     string
		Message  struct{ Content string }
		Delta    struct{ Content string }
		Finish   string         `json:"finish_reason"`
		Logprobs map[string]any // lists
		Tokens   []uint32       `json:"token_ids"`
		Prompt   []uint32       `json:"prompt_token_ids"`
	}
	Prompt []uint32 `json:"prompt_token_ids"`
	Usage  *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// add adds a body, or a part of a stream.
func (r *clientReply) add(text []byte) error {
	var w wireReply
	if err := json.Unmarshal(text, &w); err != nil {
		return fmt.Errorf("%w: %.300s", err, text)
	}
	for _, c := range w.Choices {
		for len(r.choices) <= c.Index {
			r.choices = append(r.choices, clientChoice{logprobs: map[string][]any{}})
		}
		into := &r.choices[c.Index]
		into.text += c.Text + c.Message.Content + c.Delta.Content
		into.finish += c.Finish
		into.tokens = append(into.tokens, c.Tokens...)
		for name, v := range c.Logprobs {
			if list, ok := v.([]any); ok {
				into.logprobs[name] = append(into.logprobs[name], list...)
			}
		}
		into.prompt = append(into.prompt, c.Prompt...)
	}
	if len(r.choices) > 0 { // a chat has a single prompt
		r.choices[0].prompt = append(r.choices[0].prompt, w.Prompt...)
	}
	if w.Usage != nil {
		r.promptTokens, r.completionTokens = w.Usage.Prompt, w.Usage.Completion
		r.cached = w.Usage.Details.Cached
	}
	return nil
}

// send sends a request with an id to a server at a URL.
func (q *clientRequest) send(client *http.Client, url, id string) (r clientReply, err error) {
	body, err := json.Marshal(q.body)
	if err != nil {
		return r, err
	}
	request, err := http.NewRequest(http.MethodPost, url+q.path, bytes.NewReader(body))
	if err != nil {
		return r, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(harness.TestID, id)
	reply, err := client.Do(request)
	if err != nil {
		return r, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		return r, err
	}
	r.status, r.unsupported = reply.StatusCode, reply.Header.Get("X-Kvatlas-Unsupported-Fields")
	if r.status != http.StatusOK {
		return r, nil
	}
	if q.body["stream"] == nil {
		return r, r.add(text)
	}
	parts, complete := bytes.CutSuffix(text, []byte("data: [DONE]\n\n"))
	if !complete {
		return r, fmt.Errorf("the stream has no end: %.300s", text)
	}
	for part := range bytes.SplitSeq(bytes.TrimSpace(parts), []byte("\n\n")) {
		if err := r.add(bytes.TrimPrefix(part, []byte("data: "))); err != nil {
			return r, err
		}
	}
	return r, nil
}
