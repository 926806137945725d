// Package bpe makes tokens of text by a tokenizer.json of Hugging Face's tokenizers, for byte-level BPE alone: the
// vocabularies of Llama 3, Qwen 2, 2.5 and 3, DeepSeek V3 and gpt-oss.
//
//	t, err := bpe.New(data)        // the file's bytes
//	ids, err := t.Encode(ctx, ids, text) // with the tokens that the file's template puts around a prompt
//
// # Promises
//
//  1. The tokens are those of the tokenizers library, which judges (integration/judges/tokenize) compare for real
//     vocabularies, texts and every code point. What is not known to be the same is refused by [New], with what it is:
//     other models, normalizers and patterns. Patterns are recognised by their exact text, and each has a splitter that
//     is written by hand, since Go's regular expressions have no look-ahead.
//  2. A text costs n log n steps at most, for whichever text: merges wait in a heap. It ends with the context.
//  3. A Tokenizer does not change. Any number of goroutines may use it.
//
// # The way of a text
//
// Added tokens that are matched before normalization split it, the longest at the leftmost place first. A token may be
// one only where no letter is beside it, and take the spaces around it along. What is between is put into NFC, if the
// file says so, and is split by the other added tokens. What is between those is split into pieces by the pattern. The
// bytes of each piece are merged: of all neighbours the pair of the lowest rank, the first of equal ones, again and
// again. With ignore_merges a piece that is in the vocabulary is taken whole.
//
// Go's normalization puts U+034F into runs of more than 30 combining characters, as the Stream-Safe Text Format has it,
// and tokenizers does not: [Tokenizer.Encode] refuses such a text.
//
// Go's tables are of Unicode 15. A text with code points that were assigned later may be split otherwise by an
// engine, whose tables may be newer.
package bpe
