package events

// An image is the content of an index for a set of ranks, in a form that does not depend on the index's structure: a
// list of runs, and the remaining state of each rank. pkg/radix exports and imports images;
// pkg/snapshot writes and reads them.

// RunID identifies a run within an image. An index keeps a run's id from one image to the next where possible, so
// unchanged runs result in the same bytes.
type RunID uint32

// NoRun is the parent of a run at the start of a prompt.
const NoRun RunID = 1<<32 - 1

// Run is a sequence of consecutive blocks on a path from the root, with the holders. In an image, a run's parent may
// come before or after it.
type Run struct {
	ID     RunID
	Space  uint32 // the caller's number for one (model, block size); runs of different spaces never match
	Parent RunID  // NoRun at the start of a prompt
	Offset uint32 // the number of the parent's blocks before this run's first block

	Locals []LocalHash
	// per block: the engine hash on all ranks apart from those in Holding.Names; 0 without a holder
	Names []BlockHash

	Holdings []Holding
}

// Holding lists the blocks of a run on a rank, in a tier and for a main attention group.
type Holding struct {
	Rank  uint32 // position in the image's list of ranks
	Tier  Tier
	Group GroupIndex

	Lead uint32   // the rank holds all of the first Lead blocks
	Bits []uint64 // further held blocks: bit i%64 of word i/64 for block i of the run; nil if there are none

	Copies []BlockCount // blocks held more than once (under their first name)
	Names  []BlockName  // blocks with a name different from Run.Names
	Also   []NamedCount // blocks held under further names as well
}

// BlockCount is the number of copies of a run's block: two or more.
type BlockCount struct {
	Block uint32 // position in the run
	Count uint32
}

// BlockName is a rank's own name for a run's block.
type BlockName struct {
	Block uint32 // position in the run
	Name  BlockHash
}

// NamedCount is the number of copies of a run's block under a further name: at least 1.
type NamedCount struct {
	Block uint32 // position in the run
	Name  BlockHash
	Count uint32
}

// RankImage is the state of a rank beside the runs.
type RankImage struct {
	Clock      Millis      // the latest time of applied events; ages count from this time
	Groups     []GroupKind // by group
	Loading    Loading
	Pending    []Pending   // oldest first
	Tombstones []Tombstone // oldest first; of equal names the last one counts
	Sets       []GroupSet  // by tier and group
}

// GroupKind is the kind of a group, as the rank announced it. Window and Drops are as in [Event].
type GroupKind struct {
	Group  GroupIndex
	Kind   Attention
	Window uint32
	Drops  bool
}

// Loading describes how an engine loads blocks from below the device, as far as the events have shown. The zero value
// means block by block.
type Loading struct {
	// Blocks is the size of a chunk in blocks, counted from the prompt's start. The engine loads whole chunks. 0 and 1
	// mean single blocks.
	Blocks uint32

	// Told is true if an event announced Blocks. Otherwise Blocks is the largest number that fits the places of all names
	// so far.
	Told bool

	// Own is true if the chunks have the connector's own names (LMCache). Such a connector loads a chunk even if most of
	// the blocks are in device memory; vLLM's offloading connector loads nothing if less than a chunk is missing there.
	Own bool
}

// Chunked reports whether a prefix below the device ends where a chunk ends.
func (l Loading) Chunked() bool { return l.Blocks > 1 }

// Pending is a stored event waiting for the parent, or, without local hashes, for the names of the blocks.
type Pending struct {
	Since     Millis
	Event     Event    // Kind is Stored; Attention is not kept
	Cancelled []uint32 // positions in Event.Blocks of copies removed meanwhile, ascending
}

// Tombstone records the place of a block after its rank has removed the last copy.
type Tombstone struct {
	Name  BlockHash
	Run   RunID
	Block uint32 // position in the run
	Since Millis
}

// GroupSet lists a rank's blocks in a tier for a group outside the prefix.
type GroupSet struct {
	Tier   Tier
	Group  GroupIndex
	Blocks []BlockHash
	Counts []uint32 // as many as Blocks
}
