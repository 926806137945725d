package gateway

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// bytesPerToken is the approximate size of a token in prompts. It estimates the load of prompts without tokens.
const bytesPerToken = 4

// prompt contains the fields of a request's body that matter for the choice.
type prompt struct {
	Model     string          `json:"model"`
	Prompt    json.RawMessage `json:"prompt"` // of a completion: text, token ids, or a list of either
	CacheSalt string          `json:"cache_salt"`

	// LoRARequest names the adapter for trtllm-serve (NVIDIA/TensorRT-LLM › tensorrt_llm/serve/openai_protocol.py).
	LoRARequest json.RawMessage `json:"lora_request"`

	api.Text // of a chat; of a completion after it is read
}

// readPrompt reads the body of an OpenAI-compatible request. Only the first prompt of a list counts. Without tokens,
// the prompt's Text may be set.
func readPrompt(body []byte) (p prompt, tokens api.Tokens, err error) {
	if err := strictjson.Unmarshal(body, &p); err != nil {
		return p, nil, api.Errorf(api.CodeMalformed, "the body is not the JSON of a request: %v", err)
	}
	p.ReturnTokenIDs = false // the field is for the engine
	first := p.Prompt
	var list []json.RawMessage
	if opens(first, '[') && strictjson.Unmarshal(first, &list) == nil && len(list) > 0 &&
		(opens(list[0], '[') || opens(list[0], '"')) {
		first = list[0]
	}
	switch {
	case opens(first, '['):
		tokens, err = api.ReadTokens("prompt", first)
	case opens(first, '"'):
		err = strictjson.Unmarshal(first, &p.Text.Prompt)
	}
	return p, tokens, err
}

// numberedLoRA returns the lora_name of the adapter number in lora_request; "" without a number.
func (p *prompt) numberedLoRA() string {
	var lora struct {
		Number *uint64 `json:"lora_int_id"`
	}
	if p.LoRARequest == nil || strictjson.Unmarshal(p.LoRARequest, &lora) != nil || lora.Number == nil {
		return ""
	}
	return events.LoRAByID(strconv.FormatUint(*lora.Number, 10))
}

// opens reports whether JSON begins with a byte.
func opens(text []byte, with byte) bool {
	text = bytes.TrimLeft(text, " \t\r\n")
	return len(text) > 0 && text[0] == with
}

// estimate returns the approximate number of tokens of a text prompt.
func (p *prompt) estimate() uint64 {
	return uint64(len(p.Text.Prompt)+len(p.Messages)+len(p.Tools))/bytesPerToken + 1
}
