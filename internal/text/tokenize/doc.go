// Package tokenize converts texts to tokens, with the same result as the engines of a model.
//
//	s, err := tokenize.New(tokenize.Config{Settings: settings, Endpoints: servingEndpoints})
//	tokens, err := s.Tokenize(ctx, model, text)
//
// [Settings] names a [Source] for each model:
//
//	render    a URL of vLLM's renderer: it returns the tokens that the engine would compute, images included
//	tokenize  a URL of an engine's tokenizer, of vLLM or SGLang: the same for texts
//	path      a tokenizer.json for this process (internal/text/bpe), and the chat template beside it (internal/text/jinja)
//	engines   one of the first two, at the addresses of the model's own workers
//
// A source is a [Tokenizer]. The service adds the common parts: a time limit, a bound on the texts in progress, a
// cache, and counts of outcomes.
//
// # Wire forms
//
// From vLLM's documentation (docs.vllm.ai, "Renderer APIs" and "Tokenizer API") and SGLang's source
// (python/sglang/srt/entrypoints/openai/serving_tokenize.py and protocol.py):
//
//	POST /v1/completions/render       {model, prompt} → [{token_ids, features}]
//	POST /v1/chat/completions/render  {model, messages, tools, …} → {token_ids, features}
//	POST /v1/responses/render         the whole request → {token_ids, features}, of vLLM 0.32 and later
//	POST /v1/messages/render          the same
//	POST /tokenize                    {model, prompt} or {model, messages, tools, …} → {tokens, count, …}
//	POST /v1/tokenize                 the same, of SGLang; older versions accept prompts only
//
// features.mm_placeholders contains, by modality, the offsets and lengths of the tokens in place of images and other
// media. features.mm_hashes contains the values that engines hash with these blocks ([Tokens].Media). Only the tokens
// before an item without a hash are valid for queries ([Tokens].Known). /tokenize does not return the positions of
// items, so messages with other parts than text are not sent there.
//
// # Agents' APIs
//
// A request of the Responses or Messages API ([api.Text].API and Request) goes to the renderer of the API. Without the
// renderer, internal/text/agents converts the request to a chat. GET /version must name vLLM 0.32 or later, because
// other engines convert differently.
//
// # Local chats
//
// A chat template receives the same values as in vLLM: messages with the fields that vLLM keeps, contents as one text,
// arguments of tool calls as objects, tools with all their fields in vLLM's order. Requests that engines or their
// versions treat differently are refused, and so are templates that require contents in parts, and the template of
// gpt-oss, which vLLM does not use. Only prompts and Responses have the tokens that the tokenizer adds around a text.
// Texts of a template that reads the time are not cached.
//
// # Hedges and failures
//
// Requests rotate over the URLs of a source. If a server has not answered within a quarter of the time limit, a hedged
// request goes to a second server, within the budget ([rpc.Budget]). After an unreachable or failing server (5xx), the
// next request follows at once. A refusal (4xx) is final, because all servers would refuse.
//
// # Comparison with engines' events
//
// [Announced] follows one request of each model at a time from its booking on. It checks whether the worker announces
// the blocks of this service's tokens. No other check detects that the engine uses another template or tokenizer. The
// comparison uses hashes, because engines' events contain no tokens here.
//
// # The cache
//
// The cache is an LRU, bounded by bytes. For a URL, the key is the digest of the whole request, so a repeated prompt (a
// find and then a select, or a retry) costs no request. For local chats, the cache also contains the parts between
// added tokens, because their tokens are independent of their surroundings. In a growing chat, only new parts are
// tokenized, even if its template changes earlier messages.
package tokenize
