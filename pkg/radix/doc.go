// Package radix is the index: for the local hashes of a prompt's blocks, it says how many leading blocks every
// (worker, rank) holds in each tier.
//
// Use: [New], [Index.AddRank] for every (worker, rank), [Index.Apply] for its events in the order of the log, and
// [Index.Match] for queries. [Index.StartExport] and [Index.StartImport] carry ranks from one index to another.
//
// It promises that no rank is credited with a block that it does not hold; that what it says of a rank depends on that
// rank's own events and their times alone, so that replicas of one log are equal ([Index.Checksum]); and that what it
// keeps is bounded by what is held, plus a bounded rest for each rank ([Config]).
//
// One goroutine, the writer, may call AddRank, DropRank, Apply, Checksum, Stats, RankStats, Bounded and everything
// about exports and imports. Match and Explain may be called from any goroutine at any time, and see an event as a
// whole or not at all. Match never waits for the writer, and Explain only after it was overtaken some times. So may
// MatchNames, which asks by engine hashes; it and the writer wait for each other.
//
// What events mean: a rank's copies are counted by (tier, group, engine hash). A name, that is an engine hash under
// which the rank holds a copy in whatever tier or group, stands for one place: the path of local hashes from the root.
//
//   - A stored block's place follows from its parent's: from the name, or from the latest removal of the name, if it is
//     remembered. If neither is there the event waits for the parent's name, however long, within the bounds of Config.
//     Of several that become ready the oldest goes first.
//   - A stored block whose name has copies at another place is a conflict: it and the rest of its event are ignored.
//   - A stored event without local hashes adds a copy for each block that has a name or is remembered; others wait.
//   - A stored event of a chunk with a name of the connector's own adds a copy at the place of the chunk's last block:
//     where the name is known, or where the content follows the parent's place and the rank holds or remembers the last
//     block. Others wait, for the name, the parent or that block.
//   - A removed block loses one copy; if there is none, the oldest pending copy is cancelled; if there is none either,
//     it is counted. When the last copy under a name goes, its place is remembered.
//   - Cleared takes a tier's copies, pending ones too, and remembers none of them; of all tiers, it leaves the rank as
//     new.
//   - The first stored event of a group says whether it is a main one, that is part of the prefix. A block counts as
//     held in a tier if every main group that the rank has announced holds it there. Other groups are sets of names
//     with counts.
//
// What an answer's depths are: how much of a prefix the rank's engine can reuse, which is what it holds of it, but for
// what its groups say otherwise.
//
//   - Of a prefix of n blocks a sliding group needs the last ceil((window-1) / block size), at least one, or all if
//     there are fewer; a chunked one those of the chunk in which its end lies, none if it ends with a chunk; a Mamba
//     group the last one, under which its state is kept.
//   - Groups of the same kind and window count together: a block is there for them in a tier if each of them has a copy
//     in that tier, under one name which the rank holds for a main group, in whatever tier, at that place.
//   - A group that drops its last block for a draft model needs one block behind the prefix too, and so do those that
//     count with it. Mamba groups drop nothing.
//   - Up to tier t the usable prefix is the longest of which the main groups hold all blocks in tiers up to t, as
//     above, and every other group has what it needs in some of these tiers. The depth in t is how much longer it is
//     than that up to the tier before.
//   - A group whose needs are not known (a window that was never said, a kind that we do not know, or one that the
//     engine announces nothing of) shortens nothing; the rank's depths are then an upper bound ([Index.Bounded]).
//     Encoders' groups and cross attention need nothing.
//   - Below the device, a rank whose engine loads chunks ([events.Loading]) has whole chunks, counted from the prompt's
//     start. A chunk is there if its last block is held. The engine loads one chunk at least, unless the chunks have
//     names of the connector's own.
//
// When a main group names blocks that other groups hold already, a reader may see the prefix grow in two steps.
//
// A query may name sets of tiers ([Answer.Sets]). Within such a set a prefix goes as far as each of its blocks is held
// in one of these tiers, whichever; what groups need of it they need in these tiers too.
//
// A query by engine hashes finds of each rank the blocks that it holds under these names, each at its place: the first
// is the first of a prompt, and each follows the one before it.
//
// Where things are: node.go (the tree), slabs.go (the arena), holders.go (who holds what), names.go (the table of
// engine hashes; names_amd64.s does the same many at a time), aliases.go (names for which the arena has no place),
// naming.go (whose names they are), exact.go (ranks that need more), chunks.go (engines that load chunks), apply.go
// (events), remove.go (those that remove), match.go (queries), bynames.go (those by engine hashes), windows.go,
// limits.go and ends.go (groups beside the main ones), export.go and import.go (images), check_test.go (every
// invariant, in code). DESIGN.md says why.
//
// It leaves to others who a rank is, the log, the format of snapshots, and time: it knows none but what it is given.
package radix
