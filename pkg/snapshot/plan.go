package snapshot

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bucket is what was seen of one partition in the bucket.
type Bucket struct {
	Partition events.Partition

	// Manifests are the values of ManifestKey and of the partition's earlier manifests, by key.
	Manifests map[string][]byte

	// Keys lists the partition's keys, read after the manifests: else a chunk that a manifest names could be younger
	// than the list. Nil if it was not read; then chunks are taken to be there.
	Keys []string

	// Corrupt are the chunks that are known not to be what was written, or not to be there.
	Corrupt map[string]bool
}

// Log is what the stream's own description says of it now.
type Log struct {
	Namespace string
	Stream    string
	Epoch     time.Time        // creation time
	First     events.StreamSeq // first message that is still there; Last+1 if none is
	Last      events.StreamSeq // last message that was ever there
}

// Reason says why a generation cannot be used. Its name is made for counters.
type Reason uint8

const (
	Unreadable   Reason = iota + 1 // the manifest is not what was written
	Future                         // the manifest or a chunk is of a later version of the format
	Foreign                        // it belongs to another namespace, partition or stream, or lies under another's key
	OtherEpoch                     // the stream was made again since
	AheadOfLog                     // the log ends before the snapshot's place: it lost its end
	LogTruncated                   // the log begins after the snapshot's place
	MissingChunk                   // a chunk is not in the bucket
	CorruptChunk                   // a chunk is not what was written
	Failed                         // it could not be read for a reason of its own; see the error

	// NumReasons is above all reasons.
	NumReasons
)

