package fields

import (
	"bytes"
	"encoding/json"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// KVTransfer is the field of vLLM's requests and answers that describes a transfer of blocks between two engines.
const KVTransfer = "kv_transfer_params"

// remoteDecode is the value of KVTransfer in a request to a prefill worker.
const remoteDecode = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// Prefill returns the request for a prefill worker of vLLM: body with one token of output, without a stream, and with
// the instruction to keep the blocks for another engine. For completions and chats the form is that of vLLM's proxies
// (vllm-project/vllm › tests/v1/kv_connector/nixl_integration/toy_proxy_server.py). The body must have passed [Read].
func Prefill(a API, body []byte) []byte {
	members := []Member{{"stream", "false"}, {KVTransfer, remoteDecode}, {"stream_options", ""}}
	switch a {
	case Responses:
		// The engine with the rest of the answer stores the response.
		members = append(members, Member{"max_output_tokens", "1"}, Member{"store", "false"})
	case Messages:
		members = append(members, Member{"max_tokens", "1"})
	default:
		members = append(members, Member{"max_tokens", "1"}, Member{"min_tokens", ""}, Member{"min_completion_tokens", ""})
		if Get(body, "max_completion_tokens") != nil {
			members = append(members, Member{"max_completion_tokens", "1"})
		}
	}
	return Replace(body, members)
}

// Get returns the value of a member of a body that [Read] accepts; nil without the member.
func Get(body []byte, name string) (value []byte) {
	text := toUTF8(body)
	eachItem(text, func(quoted []byte, from, to int) {
		var is string
		if _ = strictjson.Unmarshal(quoted, &is); is == name { // a valid string
			value = text[from:to]
		}
	})
	return value
}

// Transfer returns KVTransfer of the answer of a prefill worker as JSON; nil without a description of a transfer. ok is
// false for an answer that is not an object. Of several members of the name, the last counts, as in Python.
func Transfer(answer []byte) (value []byte, ok bool) {
	if !json.Valid(answer) || answer[blank(answer, 0)] != '{' {
		return nil, false
	}
	value = Get(answer, KVTransfer)
	if len(value) == 0 || value[0] != '{' || bytes.Equal(bytes.Join(bytes.Fields(value), nil), []byte("{}")) {
		return nil, true
	}
	return value, true
}

// Transferable reports whether vLLM can transfer the blocks of a generating request from one engine to another. An
// answer of vLLM describes the transfer of a single prompt and a single answer. A response in the background has no
// description, and only the engine of the previous response can continue that response. The body must have passed
// [Read].
func (r *Request) Transferable(body []byte) bool {
	for _, name := range []string{"n", "best_of"} {
		if v := string(Get(body, name)); v != "" && v != "1" && v != "null" {
			return false
		}
	}
	for _, name := range []string{"use_beam_search", "background"} {
		if v := string(Get(body, name)); v != "" && v != "false" && v != "null" {
			return false
		}
	}
	return r.API.Generates() && r.Prompts <= 1 && r.Previous == ""
}
