// Package tokenize compares internal/text with the libraries of engines: internal/text/bpe with Hugging Face's
// tokenizers, internal/text/jinja with Jinja2 on chat templates of models, and internal/text/agents with vLLM's own
// conversion of Responses and Messages. It runs indexer tokenizer check against a server of the libraries. Build tag
// judges; see `make judges`. With -gonja and -harmony it repeats docs/measurements/2026-11-templates.md.
package tokenize
