package fields

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"image"
	"image/png"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestTables: no name has two classes in a table.
func TestTables(t *testing.T) {
	for _, names := range []string{generation + " " + generationUnsupported + " " + identityFields + " " + openAI,
		pooling + " " + scoringUnsupported + " " + identityFields} {
		seen := map[string]bool{}
		for _, name := range strings.Fields(names) {
			if seen[name] {
				t.Errorf("%s is listed twice", name)
			}
			seen[name] = true
		}
	}
}

func TestOfPath(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/completions": Completions, "/v1/chat/completions": Chat, "/llama/v1/chat/completions/?a=/v1/score": Chat,
		"/v1/responses": Responses, "/v1/messages": Messages, "/v1/embeddings": Embeddings, "/score": Score,
		"/v2/rerank": Rerank, "": "", "/v1/models": "", "/v1/chat/completions/batch": "", "/v1/messages/count_tokens": "",
	} {
		if got := OfPath(path); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
}

// show formats the parts of a request.
func show(r *Request) string {
	t := r.Text
	text := fmt.Sprintf("%s tokens %v prompt %q messages %s request %s", r.API, r.Tokens, t.Prompt, t.Messages, t.Request)
	return text + fmt.Sprintf(" salt %q lora %q unsupported %v", r.Salt, r.LoRA, r.Unsupported)
}

func TestRead(t *testing.T) {
	const m = `"messages":[{"role":"user"}]`
	const messages = `messages [{"role":"user"}]`
	for _, c := range []struct {
		api        API
		body, want string
	}{
		{"", `{"prompt":"a","temperature":0.5,"user":"u"}`,
			`completions tokens [] prompt "a" messages  request  salt "" lora "" unsupported []`},
		{"", `{"prompt":[[1,2],[3]],"cache_salt":"s","add_special_tokens":false}`,
			`completions tokens [1 2] prompt "" messages  request  salt "s" lora "" unsupported []`},
		{"", `{"prompt":"a","add_special_tokens":false,"truncate_prompt_tokens":5}`,
			`completions tokens [] prompt "a" messages  request {"add_special_tokens":false,"truncate_prompt_tokens":5} ` +
				`salt "" lora "" unsupported []`},
		{"", `{"prompt":[1,2],"truncate_prompt_tokens":1,"suffix":"x","prompt_embeds":"AA=="}`,
			`completions tokens [1 2] prompt "" messages  request  salt "" lora "" ` +
				`unsupported [prompt_embeds truncate_prompt_tokens suffix]`},
		{Chat, `{` + m + `,"reasoning_effort":"high","documents":[{"a":"b"}],"extra_key":"","thinking":null,"task":"query"}`,
			`chat tokens [] prompt "" ` + messages + ` request {"reasoning_effort":"high","documents":[{"a":"b"}]} ` +
				`salt "" lora "" unsupported [task]`},
		{Chat, `{` + m + `,"extra_key":"k","reasoning":{"effort":"low"},"kv_transfer_params":{"prompt_token_ids":[1]}}`,
			`chat tokens [] prompt "" ` + messages + ` request  salt "" lora "" ` +
				`unsupported [extra_key reasoning kv_transfer_params]`},
		{Responses, `{"model":"m","input":"hi","tools":[],"stream":true,"cache_salt":"s","include":["x"]}`,
			`responses tokens [] prompt "" messages  request {"input":"hi","tools":[]} salt "s" lora "" unsupported []`},
		{Responses, `{"input":[1],"previous_response_id":"resp_1","new_field":1}`,
			`responses tokens [] prompt "" messages  request {"input":[1]} salt "" lora "" ` +
				`unsupported [previous_response_id new_field]`},
		{Messages, `{"system":"s",` + m + `,"max_tokens":5,"thinking":{"type":"disabled"},"metadata":{},"betas":["x"]}`,
			`messages tokens [] prompt "" messages  request {"system":"s",` + m + `,"max_tokens":5,` +
				`"thinking":{"type":"disabled"}} salt "" lora "" unsupported []`},
		{Chat, `{` + m + `,"lora_path":"a","cache_salt":["x"]}`,
			`chat tokens [] prompt "" ` + messages + ` request  salt "" lora "a" unsupported [cache_salt]`},
		{Chat, `{` + m + `,"lora_request":{"lora_int_id":3},"add_generation_prompt":"true"}`,
			`chat tokens [] prompt "" ` + messages + ` request  salt "" lora "lora_id:3" unsupported [add_generation_prompt]`},
		{Chat, `{` + m + `,"Cache_Salt":"s","new\nline":1,"` + strings.Repeat("x", 99) + `":1,"temperature":NaN}`,
			`chat tokens [] prompt "" ` + messages + ` request  salt "" lora "" unsupported [Cache_Salt other]`},
		{Chat, `{` + m + `,"chat_template_kwargs":{"x":-Infinity},"documents":"NaN","top_p":Infinity}`,
			`chat tokens [] prompt "" ` + messages + ` request {"documents":"NaN"} salt "" lora "" ` +
				`unsupported [chat_template_kwargs]`},
		{Embeddings, `{"input":[5,6],"dimensions":3}`,
			`embeddings tokens [5 6] prompt "" messages  request  salt "" lora "" unsupported []`},
		{Embeddings, `{"input":"text"}`,
			`embeddings tokens [] prompt "" messages  request  salt "" lora "" unsupported [input]`},
		{Score, `{"queries":"a","documents":["b"],"cache_salt":"s"}`,
			`score tokens [] prompt "" messages  request  salt "s" lora "" unsupported [queries documents]`},
		{Rerank, `{"query":"a","documents":["b"],"top_n":3}`,
			`rerank tokens [] prompt "" messages  request  salt "" lora "" unsupported [query documents]`},
		{"", `{"text":"a","input_ids":[1]}`, ` tokens [] prompt "" messages  request  salt "" lora "" unsupported []`},
	} {
		for name, encode := range encodings {
			r, err := Read(c.api, encode(c.body))
			if err != nil {
				t.Errorf("%s in %s: %v", c.body, name, err)
			} else if got := show(r); got != c.want {
				t.Errorf("%s in %s:\n%s\nwant\n%s", c.body, name, got, c.want)
			}
		}
	}
	for _, body := range []string{``, `[]`, `{"a":1`, `{"a":1}x`, `"a"`, `{"a":1,"a":2}`, `{"a":nan}`, `{"model":1}`,
		`{"a":-NaN}`} {
		if r, err := Read("", []byte(body)); err == nil {
			t.Errorf("%s is read as %s", body, show(r))
		}
	}
}

