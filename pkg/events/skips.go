package events

import "fmt"

// Skip is why a decoder passed over something in an engine's message.
type Skip uint8

// What is passed over. All but the last five of these lose an event.
const (
	SkipUnknownType  Skip = iota // an event of a type that we do not know
	SkipMalformed                // an event that is neither array nor map, or lacks what it must have
	SkipEmpty                    // an event that names no block
	SkipTooLarge                 // an event of more than maxEventTokens tokens or blocks
	SkipBlockSize                // blocks of another size than expected, or of none; see Decoder.Diagnosis
	SkipPartialBlock             // blocks that are smaller than expected, and may be the tail of a block
	SkipLength                   // tokens that do not fill the blocks: some of them are not kept
	SkipToken                    // a token that is no integer from 0 to 2^32-1
	// a name that is no integer, bytes, or number in digits; of a removed event no more is lost than such names
	SkipHash
	SkipRepeated // a block that follows itself
	SkipRemote   // blocks that are not local to the worker
	SkipMedium   // a medium that we do not know
	// a LoRA, a salt or an extra key that cannot be read: no saying which prompts the blocks serve
	SkipSpace
	// lookahead tokens that cannot be read, or are not equally many of each block: likewise
	SkipLookahead
	SkipCopySize // a copy below the device that is no whole number of the rank's blocks
	// blocks of the base model or of an adapter: the engine does not announce which; see DecoderConfig.UnnamedAdapters
	SkipAdapter
	// nothing lost: blocks that a request reuses, which were announced when they were stored
	SkipReused
	// nothing lost: copies in a shared store, of which the engine announces no removal; the store itself is asked
	SkipStore
	SkipField // not an event: a field that is not needed and has a wrong type
	// not an event: tokens of a group that is no part of the prefix, and keeps not every block
	SkipGroupTokens
	// not an event: tokens of a copy below the device that come without extra keys. They tell no place alone
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

// String is the reason as a label of a metric.
func (s Skip) String() string {
	if int(s) < len(skipNames) {
		return skipNames[s]
	}
	return fmt.Sprintf("skip(%d)", uint8(s))
}

// Loses reports whether what is passed over for the reason was an event that the index lacks then.
func (s Skip) Loses() bool { return s < SkipReused && s != SkipRemote && s != SkipPartialBlock }

// SkipCounts says how often each reason occurred.
type SkipCounts [skipKinds]uint64

// BlockSizeError says that all device blocks of an engine have another size than was expected, so that none of them
// can be indexed.
type BlockSizeError struct {
	Engine Engine
	Want   uint32 // tokens, as configured
	Got    uint32 // tokens, as announced last; 0 if block_size was 0 or missing
	Events uint64 // how many events were skipped for that since the engine began
}

func (e *BlockSizeError) Error() string {
	if e.Got == 0 {
		return fmt.Sprintf(
			"events: %s announces blocks with tokens and a block_size that is 0 or missing, and blocks of %d are expected: %d events skipped, none taken; "+
				"have its publisher say the size", e.Engine, e.Want, e.Events)
	}
	text := fmt.Sprintf(
		"events: %s announces blocks of %d tokens, and blocks of %d are expected: %d events skipped, none taken",
		e.Engine, e.Got, e.Want, e.Events)
	if option := blockSizeOptions[e.Engine]; option != "" {
		text += fmt.Sprintf("; start the engine with %s %d or expect %d", option, e.Want, e.Got)
	}
	return text
}
