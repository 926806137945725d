package api

// RegionPrefix is the longest prefix of a prompt that a worker of a region holds. The figures of another region follow
// from its digests, which are sets with false positives.
type RegionPrefix struct {
	Region string      `json:"region" msgpack:"region"`
	Local  bool        `json:"local,omitempty" msgpack:"local,omitempty"` // the answering node's region: exact
	State  RegionState `json:"state" msgpack:"state"`
	Reason string      `json:"reason,omitempty" msgpack:"reason,omitempty"` // for people: why the state is not complete

	Blocks uint32 `json:"blocks" msgpack:"blocks"`
	Tokens uint64 `json:"tokens" msgpack:"tokens"` // of Blocks

	// PriceMS is the configured price of a request in the region, in milliseconds of time to first token; nil: none.
	PriceMS *float64 `json:"price_ms,omitempty" msgpack:"price_ms,omitempty"`

	AgeMS uint64 `json:"age_ms" msgpack:"age_ms"` // of the oldest digest in use; with the state unknown, of the last one

	// DigestBlocks of the model's HeldBlocks in the region are in the digests. Blocks of several nodes count for each.
	DigestBlocks uint64 `json:"digest_blocks" msgpack:"digest_blocks"`
	HeldBlocks   uint64 `json:"held_blocks" msgpack:"held_blocks"`

	// FalsePositiveRate is an upper bound of the probability that Blocks is too large. Each further block is 256 times
	// less likely than the one before.
	FalsePositiveRate float64 `json:"false_positive_rate" msgpack:"false_positive_rate"`
}

// RegionState is the meaning of Blocks in a [RegionPrefix].
type RegionState string

// The states.
const (
	RegionComplete RegionState = "complete" // the digests cover all blocks of the region
	RegionPartial  RegionState = "partial"  // the prefix may be longer: some blocks or partitions are unknown
	RegionUnknown  RegionState = "unknown"  // there is no recent digest, or the prompt cannot be looked up
)

// RegionsStatus describes the exchange of digests with other regions. Counts are since the node's start.
type RegionsStatus struct {
	Region string `json:"region" msgpack:"region"` // of the node

	Published      uint64 `json:"published" msgpack:"published"` // digests
	PublishedBytes uint64 `json:"published_bytes" msgpack:"published_bytes"`
	Failed         uint64 `json:"failed" msgpack:"failed"` // digests that could not be sent

	// The last digest of this node: its size, its blocks, the blocks in the index, and the time to make it.
	DigestBytes  uint64  `json:"digest_bytes" msgpack:"digest_bytes"`
	DigestBlocks uint64  `json:"digest_blocks" msgpack:"digest_blocks"`
	HeldBlocks   uint64  `json:"held_blocks" msgpack:"held_blocks"`
	MadeInMS     float64 `json:"made_in_ms" msgpack:"made_in_ms"`

	Received  uint64 `json:"received" msgpack:"received"`   // digests
	Malformed uint64 `json:"malformed" msgpack:"malformed"` // messages and digests, also of other versions
	Broken    uint64 `json:"broken" msgpack:"broken"`       // digests without some of their messages
	Refused   uint64 `json:"refused" msgpack:"refused"`     // messages beyond a limit

	// Leaks counts messages of other regions on a subject that must stay in a region.
	Leaks uint64 `json:"leaks" msgpack:"leaks"`

	Regions []RegionStatus `json:"regions" msgpack:"regions"` // others, by name
}

// RegionStatus describes the digests of another region on a node.
type RegionStatus struct {
	Region  string      `json:"region" msgpack:"region"`
	State   RegionState `json:"state" msgpack:"state"`
	Reason  string      `json:"reason,omitempty" msgpack:"reason,omitempty"`
	PriceMS *float64    `json:"price_ms,omitempty" msgpack:"price_ms,omitempty"` // nil: no configured price

	AgeMS        uint64 `json:"age_ms" msgpack:"age_ms"` // as in a [RegionPrefix]
	Nodes        int    `json:"nodes" msgpack:"nodes"`   // with a recent digest
	Bytes        uint64 `json:"bytes" msgpack:"bytes"`
	DigestBlocks uint64 `json:"digest_blocks" msgpack:"digest_blocks"`
	HeldBlocks   uint64 `json:"held_blocks" msgpack:"held_blocks"`
}