// encodings are the forms of a body that Python's json module accepts.
var encodings = map[string]func(string) []byte{
	"UTF-8":           func(s string) []byte { return []byte(s) },
	"UTF-8 with mark": func(s string) []byte { return []byte("\ufeff" + s) },
	"UTF-16LE":        func(s string) []byte { return utf16Bytes(s, binary.LittleEndian) },
	"UTF-16BE":        func(s string) []byte { return utf16Bytes(s, binary.BigEndian) },
	"UTF-16 with mark": func(s string) []byte {
		return utf16Bytes("\ufeff"+s, binary.LittleEndian)
	},
	"UTF-32LE": func(s string) []byte { return utf32Bytes(s, binary.LittleEndian) },
	"UTF-32 with mark": func(s string) []byte {
		return utf32Bytes("\ufeff"+s, binary.BigEndian)
	},
}

func utf16Bytes(s string, order binary.AppendByteOrder) (b []byte) {
	for _, u := range utf16.Encode([]rune(s)) {
		b = order.AppendUint16(b, u)
	}
	return b
}

func utf32Bytes(s string, order binary.AppendByteOrder) (b []byte) {
	for _, c := range s {
		b = order.AppendUint32(b, uint32(c))
	}
	return b
}

// TestPartial: a request is partial if the prompt has more tokens than the body.
func TestPartial(t *testing.T) {
	for _, c := range []struct {
		api  API
		body string
		want bool
	}{
		{Completions, `{"prompt":[[1],[2]],"temperature":NaN,"session_params":null}`, false},
		{Chat, `{"messages":[],"previous_response_id":null,"task":"query"}`, false},
		{Responses, `{"input":"a","previous_response_id":""}`, false},
		{Embeddings, `{"input":["a","b"]}`, false},
		{"", `{"prompt":"a"}`, false},
		{"", `{"x":"a"}`, true},
		{Responses, `{"input":"a","previous_response_id":"resp_1"}`, true},
		{Chat, `{"messages":[],"session_params":{"id":"a"}}`, true},
		{Chat, `{"messages":[],"documents":[NaN]}`, true},
		{Score, `{"queries":"a","documents":["b","c"]}`, true},
		{Rerank, `{"query":"a","documents":["b","c"]}`, true},
	} {
		if r, err := Read(c.api, []byte(c.body)); err != nil || r.Partial != c.want {
			t.Errorf("%s: %v, %v, want %v", c.body, r.Partial, err, c.want)
		}
	}
}

