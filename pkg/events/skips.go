package events

import "fmt"

// Skip is the reason why a decoder skipped a part of an engine's message.
type Skip uint8

// The reasons. Each reason loses an event, apart from the last five.
const (
	skipUnknownType  Skip = iota // an event of an unknown type
	skipMalformed                // an event that is neither array nor map, or lacks a required field
	skipEmpty                    // an event without blocks
	skipTooLarge                 // an event of more than maxEventTokens tokens or blocks
	SkipBlockSize                // blocks of another size than expected, or without a size; see Decoder.Diagnosis
	skipPartialBlock             // blocks smaller than expected, possibly the tail of a block
	skipLength                   // tokens that do not fill the blocks
	skipToken                    // a token that is not an integer from 0 to 2^32-1
	// a name that is not an integer, bytes, or a number in digits; a removed event loses only such names
	skipHash
	skipRepeated // a block that follows itself
	skipRemote   // blocks that are not local to the worker
	skipMedium   // an unknown medium
	// an unreadable LoRA, salt or extra key: the prompts that the blocks serve are unknown
	skipSpace
	// unreadable lookahead tokens, or different numbers of them between blocks
	skipLookahead
	SkipCopySize // a copy below the device that is not a multiple of the rank's blocks
	// blocks of the base model or of an adapter; the engine does not announce which. See DecoderConfig.UnnamedAdapters
	SkipAdapter
	// nothing lost: reused blocks, which the engine announced when storing them
	skipReused
	// nothing lost: copies in a shared store, without events of removal; queries ask the store
	skipStore
	skipField // no event lost: an optional field with a wrong type
	// no event lost: tokens of a group that is no part of the prefix and does not keep every block
	skipGroupTokens
	// no event lost: tokens of a copy below the device without extra keys; alone they do not determine a place
	skipCopyTokens

	skipKinds = iota
)

var skipNames = [skipKinds]string{
	skipUnknownType:  "unknown_type",
	skipMalformed:    "malformed_event",
	skipEmpty:        "no_blocks",
	skipTooLarge:     "too_large",
	SkipBlockSize:    "block_size",
	skipPartialBlock: "partial_block",
	skipLength:       "length_mismatch",
	skipToken:        "bad_token",
	skipHash:         "bad_hash",
	skipRepeated:     "repeated_hash",
	skipRemote:       "not_local",
	skipMedium:       "unknown_medium",
	skipSpace:        "unreadable_space",
	skipLookahead:    "unreadable_lookahead",
	SkipCopySize:     "copy_size",
	SkipAdapter:      "unnamed_adapter",
	skipReused:       "reused",
	skipStore:        "shared_store",
	skipField:        "field",
	skipGroupTokens:  "sparse_group_tokens",
	skipCopyTokens:   "copy_tokens",
}

// String returns the reason as a metric's label.
func (s Skip) String() string {
	if int(s) < len(skipNames) {
		return skipNames[s]
	}
	return fmt.Sprintf("skip(%d)", uint8(s))
}

// Loses reports whether the index lacks an event skipped for this reason.
func (s Skip) Loses() bool { return s < skipReused && s != skipRemote && s != skipPartialBlock }

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
