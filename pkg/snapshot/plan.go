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

// Bucket is a listing of a partition in the bucket.
type Bucket struct {
	Partition events.Partition

	// Manifests has the values of ManifestKey and of the partition's earlier manifests, by key.
	Manifests map[string][]byte

	// Keys lists the keys of the partition. Read the keys after the manifests: an older list may lack a chunk of a
	// newer manifest. nil means that the keys were not read. Choose then assumes that the bucket has all chunks.
	Keys []string

	// Corrupt has the chunks that a reader found to be damaged or missing.
	Corrupt map[string]bool
}

// Log is the current state of the stream.
type Log struct {
	Namespace string
	Stream    string
	Epoch     time.Time        // creation time
	First     events.StreamSeq // first stored message; Last+1 if the stream is empty
	Last      events.StreamSeq // last message ever stored
}

// Reason is the reason against a generation. String returns the name for counters: unreadable, future_version, foreign,
// other_epoch, ahead_of_log, log_truncated, missing_chunk, corrupt_chunk or failed.
type Reason uint8

const (
	unreadable   Reason = iota + 1 // the manifest is damaged
	Future                         // the manifest or a chunk has a later version of the format
	foreign                        // the manifest is of another namespace, partition or stream, or under a wrong key
	OtherEpoch                     // the stream was recreated
	AheadOfLog                     // the log ends before the position of the snapshot: the log has lost messages
	LogTruncated                   // the log begins after the position of the snapshot
	MissingChunk                   // a chunk is missing from the bucket
	CorruptChunk                   // a chunk is damaged
	failed                         // another read error; see Err

	// NumReasons is greater than all reasons.
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

// ReasonOf classifies an error of reading the chunks of a generation.
func ReasonOf(err error) Reason {
	switch {
	case errors.Is(err, ErrVersion):
		return Future
	case errors.Is(err, ErrMissing):
		return MissingChunk
	case errors.Is(err, ErrCorrupt):
		return CorruptChunk
	}
	return failed
}

// Rejection is an unusable generation.
type Rejection struct {
	Key        string     // of the manifest
	Generation Generation // 0 if unknown
	Reason     Reason
	Err        error
}

// Choice is the result of [Choose].
type Choice struct {
	Usable   []*Manifest // newest first. Restore the first; if a chunk is bad, restore the next
	Rejected []Rejection // newest first
}

// Choose returns the generations that a node can restore and then update from the log.
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
	m      *Manifest // nil if the manifest is damaged
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

// parse parses all manifests, newest first. A damaged current manifest counts as the newest. A generation appears once.
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
			f.reject(unreadable, err)
		case m.Partition != key.Partition || key.Type == EarlierKey && m.Generation != key.Generation:
			f.reject(foreign, fmt.Errorf("%w: manifest of partition %d, generation %d", ErrCorrupt, m.Partition,
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
		case f.key.Type == currentKey:
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

// whole checks that the bucket has the chunks of the manifest.
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

// fits checks that the log continues after the snapshot.
func (m *Manifest) fits(log *Log) (Reason, error) {
	switch {
	case m.Namespace != log.Namespace || m.Stream != log.Stream:
		return foreign, fmt.Errorf("snapshot of stream %s in namespace %q, not of %s in %q", m.Stream, m.Namespace,
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

// WritePlan is the plan of the next generation of a partition. [PlanWrite] returns it.
type WritePlan struct {
	Partition  events.Partition
	Generation Generation

	// Older is the generation to keep beside the new generation: the newest usable generation, else the newest
	// complete generation, else nil.
	Older *Manifest

	// CopyKey and Copy are to be written before the new manifest: they keep the current manifest under a separate key.
	// CopyKey is empty if no copy is required.
	CopyKey string
	Copy    []byte

	Rejected []Rejection // unusable generations

	usable bool            // Older is usable with the log
	chunks map[Hash]string // chunks that the Writer need not write again
}

// PlanWrite plans a snapshot for seq of the log. Read the current manifest (with the revision) and the earlier
// manifests, then the keys, then the log. PlanWrite returns ErrBehind if the bucket has a usable generation for a later
// position.
//
// Write the following in this order, or all except the deletions in a single atomic batch:
//
//  1. the chunks that the [Writer] emits
//  2. Copy under CopyKey
//  3. the new manifest under [ManifestKey], if the key still has the same revision. Otherwise stop and clean up nothing
//  4. the deletions of [WritePlan.After]
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
		b.Keys = []string{} // the plan writes all chunks without a listing
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
	if key := older.m.earlierKey(); older.key.Type == currentKey && !bytes.Equal(b.Manifests[key], older.data) {
		p.CopyKey, p.Copy = key, older.data
	}
	return p, nil
}

// protected returns the generations whose chunks no writer deletes until the next manifest replaces the current
// manifest. They are the current generation and the kept older generation. The writer of the current generation may
// still delete other chunks. If the current manifest is damaged, the kept generation is unknown.
func protected(all []found) (kept []*Manifest) {
	at := slices.IndexFunc(all, func(f found) bool { return f.key.Type == currentKey && f.m != nil })
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

// Cleanup lists the data that may be deleted after a new manifest is in the bucket.
type Cleanup struct {
	Delete []string // keys that no kept generation and no later writer needs

	// PurgeTo is the first sequence that the log must keep. Earlier messages may be purged if the stream still has the
	// epoch of the manifest. 0 permits no purge.
	PurgeTo events.StreamSeq
}

// After returns the cleanup after the bucket has acknowledged the manifest m of this plan. keys lists the partition's
// keys; a list from before the write of m is permitted and lacks some garbage. Every step is idempotent and optional:
// the next snapshot finds the rest.
func (p *WritePlan) After(m *Manifest, keys []string) Cleanup {
	var c Cleanup
	if p.Older == nil {
		return c // a single generation is not enough for a deletion
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
		// Keys of later generations belong to a later writer.
		if k.Type == ChunkKey && k.Generation <= m.Generation || k.Type == EarlierKey && k.Generation < m.Generation {
			c.Delete = append(c.Delete, name)
		}
	}
	if p.usable && p.Older.Epoch.Equal(m.Epoch) {
		c.PurgeTo = min(p.Older.Seq, m.Seq) + 1
	}
	return c
}
