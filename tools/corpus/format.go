package corpus

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrFormat is wrapped by every error of a reader that comes from what is in the file: it is no corpus, or a damaged
// one.
var ErrFormat = errors.New("not a sound corpus")

// Kind is what an operation does. A disk constant: do not renumber.
type Kind uint8

// The kinds of operations.
const (
	Store  Kind = 1
	Remove Kind = 2
	Query  Kind = 3
)

func (k Kind) String() string {
	switch k {
	case Store:
		return "store"
	case Remove:
		return "remove"
	case Query:
		return "query"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

const (
	magic      = "KVCORP01"
	headerSize = 16 + 9*8
	opSize     = 12

	flagParent = 1
)

// Header is what a corpus says of itself.
type Header struct {
	Workers   uint32
	BlockSize uint32 // tokens

	Ops           uint64 // StoreOps + RemoveOps + Queries
	Stored        uint64 // blocks in stores
	Removed       uint64 // blocks in removes
	Queries       uint64
	QueryBlocks   uint64 // blocks in queries
	StoreOps      uint64
	RemoveOps     uint64
	LiveAtEnd     uint64 // (worker, block) that are held when all is done: the holdings
	DistinctAtEnd uint64 // different blocks among them
}

func (h *Header) counts() [9]*uint64 {
	return [...]*uint64{&h.Ops, &h.Stored, &h.Removed, &h.Queries, &h.QueryBlocks, &h.StoreOps, &h.RemoveOps,
		&h.LiveAtEnd, &h.DistinctAtEnd}
}

func (h *Header) encode() []byte {
	b := append(make([]byte, 0, headerSize), magic...)
	b = binary.LittleEndian.AppendUint32(b, h.Workers)
	b = binary.LittleEndian.AppendUint32(b, h.BlockSize)
	for _, c := range h.counts() {
		b = binary.LittleEndian.AppendUint64(b, *c)
	}
	return b
}

// decodeHeader reads the header of a corpus that is size bytes long and checks that its counts make up that length.
func decodeHeader(b []byte, size int64) (Header, error) {
	var h Header
	if len(b) < headerSize {
		return h, fmt.Errorf("%w: %d bytes, a header has %d", ErrFormat, len(b), headerSize)
	}
	if string(b[:8]) != magic {
		return h, fmt.Errorf("%w: begins with %q, want %q", ErrFormat, b[:8], magic)
	}
	h.Workers, h.BlockSize = binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])
	for i, c := range h.counts() {
		*c = binary.LittleEndian.Uint64(b[16+8*i:])
	}
	for _, c := range []uint64{h.Ops, h.Stored, h.Removed, h.Queries, h.QueryBlocks, h.StoreOps, h.RemoveOps} {
		if c > uint64(size)/8 { // no count can be, and what follows cannot overflow
			return h, fmt.Errorf("%w: the header counts %d of something in %d bytes", ErrFormat, c, size)
		}
	}
	switch want := headerSize + opSize*h.Ops + 8*h.StoreOps + 16*h.Stored + 8*h.Removed + 8*h.QueryBlocks; {
	case h.Ops != h.StoreOps+h.RemoveOps+h.Queries:
		return h, fmt.Errorf("%w: the header counts %d operations, but %d stores, %d removes and %d queries", ErrFormat,
			h.Ops, h.StoreOps, h.RemoveOps, h.Queries)
	case want != uint64(size):
		return h, fmt.Errorf("%w: %d bytes, the header's counts make %d", ErrFormat, size, want)
	}
	return h, nil
}
