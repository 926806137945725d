// Package tokenize holds internal/bpe to Hugging Face's tokenizers, on the vocabularies that it is for. Build tag
// judges; see `make judges`.
package tokenize
