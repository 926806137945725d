package fields

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// textFields are the fields of completions that need the text of the prompt, or change the tokens that an engine makes
// of it: an answer with them differs if the prompt is token ids. vLLM: echo returns the text, return_token_offsets
// counts in it, suffix and the others are inputs of its renderer (vllm › entrypoints/openai/completion/serving.py,
// renderers/online_renderer.py). An adapter may have a tokenizer of its own in vLLM before 0.12.
const textFields = `echo use_beam_search return_token_offsets mm_payload return_mm_kwargs add_special_tokens suffix
	truncate_prompt_tokens truncation_side lora_path lora_request`

var needsText = newTable(textFields, "", "", "", "")

// ReplacePrompt returns the body of a completion with token ids in place of its text. ok is false if the engine's
// answer could differ from the answer to the text: if the prompt is not exactly one text, if another field needs the
// text, or if an engine may refuse the body. The body must have passed [Read] without unsupported fields.
//
// A list with one text becomes a list with one list, because engines also return a list then.
func ReplacePrompt(body []byte, tokens api.Tokens) (replaced []byte, ok bool) {
	if text := toUTF8(body); len(text) != len(body) || !utf8.Valid(body) || len(tokens) == 0 {
		return nil, false
	}
	from, to := 0, 0
	possible := true
	eachItem(finite(body), func(quoted []byte, start, end int) {
		var name string
		_ = strictjson.Unmarshal(quoted, &name) // a valid string
		value := string(body[start:end])
		switch {
		case name == "prompt":
			from, to = start, end
		case needsText[name] != 0 && value != "null" && !(value == "false" && name != "add_special_tokens"):
			possible = false
		}
	})
	if !possible || to == 0 {
		return nil, false
	}
	first, list := body[from:to], body[from] == '['
	if list {
		n := 0
		eachItem(body[from:to], func(_ []byte, start, end int) {
			first = body[from+start : from+end]
			n++
		})
		if n != 1 {
			return nil, false
		}
	}
	var text string // a lone surrogate becomes U+FFFD here, and an error in an engine
	if first[0] != '"' || strictjson.Unmarshal(first, &text) != nil || strings.ContainsRune(text, utf8.RuneError) {
		return nil, false
	}
	ids := make([]byte, 0, 7*len(tokens)+2)
	if list {
		ids = append(ids, '[')
	}
	for i, id := range tokens {
		ids = strconv.AppendUint(append(ids, "[,"[min(i, 1)]), uint64(id), 10)
	}
	ids = append(ids, ']')
	if list {
		ids = append(ids, ']')
	}
	return Replace(body, []Member{{"prompt", string(ids)}}), true
}
