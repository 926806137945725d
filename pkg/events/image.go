package events

// An image is what an index holds of a set of ranks, in a form that does not depend on how the index is built: a list
// of runs and, for each rank, what does not fit into runs. It is what pkg/radix exports and takes back, and what
// pkg/snapshot writes and reads.

// RunID names a run within an image. An index gives a run the same id in one image after another for as long as it can,
// so that what did not change is written as the same bytes.
type RunID uint32

// NoRun is the parent of a run that starts a prompt.
const NoRun RunID = 1<<32 - 1

// Run is a stretch of consecutive blocks on one path from the root, and who holds which of them. In an image, a run's
// parent may come before or after it.
type Run struct {
	ID     RunID
	Space  uint32 // what can match at all: the caller's number for one (model, block size)
	Parent RunID  // NoRun at the start of a prompt
	Offset uint32 // how many of the parent's blocks come before this run's first

	Locals []LocalHash
	// one for each block: the engine hash under which ranks hold it, but for Holding.Names; 0 where nobody holds it
	Names []BlockHash

	Holdings []Holding
}

// Holding is what one rank holds of one run in one tier for one main attention group.
type Holding struct {
	Rank  uint32 // position in the image's list of ranks
	Tier  Tier
	Group GroupIndex

	Lead uint32   // the first Lead blocks are held, all of them
	Bits []uint64 // which blocks from Lead on are held: bit i%64 of word i/64 for block i of the run; nil if none is

	Copies []BlockCount // blocks held more than once (under their first name)
	Names  []BlockName  // blocks that this rank calls otherwise than Run.Names does
	Also   []NamedCount // blocks held under a second, third... name as well
}

// BlockCount says how many copies of a run's block there are: two or more.
type BlockCount struct {
	Block uint32 // position in the run
	Count uint32
}

// BlockName is a rank's own name for a run's block.
type BlockName struct {
	Block uint32 // position in the run
	Name  BlockHash
}

// NamedCount says how many copies of a run's block a rank holds under a further name: one or more.
type NamedCount struct {
	Block uint32 // position in the run
	Name  BlockHash
	Count uint32
}

// RankImage is what an index keeps for one rank beside runs.
type RankImage struct {
	Clock      Millis      // the latest time at which events of this rank were applied; ages are counted from it
	Groups     []GroupKind // by group
	Loading    Loading
	Pending    []Pending   // oldest first
	Tombstones []Tombstone // oldest first; a name may come twice, and the later one counts
	Sets       []GroupSet  // by tier and group
}

// GroupKind is what a rank said that a group serves. Window and Drops are as in [Event].
type GroupKind struct {
	Group  GroupIndex
	Kind   Attention
	Window uint32
	Drops  bool
}

// Loading is how an engine loads what it holds below its device, as far as its events have shown. The zero Loading is
// block by block.
type Loading struct {
	// Blocks is how many blocks the engine loads together: chunks of so many, counted from the prompt's start. 0 and 1
	// are single blocks.
	Blocks uint32

	// Told says that an event told Blocks. Otherwise it is the largest number that fits the places of all names so far.
	Told bool

	// Own says that the chunks have names of the connector's own (LMCache). Such a connector loads a chunk even if most of
	// it is in device; vLLM's offloading connector loads nothing if that is less than one chunk.
	Own bool
}

// Chunked reports whether a prefix below the device ends where a chunk ends.
func (l Loading) Chunked() bool { return l.Blocks > 1 }

// Pending is a stored event that waits for its parent, or, without local hashes, for its blocks to be named.
type Pending struct {
	Since     Millis
	Event     Event    // Kind is Stored; Attention is not kept
	Cancelled []uint32 // positions in Event.Blocks of copies that were removed while they waited, ascending
}

// Tombstone is the place of a block whose last copy a rank has removed.
type Tombstone struct {
	Name  BlockHash
	Run   RunID
	Block uint32 // position in the run
	Since Millis
}

// GroupSet is what a rank holds in one tier for a group that is no part of the prefix.
type GroupSet struct {
	Tier   Tier
	Group  GroupIndex
	Blocks []BlockHash
	Counts []uint32 // as many as Blocks
}
