package corpus

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrFormat is wrapped by every error about the content of a file, which is not a corpus or is damaged.
var ErrFormat = errors.New("not a valid corpus")

// Kind is the kind of an operation. The values are constants of the file format: do not renumber.
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

// Header is the header of a corpus.
type Header struct {
	Workers   uint32 `json:"workers"`
	BlockSize uint32 `json:"block_size"` // tokens

	Ops           uint64 `json:"ops"`            // StoreOps + RemoveOps + Queries
	Stored        uint64 `json:"stored_blocks"`  // blocks in stores
	Removed       uint64 `json:"removed_blocks"` // blocks in removes
	Queries       uint64 `json:"queries"`
	QueryBlocks   uint64 `json:"query_blocks"` // blocks in queries
	StoreOps      uint64 `json:"store_ops"`
	RemoveOps     uint64 `json:"remove_ops"`
	LiveAtEnd     uint64 `json:"holdings_at_end"`        // (worker, block) pairs after all operations: the holdings
	DistinctAtEnd uint64 `json:"distinct_blocks_at_end"` // number of different blocks in the holdings
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

// decodeHeader reads the header of a corpus with size bytes and checks that the counts give this length.
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
		if c > uint64(size)/8 { // an impossible count; the check prevents an overflow below
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
