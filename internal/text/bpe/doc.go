// Package bpe converts text to tokens by a tokenizer.json of Hugging Face's tokenizers. It supports only byte-level
// BPE: the vocabularies of Llama 3, Qwen 2, 2.5 and 3, DeepSeek V3 and gpt-oss.
//
//	t, err := bpe.New(data)        // the file's bytes
//	ids, err := t.Encode(ctx, ids, text) // with the tokens that the file's template adds around a prompt
//
// # Promises
//
//  1. The tokens equal those of the tokenizers library. Judges (integration/judges/tokenize) compare real vocabularies,
//     texts and every code point. [New] refuses files that may produce other tokens, and names the unsupported model,
//     normalizer or pattern. A pattern is recognised by its exact text. Each pattern has a hand-written splitter,
//     because Go's regular expressions have no look-ahead.
//  2. A text costs at most n log n steps: merges wait in a heap. The work ends with the context.
//  3. A Tokenizer is immutable and safe for concurrent use.
//
// # The way of a text
//
// Added tokens that are matched before normalization split the text: the leftmost match first, the longest of several.
// An added token may be restricted to matches without adjacent letters, and may include the spaces around it. The parts
// between these tokens are normalized to NFC, if the file requires it, and are split by the other added tokens. The
// pattern splits the remaining parts into pieces. The bytes of each piece are merged. Each step merges the adjacent
// pair with the lowest rank, the first of several. With ignore_merges, a piece in the vocabulary becomes its token
// directly.
//
// Go's normalization inserts U+034F into runs of more than 30 combining characters, as the Stream-Safe Text Format
// requires. The tokenizers library does not, so [Tokenizer.Encode] refuses such a text.
//
// Go's tables are those of Unicode 15. Engines with newer tables may split code points of later versions differently.
package bpe
