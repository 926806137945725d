package snapshot

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
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

// Manifest names the position in the log and the chunks of a snapshot of a partition. The format is readable JSON. A
// manifest is immutable after creation or parsing.
type Manifest struct {
	Format     int              `json:"format"` // version of the format
	Namespace  string           `json:"namespace"`
	Partition  events.Partition `json:"partition"`
	Generation Generation       `json:"generation"`

	// The snapshot reflects the log up to and including Seq. Epoch is the creation time of the stream.
	Stream string           `json:"stream"`
	Epoch  time.Time        `json:"epoch"`
	Seq    events.StreamSeq `json:"seq"`

	// SeqTime is the time at which the stream stored message Seq, or 0 if unknown. A reader of the log compares SeqTime
	// to verify that the stream still has the message.
	SeqTime events.Millis `json:"seq_time"`

	Created time.Time `json:"created"`
	Writer  string    `json:"writer"`

	Counts Counts `json:"counts"`

	// Previous is the kept older generation. nil for the first generation.
	Previous *Previous `json:"previous"`

	Spaces []Space `json:"spaces"`
	// sorted by instance and rank; nil if the table is in chunks: see [Ranks]
	Ranks  []RankState `json:"ranks"`
	Chunks []ChunkRef  `json:"chunks"` // in the order of a restore
}

// Counts has the sizes of a snapshot.
type Counts struct {
	Ranks    int    `json:"ranks"`
	Runs     int    `json:"runs"`
	Blocks   uint64 `json:"blocks"`   // of all runs
	Holdings uint64 `json:"holdings"` // held blocks of all ranks in all tiers and groups
	Bytes    uint64 `json:"bytes"`    // of all chunks
	New      uint64 `json:"new"`      // of the chunks that the previous generation lacks
	Dead     uint64 `json:"dead"`     // dead records, before compression
}

// Previous names an earlier generation.
type Previous struct {
	Generation Generation       `json:"generation"`
	Key        string           `json:"key"`
	Epoch      time.Time        `json:"epoch"`
	Seq        events.StreamSeq `json:"seq"`
}

// Space defines a number that the caller uses for a pair of model and block size.
type Space struct {
	Space     uint32 `json:"space"`
	Model     Text   `json:"model"`
	BlockSize uint32 `json:"block_size"` // tokens
}

