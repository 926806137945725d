// Package agents converts requests of agents' APIs to chats: OpenAI's Responses and Anthropic's Messages.
//
//	chat, err := agents.Responses(body)
//	chat, err := agents.Messages(body, template)
//
// An engine renders such a request as a chat. The conversion is the conversion of vLLM 0.32 and 0.33:
// vllm/entrypoints/anthropic/serving.py, and utils.py and protocol.py of vllm/entrypoints/openai/responses. Golden
// vectors come from vLLM's own code, and integration/judges/tokenize compares random conversations.
//
// # Guarantees
//
//  1. A conversion equals vLLM's, or is an error that names the first unsupported part. Parts are unsupported if vLLM
//     refuses them, if their result depends on more than the request, or if vLLM prints them as Python values.
//  2. The conversion reads at most [api.MaxBody] bytes, nested at most [MaxDepth] deep. It copies the JSON text of
//     values such as a tool's parameters.
//  3. All functions are pure and safe for concurrent use.
//
// # Differences from chats
//
//   - The tokenizer adds its tokens around a prompt of Responses, even if the template contains the same tokens
//     ([Chat].SpecialTokens).
//   - Messages may have system messages anywhere. If the template requires a single leading system message, vLLM moves
//     the others there ([Template].MergeSystem).
//   - Disabled thinking is a reasoning effort, which depends on the template ([Template].DisabledEffort).
//   - A tool list may be empty. Templates receive an empty list.
//
// Fields that do not determine tokens are ignored. The caller decides about unknown fields.
package agents