var reasonNames = [...]string{"none", "unreadable", "future_version", "foreign", "other_epoch", "ahead_of_log",
	"log_truncated", "missing_chunk", "corrupt_chunk", "failed"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// ReasonOf classes an error that came while the chunks of a generation were read.
func ReasonOf(err error) Reason {
	switch {
	case errors.Is(err, ErrVersion):
		return Future
	case errors.Is(err, ErrMissing):
		return MissingChunk
	case errors.Is(err, ErrCorrupt):
		return CorruptChunk
	}
	return Failed
}

// Rejection is a generation that cannot be used.
type Rejection struct {
	Key        string     // of the manifest
	Generation Generation // 0 if it is not known
	Reason     Reason
	Err        error
}

// Choice is what [Choose] found.
type Choice struct {
	Usable   []*Manifest // newest first. Restore the first; if a chunk turns out bad, the next
	Rejected []Rejection // newest first
}

// Choose says which generations can be restored and then caught up with from the log.
func Choose(b Bucket, log Log) Choice {
	var c Choice
	for _, f := range b.parse() {
		if f.err == nil {
			f.reject(f.m.fits(&log))
		}
		if f.err != nil {
			c.Rejected = append(c.Rejected, f.rejection())
		} else {
			c.Usable = append(c.Usable, f.m)
		}
	}
	return c
}

type found struct {
	key    Key
	data   []byte
	m      *Manifest // nil if it cannot be read
	reason Reason
	err    error
}

func (f *found) reject(reason Reason, err error) { f.reason, f.err = reason, err }

func (f *found) rejection() Rejection {
	r := Rejection{f.key.String(), f.key.Generation, f.reason, f.err}
	if f.m != nil {
		r.Generation = f.m.Generation
	}
	return r
}

// parse reads all manifests, newest first; the current one, if it cannot be read, is the newest. The same generation
// comes once.
func (b *Bucket) parse() []found {
	var present map[string]bool
	if b.Keys != nil {
		present = make(map[string]bool, len(b.Keys))
		for _, k := range b.Keys {
			present[k] = true
		}
	}
	var all []found
	for name, data := range b.Manifests {
		key, ok := ParseKey(name)
		if !ok || key.Type == ChunkKey || key.Partition != b.Partition {
			continue
		}
		f := found{key: key, data: data}
		m, err := ParseManifest(data)
		switch {
		case errors.Is(err, ErrVersion):
			f.reject(Future, err)
		case err != nil:
			f.reject(Unreadable, err)
		case m.Partition != key.Partition || key.Type == EarlierKey && m.Generation != key.Generation:
			f.reject(Foreign, fmt.Errorf("%w: manifest of partition %d, generation %d", ErrCorrupt, m.Partition,
				m.Generation))
		default:
			f.m = m
			f.reject(b.whole(m, present))
		}
		all = append(all, f)
	}
	generation := func(f *found) Generation {
		switch {
		case f.m != nil:
			return f.m.Generation
		case f.key.Type == CurrentKey:
			return maxGeneration + 1
		}
		return f.key.Generation
	}
	slices.SortFunc(all, func(x, y found) int {
		return cmp.Or(cmp.Compare(generation(&y), generation(&x)), cmp.Compare(x.key.Type, y.key.Type))
	})
	return slices.CompactFunc(all, func(x, y found) bool {
		return x.m != nil && y.m != nil && x.m.Generation == y.m.Generation
	})
}

// whole looks for the manifest's chunks.
func (b *Bucket) whole(m *Manifest, present map[string]bool) (Reason, error) {
	for _, ref := range m.Chunks {
		if present != nil && !present[ref.Key] {
			return MissingChunk, fmt.Errorf("chunk %s: %w", ref.Key, ErrMissing)
		}
		if b.Corrupt[ref.Key] {
			return CorruptChunk, fmt.Errorf("chunk %s: %w", ref.Key, ErrCorrupt)
		}
	}
	return 0, nil
}

// fits says whether the log goes on where the snapshot ends.
func (m *Manifest) fits(log *Log) (Reason, error) {
	switch {
	case m.Namespace != log.Namespace || m.Stream != log.Stream:
		return Foreign, fmt.Errorf("snapshot of stream %s in namespace %q, not of %s in %q", m.Stream, m.Namespace,
			log.Stream, log.Namespace)
	case !m.Epoch.Equal(log.Epoch):
		return OtherEpoch, fmt.Errorf("snapshot of the stream made at %s, not of the one made at %s",
			m.Epoch.UTC().Format(time.RFC3339Nano), log.Epoch.UTC().Format(time.RFC3339Nano))
	case log.Last < m.Seq:
		return AheadOfLog, fmt.Errorf("snapshot at sequence %d of a log that ends at %d", m.Seq, log.Last)
	case log.First > m.Seq+1:
		return LogTruncated, fmt.Errorf("snapshot at sequence %d of a log that begins at %d", m.Seq, log.First)
	}
	return 0, nil
}

// WritePlan is how the next generation of a partition is written.
type WritePlan struct {
	Partition  events.Partition
	Generation Generation

	// Older is the generation that is kept beside the new one: the newest that can be used, else the newest that is
	// whole, else nil.
	Older *Manifest

	// CopyKey and Copy are to be put before the new manifest takes the current one's place: the current one, to be kept
	// under a key of its own. Empty if nothing is to be copied.
	CopyKey string
	Copy    []byte

	Rejected []Rejection // the generations that could not be used.

	usable bool            // Older can be used with the log
	chunks map[Hash]string // that need not be written again
}

// PlanWrite says how to write a snapshot that stands for seq of the log. Read the manifest (with the revision to
// compare) and the earlier ones, then the keys, then the log. It fails with ErrBehind if the bucket has a usable
// generation that stands for a later place.
//
// To be done, in this order, or all but the deletions in one atomic batch:
//
//  1. chunks, as the [Writer] emits them
//  2. Copy under CopyKey
//  3. the new manifest under [ManifestKey], if that still has the revision that was read; else stop, and leave all as
//     it is
//  4. what [WritePlan.After] says
func PlanWrite(b Bucket, log Log, seq events.StreamSeq) (*WritePlan, error) {
	p := &WritePlan{Partition: b.Partition, chunks: make(map[Hash]string)}
	present := make(map[string]bool, len(b.Keys))
	for _, name := range b.Keys {
		present[name] = true
		if k, ok := ParseKey(name); ok && k.Partition == b.Partition {
			p.Generation = max(p.Generation, k.Generation)
		}
	}
	if b.Keys == nil {
		b.Keys = []string{} // what is not known to be there is written
	}
	var whole, older *found
	all := b.parse()
	for i := range all {
		f := &all[i]
		p.Generation = max(p.Generation, f.key.Generation)
		if f.m != nil {
			p.Generation = max(p.Generation, f.m.Generation)
		}
		if f.err == nil {
			if whole == nil {
				whole = f
			}
			f.reject(f.m.fits(&log))
		}
		switch {
		case f.err != nil:
			p.Rejected = append(p.Rejected, f.rejection())
		case f.m.Seq > seq:
			return nil, fmt.Errorf("%w: generation %d stands for sequence %d, this one for %d", ErrBehind,
				f.m.Generation, f.m.Seq, seq)
		case older == nil:
			older = f
		}
	}
	p.Generation++
	for _, m := range protected(all) {
		for _, ref := range m.Chunks {
			if present[ref.Key] && !b.Corrupt[ref.Key] {
				p.chunks[ref.hash()] = ref.Key
			}
		}
	}
	if p.usable = older != nil; !p.usable {
		older = whole
	}
	if older == nil {
		return p, nil
	}
	p.Older = older.m
	if key := older.m.earlierKey(); older.key.Type == CurrentKey && !bytes.Equal(b.Manifests[key], older.data) {
		p.CopyKey, p.Copy = key, older.data
	}
	return p, nil
}

// protected gives the generations whose chunks nobody deletes before another manifest takes the current one's place,
// and then ours cannot: the current one and the one that it keeps. Whoever wrote the current one may still be deleting
// what others need. If the current one cannot be read, nobody knows which it keeps.
func protected(all []found) (kept []*Manifest) {
	at := slices.IndexFunc(all, func(f found) bool { return f.key.Type == CurrentKey && f.m != nil })
	if at < 0 {
		return nil
	}
	current := all[at].m
	kept = append(kept, current)
	for i := range all {
		if m := all[i].m; m != nil && current.Previous != nil && m.Generation == current.Previous.Generation {
			kept = append(kept, m)
		}
	}
	return kept
}

func (p *WritePlan) previous() *Previous {
	if p.Older == nil {
		return nil
	}
	return &Previous{Generation: p.Older.Generation, Key: p.Older.earlierKey(), Epoch: p.Older.Epoch, Seq: p.Older.Seq}
}

// Cleanup is what may go once a new manifest is in its place.
type Cleanup struct {
	Delete []string // keys that neither kept generation needs, nor one that somebody may be writing.

	// PurgeTo is the sequence that the log must keep, and everything after it; what lies before may be purged, if the
	// stream still has the manifest's epoch. 0: nothing may.
	PurgeTo events.StreamSeq
}

// After says what may go once m, which was written by this plan, is acknowledged. keys lists the partition's keys; a
// list from before m was written will do, but does not have all garbage. Each step may be done twice, or never: the
// next snapshot finds what is left.
func (p *WritePlan) After(m *Manifest, keys []string) Cleanup {
	var c Cleanup
	if p.Older == nil {
		return c // with one generation to rely on, nothing goes
	}
	needed := map[string]bool{p.Older.earlierKey(): true}
	for _, kept := range []*Manifest{m, p.Older} {
		for _, ref := range kept.Chunks {
			needed[ref.Key] = true
		}
	}
	for _, name := range keys {
		k, ok := ParseKey(name)
		if !ok || k.Partition != p.Partition || needed[name] {
			continue
		}
		// What a writer of a later generation has put is its own.
		if k.Type == ChunkKey && k.Generation <= m.Generation || k.Type == EarlierKey && k.Generation < m.Generation {
			c.Delete = append(c.Delete, name)
		}
	}
	if p.usable && p.Older.Epoch.Equal(m.Epoch) {
		c.PurgeTo = min(p.Older.Seq, m.Seq) + 1
	}
	return c
}