// TestExpand merges the fields of a query with those of its request.
func TestExpand(t *testing.T) {
	r, err := Expand(&api.Text{Messages: api.Value(`[{}]`), Request: api.Value(`{"cache_salt":"s","x":1,"tools":[{}]}`)})
	if want := `chat tokens [] prompt "" messages [{}] request  salt "s" lora "" unsupported [x]`; err != nil ||
		show(r) != want || string(r.Text.Tools) != `[{}]` {
		t.Errorf("%s, %v, want %s", show(r), err, want)
	}
	again, err := Expand(&r.Text)
	if err != nil || again.Text.API != "chat" || string(again.Text.Messages) != `[{}]` {
		t.Errorf("expanded again: %s, %v", show(again), err)
	}
	for _, text := range []api.Text{{Prompt: "a", Request: api.Value(`{"prompt":"b"}`)}, {API: "chats", Prompt: "a"},
		{Request: api.Value(`{"a":1,"a":1}`)}} {
		if _, err := Expand(&text); err == nil {
			t.Errorf("%+v is accepted", text)
		}
	}
}

// TestLength compares estimates with their bounds.
func TestLength(t *testing.T) {
	picture := func(width, height int) string {
		var b bytes.Buffer
		if err := png.Encode(&b, image.NewGray(image.Rect(0, 0, width, height))); err != nil {
			t.Fatal(err)
		}
		return base64.StdEncoding.EncodeToString(b.Bytes())
	}
	part := func(p string) string { return `{"messages":[{"role":"user","content":[` + p + `]}]}` }
	random := make([]byte, 2250)                    // 3,000 characters, of which vocabularies have 2,050 to 2,220 tokens
	_, _ = rand.NewChaCha8([32]byte{}).Read(random) // never fails
	prompts := `{"prompt":["` + strings.Join(slices.Repeat([]string{strings.Repeat("word ", 800)}, 64), `","`) + `"]}`
	for _, c := range []struct {
		name, body  string
		least, most uint64
	}{
		{"a batch of prompts", prompts, 47_000, 56_000},
		{"a batch of token ids", `{"prompt":[` + strings.Repeat("[1,2,3,4],", 99) + `[5]]}`, 397, 400},
		{"instructions and input", `{"instructions":"x","input":"` + strings.Repeat("word ", 8000) + `"}`, 7_200, 8_800},
		{"data without a header", part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
			strings.Repeat("iVBORw0KGgo", 1000) + `"}}`), 500, 3000},
		{"a picture", part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + picture(560, 560) + `"}}`),
			400, 450},
		{"a large picture", part(`{"type":"image","source":{"type":"base64","data":"` + picture(5600, 5600) + `"}}`),
			16384, 16450},
		{"a picture elsewhere", part(`{"type":"image_url","image_url":{"url":"https://x.example/a.png"}}`), 1000, 1050},
		{"Chinese", `{"prompt":"` + strings.Repeat("每天早上我都喝茶", 100) + `"}`, 480, 560},
		{"escaped Chinese", `{"prompt":"` + strings.Repeat(`\u6bcf\u5929\u65e9\u4e0a\u6211\u90fd\u559d\u8336`, 100) + `"}`,
			480, 560},
		{"base64 as text", `{"prompt":"` + base64.StdEncoding.EncodeToString(random) + `"}`, 1800, 2300},
		{"an empty prompt", `{"prompt":""}`, 0, 0},
		{"a link in a text", `{"messages":[{"role":"user","content":"https://x.example/a.png"}]}`, 5, 30},
	} {
		r, err := Read("", []byte(c.body))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if n := new(Estimator).Tokens("m", &r.Length); n < c.least || n > c.most {
			t.Errorf("%s: %d tokens, want %d to %d", c.name, n, c.least, c.most)
		}
	}
}

