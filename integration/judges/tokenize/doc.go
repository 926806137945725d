// Package tokenize holds internal/text/bpe to Hugging Face's tokenizers, on the vocabularies that it is for, and
// internal/text/jinja to Jinja2, on models' chat templates, and has indexer tokenizer check
// compare both with a server of both. Build tag judges; see `make judges`. With -gonja and -harmony it repeats
// docs/measurements/2026-11-templates.md.
package tokenize
