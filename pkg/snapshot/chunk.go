package snapshot

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
)

// formatVersion is the format that this build writes. It reads the versions from 1 to formatVersion.
const formatVersion = 1

// maxChunk is the maximum size of a chunk or manifest, in bytes. NATS accepts messages of 1 MiB by default, including
// headers. maxChunk also limits the unpacked size, so a small chunk cannot make a reader allocate much memory.
const maxChunk = 900_000

const (
	magic       = "kvsn"
	headerSize  = 24
	trailerSize = 8

	// maxRaw is the maximum number of bytes of fields and words in a chunk, even without compression.
	maxRaw = maxChunk - headerSize - trailerSize

	// A chunk of runs has a 64th of all bytes, within limits, so that a rewrite is cheap. section.go has the sizes of the
	// other chunks.
	chunkShare = 64
	minChunk   = 128 << 10
)

// chunkSize returns the size of a chunk of runs if the records of all runs have total bytes.
func chunkSize(total int) int { return min(maxRaw, max(minChunk, total/chunkShare)) }

// Kind is the kind of a chunk's content. A wire constant: do not renumber. A restore reads the kinds in numerical
// order.
type Kind uint8

// The kinds of chunks.
const (
	kindRanks    Kind = 1 // part of the table of ranks, if the table is too long for the manifest
	kindDead     Kind = 2 // dead records in the chunks of runs
	kindHoldings Kind = 3 // holdings of the runs, by rank
	kindRuns     Kind = 4 // blocks of runs
	kindState    Kind = 5 // state of ranks apart from runs
)

var kindNames = [...]string{"", "ranks", "dead", "holdings", "runs", "state"}

func (k Kind) String() string {
	if k.valid() {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

func (k Kind) valid() bool { return k >= kindRanks && k <= kindState }

func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

func (k *Kind) UnmarshalText(text []byte) error {
	if *k = Kind(max(0, slices.Index(kindNames[:], string(text)))); !k.valid() {
		return fmt.Errorf("unknown kind of chunk %q", text)
	}
	return nil
}

// Hash is the XXH3-128 of a chunk's stored bytes. It names and verifies the chunk.
type Hash struct{ Hi, Lo uint64 }

func hashOf(data []byte) Hash {
	h := xxh3.Hash128(data)
	return Hash{h.Hi, h.Lo}
}

func (h Hash) String() string { return fmt.Sprintf("%016x%016x", h.Hi, h.Lo) }

func parseHash(s string) (Hash, bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return Hash{}, false
	}
	h := Hash{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}
	return h, h.String() == s
}

// Compression of a column. Wire constants.
const (
	packNone = 0
	packZstd = 1
)

// packer and unpacker are safe for concurrent use.
var (
	packer = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
			zstd.WithEncoderCRC(false), zstd.WithWindowSize(1<<20))
		if err != nil {
			panic("snapshot: zstd rejected the options: " + err.Error())
		}
		return e
	})
	unpacker = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxWindow(1<<20),
			zstd.WithDecoderMaxMemory(1<<20), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			panic("snapshot: zstd rejected the options: " + err.Error())
		}
		return d
	})
)

// sampleSize is the size of a sample of a column. A trial shows whether compression pays. Hashes never compress.
const sampleSize = 4096

// pack appends the column to dst. It compresses the column if compression saves at least an eighth.
func pack(dst, column []byte) ([]byte, uint8) {
	if len(column) < 64 {
		return append(dst, column...), packNone
	}
	if len(column) > 4*sampleSize {
		// The sample is from the middle.
		at := (len(column) - sampleSize) / 2
		if trial := packer().EncodeAll(column[at:at+sampleSize], nil); !pays(len(trial), sampleSize) {
			return append(dst, column...), packNone
		}
	}
	start := len(dst)
	if dst = packer().EncodeAll(column, dst); pays(len(dst)-start, len(column)) {
		return dst, packZstd
	}
	return append(dst[:start], column...), packNone
}

func pays(packed, raw int) bool { return packed <= raw-raw/8 }

