// Package snapshot writes the state of a partition's index to chunks and restores the index from chunks. A snapshot of
// a slightly changed index writes little. After a crash, a race of two writers or a damaged byte, no reader gets a
// wrong image.
//
// The package has the format and the plan. It imports pkg/events and nothing of NATS: functions of the caller read and
// write the bytes.
//
// # In order of use
//
// To write a snapshot: [PlanWrite] reads the listing of the bucket and returns the kept chunks and the next generation.
// A [Writer] receives the image run by run and rank by rank, and passes finished chunks to a callback. [Writer.Close]
// returns the [Manifest]. The caller stores the manifest in the bucket. [WritePlan.After] then returns the keys to
// delete and the position up to which the log may be purged. The caller keeps the [RunIndex] for the next Writer.
//
// To restore: [Choose] returns the usable generations, newest first, and the reasons against the others. [Ranks]
// returns the table of ranks. A [Reader] receives the chunks in the order of [Manifest.Restore], passes the image to a
// [Sink], and returns a RunIndex at the end. If a chunk is bad, restore the next generation with a new sink: the image
// in the old sink is incomplete. A shim looks up the cursor of a rank with [FindRank].
//
// # Guarantees
//
//  1. A Reader returns the image that a Writer received, except for the order of runs, empty ends of bitmaps, and nil
//     in place of empty slices.
//  2. A changed byte is an error: ErrCorrupt, at the latest from Close. A later format is ErrVersion. No input makes
//     the package panic, or use more memory than [maxChunk] and the size of the image.
//  3. A snapshot of an unchanged image writes no chunk. With the run index, a snapshot of a changed image writes only
//     the changed runs, the changed ranks, and a few old runs that keep dead records below an eighth.
//  4. Writers may stop at any step, and several may write at once: with the order of [PlanWrite], the bucket always has
//     a complete generation with the log after it.
//  5. Equal calls write equal bytes.
//
// The package starts no goroutine, reads no clock and writes no log lines. A Writer or Reader belongs to a single
// goroutine. Manifests, run indexes and plans are immutable and may be shared.
//
// # Keys
//
//	p3.manifest                                  the current manifest: all writers compare and set this key
//	p3.g41                                       the unchanged manifest of the previous generation
//	p3.c42.9f86d081884c7d659a2feaa0c55ad015      a chunk, first written for generation 42; XXH3-128 of its bytes
//
// DESIGN.md draws the bytes of a chunk and of every kind of record, and gives the reasons.
//
// Other packages move bytes, handle revisions and retries, decide when a snapshot is due, count, write log lines, and
// interpret images.
package snapshot