// TestReplace: a body in any encoding of JSON gets the new members once, at its end.
func TestReplace(t *testing.T) {
	wide := []byte{0xff, 0xfe}
	for _, c := range `{"a": "\u00e9}", "x":{"x":1}}` {
		wide = append(wide, byte(c), 0)
	}
	for body, want := range map[string]string{
		`{}`: `{"x":"1","y":2}`, ` {"x" : NaN , "a":[ {"x":1}],"y":0 } `: `{"a":[ {"x":1}],"x":"1","y":2}`,
		`{"\u0078":5,"b":-Infinity}`: `{"b":-Infinity,"x":"1","y":2}`, string(wide): `{"a":"\u00e9}","x":"1","y":2}`,
		"\xef\xbb\xbf{\"a\":1}": `{"a":1,"x":"1","y":2}`,
	} {
		if _, err := Read("", []byte(body)); err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		if got := Replace([]byte(body), []Member{{"x", `"1"`}, {"y", "2"}}); string(got) != want {
			t.Errorf("%q becomes %s, want %s", body, got, want)
		}
	}
}

// TestEstimator: estimates approach the numbers of the engines, separately for each model. Absurd numbers and prompts
// of token ids alone have bounded effects.
func TestEstimator(t *testing.T) {
	read := func(body string) *Length {
		r, err := Read("", []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		return &r.Length
	}
	var e Estimator
	words, ids := read(`{"prompt":"`+strings.Repeat("word ", 1000)+`"}`), read(`{"prompt":[1,2,3]}`)
	chat := read(`{"messages":[{"role":"user","content":"hi"}]}`)
	first := e.Tokens("m", words)
	for range 100 {
		e.Learn("m", words, 1500)
		e.Learn("m", chat, 35) // a template with a long preamble
	}
	for l, want := range map[*Length]uint64{words: 1500, chat: 35, ids: 3} {
		if n := e.Tokens("m", l); n < want*98/100 || n > want*102/100 {
			t.Errorf("%+v has %d tokens, want %d", *l, n, want)
		}
	}
	if n := e.Tokens("other", words); n != first {
		t.Errorf("another model has %d tokens, want %d", n, first)
	}
	for range 100 {
		e.Learn("x", words, 1<<40)
		e.Learn("x", ids, 1<<40)
		e.Learn("y", words, 1)
		e.Learn("x", new(Length), 5)
	}
	if more, less := e.Tokens("x", words), e.Tokens("y", words); more > 5000 || less < 190 || e.Tokens("x", ids) != 3 {
		t.Errorf("after absurd numbers: %d and %d tokens", more, less)
	}
	for i := range 2 * maxModels {
		e.Learn(fmt.Sprint(i), words, 1000)
	}
	if len(e.models) > maxModels {
		t.Errorf("%d models are kept", len(e.models))
	}
}

func BenchmarkLength(b *testing.B) {
	text := strings.Repeat(`It rains 12 times, \n每天 a Day. `, 3000)
	body := []byte(`{"messages":[{"role":"user","content":"` + text + `"}]}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := Read(Chat, body); err != nil {
			b.Fatal(err)
		}
	}
}
