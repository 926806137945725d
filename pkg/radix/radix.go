package radix

import (
	"github.com/kvatlas/kvatlas/pkg/events"
)

// RankID names a (worker, rank) that an index was told of. It is a dense number ([RankID.Slot]) with a generation: a
// slot is used again after [Index.DropRank], but with another generation, so that an id kept from before equals no id
// in a later answer. A caller that looks ranks up by slot must compare the whole id before it credits anybody.
type RankID uint32

const (
	slotBits = 20
	slotMask = 1<<slotBits - 1
	maxSlots = 1 << slotBits
)

// Slot is a number below the largest number of ranks that were ever present together.
func (id RankID) Slot() int { return int(id & slotMask) }

// Config bounds what is kept for one rank beside what it holds. The zero value takes the defaults; a negative number
// means none.
type Config struct {
	// MaxPending is the number of blocks that may wait for their parents (default 4096). The oldest event is dropped
	// first. Each block costs PendingBlockBytes while it waits, and each event PendingEventBytes.
	MaxPending int

	// MaxPendingBytes bounds the memory of the events that wait (default 2 MiB). The oldest event is dropped first.
	MaxPendingBytes int

	// PendingFor is the age at which a pending event is dropped, in the time that [Index.Apply] is given. Zero or less
	// keeps events of any age.
	PendingFor events.Millis

	// MaxTombstones is how many of the latest removals are remembered with their place (default 512), so that a child
	// announced after its parent left is still placed. All removals of one Apply are remembered until it ends. Each
	// costs 28 bytes, and keeps the path to that place in memory.
	MaxTombstones int

	// TombstoneFor is how long a removal is remembered (default 60,000 ms).
	TombstoneFor events.Millis
}

// The defaults of Config.
const (
	DefaultMaxPending      = 4096
	DefaultMaxPendingBytes = 2 << 20
	DefaultMaxTombstones   = 512
	DefaultTombstoneFor    = events.Millis(60_000)
)

// The memory of what waits, as MaxPendingBytes counts it. TestPendingMemory compares it with the heap.
const (
	PendingEventBytes = 288
	PendingBlockBytes = 128
)

func orDefault[T int | events.Millis](v, def T) T {
	switch {
	case v == 0:
		return def
	case v < 0:
		return 0
	}
	return v
}

func (c Config) withDefaults() Config {
	return Config{
		MaxPending:      orDefault(c.MaxPending, DefaultMaxPending),
		MaxPendingBytes: orDefault(c.MaxPendingBytes, DefaultMaxPendingBytes),
		PendingFor:      max(c.PendingFor, 0),
		MaxTombstones:   orDefault(c.MaxTombstones, DefaultMaxTombstones),
		TombstoneFor:    orDefault(c.TombstoneFor, DefaultTombstoneFor),
	}
}

// Counts says what became of a list of events, in blocks unless said otherwise. Nothing is passed over without a count.
type Counts struct {
	Stored          uint64 // first copies under a name in a tier, for a main group
	Duplicates      uint64 // further copies
	Removed         uint64 // copies
	UnknownRemovals uint64 // no such copy: ignored
	// the name has copies at another place: the block and what follows it in its event are ignored
	Conflicts      uint64
	KindConflicts  uint64 // the group was said to be main before and is not now, or the other way round: ignored
	Pending        uint64 // the parent, or the block's own place, is not known yet
	Attached       uint64 // pending blocks whose place became known; they count as stored, duplicates or conflicts too
	Cancelled      uint64 // pending copies that were removed
	Expired        uint64 // pending blocks dropped by age
	Overflowed     uint64 // pending blocks dropped by number or memory
	ClearedWaiting uint64 // pending blocks dropped by a clear
	Cleared        uint64 // copies that a clear took
	OtherStored    uint64 // copies for groups that are no part of the prefix
	OtherRemoved   uint64 // such copies removed or cleared
	Malformed      uint64 // events that say nothing: unknown kind or tier, or locals that do not match the blocks
}

// Add adds d to c.
func (c *Counts) Add(d Counts) {
	c.Stored += d.Stored
	c.Duplicates += d.Duplicates
	c.Removed += d.Removed
	c.UnknownRemovals += d.UnknownRemovals
	c.Conflicts += d.Conflicts
	c.KindConflicts += d.KindConflicts
	c.Pending += d.Pending
	c.Attached += d.Attached
	c.Cancelled += d.Cancelled
	c.Expired += d.Expired
	c.Overflowed += d.Overflowed
	c.ClearedWaiting += d.ClearedWaiting
	c.Cleared += d.Cleared
	c.OtherStored += d.OtherStored
	c.OtherRemoved += d.OtherRemoved
	c.Malformed += d.Malformed
}

// Stats says what an index holds and what it takes.
type Stats struct {
	Ranks    int                    // present
	Holdings [events.NumTiers]int64 // (rank, block) pairs by tier, device first
	Blocks   int64                  // distinct blocks in memory, dead ones included
	// blocks that nobody holds, kept for what follows them or because they are remembered
	Dead       int64
	Nodes      int64  // runs of consecutive blocks
	Splits     uint64 // how many nodes were ever cut in two, because contents branched
	Pending    int64  // blocks that wait
	Tombstones int64  // removals
	SetBlocks  int64  // (rank, tier, group, block) of groups that are no part of the prefix
	Bytes      Bytes
}

// Bytes is memory by what it is for.
type Bytes struct {
	Blocks int64 // local hashes and engine hashes
	Names  int64 // engine hash to block
	Nodes  int64 // runs, the edges between them, and who holds them
	Holes  int64 // bitmaps of holes and counts of copies
	Ranks  int64 // pending, remembered, sets
	Total  int64
}

// Overlap is what one rank holds of a query's prefix: Depth[0] leading blocks in device, then Depth[1] directly after
// those in host, and so on in disk and external.
type Overlap struct {
	Rank  RankID
	Depth [events.NumTiers]uint32
}

// Blocks is the length of the whole prefix, in all tiers.
func (o *Overlap) Blocks() uint32 { return o.Depth[0] + o.Depth[1] + o.Depth[2] + o.Depth[3] }

// RankSet is a set of ranks by slot, to restrict a query to. The zero value is empty.
type RankSet struct{ words []uint64 }

// Add puts a rank into the set.
func (s *RankSet) Add(id RankID) {
	i := id.Slot()
	for len(s.words) <= i>>6 {
		s.words = append(s.words, 0)
	}
	s.words[i>>6] |= 1 << (i & 63)
}

// Clear empties the set and keeps its memory.
func (s *RankSet) Clear() { clear(s.words) }

// Has reports whether a rank is in the set.
func (s *RankSet) Has(id RankID) bool {
	i := id.Slot()
	return i>>6 < len(s.words) && s.words[i>>6]>>(i&63)&1 != 0
}
