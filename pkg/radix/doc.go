// Package radix is the index. For the local hashes of a prompt's blocks, it returns the number of leading blocks that
// each rank of a worker holds in each tier.
//
// # Use
//
// Call [New], [Index.AddRank] for each rank, [Index.Apply] for the events of a rank in the order of the log, and
// [Index.Match] for queries. [Index.StartExport] and [Index.StartImport] move ranks from an index to another.
//
// # Guarantees
//
//  1. A rank gets credit only for blocks that it holds.
//  2. The answer for a rank depends only on the events of the rank and their times. So replicas of a log are equal
//     ([Index.Checksum]).
//  3. The memory is bounded by the held blocks plus a limit for each rank ([Config]).
//
// # Concurrency
//
// A single goroutine, the writer, may call AddRank, DropRank, Apply, Checksum, Stats, RankStats, DeviceMemory, Bounded,
// Path and the methods of exports and imports. Match, Explain and MatchNames are safe for concurrent use. A reader sees
// a whole event or nothing of it. Match never blocks on the writer. Explain blocks only after several overtaken tries.
// MatchNames, a query by engine hashes, and the writer exclude each other.
//
// # Meaning of events
//
// The copies of a rank are counted by (tier, group, engine hash). A name is an engine hash under which the rank holds a
// copy in any tier or group. A name has a single place: the path of local hashes from the root.
//
//   - The place of a stored block follows from the place of the parent's name: the current place, or the place of the
//     latest remembered removal. If both are missing, the event is pending until the parent's name appears, within the
//     limits of Config. Of several ready events, the oldest goes first.
//   - A stored block whose name has copies at another place is a conflict. The index ignores the block and the rest of
//     the event.
//   - A stored event without local hashes adds a copy for each block with a known or remembered name. The other blocks
//     are pending.
//   - A stored event of a chunk with a name of the connector adds a copy at the place of the chunk's last block. The
//     place follows from the name, or from the content after the parent if the rank holds or remembers the last block.
//     Other chunks are pending until the name, the parent or the block appears.
//   - A removed block loses a copy. Without a copy, the oldest pending copy is cancelled. Without a pending copy, the
//     removal is counted. When the last copy of a name goes, the place is remembered.
//   - Cleared removes the copies of a tier, also pending copies, and remembers none. Cleared for all tiers makes the
//     rank new.
//   - The first stored event of a group defines whether the group is a main group, that is, part of the prefix. A block
//     is held in a tier if all announced main groups of the rank hold the block there. Other groups are sets of names
//     with counts.
//
// # Depths
//
// The depths in an answer are the part of a prefix that the rank's engine can reuse. It is the held part, shortened by
// the rules of the groups:
//
//   - For a prefix of n blocks, a sliding group needs the last ceil((window-1) / block size) blocks, at least one, or
//     all blocks of a shorter prefix. A chunked group needs the blocks of the last incomplete chunk. A Mamba group
//     needs the last block, which has the state.
//   - Groups with equal kind and window count together. A block counts for them in a tier if each of them has a copy in
//     the tier, under the same name. The rank must hold the name at the place for a main group, in any tier.
//   - A group that drops its last block for a draft model also needs a block after the prefix, and so do the groups
//     that count with it. Mamba groups drop nothing.
//   - The usable prefix up to tier t is the longest prefix with two properties. The main groups hold all blocks in
//     tiers up to t, and every other group has its blocks in these tiers. The depth in t is the difference to the
//     previous tier.
//   - A group with unknown needs shortens nothing (an unannounced window, an unknown kind, or a group without events).
//     The depths of the rank are then upper bounds ([Index.Bounded]). Encoder groups and cross attention need nothing.
//   - Below the device, a rank whose engine loads chunks ([events.Loading]) has only whole chunks, which count from the
//     start of the prompt. A chunk is present if its last block is held. The engine loads at least one chunk, unless
//     the connector names the chunks.
//
// If a main group announces blocks that other groups hold already, a reader may see the prefix grow in two steps.
//
// A query may name sets of tiers ([Answer.Sets]). In such a set, a block counts if any of the tiers has the block. The
// needs of groups count in these tiers too.
//
// A query by engine hashes finds the blocks of each rank with these names, each at its place: the first block starts a
// prompt, and each block follows the previous block.
//
// # Files
//
// node.go (tree), slabs.go (arena), holders.go (holders of blocks), names.go (table of engine hashes; names_amd64.s
// handles several at once), aliases.go (names without a place in the arena), naming.go (owners of names), exact.go
// (exact counts), chunks.go (engines that load chunks), apply.go (events), remove.go (removals), match.go (queries),
// bynames.go (queries by engine hashes), windows.go, limits.go and ends.go (groups besides the main groups), export.go
// and import.go (images), check_test.go (all invariants, in code). DESIGN.md has the reasons.
//
// Other packages define the identity of ranks, the log, the format of snapshots, and time.
package radix