// RankState is the state of a rank at the sequence of the snapshot. Later versions of the format may add fields.
type RankState struct {
	Instance    Text               `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Model       Text               `json:"model"`
	BlockSize   uint32             `json:"block_size"` // tokens
	Incarnation events.Incarnation `json:"incarnation,string"`
	LastID      events.EventID     `json:"last_id,string"`
	Cursor      *CursorState       `json:"cursor,omitempty"`         // of the shim; nil if unknown
	Closed      bool               `json:"closed,omitempty"`         // the engine has ended cleanly
	LastSeen    events.Millis      `json:"last_seen,omitempty"`      // when the log stored the last batch
	Stored      uint64             `json:"stored,omitempty,string"`  // blocks in all stored events of the incarnation
	Removed     uint64             `json:"removed,omitempty,string"` // blocks in all removed events
	Partial     bool               `json:"partial,omitempty"`        // some events of the incarnation are missing
	Lookahead   uint32             `json:"lookahead,omitempty"`      // tokens after a block that the local hash includes
	// the reason for a rejection of the rank's events, for operators
	Refused  string `json:"refused,omitempty"`
	Checksum Hex64  `json:"checksum"` // of the rank's holdings; the caller computes it

	// Sessions are the last used sessions of the rank, the latest first. nil in snapshots of builds without sessions.
	// SessionsCut means that the rank has further sessions.
	Sessions    []SessionEnd `json:"sessions,omitzero"`
	SessionsCut bool         `json:"sessions_cut,omitempty"`
}

// SessionEnd is a session on a rank: the blocks of the session end with the block of a name.
type SessionEnd struct {
	Session Hex64 `json:"id"`  // an [events.SessionHash]
	Last    Hex64 `json:"end"` // an [events.BlockHash]

	// If the image lacks Last, the session has the Blocks blocks up to the block of the name Held, and the blocks of the
	// local hashes After.
	After  Locals `json:"after,omitempty"`
	Held   Hex64  `json:"held,omitzero"` // an [events.BlockHash]
	Blocks uint32 `json:"blocks,omitempty"`
}

// Key returns the identity of the rank.
func (r *RankState) Key() events.RankKey {
	return events.RankKey{Instance: events.WorkerID(r.Instance), Rank: r.Rank}
}

// CursorState is a known [events.Cursor].
type CursorState struct {
	Seq     events.EngineSeq `json:"seq,string"`
	Digest  Hex64            `json:"digest"`
	Partial uint32           `json:"partial,omitempty"`
}

// CursorOf converts a shim's cursor for a manifest. An unknown cursor becomes nil.
func CursorOf(c events.Cursor) *CursorState {
	if !c.Known {
		return nil
	}
	return &CursorState{c.Seq, Hex64(c.Digest), c.Partial}
}

// Cursor is the inverse of [CursorOf].
func (c *CursorState) Cursor() events.Cursor {
	if c == nil {
		return events.Cursor{}
	}
	return events.Cursor{Known: true, Seq: c.Seq, Digest: uint64(c.Digest), Partial: c.Partial}
}

// ChunkRef refers to a chunk.
type ChunkRef struct {
	Key   string `json:"key"`
	Kind  Kind   `json:"kind"`
	Bytes int    `json:"bytes"`

	From *RankName `json:"from,omitempty"` // the first rank in a chunk of ranks
}

// hash returns the hash in the key. A constructor or parser has checked the key.
func (c *ChunkRef) hash() Hash {
	k, _ := ParseKey(c.Key)
	return k.Hash
}

// RankName is an [events.RankKey] in JSON.
type RankName struct {
	Instance Text        `json:"instance"`
	Rank     events.Rank `json:"rank"`
}

// Text is a string from outside. In JSON, a UTF-8 text is a string, and any other text is {"hex": "…"}. Both forms are
// lossless.
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

// Hex64 is a 64-bit hash. JSON has 16 hex digits.
type Hex64 uint64

func (h Hex64) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%016x", uint64(h)), nil }

func (h *Hex64) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 16, 64)
	*h = Hex64(v)
	return err
}

// Locals is a list of local hashes, in base64 of 8 little-endian bytes each.
type Locals []events.LocalHash

func (l Locals) MarshalText() ([]byte, error) {
	b := make([]byte, 0, 8*len(l))
	for _, h := range l {
		b = binary.LittleEndian.AppendUint64(b, uint64(h))
	}
	return base64.StdEncoding.AppendEncode(nil, b), nil
}

func (l *Locals) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.AppendDecode(nil, text)
	if err == nil && len(b)%8 != 0 {
		err = fmt.Errorf("local hashes have %d bytes, not a multiple of 8", len(b))
	}
	if err != nil {
		return err
	}
	*l = nil
	for ; len(b) > 0; b = b[8:] {
		*l = append(*l, events.LocalHash(binary.LittleEndian.Uint64(b)))
	}
	return nil
}

// The last line of a manifest has a checksum: the XXH3-128 of all bytes before the line.
const (
	sealBefore = "\"checksum\": \""
	sealAfter  = "\"\n}\n"
	sealLength = len(sealBefore) + 32 + len(sealAfter)
)

// Encode encodes the manifest. It returns ErrImage for a result of more than [maxChunk] bytes.
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

// encodeField encodes a field of the manifest. An array has a line for each element.
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

// ParseManifest parses a result of [Manifest.Encode]. It returns ErrCorrupt or ErrVersion.
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

// check returns an error if the manifest is inconsistent.
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

// chunksOf returns the references to chunks of the kinds from to to.
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

// Restore returns the chunks for a [Reader], in order: all chunks except the chunks of ranks.
func (m *Manifest) Restore() []ChunkRef { return m.chunksOf(kindDead, kindState) }

// earlierKey returns the key of the manifest after a newer manifest has replaced it.
func (m *Manifest) earlierKey() string {
	return Key{Partition: m.Partition, Type: EarlierKey, Generation: m.Generation}.String()
}
