package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Flags of a run's record.
const (
	runHasParent = 1 << 0
	runPiece     = 1 << 1 // a piece of a run that is too long for a chunk
	runSomeNamed = 1 << 2 // a bitmap marks the blocks with a name
	runNoneNamed = 1 << 3
	runFlags     = 1<<4 - 1

	// pieceBlocks is the number of blocks in a piece. A longer run is written as pieces in separate chunks.
	pieceBlocks = 50_000
)

// record is an encoded run, or a piece of a run, without the distance to the previous id.
type record struct {
	id     events.RunID
	flags  byte
	n      uint32 // the run's length in blocks
	fields []byte // after flags and id
	words  []byte // local hashes, then the names except zero
	sum    Hash   // of the whole record and the pieces before
}

// size returns the maximum size of the record in a chunk.
func (r *record) size() int { return 1 + binary.MaxVarintLen64 + len(r.fields) + len(r.words) }

// encodePiece encodes blocks [from, to) of the run. It reuses the memory of the record. The sum includes the sum of the
// previous piece.
func (r *record) encodePiece(run *events.Run, from, to int) {
	before := r.sum
	if from == 0 {
		before = Hash{}
	}
	names := run.Names[from:to]
	named := 0
	for _, n := range names {
		if n != 0 {
			named++
		}
	}
	r.id, r.n, r.flags = run.ID, uint32(len(run.Locals)), 0
	f := appendUint(r.fields[:0], uint64(run.Space))
	if run.Parent != events.NoRun {
		r.flags |= runHasParent
		f = appendNear(f, uint32(run.Parent), uint32(run.ID))
	}
	f = appendUint(f, uint64(run.Offset))
	f = appendUint(f, uint64(r.n))
	if from > 0 || to < len(run.Locals) {
		r.flags |= runPiece
		f = appendUint(f, uint64(from))
		f = appendUint(f, uint64(to-from))
	}
	w := littleendian.Append(r.words[:0], run.Locals[from:to])
	switch named {
	case len(names):
		w = littleendian.Append(w, names)
	case 0:
		r.flags |= runNoneNamed
	default:
		r.flags |= runSomeNamed
		at := len(f)
		f = grow(f, (len(names)+7)/8)
		clear(f[at:])
		start := len(w)
		w = grow(w, 8*named)
		out := w[start:]
		for i, n := range names {
			if n != 0 {
				f[at+i/8] |= 1 << (i % 8)
				binary.LittleEndian.PutUint64(out, uint64(n))
				out = out[8:]
			}
		}
	}
	r.fields, r.words = f, w
	r.sum = fingerprint(before, r.id, r.flags, f, w)
}

// fingerprint returns a hash of the whole content of a record.
func fingerprint(before Hash, id events.RunID, flags byte, fields, words []byte) Hash {
	var b [56]byte
	f, w := xxh3.Hash128(fields), xxh3.Hash128(words)
	for i, v := range [...]uint64{before.Hi, before.Lo, uint64(id)<<8 | uint64(flags), f.Hi, f.Lo, w.Hi, w.Lo} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	return hashOf(b[:])
}

// appendTo appends the record to the columns. before is the id of the previous record, or 0.
func (r *record) appendTo(fields, words []byte, before events.RunID) ([]byte, []byte) {
	fields = append(fields, r.flags)
	fields = appendNear(fields, uint32(r.id), uint32(before))
	return append(fields, r.fields...), append(words, r.words...)
}

// piece is a decoded record.
type piece struct {
	id          events.RunID
	flags       byte
	space       uint32
	parent      events.RunID
	offset      uint32
	n           uint32
	from, count uint32
	bitmap      []byte
	locals      []byte
	names       []byte
	fields      []byte // the fields of the record, for the fingerprint
	words       []byte
}

var errRun = errors.New("contradicts itself")

// readPiece reads the next record from the columns.
func (c *cursor) readPiece(before events.RunID) (p piece) {
	p.flags = c.byte()
	p.id = events.RunID(c.near(uint32(before)))
	fields, words := c.fields, c.words
	p.parent = events.NoRun
	p.space = c.uint32()
	if p.flags&runHasParent != 0 {
		p.parent = events.RunID(c.near(uint32(p.id)))
	}
	p.offset = c.uint32()
	p.n = c.uint32()
	p.count = p.n
	if p.flags&runPiece != 0 {
		p.from, p.count = c.uint32(), c.uint32()
	}
	if c.err != nil {
		return p
	}
	if p.flags&^runFlags != 0 || p.flags&(runSomeNamed|runNoneNamed) == runSomeNamed|runNoneNamed ||
		p.id == events.NoRun || uint64(p.from)+uint64(p.count) > uint64(p.n) || p.count == 0 && p.n > 0 ||
		(p.parent == events.NoRun) != (p.flags&runHasParent == 0) {
		c.fail(fmt.Errorf("run %d: %w", p.id, errRun))
		return p
	}
	named := p.count
	switch {
	case p.flags&runNoneNamed != 0:
		named = 0
	case p.flags&runSomeNamed != 0:
		p.bitmap = c.bytes((uint64(p.count) + 7) / 8)
		named = 0
		for _, b := range p.bitmap {
			named += uint32(bits.OnesCount8(b))
		}
		if p.count%8 != 0 && len(p.bitmap) > 0 && p.bitmap[len(p.bitmap)-1]>>(p.count%8) != 0 {
			c.fail(fmt.Errorf("run %d: %w", p.id, errRun))
		}
	}
	p.locals = c.wordBytes(uint64(p.count))
	p.names = c.wordBytes(uint64(named))
	if c.err == nil {
		p.fields = fields[:len(fields)-len(c.fields)]
		p.words = words[:len(words)-len(c.words)]
	}
	return p
}

// decodeInto appends the piece's blocks to the run.
func (p *piece) decodeInto(run *events.Run) {
	run.Locals = getWords(run.Locals, p.locals)
	if p.flags&(runSomeNamed|runNoneNamed) == 0 {
		run.Names = getWords(run.Names, p.names)
		return
	}
	start := len(run.Names)
	run.Names = grow(run.Names, int(p.count))
	names := run.Names[start:]
	clear(names)
	rest := p.names
	for i, b := range p.bitmap {
		for ; b != 0; b &= b - 1 {
			names[8*i+bits.TrailingZeros8(b)] = events.BlockHash(binary.LittleEndian.Uint64(rest))
			rest = rest[8:]
		}
	}
}
