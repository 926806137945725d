package radix

import (
	"github.com/kvatlas/kvatlas/pkg/events"
)

// RankID identifies a rank of an index. It is a dense number ([RankID.Slot]) with a generation. After [Index.DropRank],
// the slot is reused with another generation, so an old id equals no id in a later answer. A caller that looks up ranks
// by slot must compare the whole id before it credits a rank.
type RankID uint32

const (
	slotBits = 20
	slotMask = 1<<slotBits - 1
	maxSlots = 1 << slotBits
)

// Slot returns a number below the maximum number of simultaneous ranks.
func (id RankID) Slot() int { return int(id & slotMask) }

// Config limits the state of a rank besides its holdings. The zero value selects the defaults. A negative number means
// none.
type Config struct {
	// MaxPending is the maximum number of pending blocks (default 4096). The oldest event is dropped first. A pending
	// block costs pendingBlockBytes, and a pending event pendingEventBytes.
	MaxPending int

	// MaxPendingBytes limits the memory of the pending events (default 2 MiB). The oldest event is dropped first.
	MaxPendingBytes int

	// PendingFor is the age at which a pending event is dropped, by the time of [Index.Apply]. Zero or less keeps
	// events of any age.
	PendingFor events.Millis

	// MaxTombstones is the number of latest removals that are remembered with their place (default 512; negative: none).
	// A child of a removed parent is then placed. All removals of an Apply are remembered until its end. A tombstone
	// costs 28 bytes, and keeps the path to its place in memory.
	MaxTombstones int

	// TombstoneFor is the age at which a tombstone is deleted (default 60,000 ms).
	TombstoneFor events.Millis
}

// Defaults of Config.
const (
	DefaultMaxPending      = 4096
	DefaultMaxPendingBytes = 2 << 20
	DefaultMaxTombstones   = 512
	DefaultTombstoneFor    = events.Millis(60_000)
)

// Memory of pending events, as MaxPendingBytes counts it. TestPendingMemory compares it with the heap.
const (
	pendingEventBytes = 288
	pendingBlockBytes = 128
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

// Counts has the results of a list of events, in blocks unless stated otherwise. Every ignored input has a count.
type Counts struct {
	Stored          uint64 // first copies of a name in a tier, for a main group
	Duplicates      uint64 // further copies
	Removed         uint64 // copies
	UnknownRemovals uint64 // removals of missing copies: ignored
	// the name has copies at another place: the block and the rest of its event are ignored
	Conflicts      uint64
	KindConflicts  uint64 // the group was a main group before and is not now, or the reverse: ignored
	Pending        uint64 // the place of the parent, or of the block itself, is unknown
	Attached       uint64 // pending blocks with a known place; also counted as stored, duplicates or conflicts
	Cancelled      uint64 // pending copies that were removed
	Expired        uint64 // pending blocks dropped by age
	Overflowed     uint64 // pending blocks dropped by number or memory
	ClearedWaiting uint64 // pending blocks dropped by a clear
	Cleared        uint64 // copies removed by a clear
	OtherStored    uint64 // copies for groups outside of the prefix
	OtherRemoved   uint64 // such copies removed or cleared
	Malformed      uint64 // events with an unknown kind or tier, or with locals that do not match the blocks
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

// Stats has the size and the memory of an index.
type Stats struct {
	Ranks    int                    // present
	Holdings [events.NumTiers]int64 // (rank, block) pairs by tier, device first
	Blocks   int64                  // distinct blocks in memory, including dead blocks
	// blocks without holders, kept for their followers or for tombstones
	Dead       int64
	Nodes      int64  // runs of consecutive blocks
	Splits     uint64 // number of nodes that were split, because contents branched
	Pending    int64  // pending blocks
	Tombstones int64  // tombstones
	SetBlocks  int64  // (rank, tier, group, block) of groups outside of the prefix
	Bytes      Bytes
}

// Bytes is the memory by use.
type Bytes struct {
	Blocks int64 // local hashes and engine hashes
	Names  int64 // table from engine hash to block
	Nodes  int64 // runs, their edges, and their holders
	Holes  int64 // bitmaps of holes and counts of copies
	Ranks  int64 // pending events, tombstones, sets
	Total  int64
}

// Overlap is the part of a query's prefix that a rank holds: Depth[0] leading blocks in device, then Depth[1] blocks
// directly after in host, and so on in disk and external.
type Overlap struct {
	Rank  RankID
	Depth [events.NumTiers]uint32
}

// Blocks returns the length of the whole prefix, in all tiers.
func (o *Overlap) Blocks() uint32 { return o.Depth[0] + o.Depth[1] + o.Depth[2] + o.Depth[3] }

// RankSet is a set of ranks by slot, to restrict a query. The zero value is empty.
type RankSet struct{ words []uint64 }

// Add adds a rank to the set.
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
