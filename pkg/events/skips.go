package events

import "fmt"

// Skip is the reason why a decoder skipped a part of an engine's message.
type Skip uint8

// The reasons. Each reason loses an event, apart from the last five.
const (
	SkipUnknownType  Skip = iota // an event of an unknown type
	SkipMalformed                // an event that is neither array nor map, or lacks a required field
	SkipEmpty                    // an event without blocks
	SkipTooLarge                 // an event of more than maxEventTokens tokens or blocks
	SkipBlockSize                // blocks of another size than expected, or without a size; see Decoder.Diagnosis
	SkipPartialBlock             // blocks smaller than expected, possibly the tail of a block
	SkipLength                   // tokens that do not fill the blocks
	SkipToken                    // a token that is not an integer from 0 to 2^32-1
	// a name that is not an integer, bytes, or a number in digits; a removed event loses only such names
	SkipHash
	SkipRepeated // a block that follows itself
	SkipRemote   // blocks that are not local to the worker
	SkipMedium   // an unknown medium
	// an unreadable LoRA, salt or extra key: the prompts that the blocks serve are unknown
	SkipSpace
	// unreadable lookahead tokens, or different numbers of them between blocks
	SkipLookahead
	SkipCopySize // a copy below the device that is not a multiple of the rank's blocks
	// blocks of the base model or of an adapter; the engine does not announce which. See DecoderConfig.UnnamedAdapters
	SkipAdapter
	// nothing lost: reused blocks, which the engine announced when storing them
	SkipReused
	// nothing lost: copies in a shared store, without events of removal; queries ask the store
	SkipStore
	SkipField // no event lost: an optional field with a wrong type
	// no event lost: tokens of a group that is no part of the prefix and does not keep every block
	SkipGroupTokens
	// no event lost: tokens of a copy below the device without extra keys; alone they do not determine a place
	SkipCopyTokens

	skipKinds = iota
)

var skipNames = [skipKinds]string{
	SkipUnknownType:  "unknown_type",
	SkipMalformed:    "malformed_event",
	SkipEmpty:        "no_blocks",
	SkipTooLarge:     "too_large",
	SkipBlockSize:    "block_size",
	SkipPartialBlock: "partial_block",
	SkipLength:       "length_mismatch",
	SkipToken:        "bad_token",
	SkipHash:         "bad_hash",
	SkipRepeated:     "repeated_hash",
	SkipRemote:       "not_local",
	SkipMedium:       "unknown_medium",
	SkipSpace:        "unreadable_space",
	SkipLookahead:    "unreadable_lookahead",
	SkipCopySize:     "copy_size",
	SkipAdapter:      "unnamed_adapter",
	SkipReused:       "reused",
	SkipStore:        "shared_store",
	SkipField:        "field",
	SkipGroupTokens:  "sparse_group_tokens",
	SkipCopyTokens:   "copy_tokens",
}

// String returns the reason as a metric's label.
func (s Skip) String() string {
	if int(s) < len(skipNames) {
		return skipNames[s]
	}
	return fmt.Sprintf("skip(%d)", uint8(s))
}

// Loses reports whether the index lacks an event skipped for this reason.
func (s Skip) Loses() bool { return s < SkipReused && s != SkipRemote && s != SkipPartialBlock }

// SkipCounts has the number of occurrences of each reason.
type SkipCounts [skipKinds]uint64

// BlockSizeError reports that all device blocks of an engine have another size than expected. None of them can be
// indexed.
type BlockSizeError struct {
	Engine Engine
	Want   uint32 // tokens, as configured
	Got    uint32 // tokens, as announced last; 0 if block_size was 0 or missing
	Events uint64 // events skipped for this reason since the engine started
}

func (e *BlockSizeError) Error() string {
	if e.Got == 0 {
		return fmt.Sprintf(
			"events: %s announces blocks with tokens and a block_size that is 0 or missing, and blocks of %d are expected: %d events skipped, none taken; "+
				"have its publisher announce the size", e.Engine, e.Want, e.Events)
	}
	text := fmt.Sprintf(
		"events: %s announces blocks of %d tokens, and blocks of %d are expected: %d events skipped, none taken",
		e.Engine, e.Got, e.Want, e.Events)
	if option := blockSizeOptions[e.Engine]; option != "" {
		text += fmt.Sprintf("; start the engine with %s %d or expect %d", option, e.Want, e.Got)
	}
	return text
}
