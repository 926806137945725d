package snapshot

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Manifest says what one snapshot of one partition stands for and which chunks it is made of. It is JSON, for people
// too. A manifest that was made or parsed does not change.
type Manifest struct {
	Format     int              `json:"format"` // version of the format
	Namespace  string           `json:"namespace"`
	Partition  events.Partition `json:"partition"`
	Generation Generation       `json:"generation"`

	// The snapshot stands for the log up to and including Seq. Epoch is the stream's creation time.
	Stream string           `json:"stream"`
	Epoch  time.Time        `json:"epoch"`
	Seq    events.StreamSeq `json:"seq"`

	// SeqTime is when the stream took message Seq, 0 if that is not known: by it a reader of the log makes sure that
	// the stream still has that message.
	SeqTime events.Millis `json:"seq_time"`

	Created time.Time `json:"created"`
	Writer  string    `json:"writer"`

	Counts Counts `json:"counts"`

	// Previous is the generation that is kept beside this one; nil for the first.
	Previous *Previous `json:"previous"`

	Spaces []Space `json:"spaces"`
	// sorted by instance and rank; nil if they are in chunks of their own: see [Ranks]
	Ranks  []RankState `json:"ranks"`
	Chunks []ChunkRef  `json:"chunks"` // in the order in which a restore reads them
}

// Counts says how much a snapshot holds.
type Counts struct {
	Ranks    int    `json:"ranks"`
	Runs     int    `json:"runs"`
	Blocks   uint64 `json:"blocks"`   // of runs
	Holdings uint64 `json:"holdings"` // blocks held, by all ranks in all tiers and groups
	Bytes    uint64 `json:"bytes"`    // of all chunks
	New      uint64 `json:"new"`      // of those chunks that the generation before did not have
	Dead     uint64 `json:"dead"`     // bytes of records that no longer count, before packing
}

// Previous names an earlier generation.
type Previous struct {
	Generation Generation       `json:"generation"`
	Key        string           `json:"key"`
	Epoch      time.Time        `json:"epoch"`
	Seq        events.StreamSeq `json:"seq"`
}

// Space is what one of the caller's numbers for (model, block size) stands for.
type Space struct {
	Space     uint32 `json:"space"`
	Model     Text   `json:"model"`
	BlockSize uint32 `json:"block_size"` // tokens
}

