// Package tokenize makes tokens of texts, as the engines of a model would.
//
//	s, err := tokenize.New(tokenize.Config{Settings: settings, Endpoints: servingEndpoints})
//	tokens, err := s.Tokenize(ctx, model, text)
//
// [Settings] names a [Source] for each model:
//
//	render    a URL of vLLM's renderer: it makes of a request the tokens that the engine would compute, images included
//	tokenize  a URL of an engine's tokenizer, of vLLM or SGLang: the same for texts
//	path      a tokenizer.json that is read here (internal/text/bpe), and the chat template beside it (internal/text/jinja)
//	engines   one of the first two, asked of the model's own workers where they serve
//
// A source is a [Tokenizer]; the service puts around it what all have in common: a time limit, a bound on how many
// texts are under way, a cache, and counts of what came of them.
//
// # Wire forms
//
// From vLLM's documentation (docs.vllm.ai, "Renderer APIs" and "Tokenizer API") and SGLang's source
// (python/sglang/srt/entrypoints/openai/serving_tokenize.py and protocol.py):
//
//	POST /v1/completions/render       {model, prompt} → [{token_ids, features}]
//	POST /v1/chat/completions/render  {model, messages, tools, …} → {token_ids, features}
//	POST /tokenize                    {model, prompt} or {model, messages, tools, …} → {tokens, count, …}
//	POST /v1/tokenize                 the same, of SGLang; older versions take prompts only
//
// features.mm_placeholders, by modality, has the offsets and lengths of the tokens that stand for images and the like,
// and features.mm_hashes what engines hash with those blocks ([Tokens].Media). Only what is before an item without a
// hash may be looked up ([Tokens].Known). /tokenize does not say where items are: messages with anything but text are
// not sent there.
//
// # Chats here
//
// A chat template gets what vLLM gives it: messages with the fields that vLLM keeps, contents as one text, arguments of
// tool calls as objects, tools with all their fields in vLLM's order. What engines or their versions take differently
// is refused, as are templates that want contents in parts, and that of gpt-oss, which vLLM does not use. Tokens are
// made without those that a prompt gets around it. A template that shows the time has its texts not kept in the cache.
//
// # Hedges and failures
//
// The URLs of a source take turns. A second one is asked beside one that has not answered within a quarter of the time
// limit, if the budget of hedged requests allows it ([rpc.Budget]), and the next one at once after one that cannot be
// reached or is in trouble itself (5xx). What a server refuses (4xx), all would: that ends it.
//
// # What engines announce
//
// [Announced] follows a request of each model at a time from its booking on, and looks whether its worker announces the
// blocks of the tokens that were made here: the only way to see that a template or a tokenizer is another than the
// engine's. It knows of no tokens but those made here; an engine's are hashes by then.
//
// # The cache
//
// An LRU, bounded by bytes. For a URL its key is the digest of the whole request, so that the same prompt asked about
// again (a find and then a select, or a retry) costs no request. For chats here it has their parts between added tokens
// too, which depend on nothing around them: of a chat that grows only what is new is made tokens of, whatever its
// template does to earlier messages.
package tokenize
