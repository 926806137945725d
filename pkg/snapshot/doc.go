// Package snapshot answers: how is what an index holds of one partition written down so that it comes back exactly,
// that little is written when little has changed, and that no crash, no second writer and no damaged byte can make a
// reader believe something wrong?
//
// It is format and plan. It knows pkg/events and nothing of NATS: bytes come in and go out by functions of the caller.
//
// # In order of use
//
// To take a snapshot: [PlanWrite] looks at what is in the bucket and says what is kept and which generation comes next;
// a [Writer] takes the image run by run and rank by rank and hands finished chunks to a callback; [Writer.Close] gives
// the [Manifest]. When the manifest has taken its place in the bucket, [WritePlan.After] says which keys are garbage
// and up to where the log may be purged, and the [RunIndex] is kept for the next Writer.
//
// To restore: [Choose] says which generations can be used, newest first, and why the others cannot; [Ranks] gives the
// table of ranks; a [Reader] takes the chunks in the order of [Manifest.Restore] and gives the image to a [Sink], and
// again a RunIndex at the end. If a chunk is bad, take the next generation, with a new sink: what the old one got is
// incomplete. A shim that looks only for its cursor uses [FindRank].
//
// # Promises
//
//  1. What a Writer took, a Reader gives back, but for the order of runs, empty ends of bitmaps, and nil for empty.
//  2. A byte that differs from what was written is an error: ErrCorrupt, before the sink is done (Close). A later
//     format is ErrVersion. Nothing that is read makes this package panic, or take more memory than [maxChunk] and what
//     the image itself needs.
//  3. A snapshot of an image that did not change writes no chunk. With the run index, one that changed writes the runs
//     that changed, the ranks that changed, and a little of what is needed to keep dead records at an eighth.
//  4. Whatever step a writer dies at, and however many write: as long as [PlanWrite]'s order is kept there is a whole
//     generation in the bucket whose log is still there.
//  5. The same calls give the same bytes.
//
// Nothing here starts a goroutine, reads a clock or logs. Writers and Readers are for one goroutine each; manifests,
// run indexes and plans do not change and can be shared.
//
// # Keys
//
//	p3.manifest                                  the current manifest: the one key that writers compare and set
//	p3.g41                                       the manifest before it, as it was
//	p3.c42.9f86d081884c7d659a2feaa0c55ad015      a chunk, first written for generation 42; XXH3-128 of its bytes
//
// DESIGN.md beside this file says why.
//
// # A chunk
//
// Numbers are little-endian. Every chunk has two columns: fields (small numbers, as varints) and words (64-bit things:
// hashes and bitmaps). Each is packed with zstd if that makes it an eighth smaller. Magic, version and checksum are
// where they are in every version to come.
//
//	 0      4     6    7    8        12       16       20       24
//	+------+-----+----+----+--------+--------+--------+--------+----------+---------+----------+
//	| kvsn | ver |kind|pack| fields | fields | words  | words  |  fields  |  words  |  XXH3-64 |
//	|      | u16 | u8 | u8 | stored |  raw   | stored |  raw   |          |         |  of all  |
//	|      |     |    |    |  u32   |  u32   |  u32   |  u32   |          |         |  before  |
//	+------+-----+----+----+--------+--------+--------+--------+----------+---------+----------+
//	kind: 1 ranks, 2 dead, 3 holdings, 4 runs, 5 state      pack: fields' in the low 4 bits, words' in the high; 0 none, 1 zstd
//
// uint is a varint as in encoding/binary; int is one with the sign in the lowest bit; ~x is the distance to the x of
// the record before (0 at the start of a chunk or section) as an int.
//
// # Runs
//
//	+-------+-----+-------+----------------+--------+-----+--------------------+--------------------+
//	| flags | ~id | space | parent - id    | offset | n   | from, count        | named              |
//	|  u8   | int | uint  | int, if 1      | uint   |uint | uint, if 2         | bitmap, if 4       |   fields
//	+-------+-----+-------+----------------+--------+-----+--------------------+--------------------+
//	| local hashes, one a block            | names that are not 0                                   |   words
//	+--------------------------------------+--------------------------------------------------------+
//	flags: 1 has a parent, 2 a piece of a long run, alone in its chunk, 4 some blocks have no name, 8 none has
//
// # Dead
//
// For each chunk of runs in which records no longer count, because the run has gone or is written elsewhere: words: the
// chunk's hash, high half first; fields: how many, and the distances between their positions (less one, but for the
// first).
//
// # Sections: holdings and state
//
//	+--------+----------+------+--------+-------+------------------+
//	| length | instance | rank | fields | words | records          |   fields
//	|  uint  |          | uint |  uint  | uint  | (fields bytes)   |
//	+--------+----------+------+--------+-------+------------------+
//
// A holding's record; what is more than 2048 of anything continues in another record:
//
//	+-------+------+-----------+-----------+--------------------+-------------+-------------+-------------+
//	| flags | ~run | group     | lead      | bits: by form      | copies      | names       | also        |   fields
//	| uint  | int  | uint, 128 |uint,-4-512|                    | if 32       | if 64       | if 256      |
//	+-------+------+-----------+-----------+--------------------+-------------+-------------+-------------+
//	flags: 3 tier-1, 4 lead is the whole run, 24 form, 32 copies, 64 names, 128 group, 256 also, 512 continues
//	form 0: none         8: index of the first word, how many; the words in words
//	    16: how many, distances of blocks held    24: end - lead, how many (u32), distances of blocks before end that are not
//	copies: how many; distance, count-2    names: how many; distance; name in words    also: how many; distance (may be 0), count-1; name in words
//
// A state's records, each begun by a byte:
//
//	1 clock      int
//	2 group      kind u8, group uint; of kind 0xf0, and 0xf1 if the group drops its last block: 1<<31 | group<<20 | its window, behind its own record
//	3 pending    flags u8 (1 parent, 2 locals), kind, tier, attention, reason u8, since int, group, blocks, cancelled uint, distances;
//	             words: parent, blocks, locals
//	4 tombstones how many; each ~run, ~block, ~since; words: name
//	5 set        continues u8, tier u8, group, how many, counts; words: blocks
//
// # Ranks and manifest
//
// A chunk of ranks is the JSON array of the manifest's field ranks, in fields. The manifest is the JSON of [Manifest],
// whose last line is the XXH3-128 of the bytes before that line.
//
// What it leaves to others: moving bytes, revisions and retries; when a snapshot is due; counting and logging; what an
// image means.
package snapshot