// RankState is where one rank was at the snapshot's sequence. Fields may be added in a later version of the format.
type RankState struct {
	Instance    Text               `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Model       Text               `json:"model"`
	BlockSize   uint32             `json:"block_size"` // tokens
	Incarnation events.Incarnation `json:"incarnation,string"`
	LastID      events.EventID     `json:"last_id,string"`
	Cursor      *CursorState       `json:"cursor,omitempty"`         // the shim's; nil if not known
	Closed      bool               `json:"closed,omitempty"`         // the engine has ended in good order
	LastSeen    events.Millis      `json:"last_seen,omitempty"`      // when the log took its last batch
	Stored      uint64             `json:"stored,omitempty,string"`  // blocks in all stored events of the incarnation
	Removed     uint64             `json:"removed,omitempty,string"` // blocks in all removed events
	Partial     bool               `json:"partial,omitempty"`        // some of the incarnation's events were never seen
	Lookahead   uint32             `json:"lookahead,omitempty"`      // tokens beyond a block that are in its local hash
	// why the rank's events are not applied, for people
	Refused  string `json:"refused,omitempty"`
	Checksum Hex64  `json:"checksum"` // of what the rank holds, as the caller reckons it
}

// Key is the rank's identity.
func (r *RankState) Key() events.RankKey {
	return events.RankKey{Instance: events.WorkerID(r.Instance), Rank: r.Rank}
}

// CursorState is an [events.Cursor] that is known.
type CursorState struct {
	Seq     events.EngineSeq `json:"seq,string"`
	Digest  Hex64            `json:"digest"`
	Partial uint32           `json:"partial,omitempty"`
}

// CursorOf turns a shim's cursor into what a manifest holds: nil if it is not known.
func CursorOf(c events.Cursor) *CursorState {
	if !c.Known {
		return nil
	}
	return &CursorState{c.Seq, Hex64(c.Digest), c.Partial}
}

// Cursor is the reverse of [CursorOf].
func (c *CursorState) Cursor() events.Cursor {
	if c == nil {
		return events.Cursor{}
	}
	return events.Cursor{Known: true, Seq: c.Seq, Digest: uint64(c.Digest), Partial: c.Partial}
}

// ChunkRef is one chunk of a manifest.
type ChunkRef struct {
	Key   string `json:"key"`
	Kind  Kind   `json:"kind"`
	Bytes int    `json:"bytes"`

	From *RankName `json:"from,omitempty"` // the first rank in a chunk of ranks.
}

// hash is in the key, which was checked when the reference was made or parsed.
func (c *ChunkRef) hash() Hash {
	k, _ := ParseKey(c.Key)
	return k.Hash
}

// RankName is an [events.RankKey] in JSON.
type RankName struct {
	Instance Text        `json:"instance"`
	Rank     events.Rank `json:"rank"`
}

// Text is a string from outside. In JSON it is a string if it is UTF-8, else {"hex": "…"}, so that it comes back as it
// was.
type Text string

func (t Text) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(t)) {
		return json.Marshal(string(t))
	}
	return fmt.Appendf(nil, `{"hex":"%x"}`, string(t)), nil
}

func (t *Text) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '{' {
		var h struct{ Hex string }
		if err := json.Unmarshal(data, &h); err != nil {
			return err
		}
		b, err := hex.DecodeString(h.Hex)
		if err != nil {
			return err
		}
		*t = Text(b)
		return nil
	}
	return json.Unmarshal(data, (*string)(t))
}

// Hex64 is a 64-bit hash; in JSON 16 hex digits.
type Hex64 uint64

func (h Hex64) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%016x", uint64(h)), nil }

func (h *Hex64) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 16, 64)
	*h = Hex64(v)
	return err
}

// The last line of a manifest is its checksum: the XXH3-128 of all bytes before the line.
const (
	sealBefore = "\"checksum\": \""
	sealAfter  = "\"\n}\n"
	sealLength = len(sealBefore) + 32 + len(sealAfter)
)

// Encode writes the manifest. It fails with ErrImage if that takes more than [maxChunk] bytes.
func (m *Manifest) Encode() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("{\n")
	fields := reflect.ValueOf(m).Elem()
	for i := range fields.NumField() {
		name, _, _ := strings.Cut(fields.Type().Field(i).Tag.Get("json"), ",")
		v, err := encodeField(fields.Field(i))
		if err != nil {
			return nil, fmt.Errorf("%w: manifest: %s: %v", ErrImage, name, err)
		}
		fmt.Fprintf(&b, "%q: %s,\n", name, v)
	}
	sum := hashOf(b.Bytes())
	b.WriteString(sealBefore)
	b.WriteString(sum.String())
	b.WriteString(sealAfter)
	if b.Len() > maxChunk {
		return nil, fmt.Errorf("%w: the manifest takes %d bytes for %d chunks, %d is the limit: use more partitions",
			ErrImage, b.Len(), len(m.Chunks), maxChunk)
	}
	return b.Bytes(), nil
}

// encodeField writes a field of the manifest; an array takes a line for each element.
func encodeField(v reflect.Value) ([]byte, error) {
	if v.Kind() != reflect.Slice || v.IsNil() {
		return json.Marshal(v.Interface())
	}
	b := []byte{'['}
	for i := range v.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		e, err := json.Marshal(v.Index(i).Interface())
		if err != nil {
			return nil, err
		}
		b = append(append(b, "\n  "...), e...)
	}
	return append(b, ']'), nil
}

// ParseManifest reads what [Manifest.Encode] wrote. Errors are ErrCorrupt and ErrVersion.
func ParseManifest(data []byte) (*Manifest, error) {
	corrupt := func(format string, args ...any) (*Manifest, error) {
		return nil, fmt.Errorf("%w: manifest: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	if len(data) > maxChunk {
		return corrupt("%d bytes are too many", len(data))
	}
	end := len(data) - sealLength
	if end < 0 || !bytes.HasPrefix(data[end:], []byte(sealBefore)) || !bytes.HasSuffix(data, []byte(sealAfter)) {
		return corrupt("does not end with its checksum")
	}
	want := string(data[end+len(sealBefore) : len(data)-len(sealAfter)])
	if got := hashOf(data[:end]).String(); got != want {
		return corrupt("checksum is %s instead of %q", got, want)
	}
	var version struct{ Format int }
	if err := json.Unmarshal(data, &version); err != nil {
		return corrupt("%v", err)
	}
	if version.Format > formatVersion {
		return nil, fmt.Errorf("%w: manifest of version %d, this build reads 1 to %d", ErrVersion, version.Format,
			formatVersion)
	}
	m := new(Manifest)
	if err := json.Unmarshal(data, m); err != nil {
		return corrupt("%v", err)
	}
	if err := m.check(); err != nil {
		return corrupt("%v", err)
	}
	return m, nil
}

// check says what in the manifest contradicts itself.
func (m *Manifest) check() error {
	switch {
	case m.Format < 1 || m.Format > formatVersion:
		return fmt.Errorf("format %d", m.Format)
	case m.Generation == 0:
		return errors.New("no generation")
	case m.Counts.Ranks < 0 || m.Counts.Runs < 0:
		return errors.New("negative count")
	}
	if err := checkRanks(m.Ranks); err != nil {
		return err
	}
	kind := kindRanks
	var bytes uint64
	var from *RankName
	for i := range m.Chunks {
		c := &m.Chunks[i]
		k, ok := ParseKey(c.Key)
		switch {
		case !ok || k.Type != ChunkKey || k.Partition != m.Partition || k.Generation > m.Generation:
			return fmt.Errorf("chunk %d: key %q", i, c.Key)
		case c.Bytes < headerSize+trailerSize || c.Bytes > maxChunk:
			return fmt.Errorf("chunk %s: %d bytes", c.Key, c.Bytes)
		case c.Kind < kind || !c.Kind.valid():
			return fmt.Errorf("chunk %s: %s after %s", c.Key, c.Kind, kind)
		case (c.Kind == kindRanks) != (c.From != nil):
			return fmt.Errorf("chunk %s: a first rank belongs to a chunk of ranks", c.Key)
		case from != nil && c.From != nil && compareNames(*from, *c.From) >= 0:
			return fmt.Errorf("chunk %s: ranks out of order", c.Key)
		}
		kind, from = c.Kind, c.From
		bytes += uint64(c.Bytes)
	}
	if bytes != m.Counts.Bytes {
		return fmt.Errorf("chunks have %d bytes and not %d", bytes, m.Counts.Bytes)
	}
	if inline := len(m.Chunks) == 0 || m.Chunks[0].Kind != kindRanks; inline && len(m.Ranks) != m.Counts.Ranks ||
		!inline && m.Ranks != nil {
		return fmt.Errorf("%d ranks in the manifest, %d in all", len(m.Ranks), m.Counts.Ranks)
	}
	return nil
}

// chunksOf gives the references to chunks of the kinds from one to another.
func (m *Manifest) chunksOf(from, to Kind) []ChunkRef {
	lo := 0
	for lo < len(m.Chunks) && m.Chunks[lo].Kind < from {
		lo++
	}
	hi := lo
	for hi < len(m.Chunks) && m.Chunks[hi].Kind <= to {
		hi++
	}
	return m.Chunks[lo:hi]
}

// Restore is what a [Reader] wants to be given, in this order: all chunks but those with ranks.
func (m *Manifest) Restore() []ChunkRef { return m.chunksOf(kindDead, kindState) }

// earlierKey is where the manifest lies once another has taken its place.
func (m *Manifest) earlierKey() string {
	return Key{Partition: m.Partition, Type: EarlierKey, Generation: m.Generation}.String()
}
