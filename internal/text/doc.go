// Package text converts prompts and chats to token ids.
//
//   - agents converts requests of OpenAI's Responses API and of Anthropic's Messages API to chats, as vLLM does
//   - bpe tokenizes text with a tokenizer.json: byte-level BPE, without network
//   - fields reads bodies of requests to engines, and classifies their fields
//   - jinja renders chat templates: the part of Jinja2 that templates use, exactly or not at all
//   - tokenize asks engines for the tokens of a text, with a time limit, hedges and a cache
package text