// seal returns a chunk with the two columns of at most maxRaw bytes together. The chunk is in new memory.
func seal(kind Kind, fields, words []byte) []byte {
	if len(fields)+len(words) > maxRaw {
		panic(fmt.Sprintf("snapshot: chunk of %s with %d bytes", kind, len(fields)+len(words)))
	}
	out := make([]byte, headerSize, headerSize+len(fields)+len(words)+trailerSize)
	copy(out, magic)
	binary.LittleEndian.PutUint16(out[4:], formatVersion)
	out[6] = byte(kind)
	out, how := pack(out, fields)
	stored := len(out) - headerSize
	out, howWords := pack(out, words)
	out[7] = how | howWords<<4
	binary.LittleEndian.PutUint32(out[8:], uint32(stored))
	binary.LittleEndian.PutUint32(out[12:], uint32(len(fields)))
	binary.LittleEndian.PutUint32(out[16:], uint32(len(out)-headerSize-stored))
	binary.LittleEndian.PutUint32(out[20:], uint32(len(words)))
	return binary.LittleEndian.AppendUint64(out, xxh3.Hash(out))
}

// unsealed has the parts of a chunk. The columns point into the chunk, or into the scratch until the next open with the
// same scratch.
type unsealed struct {
	kind   Kind
	fields []byte
	words  []byte // a multiple of 8
}

// scratch is reusable memory for decompression.
type scratch struct{ fields, words []byte }

// open verifies a chunk and returns the parts.
func open(data []byte, mem *scratch) (unsealed, error) {
	corrupt := func(format string, args ...any) (unsealed, error) {
		return unsealed{}, fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	switch {
	case len(data) < headerSize+trailerSize:
		return corrupt("%d bytes are too short for a chunk", len(data))
	case len(data) > maxChunk:
		return corrupt("%d bytes are too long for a chunk", len(data))
	case string(data[:4]) != magic:
		return corrupt("not a chunk: it begins with %q", data[:4])
	}
	end := len(data) - trailerSize
	if got, want := xxh3.Hash(data[:end]), binary.LittleEndian.Uint64(data[end:]); got != want {
		return corrupt("checksum is %016x instead of %016x", got, want)
	}
	if v := binary.LittleEndian.Uint16(data[4:]); v == 0 || v > formatVersion {
		return unsealed{}, fmt.Errorf("%w: chunk of version %d, this build reads 1 to %d", ErrVersion, v, formatVersion)
	}
	kind, how := Kind(data[6]), data[7]
	if !kind.valid() {
		return corrupt("unknown kind %d", data[6])
	}
	size := func(at int) int { return int(binary.LittleEndian.Uint32(data[at:])) }
	fieldsStored, fieldsRaw, wordsStored, wordsRaw := size(8), size(12), size(16), size(20)
	if fieldsStored+wordsStored != end-headerSize || fieldsRaw+wordsRaw > maxRaw || wordsRaw%8 != 0 {
		return corrupt("columns of %d+%d bytes (%d+%d unpacked) in a chunk of %d", fieldsStored, wordsStored, fieldsRaw,
			wordsRaw, len(data))
	}
	u := unsealed{kind: kind}
	var err error
	if u.fields, mem.fields, err = unpack(data[headerSize:headerSize+fieldsStored], fieldsRaw, how&15,
		mem.fields); err != nil {
		return corrupt("fields: %v", err)
	}
	if u.words, mem.words, err = unpack(data[headerSize+fieldsStored:end], wordsRaw, how>>4, mem.words); err != nil {
		return corrupt("words: %v", err)
	}
	return u, nil
}

// unpack returns a column, and the memory for the next call.
func unpack(stored []byte, raw int, how uint8, mem []byte) (column, keep []byte, err error) {
	switch how {
	case packNone:
		if len(stored) != raw {
			return nil, mem, fmt.Errorf("%d bytes instead of %d", len(stored), raw)
		}
		return stored, mem, nil
	case packZstd:
		if cap(mem) < raw {
			mem = make([]byte, 0, raw)
		}
		column, err := unpacker().DecodeAll(stored, mem[:0:raw])
		if err == nil && len(column) != raw {
			err = fmt.Errorf("%d bytes unpacked instead of %d", len(column), raw)
		}
		return column, mem, err
	}
	return nil, mem, fmt.Errorf("unknown packing %d", how)
}
