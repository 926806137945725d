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
// DESIGN.md beside this file draws the bytes of a chunk and of each kind of record, and says why they are so.
//
// What it leaves to others: moving bytes, revisions and retries; when a snapshot is due; counting and logging; what an
// image means.
package snapshot
